"""Handoffs from one rank to two, from two to one and from two to two, when a rank fails.

At any moment of the protocol: nothing is wrong, lost or left. On virtual time (gang_simulation.py);
processes that are killed: tests/cluster/test_gang_handoffs.py and load_tests/lab/gang_deaths.py.
"""

import random
from itertools import product
from typing import get_args
from unittest.mock import ANY

import pytest

from actors.kv_transfer import rank_pulls
from actors.kv_transfer.rank_pieces import RankPieces
from engine.messages import Role
from tests.actors.kv_transfer.gang_simulation import Fault, Way, What, play

SIZES = [(1, 2), (2, 1), (2, 2)]
ROLES: tuple[Role, Role] = ("prefill", "decode")
CELLS = list(product(SIZES, get_args(Way), get_args(What)))


def faults(sizes: tuple[int, int], way: Way, what: What) -> list[Fault]:
    """One at each moment at which it may be."""
    seen = play(sizes, way).seen
    found = []
    for role, size in zip(ROLES, sizes, strict=True):
        for moment, name in enumerate(seen[role]):
            # One rank checks what came through host memory before it writes.
            is_checked = name.endswith(("read", "digested")) or (
                size > 1 and name.endswith("is written")
            )
            if is_checked if what == "wrong" else what == "death" or size > 1:
                found.append(Fault(what, role, moment))
    return found


@pytest.mark.parametrize(("sizes", "way", "what"), CELLS)
def test_a_rank_that_fails_at_any_moment_costs_nothing_but_time(
    sizes: tuple[int, int], way: Way, what: What
) -> None:
    """Its death, which is its gang's; other bytes; a step that ends late, or never."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    for fault in random.Random(seed).sample(faults(sizes, way, what), 2):
        print(fault)
        play(sizes, way, fault, seed)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("sizes", "way", "what"), CELLS)
def test_every_moment(sizes: tuple[int, int], way: Way, what: What) -> None:
    play_all(sizes, way, faults(sizes, way, what))


def play_all(sizes: tuple[int, int], way: Way, found: list[Fault]) -> None:
    for fault in found:
        print(fault)
        play(sizes, way, fault)


@pytest.mark.parametrize(
    ("way", "what", "owner", "check"),
    [
        ("copied", "wrong", RankPieces, "_have"),
        ("copied", "late", RankPieces, "_wait_steps"),
        ("own", "late", RankPieces, "_wait_steps"),
        ("pulled", "wrong", rank_pulls, "add_terms"),
        ("asked", "wrong", rank_pulls, "add_terms"),
    ],
)
def test_without_its_check_some_fault_is_not_survived(
    way: Way, what: What, owner: object, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = faults((2, 2), way, what)
    monkeypatch.setattr(owner, check, lambda *_: ANY)
    with pytest.raises(AssertionError):
        play_all((2, 2), way, found)
