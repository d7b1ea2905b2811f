"""Faults on demand do what they are told, once, and what follows is what a real fault has."""

import subprocess
import sys
from collections.abc import Sequence

import pytest

from actors.kv_transfer.faulty_pieces import FaultyPieces
from actors.worker.faulty_steps import FaultySteps, InjectedError
from actors.worker.stall_watch import LOOKS, StallWatch
from configs.faults import parse_faults
from engine.core import EngineCore
from tests.actors.kv_transfer.handoff_simulation import World, simulate
from tests.engine.scheduling.replica import Replica, prompt_of


def _core(replica: Replica, text: str) -> EngineCore:
    replica.core.wrap_executor(lambda executor: FaultySteps(executor, parse_faults(text)))
    return replica.core


class TestSteps:
    def test_a_step_of_nan_ends_its_requests_and_leaves_nothing_behind(self) -> None:
        replica = Replica()
        _core(replica, "unified:step=3:nan")
        first = replica.add("a", prompt_of(5))
        replica.run()
        assert replica.failures[first.key].code == "non_finite_logits"
        assert replica.output(first) == replica.expected(first)[:2]
        again = replica.add("b", prompt_of(5))
        replica.run()
        assert replica.output(again) == replica.expected(again)
        replica.check_idle()

    def test_a_step_that_raises_does_it_once(self) -> None:
        replica = Replica()
        core = _core(replica, "unified:step=2:raise")
        replica.add("a", prompt_of(5))
        core.step()
        with pytest.raises(InjectedError, match="step 2"):
            core.step()

    def test_a_step_that_is_to_die_kills_the_process(self) -> None:
        code = (
            "from actors.worker.faulty_steps import FaultySteps;"
            "from configs.faults import parse_faults;"
            "FaultySteps(None, parse_faults('decode:step=1:die')).launch(None); print('alive')"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
        assert done.returncode == -9
        assert b"alive" not in done.stdout

    def test_a_step_that_hangs_is_never_done(self) -> None:
        replica = Replica()
        replica.add("a", prompt_of(5))
        plan = replica.scheduler.plan(0.0)
        assert plan is not None
        steps = FaultySteps(replica.executor, parse_faults("unified:step=1:hang"))
        pending = steps.launch(plan)
        assert not pending.is_done
        watch = StallWatch(60.0, lambda: 1, lambda: None)
        assert [watch.look() for _ in range(LOOKS + 1)][-1], "which is what a watch sees"


def _with_faults(text: str, num_retries: int) -> None:
    async def scenario(world: World) -> None:
        world.sender._pieces._store = FaultyPieces(world.prefill_pieces, parse_faults(text))
        request = world.start(1, range(20))
        await world.until(lambda: len(world.decode.incoming) == 1)
        world.compute(request, 10)
        world.finish(request)
        await world.settled()
        world.check_arrived(request)
        assert world.sender.statistics().num_retries == num_retries

    simulate(scenario)


@pytest.mark.parametrize(
    ("faults", "num_retries"),
    [
        (["drop"], 1),
        (["corrupt"], 1),
        (["delay=3.5"], 0),
    ],
)
@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_piece_that_fails_on_demand_is_survived(
    faults: Sequence[str], num_retries: int, number: int
) -> None:
    _with_faults("; ".join(f"prefill:piece={number}:{kind}" for kind in faults), num_retries)
