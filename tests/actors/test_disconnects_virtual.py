"""Clients that leave in every phase of their request leave nothing behind, on any worker.

On virtual time, against the product's ingress, engine hosts and handoff.
"""

import random
from collections.abc import Awaitable, Callable, Mapping

import pytest

from tests.harness.phases import Phase, Watch
from tests.harness.virtual_system import Question, VirtualSystem, play

LONG = 150  # tokens of a prompt that takes ten steps and nearly forty pieces
TOKENS = 100  # more than anybody waits for
DISAGGREGATED: Mapping[str, object] = {"workers__prefill": 1, "workers__decode": 1}
UNIFIED: Mapping[str, object] = {"workers__unified": 1}
# Two long answers fill the decode worker, and who holds a row gives way to nobody.
TIGHT: Mapping[str, object] = DISAGGREGATED | {
    "scheduler__max_num_seqs": 2,
    "scheduler__short_share": 0.0,
    "scheduler__unreserved_share": 0.001,
}

both_modes = pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])


def ask(system: VirtualSystem, num_tokens: int, **fields: object) -> Question:
    prompt = system.prompt(num_tokens)
    return Question(prompt=prompt, max_tokens=TOKENS, seed=5, **fields)  # type: ignore[arg-type]


def num_computed(system: VirtualSystem) -> int:
    """Prompt tokens, on all workers."""
    counts = [system.host(name).engine.core.scheduler.statistics() for name in system.names()]
    return sum(count.num_prompt_tokens_computed for count in counts)


def leaves_in(phase: Phase, *, is_stream: bool) -> Callable[[VirtualSystem], Awaitable[None]]:
    async def scenario(system: VirtualSystem) -> None:
        question = ask(system, LONG, is_stream=is_stream)
        watch = Watch(system, question.prompt)
        before = num_computed(system)
        call = system.ask(question)
        await watch.reach(phase)
        assert not call.task.done()
        await call.leave()
        await system.rest()
        assert watch.places() == []
        assert len(call.token_ids()) < TOKENS
        if phase is Phase.PREFILL:
            assert num_computed(system) - before < LONG, "the rest of the prompt was not computed"

    return scenario


@both_loops
@both_modes
@pytest.mark.parametrize(
    ("config", "phase"),
    [
        (DISAGGREGATED, Phase.PREFILL),
        (DISAGGREGATED, Phase.HANDOFF),
        (DISAGGREGATED, Phase.DECODING),
        (UNIFIED, Phase.PREFILL),
        (UNIFIED, Phase.DECODING),
    ],
    ids=lambda value: value.value if isinstance(value, Phase) else str(len(value)),
)
def test_a_client_that_leaves_is_forgotten_by_everybody(
    config: Mapping[str, object], phase: Phase, is_stream: bool, overlap: bool
) -> None:
    scenario = leaves_in(phase, is_stream=is_stream)
    play(scenario, seed=random.randrange(2**32), scheduler__overlap=overlap, **config)


async def fill_decode_worker(system: VirtualSystem) -> None:
    for _ in range(2):
        system.ask(Question(prompt=system.prompt(9), max_tokens=200, seed=1))
    [decode] = system.workers("decode")
    await system.until(lambda: system.load(decode).num_running == 2, "both rows are held")


@both_modes
@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.IN_LINE], ids=lambda phase: phase.value)
def test_a_client_that_leaves_before_there_is_room_makes_room_for_nobody_else_s_loss(
    phase: Phase, is_stream: bool
) -> None:
    """One that leaves the line, or the queue behind it, takes only itself along."""

    async def scenario(system: VirtualSystem) -> None:
        await fill_decode_worker(system)
        first = ask(system, 9)
        in_line = Watch(system, first.prompt)
        call = system.ask(first)
        await in_line.reach(Phase.IN_LINE)
        if phase is Phase.QUEUED:
            second = ask(system, 9, is_stream=is_stream)
            queued = Watch(system, second.prompt)
            leaver = system.ask(second)
            await queued.reach(Phase.QUEUED)
            await leaver.leave()
            await system.until(lambda: queued.places() == [], "the queue is empty")
            assert in_line.is_in(Phase.IN_LINE), "only the one that left has gone"
            await call.wait()
            assert call.error is None
        else:
            await system.until(lambda: len(call.token_ids()) == 1, "the first token came anyway")
            await call.leave()
            await system.rest()
            [decode] = system.workers("decode")
            committed = system.host(decode).connector.statistics()["incoming"]
            assert committed["num_committed"] == 2, "room came, but nobody took it"

    play(scenario, seed=random.randrange(2**32), **TIGHT)


@both_modes
def test_a_client_that_leaves_with_choices_in_every_phase(is_stream: bool) -> None:
    """Of six choices two decode, some are in line, and the rest is queued."""

    async def scenario(system: VirtualSystem) -> None:
        question = ask(system, 9, n=6, is_stream=is_stream)
        watch = Watch(system, question.prompt)
        call = system.ask(question)

        def is_everywhere() -> bool:
            phases = {place.phase for place in watch.places()}
            return phases >= {Phase.DECODING, Phase.IN_LINE, Phase.QUEUED}

        await system.until(is_everywhere, "choices decode, are in line and queued")
        assert system.generations.num_open == 6
        await call.leave()
        await system.rest()
        assert watch.places() == []

    play(scenario, seed=random.randrange(2**32), **TIGHT)
