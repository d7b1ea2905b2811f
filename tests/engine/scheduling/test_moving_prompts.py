"""A prompt whose first blocks are on their way when its numbers stop being finite."""

import random

import pytest

from engine.request import SamplingParams
from engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.world import World


@pytest.mark.parametrize("overlap", [False, True])
def test_it_ends_alone_and_what_was_told_of_it_stays_good(overlap: bool) -> None:
    world = World(Scheduler, overlap=overlap)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    tokens = [random.randrange(1, 9) for _ in range(23)]
    for prompt, moves in ((tokens, True), (tokens[:5], False)):
        world.add(prompt, params, num_children=1, priority=0, patience_s=None, moves=moves)
    world.poison(0, num_ahead=0)  # the last token of the prompt that moves
    moving, staying = world.stories
    while world.stories[moving].phase == "scheduler":
        world.step()
        world.check()  # also what the sender may read, block by block
    assert world.stories[moving].tokens == []
    assert world.sender.num_unanswered == 1, "its handoff was told of, and is dropped"
    world.drain()  # its blocks are zeroed before anybody gets them, and nothing is left
    assert world.stories[staying].tokens == world.stories[staying].expected
