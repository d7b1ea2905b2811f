"""Workers that die in every phase of a request: no client gets a wrong token, and nothing is left.

On virtual time, against the product's ingress, engine hosts and handoff.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from itertools import product

import pytest

from engine.messages import Placement, Role, RouteRequest
from tests.harness.phases import Phase, Watch
from tests.harness.virtual_system import Question, VirtualSystem, play

LONG = 150  # tokens of a prompt that takes ten steps and nearly forty pieces
TOKENS = 40
ALONE = {"workers__prefill": 1, "workers__decode": 1}
IN_PAIRS = {"workers__prefill": 2, "workers__decode": 2}
UNIFIED = {"workers__unified": 2}

# Who may die under a request, and in which phases of it.
DISAGGREGATED: list[tuple[Role, Phase]] = [
    ("prefill", Phase.QUEUED),
    ("prefill", Phase.PREFILL),
    ("prefill", Phase.HANDOFF),
    ("decode", Phase.PREFILL),
    ("decode", Phase.HANDOFF),
    ("decode", Phase.DECODING),
]
UNIFIED_PHASES = (Phase.QUEUED, Phase.PREFILL, Phase.DECODING)

both_modes = pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])


def ask_long(system: VirtualSystem, *, is_stream: bool = True, n: int = 1) -> Question:
    return Question(prompt=system.prompt(LONG), max_tokens=TOKENS, seed=7, n=n, is_stream=is_stream)


async def fill_prefill_workers(system: VirtualSystem) -> None:
    """So that who comes next is queued: more prompts than there are rows for them."""
    workers = [*system.workers("prefill"), *system.workers("unified")]
    for _ in range(2 * system.config.scheduler.max_num_seqs * len(workers)):
        system.ask(Question(prompt=system.prompt(LONG), max_tokens=2, seed=1))
    await system.until(
        lambda: all(system.load(name).num_waiting > 0 for name in workers), "all have a queue"
    )


def dies_in(
    role: Role, phase: Phase, *, is_stream: bool
) -> Callable[[VirtualSystem], Awaitable[None]]:
    """The worker of a role that has, or is to have, a request, dies when that is in a phase."""

    async def scenario(system: VirtualSystem) -> None:
        if phase is Phase.QUEUED:
            await fill_prefill_workers(system)
        question = ask_long(system, is_stream=is_stream)
        watch = Watch(system, question.prompt)
        call = system.ask(question)
        holder = await watch.reach(phase)
        victims = [holder] if holder.startswith(role) else system.workers(role)[:1]
        if phase is Phase.PREFILL and role == "decode":
            await system.until(lambda: bool(receiving(system)), "a decode worker has pieces")
            victims = receiving(system)
        elif phase is Phase.HANDOFF and role == "decode":
            victims = receiving(system) or victims
        for victim in victims:
            await system.kill(victim)
        await call.wait()
        assert call.error is None, call.error

    return scenario


def receiving(system: VirtualSystem) -> list[str]:
    """Decode workers with a reservation that is not committed."""
    workers = [name for name in system.names() if name in system.workers("decode")]
    return [name for name in workers if system.host(name).connector.num_handoffs]


# Of these by day such as make all pairs of two, and by night the others.
@pytest.mark.parametrize(
    ("config", "is_stream", "overlap"),
    [
        pytest.param(
            [ALONE, IN_PAIRS][is_paired],
            is_stream,
            overlap,
            id="-".join(
                [
                    ["alone", "in pairs"][is_paired],
                    ["unary", "stream"][is_stream],
                    ["in turn", "overlapped"][overlap],
                ]
            ),
            marks=[pytest.mark.nightly] if is_paired ^ is_stream ^ overlap else [],
        )
        for is_paired, is_stream, overlap in product([False, True], repeat=3)
    ],
)
@pytest.mark.parametrize(
    ("role", "phase"), DISAGGREGATED, ids=lambda value: getattr(value, "value", value)
)
def test_a_death_costs_a_request_no_token(
    role: Role, phase: Phase, config: dict[str, object], is_stream: bool, overlap: bool
) -> None:
    scenario = dies_in(role, phase, is_stream=is_stream)
    play(scenario, seed=random.randrange(2**32), scheduler__overlap=overlap, **config)


@both_modes
@pytest.mark.parametrize("phase", UNIFIED_PHASES, ids=lambda phase: phase.value)
def test_a_unified_worker_that_dies_costs_a_request_no_token(phase: Phase, is_stream: bool) -> None:
    scenario = dies_in("unified", phase, is_stream=is_stream)
    play(scenario, seed=random.randrange(2**32), **UNIFIED)


@both_modes
def test_choices_in_every_phase_survive_one_death_of_each_role(is_stream: bool) -> None:
    async def scenario(system: VirtualSystem) -> None:
        question = ask_long(system, is_stream=is_stream, n=6)
        watch = Watch(system, question.prompt)
        call = system.ask(question)
        await watch.reach(Phase.DECODING)
        for role in ("prefill", "decode"):
            await system.kill(system.workers(role)[0])
        await call.wait()
        assert call.error is None, call.error

    play(scenario, seed=random.randrange(2**32), **ALONE)


def test_a_stream_that_loses_its_worker_on_every_try_ends_with_an_error_and_without_done() -> None:
    async def scenario(system: VirtualSystem) -> None:
        question = Question(prompt=system.prompt(20), max_tokens=200, seed=7)
        watch = Watch(system, question.prompt)
        call = system.ask(question)
        num_tries = 1 + system.config.handoff.tries
        for _ in range(num_tries):
            holder = await watch.reach(Phase.DECODING)
            # Who gets on between two deaths is not taken for their cause.
            num_seen = len(call.token_ids())
            await system.until(lambda: len(call.token_ids()) > num_seen + 8, "it gets on")  # noqa: B023
            await system.kill(holder)
        await call.wait()
        assert call.error is not None
        assert call.error["type"] == "server_error"
        assert f"failed on {num_tries} tries" in call.error["message"]
        assert not call.is_done
        assert 0 < len(call.token_ids()) < question.max_tokens

    play(scenario, seed=random.randrange(2**32), **IN_PAIRS)


@pytest.mark.parametrize(
    ("config", "role"), [(IN_PAIRS, "prefill"), (IN_PAIRS, "decode"), (UNIFIED, "unified")]
)
def test_every_worker_of_a_role_dies_in_turn_under_load(
    config: dict[str, object], role: Role
) -> None:
    async def scenario(system: VirtualSystem) -> None:
        for _ in range(2):
            for victim in system.workers(role):
                for i in range(8):
                    num_tokens = system.rng.randrange(3, LONG)
                    system.ask(
                        Question(
                            prompt=system.prompt(num_tokens),
                            max_tokens=30,
                            seed=i,
                            is_stream=i % 3 > 0,
                        )
                    )
                await system.until(lambda: system.generations.num_open >= 6, "they are under way")
                await system.kill(victim)
                await system.until(system.is_whole, "it lives again")
        for _, call in system.calls:
            await call.wait()
            assert call.error is None, call.error

    play(scenario, seed=random.randrange(2**32), **config)


def test_a_prefill_and_a_decode_worker_that_die_at_once_cost_no_stream_a_token() -> None:
    async def scenario(system: VirtualSystem) -> None:
        calls = [system.ask(ask_long(system)) for _ in range(16)]
        await system.until(lambda: sum(bool(e.token_ids()) for e in calls) > 4, "tokens come")
        for role in ("prefill", "decode"):
            await system.kill(system.workers(role)[-1])
        for call in calls:
            await call.wait()
            assert call.error is None, call.error

    play(scenario, seed=random.randrange(2**32), **IN_PAIRS)


@pytest.mark.parametrize(
    ("role", "phase"),
    [("prefill", Phase.PREFILL), ("prefill", Phase.HANDOFF), ("decode", Phase.DECODING)],
    ids=lambda value: getattr(value, "value", value),
)
def test_a_worker_that_freezes_is_given_up_and_costs_no_token(role: Role, phase: Phase) -> None:
    """Nobody says that it is gone: it is silent, and its supervisor kills it in the end."""

    async def scenario(system: VirtualSystem) -> None:
        question = ask_long(system)
        watch = Watch(system, question.prompt)
        call = system.ask(question)
        frozen = await watch.reach(phase)
        assert frozen.startswith(role)
        began_s = system.clock.now_s()
        system.freeze(frozen)
        await call.wait()
        assert call.error is None, call.error
        assert system.clock.now_s() - began_s >= system.config.lifetimes.ingress_silence_s
        await system.kill(frozen)

    play(scenario, seed=random.randrange(2**32), **IN_PAIRS)


class HangingAllocator:
    """Hears, and never answers."""

    num_asked = 0

    async def route(self, request: RouteRequest) -> Placement:
        self.num_asked += 1
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


def test_placement_goes_on_while_the_allocator_hangs() -> None:
    async def scenario(system: VirtualSystem) -> None:
        allocator = system.allocator = HangingAllocator()
        for _ in range(3):
            call = system.ask(ask_long(system))
            await call.wait()
            assert call.error is None, call.error
        assert allocator.num_asked == 1, "not every request finds out that it hangs"

    play(scenario, seed=random.randrange(2**32), **IN_PAIRS)


def test_in_a_burst_ten_times_too_large_everybody_gets_an_answer_or_is_sent_away() -> None:
    num_fitting, num_tokens = 9, 67
    narrow: dict[str, object] = {
        "workers__unified": 1,
        "scheduler__max_num_seqs": 2,
        "scheduler__short_share": 0.0,  # who holds a row gives way to nobody
        "edge__max_queued_tokens": num_fitting * num_tokens,
        "cache__enable_prefix_caching": False,
    }

    async def scenario(system: VirtualSystem) -> None:
        for _ in range(2):
            system.ask(Question(prompt=system.prompt(9), max_tokens=180, seed=1))
        await system.until(
            lambda: system.load(system.names()[0]).num_running == 2, "both rows are taken"
        )
        burst = [
            system.ask(Question(prompt=system.prompt(num_tokens), max_tokens=11, seed=i))
            for i in range(10 * num_fitting)
        ]
        for call in burst:
            await call.wait()
        answered = [call for call in burst if call.status == 200]
        refused = [call for call in burst if call.status != 200]
        assert answered
        assert len(refused) >= len(burst) // 2
        assert {call.status for call in refused} <= {429, 503}
        assert all(call.error and call.error["message"] for call in refused)

    play(scenario, seed=random.randrange(2**32), **narrow)
