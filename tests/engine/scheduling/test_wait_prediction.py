"""The predicted wait for rows and blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.scheduling.wait_prediction import Room, num_steps_left, steps_until

HELD = [(30, 4), (10, 2), (20, 3)]  # steps left, blocks


def room(num_rows: int, num_blocks: int) -> Room:
    return Room(num_rows=num_rows, num_blocks=num_blocks)


@pytest.mark.parametrize(
    ("needed", "num_steps"),
    [
        (room(1, 1), 0),  # is free
        (room(2, 1), 10),  # a row more: the first that ends
        (room(1, 5), 20),  # 1 + 2 + 3 blocks
        (room(1, 10), 30),
        (room(1, 40), 120),  # four times what all hold
        (room(8, 1), 60),
    ],
)
def test_requests_end_in_the_order_of_what_they_have_left(needed: Room, num_steps: int) -> None:
    assert steps_until(needed, room(1, 1), HELD) == num_steps


@given(
    held=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), max_size=6),
    free=st.builds(room, st.integers(0, 3), st.integers(0, 9)),
    needed=st.builds(room, st.integers(0, 9), st.integers(0, 60)),
)
def test_more_is_never_waited_for_less(
    held: list[tuple[int, int]], free: Room, needed: Room
) -> None:
    num_steps = steps_until(needed, free, held)
    more = room(needed.num_rows + 1, needed.num_blocks + 1)
    assert (num_steps == 0) == free.holds(needed)
    assert steps_until(more, free, held) >= num_steps


@pytest.mark.parametrize(
    ("max_tokens", "num_output", "left"), [(50, 10, 10), (12, 10, 2), (9, 0, 1)]
)
def test_an_answer_goes_on_as_long_as_it_has_but_not_beyond_its_limit(
    max_tokens: int, num_output: int, left: int
) -> None:
    request = Request(
        spec=RequestSpec(params=SamplingParams(max_tokens=max_tokens)),
        key=RequestKey("a"),
        ingress_id="ingress",
        tokens=[1] * (5 + num_output),
        num_prompt_tokens=5,
        num_emitted_tokens=num_output,
        arrival_s=0.0,
    )
    assert num_steps_left(request) == left
