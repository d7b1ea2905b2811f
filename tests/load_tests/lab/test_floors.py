"""A floor counts what a step must read and multiply, and nothing twice."""

import dataclasses
from pathlib import Path

import pytest

from engine.models.spec import ModelSpec, load_spec
from load_tests.lab.floors import (
    H200,
    Machine,
    active_parameters,
    decode_floor_s,
    distinct_experts,
    floor_s,
    head_parameters,
    layer_parameters,
    read_parameters,
)
from load_tests.lab.shapes import WEIGHT_FORMATS, write_shapes
from load_tests.lab.works import DECODES, LONG_PREFILLS, Kind, Work
from tests.harness.weight_counts import num_parameters

ONLY_BYTES = Machine(bytes_per_s=1.0, flops_per_s=float("inf"))
ONLY_FLOPS = Machine(bytes_per_s=float("inf"), flops_per_s=1.0)


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return load_spec(write_shapes("qwen3-8b", tmp_path))


def test_the_shapes_are_those_of_qwen3_8b(spec: ModelSpec) -> None:
    linear = spec.num_layers * layer_parameters(spec) + head_parameters(spec)
    assert 2 * linear == pytest.approx(15.1e9, rel=0.01)  # bytes read a step in bf16
    assert spec.max_model_len == 40960
    assert spec.has_qk_norm
    assert not spec.has_tied_embeddings


def test_a_step_of_one_row_takes_as_long_as_reading_the_weights(spec: ModelSpec) -> None:
    least_s = floor_s(DECODES[0], spec, "bfloat16", H200)
    assert least_s == pytest.approx(15.16e9 / 4.29e12, rel=0.005)


def test_every_linear_weight_of_a_model_with_latents_counts_once(tmp_path: Path) -> None:
    spec = load_spec(write_shapes("deepseek-v2-lite", tmp_path))
    whole = read_parameters(spec, 10**6) + 2 * head_parameters(spec)
    norms = spec.hidden_size * (2 * spec.num_layers + 1) + 512 * spec.num_layers
    assert round(whole) + norms == num_parameters(spec)
    kept = decode_floor_s(2, 4096, spec, "bfloat16", ONLY_BYTES)
    fewer = decode_floor_s(2, 4095, spec, "bfloat16", ONLY_BYTES)
    assert kept - fewer == pytest.approx(2 * 27 * 1152)


def test_quantised_weights_are_fewer_bytes_to_read(spec: ModelSpec, tmp_path: Path) -> None:
    linear = spec.num_layers * layer_parameters(spec)
    dense = decode_floor_s(1, 100, spec, "bfloat16", ONLY_BYTES)
    for name, each in (("fp8-block", 1), ("fp8-row", 1), ("int4", 0.5), ("int4-zeros", 0.5)):
        assert name in WEIGHT_FORMATS
        quantised = load_spec(write_shapes("qwen3-8b", tmp_path / name, name))
        assert quantised.quantization is not None
        saved = dense - decode_floor_s(1, 100, quantised, "bfloat16", ONLY_BYTES)
        assert saved == (2 - each) * linear


def test_of_gpt_oss_the_experts_alone_have_half_a_byte_a_number(tmp_path: Path) -> None:
    spec = load_spec(write_shapes("gpt-oss-20b", tmp_path))
    attention = 2880 * (64 + 8 + 8 + 64) * 64
    expert = 3 * 2880 * 2880
    of_layers = 24 * (2 * attention + 2 * 2880 * 32 + 4 * expert / 2)
    outer = 2 * 2880 * (201088 + 1)
    kept = 2 * 2 * 8 * 64 * (100 * 24 + 24)
    assert decode_floor_s(1, 100, spec, "bfloat16", ONLY_BYTES) == of_layers + outer + kept


def test_a_row_reads_its_keys_and_values_and_writes_one_of_each(spec: ModelSpec) -> None:
    kv_bytes = 36 * 2 * 8 * 128 * 2  # of one token
    of_one = decode_floor_s(1, 100, spec, "bfloat16", ONLY_BYTES)
    of_two = decode_floor_s(2, 100, spec, "bfloat16", ONLY_BYTES)
    assert of_two - of_one == 101 * kv_bytes + 2 * 4096  # and its row of the embedding
    assert decode_floor_s(1, 101, spec, "bfloat16", ONLY_BYTES) - of_one == kv_bytes
    assert decode_floor_s(1, 100, spec, "float32", ONLY_BYTES) == 2 * of_one


def test_drafts_are_more_tokens_that_read_a_rows_keys_together(spec: ModelSpec) -> None:
    kv_bytes = 36 * 2 * 8 * 128 * 2
    plain = decode_floor_s(3, 100, spec, "bfloat16", ONLY_BYTES)
    drafted = decode_floor_s(3, 100, spec, "bfloat16", ONLY_BYTES, num_queries=4)
    assert drafted - plain == 9 * (kv_bytes + 2 * 4096)  # of nine drafts, and rows of the embedding
    plain = decode_floor_s(3, 100, spec, "bfloat16", ONLY_FLOPS)
    assert decode_floor_s(3, 100, spec, "bfloat16", ONLY_FLOPS, num_queries=4) == 4 * plain


def test_a_decode_works_context_is_the_average_over_its_steps(spec: ModelSpec) -> None:
    steps = [decode_floor_s(64, 128 + i, spec, "bfloat16", ONLY_BYTES) for i in range(1, 129)]
    assert floor_s(DECODES[2], spec, "bfloat16", ONLY_BYTES) == pytest.approx(sum(steps) / 128)


def test_a_prefill_multiplies_every_pair_of_a_query_and_a_key_before_it(spec: ModelSpec) -> None:
    work = Work(Kind.PREFILL, 3, 17)
    linear = 3 * (17 * 36 * layer_parameters(spec) + head_parameters(spec))
    pairs = 3 * sum(range(1, 18)) * 36
    expected = 2 * linear + 4 * pairs * 32 * 128  # q k^T and its product with v
    assert floor_s(work, spec, "bfloat16", ONLY_FLOPS) == expected


@pytest.mark.parametrize("window", [1, 5, 17, 100])
def test_a_window_hides_what_lies_before_it(window: int, spec: ModelSpec) -> None:
    windowed = dataclasses.replace(spec, layer_windows=(window,) + (None,) * 35)
    work = Work(Kind.PREFILL, 1, 17)
    hidden = sum(max(0, i - window) for i in range(1, 18))
    saved = floor_s(work, spec, "bfloat16", ONLY_FLOPS) - floor_s(
        work, windowed, "bfloat16", ONLY_FLOPS
    )
    assert saved == 4 * hidden * 32 * 128
    keys = decode_floor_s(1, 40, spec, "bfloat16", ONLY_BYTES) - decode_floor_s(
        1, 40, windowed, "bfloat16", ONLY_BYTES
    )
    assert keys == max(0, 40 - window) * 2 * 8 * 128 * 2


def test_the_peak_bounds_long_prefills_and_the_weights_bound_short_ones(spec: ModelSpec) -> None:
    rate = LONG_PREFILLS[0].in_unit(floor_s(LONG_PREFILLS[0], spec, "bfloat16", H200))
    assert 50_000 < rate < 60_000
    short_s = floor_s(Work(Kind.SHORT_PREFILL, 1, 64), spec, "bfloat16", H200)
    assert short_s == pytest.approx(15.14e9 / 4.29e12, rel=0.005)


def test_a_mixture_reads_the_experts_that_its_tokens_choose(tmp_path: Path) -> None:
    spec = load_spec(write_shapes("qwen3-30b-a3b", tmp_path))
    assert spec.mixture is not None
    assert distinct_experts(spec.mixture, 1) == pytest.approx(8)
    assert [round(distinct_experts(spec.mixture, n)) for n in (8, 16, 32, 64)] == [52, 82, 112, 126]
    whole = active_parameters(spec) + 2 * head_parameters(spec)
    assert whole == pytest.approx(3.3e9, rel=0.02)  # its name: A3B
    every = read_parameters(spec, 10**6) + 2 * head_parameters(spec)
    assert every == pytest.approx(num_parameters(spec), rel=1e-3)  # but for norms
    one = decode_floor_s(1, 1, spec, "bfloat16", ONLY_BYTES)
    assert one == pytest.approx(2 * (whole - head_parameters(spec)), rel=1e-3)
    mixtral = load_spec(write_shapes("mixtral-8x7b", tmp_path))
    assert num_parameters(mixtral) == pytest.approx(46.7e9, rel=1e-3)
