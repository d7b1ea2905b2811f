"""A batch that starts together, with steps as measured: trials cost little, and rows end alike."""

from collections.abc import Sequence
from typing import Any

import pytest

from engine.request import Request
from engine.speculation.controller import StepDrafts
from engine.speculation.rules import SpeculationRules
from load_tests.simulation.speculation_batch import HOST, SLOW_HOST, Batches, LookedUp, gains


@pytest.mark.parametrize(
    ("num_rows", "acceptance", "least"),
    [(1, 0.0, 0.98), (64, 0.0, 0.98), (64, 0.5, 1.05), (256, 0.0, 0.985), (256, 0.5, 0.985)],
)
def test_a_cold_start_loses_little_until_the_last_row_ends(
    num_rows: int, acceptance: float, least: float
) -> None:
    (found,) = gains([num_rows], acceptance)
    assert found.all_rows_end >= least


def test_rows_of_equal_chances_have_drafts_together() -> None:
    (found,) = gains([64], 0.75)
    assert found.all_rows_end > 1.3
    assert found.rows_a_step > 45


def test_an_unlucky_start_leaves_no_row_behind() -> None:
    (found,) = gains([64], 0.9)
    assert found.all_rows_end > 1.75


def test_a_batch_that_fits_no_graph_does_not_make_drafts_dear_for_others() -> None:
    rules = SpeculationRules(max_drafts=4)
    *_, found = gains([256], 1.0, rules=rules, seed=3, graph_tokens=1024)
    assert found.all_rows_end > 1.3


class SlowToPropose(LookedUp):
    """Drafts that take the host longer than a step takes the device."""

    def propose_ahead(self, asked: Sequence[tuple[Request, int, int]]) -> list[list[int]]:
        self._clock.advance(9e-3)
        return super().propose_ahead(asked)


def test_drafts_that_cost_the_host_more_than_the_device_are_given_up() -> None:
    """Steps overlap, so the device's own time does not show it: it waits in between."""
    plain, drafted = Batches(1, drafts=False), Batches(1, drafts=True)
    drafted.device.acceptance = 0.5
    drafted.scheduler.drafting.drafter = SlowToPropose(drafted.clock, HOST)
    assert plain.run(1, 1000).all_s / drafted.run(1, 1000).all_s > 0.96


@pytest.mark.parametrize("acceptance", [0.25, 0.75])
def test_a_sweep_as_it_is_measured_is_nowhere_below_plain_steps(acceptance: float) -> None:
    """One controller for all rows; what drafts cost must not count twice at 256 rows."""
    rules = SpeculationRules(max_drafts=4)
    found = gains([1, 16, 64, 256], acceptance, carried=True, rules=rules, seed=4)
    least = [0.98, 1.0, 0.98, 0.98] if acceptance == 0.25 else [2.0, 2.0, 1.3, 1.05]
    assert all(gain.all_rows_end >= bound for gain, bound in zip(found, least, strict=True))


def test_rows_are_not_held_for_drafts_that_would_be_refused() -> None:
    """Whoever is asked is held, so that the device waits for the host: only for a trial."""
    rules = SpeculationRules(max_drafts=4)
    *_, found = gains([16, 256], 0.5, carried=True, rules=rules, seed=2, host=SLOW_HOST)
    assert found.while_all_run > 0.985


def test_late_first_launches_are_no_price_of_later_steps() -> None:
    rules = SpeculationRules(max_drafts=4)
    *_, found = gains([16, 256], 0.75, carried=True, rules=rules, seed=2, host=SLOW_HOST)
    assert found.all_rows_end > 1.05


def test_rows_begin_with_drafts_of_the_host_and_with_their_texts_and_then_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = Batches(4, drafts=True)
    batch.device.acceptance = 1.0
    nums_beginning, observe = list[int](), batch.controller.observe_step

    def observe_step(drafts: StepDrafts, *took: Any) -> None:
        nums_beginning.append(drafts.num_beginning)
        observe(drafts, *took)

    monkeypatch.setattr(batch.controller, "observe_step", observe_step)
    batch.run(4)
    assert [num for num in nums_beginning if num] == [4, 4]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("acceptance", [0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0])
def test_nor_by_much_at_any_acceptance(acceptance: float, seed: int) -> None:
    rules = SpeculationRules(max_drafts=4)
    found = gains([1, 16, 64, 256], acceptance, carried=True, rules=rules, seed=seed)
    assert min(gain.all_rows_end for gain in found) >= 0.97
    assert min(gain.while_all_run for gain in found) >= 0.98
