"""Memory for results and timers are used in turn, by one step at a time."""

import pytest
import torch

from engine.runner.results import StepSlot, StepSlots
from tests.harness.seeds import fresh_random


def test_a_slot_belongs_to_one_step_until_it_is_given_back() -> None:
    rng = fresh_random()
    slots = StepSlots(5, torch.device("cpu"))
    in_flight: list[tuple[StepSlot, list[int]]] = []
    seen: set[int] = set()
    kept: list[StepSlot] = []  # so that no other takes the place of one that is gone
    for _ in range(100):
        if len(in_flight) == 2 or (in_flight and rng.random() < 0.3):
            slot, token_ids = in_flight.pop(0)
            assert slot.tokens(len(token_ids)).tolist() == token_ids
            slots.give_back(slot)
        slot = slots.take()
        assert all(slot is not other for other, _ in in_flight)
        token_ids = [rng.randrange(-1, 10**5) for _ in range(rng.randrange(6))]
        slot.copy_tokens(torch.tensor(token_ids, dtype=torch.int32))
        in_flight.append((slot, token_ids))
        seen.add(id(slot))
        kept.append(slot)
    assert len(seen) == 2


def test_a_step_cannot_be_waited_for_twice() -> None:
    slots = StepSlots(5, torch.device("cpu"))
    slot = slots.take()
    slots.give_back(slot)
    with pytest.raises(AssertionError, match="waited for twice"):
        slots.give_back(slot)
