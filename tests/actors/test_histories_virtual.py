"""Random histories of a whole application: clients come and leave, workers die, nothing is lost.

On virtual time; the soak on a real cluster is for what this cannot show, memory and files.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping

import msgspec
import pytest

from actors.ingress.generation import Generations
from engine.messages import StepMessage
from engine.request import RequestKey
from engine.scheduling.scheduler import Scheduler
from tests.harness.asgi_client import ClientCall
from tests.harness.phases import Phase, Watch
from tests.harness.virtual_system import Question, VirtualSystem, play

SYSTEMS: dict[str, Mapping[str, object]] = {
    "pairs": {"workers__prefill": 2, "workers__decode": 2},
    "full": {"workers__prefill": 2, "workers__decode": 1, "scheduler__max_num_seqs": 2},
    "unified": {"workers__unified": 2},
    "short of blocks": {"workers__prefill": 1, "workers__decode": 1, "cache__num_blocks": 70},
}
NUM_REQUESTS = 45
MEAN_GAP_S = 0.03
MEAN_LIFE_S = 1.0  # between two deaths of anybody
FIRST_DEATH_S = 0.5  # at the latest; clients come for longer but once in some 10**9 histories
SHARE_THAT_LEAVES = 0.3


async def _come_and_go(system: VirtualSystem) -> None:
    leaving = []
    for number in range(NUM_REQUESTS):
        await asyncio.sleep(system.rng.expovariate(1 / MEAN_GAP_S))
        question = Question(
            prompt=system.prompt(system.rng.randrange(1, 180)),
            max_tokens=system.rng.randrange(1, 60),
            seed=number,
            n=system.rng.choice([1, 1, 1, 3]),
            is_stream=system.rng.random() < 0.7,
        )
        call = system.ask(question)
        if system.rng.random() < SHARE_THAT_LEAVES:
            leaving.append(asyncio.ensure_future(_leave(call, system.rng.uniform(0, 0.5))))
    await asyncio.gather(*leaving)


async def _leave(call: ClientCall, after_s: float) -> None:
    await asyncio.sleep(after_s)
    if not call.task.done():
        await call.leave()


async def _die(system: VirtualSystem) -> None:
    wait_s = system.rng.uniform(0.1, FIRST_DEATH_S)
    while True:
        await asyncio.sleep(wait_s)
        names = system.names()
        if names:
            await system.kill(system.rng.choice(names), restart_s=system.rng.uniform(0.1, 3.0))
        wait_s = system.rng.expovariate(1 / MEAN_LIFE_S)


async def _history(system: VirtualSystem) -> None:
    """Answers, errors and what is held are checked behind it."""
    dying = asyncio.ensure_future(_die(system))
    await _come_and_go(system)
    dying.cancel()
    await asyncio.wait([dying])
    assert system.num_deaths > 0
    for _, call in system.calls:
        await call.wait()
    whole = [call for _, call in system.calls if call.is_whole]
    right = [call for call in whole if call.error is None]
    assert len(right) > len(whole) / 2, f"{len(right)} answers, {len(whole) - len(right)} errors"


def _play(name: str, *, overlap: bool) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}, overlap {overlap}")
    play(_history, seed=seed, scheduler__overlap=overlap, **SYSTEMS[name])


@pytest.mark.parametrize("name", SYSTEMS)
def test_whatever_dies_and_whoever_leaves_answers_are_right_or_one_error(name: str) -> None:
    _play(name, overlap=random.choice([False, True]))


# ---- what is wrong is seen -----------------------------------------------------------------------


async def _lose_the_decode_worker(system: VirtualSystem) -> None:
    question = Question(prompt=system.prompt(20), max_tokens=60, seed=3)
    watch = Watch(system, question.prompt)
    call = system.ask(question)
    await system.kill(await watch.reach(Phase.DECODING))
    await call.wait()


async def _leave_while_it_decodes(system: VirtualSystem) -> None:
    question = Question(prompt=system.prompt(20), max_tokens=60, seed=3)
    watch = Watch(system, question.prompt)
    call = system.ask(question)
    await watch.reach(Phase.DECODING)
    await call.leave()


def _keeps_the_blocks(self: Scheduler, key: RequestKey) -> bool:
    requests = [request for request in self._all_requests() if request.key == key]
    for request in requests:
        self._cache.share(request.block_ids)
    return bool(requests) and _ABORT(self, key)


async def _changes_tokens(self: Generations, message: StepMessage) -> None:
    for record in message.tokens:
        self._mailboxes[record.key].put(message.worker, msgspec.structs.replace(record, token_id=9))


_ABORT = Scheduler.abort


@pytest.mark.parametrize(
    ("owner", "name", "bug", "scenario", "seen"),
    [
        (Scheduler, "abort", _keeps_the_blocks, _leave_while_it_decodes, "references"),
        (Generations, "_dispatch", _changes_tokens, _lose_the_decode_worker, "wrong tokens"),
    ],
    ids=["blocks are kept", "tokens are changed"],
)
def test_a_planted_bug_is_found_by_name(
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    bug: Callable[..., object],
    scenario: Callable[[VirtualSystem], Awaitable[None]],
    seen: str,
) -> None:
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(AssertionError, match=seen):
        play(scenario, **SYSTEMS["pairs"])


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_so_it_is_in_fifty_histories(name: str, overlap: bool) -> None:
    for _ in range(50):
        _play(name, overlap=overlap)
