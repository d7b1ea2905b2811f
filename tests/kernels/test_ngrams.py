"""What the device finds in a row's text is what the host's drafter finds in it."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.speculation.ngram import NgramDrafter, NgramRules
from kernels.guessed_steps import RowStates, TextChanges
from kernels.ngrams import look_up
from tests.harness.gpus import gpu
from tests.harness.seeds import fresh_random, seed_of
from tests.kernels.cross_compile import compiled_for
from tests.kernels.interpreter import run_interpreted

SEED = seed_of(__name__)
MAX_ROWS, NUM_DRAFTS = 9, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    texts: Tensor  # before the changes
    changed: list[list[int]]  # after them
    changes: TextChanges
    states: RowStates
    drafts: Tensor
    lengths: dict[int, int]  # of each row that is looked up, as planned

    def at(self, device: str) -> tuple[Tensor, TextChanges, RowStates, Tensor]:
        changes, states = self.changes, self.states
        return (
            self.texts.to(device),
            TextChanges(
                packed=changes.packed.to(device),
                num_rows=changes.num_rows,
                num_pieces=changes.num_pieces,
            ),
            RowStates(
                shortfalls=states.shortfalls.to(device),
                samples=states.samples.to(device),
                newest=states.newest.to(device),
            ),
            self.drafts.to(device),
        )


def _case(draw: random.Random, longest: int) -> _Case:
    """Texts of few words, some of which get pieces and tokens in flight, beside those of others."""
    texts = [draw.choices(range(draw.randint(2, 9)), k=longest) for _ in range(MAX_ROWS + 1)]
    changed = [list(text) for text in texts]
    samples = [draw.choices(range(9), k=MAX_ROWS + 1) for _ in range(4)]
    heads: list[int] = []
    pieces: list[int] = []
    tokens: list[int] = []
    rows = draw.sample(range(MAX_ROWS), draw.randint(1, MAX_ROWS))
    lengths = {row: draw.randint(4, longest) for row in rows}
    for row in rows:
        in_flight = draw.randint(0, len(samples))
        heads += [row, lengths[row], in_flight, len(pieces) // 3]
        for _ in range(draw.choice((0, 1, 1, 2))):
            count = draw.randint(1, draw.choice((3, longest)))
            start = draw.randint(0, longest - count)
            pieces += [start, len(tokens), count]
            its = draw.choices(range(9), k=count)
            tokens += its
            changed[row][start : start + count] = its
        first = lengths[row] - in_flight
        changed[row][first : lengths[row]] = [its[row] for its in samples[:in_flight]]
    heads += [0, 0, 0, len(pieces) // 3]
    shortfalls = [draw.randint(0, 3) for _ in range(MAX_ROWS + 1)]
    return _Case(
        texts=torch.tensor(texts).int(),
        changed=changed,
        changes=TextChanges(
            packed=torch.tensor([*heads, *pieces, *tokens]).int(),
            num_rows=len(rows),
            num_pieces=len(pieces) // 3,
        ),
        states=RowStates(
            shortfalls=torch.tensor(shortfalls).int(),
            samples=torch.tensor(samples).int(),
            newest=torch.zeros(MAX_ROWS + 1, dtype=torch.int32),
        ),
        drafts=torch.full((NUM_DRAFTS, MAX_ROWS + 1), -7, dtype=torch.int32),
        lengths=lengths,
    )


@pytest.mark.parametrize("min_match", [1, 2, 3])
def test_drafts_are_those_of_the_host(min_match: int) -> None:
    print("seed", SEED)
    draw = random.Random(SEED)
    for _ in range(60):
        case = _case(draw, longest=draw.randint(4, 60))
        texts, _, states, drafts = given = case.at("cpu")
        look_up(*given, min_match=min_match, max_match=6)
        assert texts.tolist() == case.changed
        for row, length in case.lengths.items():
            text = case.changed[row][: length - int(states.shortfalls[row])]
            rules = NgramRules(min_match=min_match, max_match=6, max_candidates=1000)
            found = NgramDrafter(rules).propose(row, text, NUM_DRAFTS)
            assert drafts[:, row].tolist() == (found or text[-1:] * NUM_DRAFTS)
        others = sorted(set(range(MAX_ROWS + 1)) - set(case.lengths))
        assert (drafts[:, others] == -7).all()


def check_look_up(device: str) -> None:
    from kernels.ngrams_triton import look_up as there

    draw = fresh_random()
    for longest in (4, 37, 4096, 8200):
        case = _case(draw, longest)
        texts, changes, states, drafts = case.at(device)
        there(texts, changes, states, drafts, min_match=2, max_match=7)
        assert texts.tolist() == case.changed
        expected = case.at("cpu")
        look_up(*expected, min_match=2, max_match=7)
        assert torch.equal(drafts.cpu(), expected[-1])


def test_the_kernel_finds_the_same_interpreted() -> None:
    run_interpreted("tests.kernels.test_ngrams:check_look_up", "cpu")


def test_it_compiles_for_an_h200() -> None:
    from kernels import ngrams_triton

    given = _case(random.Random(SEED), longest=37).at("cpu")
    with compiled_for(gpu("H200"), ngrams_triton) as found:
        ngrams_triton.look_up(*given, min_match=2, max_match=32)
    assert set(found) == {"_look_up_kernel"}


@pytest.mark.gpu
def test_the_kernel_finds_the_same_on_a_gpu() -> None:
    check_look_up("cuda")
