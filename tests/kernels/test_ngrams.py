"""What the device finds in a row's text is what the host's drafter finds in it."""

import random

import pytest
import torch
from torch import Tensor

from engine.speculation.ngram import NgramDrafter, NgramRules
from kernels.guessed_steps import RowEnds
from kernels.ngrams import look_up
from tests.harness.gpus import gpu
from tests.harness.seeds import fresh_random, seed_of
from tests.kernels.cross_compile import compiled_for
from tests.kernels.interpreter import run_interpreted

SEED = seed_of(__name__)
MAX_ROWS, NUM_DRAFTS = 9, 5


def _case(draw: random.Random, longest: int) -> tuple[Tensor, RowEnds, Tensor]:
    """Texts of few words beside the rests of others, and how much each falls short."""
    texts = torch.tensor(
        [draw.choices(range(draw.randint(2, 9)), k=longest) for _ in range(MAX_ROWS + 1)]
    ).int()
    rows = draw.sample(range(MAX_ROWS), draw.randint(1, MAX_ROWS))
    lengths = [draw.randint(4, longest) for _ in rows]
    ends = RowEnds(
        rows=torch.tensor(rows),
        lengths=torch.tensor(lengths),
        shortfalls=torch.tensor([draw.randint(0, 3) for _ in range(MAX_ROWS + 1)]).int(),
    )
    return texts, ends, torch.full((NUM_DRAFTS, MAX_ROWS + 1), -7, dtype=torch.int32)


@pytest.mark.parametrize("min_match", [1, 2, 3])
def test_drafts_are_those_of_the_host(min_match: int) -> None:
    print("seed", SEED)
    draw = random.Random(SEED)
    for _ in range(60):
        texts, ends, drafts = _case(draw, longest=draw.randint(4, 60))
        look_up(texts, ends, drafts, min_match=min_match, max_match=6)
        for row, length in zip(ends.rows.tolist(), ends.lengths.tolist(), strict=True):
            text = texts[row, : length - int(ends.shortfalls[row])].tolist()
            rules = NgramRules(min_match=min_match, max_match=6, max_candidates=1000)
            found = NgramDrafter(rules).propose(row, text, NUM_DRAFTS)
            assert drafts[:, row].tolist() == (found or text[-1:] * NUM_DRAFTS)
        others = sorted(set(range(MAX_ROWS + 1)) - set(ends.rows.tolist()))
        assert (drafts[:, others] == -7).all()


def check_look_up(device: str) -> None:
    from kernels.ngrams_triton import look_up as there

    draw = fresh_random()
    for longest in (4, 37, 4096, 8200):
        texts, ends, drafts = _case(draw, longest)
        moved = RowEnds(
            rows=ends.rows.to(device),
            lengths=ends.lengths.to(device),
            shortfalls=ends.shortfalls.to(device),
        )
        found = drafts.to(device)
        there(texts.to(device), moved, found, min_match=2, max_match=7)
        look_up(texts, ends, drafts, min_match=2, max_match=7)
        assert torch.equal(found.cpu(), drafts)


def test_the_kernel_finds_the_same_interpreted() -> None:
    run_interpreted("tests.kernels.test_ngrams:check_look_up", "cpu")


def test_it_compiles_for_an_h200() -> None:
    from kernels import ngrams_triton

    texts, ends, drafts = _case(random.Random(SEED), longest=37)
    with compiled_for(gpu("H200"), ngrams_triton) as found:
        ngrams_triton.look_up(texts, ends, drafts, min_match=2, max_match=32)
    assert set(found) == {"_look_up_kernel"}


@pytest.mark.gpu
def test_the_kernel_finds_the_same_on_a_gpu() -> None:
    check_look_up("cuda")
