"""Sizes of captured steps: bounded padding, the smallest that fits, and what fits none."""

from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import LapsConfig, SpeculationConfig
from engine.errors import ConfigError
from engine.runner.auto import StepSizes
from engine.runner.captured_sizes import build_prompt_sizes, build_verify_sizes
from engine.runner.graph_sizes import MAX_LATENT_TOKENS, GraphSize, decode_sizes, ragged_sizes
from engine.runner.grid_sizes import grid_sizes
from kernels.attention.phased import PhasedAttention
from kernels.attention.protocol import AttentionShape
from kernels.attention.reference import ReferenceAttention
from tests.engine.runner.graph_story import RowTensorAttention

SHAPE = AttentionShape(num_heads=2, num_kv_heads=2, head_dim=8, layer_windows=(None,))
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def _smallest(sizes: tuple[GraphSize, ...], rows: list[int]) -> GraphSize | None:
    return next((s for s in sizes if s.holds(len(rows), sum(rows), max(rows))), None)


@given(rows=LENGTHS)
def test_the_grid_takes_the_fewest_rows_and_the_shortest_span_that_hold_a_step(
    rows: list[int],
) -> None:
    batches, lengths = (1, 2, 4, 8), (4, 16, 32)
    found = _smallest(grid_sizes(batches, lengths, max_row_tokens=32).sizes, rows)
    fits = [
        (batch, length)
        for batch in batches
        for length in lengths
        if batch >= len(rows) and length >= max(rows)
    ]
    expected = min(fits, default=None)
    assert (found and (found.num_rows, found.span_tokens)) == expected
    assert found is None or found.num_tokens == found.num_rows * (found.span_tokens or 0)


@given(
    rows=LENGTHS,
    max_rows=st.integers(1, 12),
    max_tokens=st.integers(1, 5000),
    max_graph_rows=st.integers(1, 12),
)
def test_ragged_sizes_hold_what_is_short_enough_with_little_padding(
    rows: list[int], max_rows: int, max_tokens: int, max_graph_rows: int
) -> None:
    prompts = ragged_sizes(max_rows, max_tokens, max_graph_rows=max_graph_rows)
    found = _smallest(prompts.sizes, rows)
    fits_rows = len(rows) <= min(max_rows, max_graph_rows)
    assert (found is not None) == (fits_rows and sum(rows) <= max_tokens)
    assert prompts.is_eligible(sum(rows), max(rows)) == (sum(rows) <= max_tokens)
    if found is not None:
        assert found.num_tokens - sum(rows) < max(64, sum(rows) // 8 + 1)


def test_steps_of_few_rows_keep_graphs_of_their_own_beside_those_of_many() -> None:
    few, many = ragged_sizes(256, 8192), ragged_sizes(256, 8192, max_graph_rows=200)
    assert set(few.sizes) < set(many.sizes)
    assert few.graph_token_sizes == many.graph_token_sizes
    for num_rows, num_tokens, expected in [
        (128, 700, (128, 768)),
        (129, 700, (200, 768)),
        (130, 140, (192, 192)),
        (40, 100, (128, 128)),
    ]:
        found = next(size for size in many.sizes if size.holds(num_rows, num_tokens, 1))
        assert (found.num_rows, found.num_tokens) == expected
    assert not any(size.holds(201, 300, 2) for size in many.sizes)


def test_ragged_sizes_end_at_4096_tokens_and_128_rows() -> None:
    largest = ragged_sizes(256, 8192).sizes[-1]
    assert (largest.num_tokens, largest.num_rows) == (4096, 128)


def test_steps_without_padding_are_known_for_ragged_graphs_alone() -> None:
    assert ragged_sizes(256, 70).graph_token_sizes == (16, 32, 64, 70)
    assert grid_sizes((1, 2), (16,), max_row_tokens=16).graph_token_sizes == ()


def test_decode_sizes_end_with_all_rows() -> None:
    for max_rows in (1, 3, 24, 255, 256, 300):
        assert decode_sizes(max_rows)[-1] == GraphSize(num_rows=max_rows, num_tokens=max_rows)


def test_the_published_grid_has_twenty_sizes() -> None:
    laps = LapsConfig()
    grid = grid_sizes(
        laps.batch_prefill_batch_sizes,
        laps.batch_prefill_seq_lengths,
        max_row_tokens=laps.batch_prefill_max_seq_len,
    )
    assert len(set(grid.sizes)) == 20
    assert grid.sizes[0] == GraphSize(num_rows=1, num_tokens=16, span_tokens=16)
    assert grid.sizes[-1] == GraphSize(num_rows=8, num_tokens=2048, span_tokens=256)
    assert grid.is_eligible(8 * 256, 256)
    assert not grid.is_eligible(257, 257)


# ---- from a configuration -----------------------------------------------------------------------


def _attention(*, can_capture_prompts: bool) -> PhasedAttention:
    captured = RowTensorAttention(SHAPE)
    if can_capture_prompts:
        return PhasedAttention(
            prefill=captured, decode=captured, graph=captured, prompt_graph=captured
        )
    reference = _reference()
    return PhasedAttention(prefill=reference, decode=captured, graph=captured)


def _reference() -> ReferenceAttention:
    return ReferenceAttention(SHAPE, block_size=4, dtype=torch.float32, device=torch.device("cpu"))


SIZES = StepSizes(max_rows=20, max_tokens=300, max_graph_rows=128)


def _config(**laps: object) -> LapsConfig:
    return LapsConfig(**laps)  # type: ignore[arg-type]


def test_a_gpu_captures_ragged_steps_unless_told_otherwise() -> None:
    attention = _attention(can_capture_prompts=True)
    ragged = build_prompt_sizes(_config(), SIZES, attention, uses_graphs=True)
    assert ragged == ragged_sizes(20, 300)
    grid = build_prompt_sizes(
        _config(batch_prefill_form="grid"), SIZES, attention, uses_graphs=True
    )
    assert grid == grid_sizes((1, 2, 4, 8), (16, 32, 64, 128, 256), max_row_tokens=256)
    latents = build_prompt_sizes(
        _config(), replace(SIZES, max_tokens=4000), attention, uses_graphs=True, is_latent=True
    )
    assert latents == ragged_sizes(20, MAX_LATENT_TOKENS)
    off = _config(enable_batch_prefill_cuda_graph=False)
    assert build_prompt_sizes(off, SIZES, attention, uses_graphs=True) is None


def test_nothing_is_captured_where_it_cannot_be_and_was_not_asked_for() -> None:
    for can_capture_prompts, uses_graphs in ((False, True), (True, False)):
        attention = _attention(can_capture_prompts=can_capture_prompts)
        assert build_prompt_sizes(_config(), SIZES, attention, uses_graphs=uses_graphs) is None


@pytest.mark.parametrize(
    ("laps", "key"),
    [
        ({"enable_batch_prefill_cuda_graph": True}, "laps.enable_batch_prefill_cuda_graph"),
        ({"batch_prefill_form": "grid"}, "laps.batch_prefill_form: grid"),
    ],
)
def test_what_was_asked_for_and_cannot_be_captured_is_an_error(
    laps: dict[str, object], key: str
) -> None:
    uncaptured = _attention(can_capture_prompts=False)
    with pytest.raises(ConfigError, match=rf"{key}.*set model\.attention\.prefill"):
        build_prompt_sizes(_config(**laps), SIZES, uncaptured, uses_graphs=True)
    attention = _attention(can_capture_prompts=True)
    with pytest.raises(ConfigError, match=rf"{key}.*set model\.attention\.decode"):
        build_prompt_sizes(_config(**laps), SIZES, attention, uses_graphs=False)


def test_steps_with_drafts_are_captured_as_far_as_they_can_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def captured(asked: SpeculationConfig, most: int, *, can_capture: bool = True) -> list[int]:
        attention = _attention(can_capture_prompts=can_capture)
        sizes = replace(SIZES, max_verify_tokens=most)
        found = build_verify_sizes(asked, sizes, attention, uses_graphs=True)
        return [size.num_tokens for size in found]

    auto = SpeculationConfig(drafter="ngram", max_drafts=3)
    assert auto.max_graph_tokens == "auto"
    assert captured(auto, 40)[-1] == 40
    assert captured(auto, 512)[-1] == 4 * SIZES.max_rows
    caplog.set_level("INFO")
    assert captured(auto, 0) == []
    assert captured(SpeculationConfig(), 512) == []  # what drafts has no steps with drafts
    assert not caplog.messages
    assert captured(auto, 512, can_capture=False) == []
    assert "steps with drafts replay no graphs of their own" in caplog.text
    with pytest.raises(ConfigError, match=r"speculation\.max_graph_tokens.*attention_backend"):
        captured(msgspec.structs.replace(auto, max_graph_tokens=40), 40, can_capture=False)
