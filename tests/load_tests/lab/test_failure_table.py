"""The table of failures: its rows can be deployed, and it lets nothing pass that it should not."""

import random
from dataclasses import replace

import pytest

from configs.faults import parse_faults
from load_tests.lab.failure_rows import FROM_OUTSIDE, NOT_RUN, ON_DEMAND, Row
from load_tests.lab.failure_stage import Phase
from load_tests.lab.failure_table import Cell, render
from load_tests.testbed.deployed import make_config

ROWS = (*FROM_OUTSIDE, *ON_DEMAND)
MATRIX = range(1, 24)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.number} {row.fault}")
def test_every_row_can_be_deployed_and_has_a_phase(row: Row) -> None:
    config = make_config("failures", row.deployment)
    assert row.phases
    assert all(str(fault.number) in row.how for fault in parse_faults(config.faults))


def test_every_row_of_the_matrix_is_run_or_named_with_a_reason() -> None:
    words = " ".join([*(row.number for row in ROWS), *NOT_RUN]).replace(",", " ").split()
    assert {int(word) for word in words if word.isdigit()} == set(MATRIX)


def _cell() -> Cell:
    return Cell(
        row=random.choice(ROWS),
        phase=random.choice(list(Phase)),
        view="60 of 60 tokens, right",
        silence_s=0.5,
        ready_s=3.25,
        held={},
        is_seen_rightly=True,
    )


def test_what_leaks_never_recovers_or_is_seen_wrongly_is_a_violation() -> None:
    cell = _cell()
    assert not cell.is_violation
    for bad in (
        replace(cell, held={"decode-0: reservations": 1}),
        replace(cell, ready_s=None),
        replace(cell, is_seen_rightly=False),
    ):
        assert bad.is_violation
        assert "VIOLATION" in bad.line()


def test_the_record_has_a_line_for_every_cell_and_every_row_that_was_not_run() -> None:
    text = render([_cell()], seed=7)
    assert "| 3.2 | 0 |" in text
    assert all(row in text for row in NOT_RUN)
