"""Handoffs from one rank to two, from two to one and from two to two, when a rank fails.

At any moment of the protocol: nothing is wrong, lost or left. On virtual time (gang_simulation.py);
processes that are killed: tests/cluster/test_gang_handoffs.py and load_tests/lab/gang_deaths.py.
"""

import random
from itertools import product
from typing import get_args

import pytest

from actors.kv_transfer.rank_pieces import RankPieces
from engine.messages import Role
from tests.actors.kv_transfer.gang_simulation import Fault, What, play

SIZES = [(1, 2), (2, 1), (2, 2)]
ROLES: tuple[Role, Role] = ("prefill", "decode")
CELLS = list(product(SIZES, get_args(What)))


def faults(sizes: tuple[int, int], what: What) -> list[Fault]:
    """One at each moment at which it may be."""
    seen = play(sizes).seen
    found = []
    for role, size in zip(ROLES, sizes, strict=True):
        for moment, name in enumerate(seen[role]):
            is_of_gang = size > 1 or what == "death"
            is_copied = name.endswith("read") or (
                size > 1 and name.endswith(("written", "digested"))
            )
            if is_copied if what == "wrong" else is_of_gang:
                found.append(Fault(what, role, moment))
    return found


@pytest.mark.parametrize(("sizes", "what"), CELLS)
def test_a_rank_that_fails_at_any_moment_costs_nothing_but_time(
    sizes: tuple[int, int], what: What
) -> None:
    """Its death, which is its gang's; other bytes; a step that ends late, or never."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    for fault in random.Random(seed).sample(faults(sizes, what), 4):
        print(fault)
        play(sizes, fault, seed)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("sizes", "what"), CELLS)
def test_every_moment(sizes: tuple[int, int], what: What) -> None:
    for fault in faults(sizes, what):
        print(fault)
        play(sizes, fault)


def play_all(found: list[Fault]) -> None:
    for fault in found:
        play((2, 2), fault)


@pytest.mark.parametrize(("what", "planted"), [("wrong", "_have"), ("late", "_wait_steps")])
def test_what_a_rank_does_wrong_is_noticed_by_its_check(
    what: What, planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check, some fault is not survived."""
    found = faults((2, 2), what)
    monkeypatch.setattr(RankPieces, planted, lambda *_: True)
    with pytest.raises(AssertionError):
        play_all(found)
