"""Requests that end their workers are told from their neighbours, and refused for a while."""

import asyncio
import random

import msgspec
import pytest

from actors.ingress.mailbox import HOLDER_LOST, WORKER_LOST, AttemptFailed, Mailbox
from actors.ingress.quarantine import MAX_REMEMBERED, REMEMBER_S, Deaths, Quarantine
from engine.clock import ManualClock
from engine.errors import PoisonedError
from engine.request import SamplingParams

PARAMS = SamplingParams(max_tokens=9, temperature=0.5, seed=1)


def _suspects(*attempts: tuple[bool, int]) -> list[bool]:
    deaths = Deaths()
    return [deaths.is_suspect(is_death=died, num_tokens=num) for died, num in attempts]


class TestWhoIsToBlame:
    def test_a_request_under_which_two_workers_die_at_once_is(self) -> None:
        assert _suspects((True, 0), (True, 0)) == [False, True]

    def test_one_that_fails_with_the_second_token_of_every_attempt_is(self) -> None:
        assert _suspects((True, 1), (True, 2)) == [False, True]

    def test_a_neighbour_that_got_on_in_between_is_not(self) -> None:
        num_tokens = random.randrange(2, 99)
        assert not any(_suspects((True, 0), (True, num_tokens), (True, 2 * num_tokens)))

    def test_one_whose_next_worker_was_dead_before_it_came_is_not(self) -> None:
        assert not any(_suspects((True, 0), (False, 0)))

    def test_a_failure_of_another_kind_in_between_acquits_nobody(self) -> None:
        assert _suspects((True, 0), (False, 0), (True, 0)) == [False, False, True]


@pytest.mark.parametrize(
    ("phase", "lost", "code"),
    [
        ("placed", "prefill", WORKER_LOST),
        ("submitted", "prefill", HOLDER_LOST),
        ("submitted", "decode", WORKER_LOST),
        ("joined", "decode", HOLDER_LOST),
    ],
)
def test_a_worker_that_dies_had_the_request_or_not(phase: str, lost: str, code: str) -> None:
    async def scenario() -> None:
        mailbox = Mailbox(prefill_worker="prefill", decode_worker="decode", next_index=0)
        if phase != "placed":
            mailbox.submitted()
        if phase == "joined":
            mailbox.joined()
        mailbox.lose(lost)
        with pytest.raises(AttemptFailed) as caught:
            await mailbox.wait_tokens()
        assert (caught.value.code, caught.value.is_retryable) == (code, True)

    asyncio.run(scenario())


class TestRemembering:
    def test_requests_like_it_are_refused_for_a_while(self) -> None:
        clock = ManualClock(5.0)
        quarantine = Quarantine(clock)
        prompt_ids = [random.randrange(999) for _ in range(7)]
        quarantine.check(prompt_ids, PARAMS, "")
        quarantine.add(prompt_ids, PARAMS, "")
        with pytest.raises(PoisonedError):
            quarantine.check(list(prompt_ids), msgspec.structs.replace(PARAMS, seed=77), "")
        clock.advance(REMEMBER_S)
        quarantine.check(prompt_ids, PARAMS, "")
        assert len(quarantine) == 0

    def test_other_requests_are_not(self) -> None:
        quarantine = Quarantine(ManualClock())
        quarantine.add([1, 2, 3], PARAMS, "")
        quarantine.check([1, 2], PARAMS, "")
        quarantine.check([1, 2, 3], msgspec.structs.replace(PARAMS, temperature=0.6), "")
        quarantine.check([1, 2, 3], PARAMS, "other")

    def test_the_oldest_is_forgotten_when_there_are_too_many(self) -> None:
        quarantine = Quarantine(ManualClock())
        for number in range(MAX_REMEMBERED + 1):
            quarantine.add([number], PARAMS, "")
        assert len(quarantine) == MAX_REMEMBERED
        quarantine.check([0], PARAMS, "")
        with pytest.raises(PoisonedError):
            quarantine.check([1], PARAMS, "")
