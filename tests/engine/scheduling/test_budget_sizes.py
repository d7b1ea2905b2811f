"""Chunks cut so that a step has a size that computes nothing in vain."""

from bisect import bisect_right

from hypothesis import given
from hypothesis import strategies as st

from engine.cost_model import StepWork
from engine.scheduling.budget import StepBudget
from tests.engine.scheduling.toy_worker import make_request

SIZES = (16, 32, 64, 128, 192, 256)


@given(
    num_tokens=st.integers(1, 600),
    num_decodes=st.integers(0, 40),
    budget=st.integers(1, 400),
    sizes=st.sampled_from([SIZES, (), (200,)]),
)
def test_a_chunk_that_is_cut_makes_a_full_step(
    num_tokens: int, num_decodes: int, budget: int, sizes: tuple[int, ...]
) -> None:
    request = make_request("long", num_tokens)
    decoding = StepWork(num_decode_rows=num_decodes, num_decode_keys=100 * num_decodes)
    room = StepBudget(now_s=0.0, max_tokens=budget, decoding=decoding, graph_token_sizes=sizes)
    granted = room.grant((request, budget))
    most = min(num_tokens, budget)
    assert granted <= most
    total = granted + num_decodes
    if most == num_tokens:
        assert granted == num_tokens  # what ends its prompt is never cut
        return
    full = [size for size in sizes if size <= most + num_decodes]
    shorter = (full[-1] - num_decodes) if full else 0
    if 2 * shorter >= most:
        assert total == full[-1], f"{granted} of {most} beside {num_decodes}"
        assert bisect_right(sizes, total) == len(full)
    else:
        assert granted == most  # more than half of it would be lost


def test_a_full_step_counts_what_the_step_holds_already() -> None:
    room = StepBudget(now_s=0.0, max_tokens=220, graph_token_sizes=SIZES)
    assert room.grant((make_request("short", 50), 50)) == 50
    assert room.grant((make_request("long", 1000), 170)) == 142
    assert room.work.num_new_tokens == 192
