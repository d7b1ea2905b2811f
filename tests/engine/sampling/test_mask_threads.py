"""Masks of a step's rows by several threads: all of them, as one thread makes them."""

import random
import threading

import pytest
import torch

from engine.request import SamplingParams, Thinking
from engine.sampling.constraint import Constraints
from engine.sampling.mask_threads import MIN_ROWS, MaskThreads
from tests.engine.sampling.test_sampler_constraints import HELD, VOCAB, Source

CPU = torch.device("cpu")
NUM_ROWS = 3 * MIN_ROWS


def test_threads_share_works_and_each_is_done_once() -> None:
    """Works that wait for each other show that three run at a time."""
    together, done = threading.Barrier(3, timeout=10.0), list[int]()

    def work(number: int) -> None:
        together.wait()
        assert torch.is_inference_mode_enabled()
        done.append(number)

    threads = MaskThreads(3)
    for _ in range(2):
        done.clear()
        threads.run([lambda number=number: work(number) for number in range(6)])
        assert sorted(done) == list(range(6))


@pytest.mark.parametrize("number", [0, NUM_ROWS - 1])
def test_what_a_work_raises_comes_when_the_others_have_ended(number: int) -> None:
    started = threading.Event()
    is_running = [False]

    def fail() -> None:
        started.wait(10.0)
        raise ValueError("no mask")

    def take_long() -> None:
        is_running[0] = True
        started.set()
        is_running[0] = False

    works = [take_long] * NUM_ROWS
    works[number] = fail
    with pytest.raises(ValueError, match="no mask"):
        MaskThreads(2).run(works)
    assert not is_running[0]


def test_few_rows_are_left_to_the_calling_thread() -> None:
    names = list[str]()
    works = [lambda: names.append(threading.current_thread().name)] * (MIN_ROWS - 1)
    MaskThreads(4).run(works)
    assert set(names) == {threading.current_thread().name}


def _constraints(num_threads: int) -> Constraints:
    """Rows with constraints of every kind."""
    found = Constraints(VOCAB, (0,), Source(stride=5), CPU, MaskThreads(num_threads))
    kinds = (
        SamplingParams(max_tokens=9, temperature=0.0, constraint=HELD),
        SamplingParams(max_tokens=9, temperature=0.0, allowed_token_ids=(3, 40, 66)),
        SamplingParams(max_tokens=9, temperature=0.0, banned_sequences=((2, 3), (7,))),
        SamplingParams(
            max_tokens=9,
            temperature=0.0,
            constraint=HELD,
            banned_sequences=((2, 3),),
            thinking=Thinking(open_id=70, close_id=71, is_open=False),
        ),
    )
    for row in range(NUM_ROWS):
        assert found.add(row, kinds[row % len(kinds)], [1], [])
    return found


def test_lines_are_those_of_one_thread_with_drafts_and_without() -> None:
    rng = random.Random(torch.seed())
    alone, shared = _constraints(1), _constraints(4)
    rows, ahead = list[int](), list[tuple[int, ...]]()
    for row in rng.sample(range(NUM_ROWS), NUM_ROWS):
        drafts = rng.sample(range(9), rng.randint(0, 3))
        for number in range(len(drafts) + 1):
            rows.append(row)
            ahead.append(tuple(drafts[:number]))
    for given in (None, ahead, ahead):
        logits = torch.randn(len(rows), VOCAB)
        expected = logits.clone()
        with torch.inference_mode():
            alone.apply(expected, rows, given)
            shared.apply(logits, rows, given)
        assert torch.equal(logits, expected)
        assert not torch.isfinite(logits).all()
