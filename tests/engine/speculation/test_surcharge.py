"""What steps with drafts take beyond their prediction is learned by their size and kind."""

import numpy as np
import pytest

from engine.speculation.surcharge import StepKind, Surcharge

GRAPH, EAGER = StepKind(has_graph=True), StepKind()


def priced(surcharge: Surcharge, kind: StepKind, *num_tokens: float) -> list[float]:
    return [float(s) for s in surcharge.seconds(kind, np.array(num_tokens))]


def test_nothing_is_added_before_anything_was_seen() -> None:
    assert priced(Surcharge(), GRAPH, 1, 1000) == [0.0, 0.0]


def test_a_large_step_does_not_make_small_ones_dear() -> None:
    surcharge = Surcharge()
    for num_tokens, error_s in [(16, 0.1e-3), (1024, 2.6e-3)] * 2:
        surcharge.observe(GRAPH, num_tokens, error_s)
    found = priced(surcharge, GRAPH, 4, 16, 520, 1024, 1280)
    assert found == pytest.approx([0.1e-3, 0.1e-3, 1.35e-3, 2.6e-3, 2.6e-3])


def test_steps_that_no_graph_holds_are_priced_apart() -> None:
    surcharge = Surcharge()
    for _ in range(2):
        surcharge.observe(EAGER, 1280, 7e-3)
    assert priced(surcharge, GRAPH, 1024) == [0.0]
    assert priced(surcharge, EAGER, 1025) == [7e-3]


def test_the_median_of_a_size_counts_and_fades() -> None:
    surcharge = Surcharge()
    for error_s in (1e-3, 60e-3, 1e-3):
        surcharge.observe(GRAPH, 64, error_s)
    assert priced(surcharge, GRAPH, 64) == [1e-3]
    surcharge.fade(0.5)
    assert priced(surcharge, GRAPH, 64) == [0.5e-3]


def test_one_step_alone_is_no_price() -> None:
    surcharge = Surcharge()
    for num_tokens, error_s in [(64, 1e-3), (64, 1e-3), (256, 60e-3)]:
        surcharge.observe(GRAPH, num_tokens, error_s)
    assert priced(surcharge, GRAPH, 64, 256) == [1e-3, 1e-3]


def test_a_wait_that_comes_again_is_a_price_of_all_sizes_and_one_that_does_not_is_none() -> None:
    surcharge = Surcharge()
    for waited_s in (5e-3, 0.0, 0.0):
        surcharge.observe(GRAPH, 64, 0.0, waited_s)
    assert surcharge.wait_s == 0.0
    for _ in range(9):
        surcharge.observe(GRAPH, 64, 0.0, 5e-3)
    assert surcharge.wait_s == 5e-3
    assert priced(surcharge, GRAPH, 64) == [0.0]


def test_steps_faster_than_predicted_make_no_draft_cheaper() -> None:
    surcharge = Surcharge()
    surcharge.observe(GRAPH, 64, -1e-3)
    assert priced(surcharge, GRAPH, 64) == [0.0]
