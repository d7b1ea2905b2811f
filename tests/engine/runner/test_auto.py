"""What is chosen for `auto`: for GPUs that are not here, by records, and by made-up step times."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3 import Qwen3Config

from configs.load import PROJECT_ROOT, load_config
from configs.schema import AppConfig
from engine.cost_model import StepWork
from engine.errors import ConfigError
from engine.models.quantization.published_tensors import weight_bytes
from engine.models.spec import load_spec
from engine.runner.auto import (
    Calibration,
    Choice,
    Footprint,
    StepSizes,
    choose_limits,
    choose_sizes,
    describe,
    needs_calibration,
)
from engine.runner.graph_sizes import verify_sizes
from kernels.device import DeviceProperties, device_properties
from tests.harness.gpus import GPUS, gpu
from tests.harness.weight_counts import num_parameters

GPU_FILE = PROJECT_ROOT / "configs" / "gpu.yaml"
# Qwen3-8B in bfloat16.
QWEN3 = Footprint(
    weights_bytes=2 * 8_190_735_360,
    kv_token_bytes=147_456,
    step_token_bytes=118_784,
    logits_bytes=303_872,
    max_model_len=40_960,
)
# Rows, tokens that a step is built for, rows of a prompt graph.
EXPECTED = {
    "A100 40GB": (128, 4096, 128),
    "A100 80GB": (256, 4096, 128),
    "A10": (24, 2048, 24),
    "L4": (24, 2048, 24),
    "L40S": (152, 4096, 128),
    "RTX 4090": (32, 4096, 32),
    "RTX 5090": (80, 4096, 80),
    "RTX PRO 6000": (256, 8192, 128),
    "H100": (256, 8192, 128),
    "H200": (256, 8192, 128),
    "B200": (256, 8192, 128),
}


def config_of(**overrides: object) -> AppConfig:
    return load_config(GPU_FILE, {key.replace("__", "."): v for key, v in overrides.items()})


def measured(decode_ms: float, token_us: float, max_tokens: int = 8192) -> Calibration:
    """Steps of a GPU that takes `decode_ms` for the weights and `token_us` for each new token."""
    lengths = [n for n in (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192) if n <= max_tokens]
    chunks = tuple((n, 1e-3 * decode_ms + 1e-6 * token_us * n) for n in lengths)
    samples = tuple((StepWork.of_prompts([(n, 0)]), seconds) for n, seconds in chunks)
    return Calibration(decode_s=1e-3 * decode_ms, chunks=chunks, samples=samples, took_s=1.5)


def chosen(config: AppConfig, sizes: StepSizes, calibration: Calibration) -> dict[str, float]:
    limits = choose_limits(config, sizes, calibration)
    return {choice.key: choice.value for choice in limits.choices}


def test_the_footprint_is_that_of_the_published_model(tmp_path: Path) -> None:
    for tied in (False, True):
        config = Qwen3Config(
            hidden_size=64, intermediate_size=88, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, vocab_size=131, tie_word_embeddings=tied,
            architectures=["Qwen3ForCausalLM"],
        )  # fmt: skip
        config.save_pretrained(tmp_path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        spec = load_spec(tmp_path)
        assert num_parameters(spec) == model.num_parameters()
        layout = spec.kv_layout(block_size=16, dtype="bfloat16")
        held_bytes = weight_bytes(spec, element_bytes=2, keeps_quantised=True)
        footprint = Footprint.of(spec, layout, held_bytes, 2)
        assert footprint.weights_bytes == 2 * model.num_parameters()
        assert footprint.kv_token_bytes == 3 * 2 * 2 * 16 * 2
        assert footprint.logits_bytes == 131 * 2


@pytest.mark.parametrize("name", sorted(GPUS))
def test_sizes_are_chosen_by_memory_and_multiprocessors(name: str) -> None:
    device = gpu(name)
    sizes = choose_sizes(config_of(), device, QWEN3)
    assert (sizes.max_rows, sizes.max_tokens, sizes.max_graph_rows) == EXPECTED[name]
    # What is expected to be resident fits, with a cache of 1,024 tokens a row.
    kv_bytes = sizes.max_rows * 1024 * QWEN3.kv_token_bytes
    assert QWEN3.weights_bytes + kv_bytes < 0.9 * device.memory_bytes


def test_a_small_model_gets_many_rows_on_a_small_gpu() -> None:
    small = Footprint(
        weights_bytes=1_200_000_000,
        kv_token_bytes=114_688,
        step_token_bytes=40_000,
        logits_bytes=303_872,
        max_model_len=40_960,
    )
    sizes = choose_sizes(config_of(), gpu("L4"), small)
    assert (sizes.max_rows, sizes.max_tokens, sizes.max_graph_rows) == (160, 2048, 128)


def test_numbers_of_the_configuration_are_kept() -> None:
    config = config_of(
        scheduler__max_num_seqs=40,
        scheduler__max_num_batched_tokens=700,
        laps__batch_prefill_max_rows=20,
        laps__max_step_ms=33.0,
        laps__max_mixed_step_ms=None,
        laps__max_busy_step_ms=77.0,
        edge__max_queued_tokens=5000,
    )
    assert not needs_calibration(config)
    sizes = choose_sizes(config, gpu("L4"), QWEN3)
    assert sizes == StepSizes(max_rows=40, max_tokens=700, max_graph_rows=20)
    limits = choose_limits(config, sizes, None)
    assert limits.choices == ()
    assert (limits.scheduler.max_num_seqs, limits.scheduler.max_num_batched_tokens) == (40, 700)
    assert (limits.laps.max_step_ms, limits.laps.max_busy_step_ms) == (33.0, 77.0)
    assert limits.laps.max_mixed_step_ms is None
    assert limits.max_queued_tokens == 5000


def test_rows_and_step_tokens_agree_when_one_of_them_is_given() -> None:
    few_tokens = choose_sizes(config_of(scheduler__max_num_batched_tokens=100), gpu("H200"), QWEN3)
    assert (few_tokens.max_rows, few_tokens.max_tokens) == (100, 100)
    many_rows = choose_sizes(config_of(scheduler__max_num_seqs=5000), gpu("L4"), QWEN3)
    assert (many_rows.max_rows, many_rows.max_tokens) == (5000, 10_000)
    blocks = choose_sizes(config_of(cache__num_blocks=1000), gpu("H200"), QWEN3)
    assert blocks.max_rows == 8  # 16,000 tokens are 15 rows


# Tokens of the largest graph with drafts; eight a row.
EXPECTED_VERIFY = {
    "A100 40GB": 512,
    "A100 80GB": 512,
    "A10": 24 * 9,
    "L4": 24 * 9,
    "L40S": 512,
    "RTX 4090": 32 * 9,
    "RTX 5090": 512,
    "RTX PRO 6000": 512,
    "H100": 512,
    "H200": 512,
    "B200": 512,
}


@pytest.mark.parametrize("name", sorted(GPUS))
def test_graphs_with_drafts_take_a_twentieth_of_the_memory_at_most(name: str) -> None:
    config, device = config_of(speculation__drafter="ngram"), gpu(name)
    sizes = choose_sizes(config, device, QWEN3)
    assert sizes.max_verify_tokens == EXPECTED_VERIFY[name]
    lines = sum(size.num_lines for size in verify_sizes(sizes.max_rows, sizes.max_verify_tokens))
    assert lines * QWEN3.logits_bytes <= device.memory_bytes // 20
    assert sizes.choices[-1] == Choice(
        key="speculation.max_graph_tokens",
        value=sizes.max_verify_tokens,
        why=f"logits of {lines * QWEN3.logits_bytes / 2**20:,.0f} MiB",
    )
    uncaptured = sizes.without_verification()
    assert (uncaptured.max_verify_tokens, uncaptured.choices) == (0, sizes.choices[:-1])
    assert choose_sizes(config_of(), device, QWEN3) == uncaptured
    assert choose_sizes(config, device, QWEN3, decodes=False) == uncaptured


def test_graphs_with_drafts_are_as_large_as_rows_steps_and_memory_allow() -> None:
    def chosen_for(device: DeviceProperties, **overrides: object) -> int:
        config = config_of(speculation__drafter="ngram", **overrides)
        return choose_sizes(config, device, QWEN3).max_verify_tokens

    h200 = gpu("H200")
    assert chosen_for(h200, scheduler__max_num_seqs=16, speculation__max_drafts=3) == 64
    assert chosen_for(h200, scheduler__max_num_batched_tokens=300) == 300
    assert chosen_for(gpu("L4"), scheduler__max_num_seqs=128) == 256  # halved once
    for number in (0, 5000):
        assert chosen_for(h200, speculation__max_graph_tokens=number) == number
    assert chosen_for(device_properties(torch.device("cpu"))) == 0


def test_a_gpu_that_cannot_run_the_model_is_an_error_that_says_why() -> None:
    with pytest.raises(ConfigError, match=r"15\.3 GiB of weights do not fit 90% of the 16\.0 GiB"):
        choose_sizes(config_of(), _gpu_of(16, (8, 9)), QWEN3)
    for config in (config_of(), config_of(scheduler__max_num_seqs=8)):
        with pytest.raises(ConfigError, match=r"capability 7\.5.*need 8\.0 or newer"):
            choose_sizes(config, _gpu_of(16, (7, 5)), QWEN3)


def _gpu_of(memory_gib: int, capability: tuple[int, int]) -> DeviceProperties:
    return DeviceProperties(
        name="a GPU",
        capability=capability,
        memory_bytes=memory_gib * 2**30,
        num_sms=40,
        shared_memory_per_block_bytes=64 * 1024,
    )


# ---- by measured steps --------------------------------------------------------------------------

H200_SIZES = StepSizes(max_rows=256, max_tokens=8192, max_graph_rows=128)


def test_an_h200_gets_about_what_was_tuned_on_it_by_hand() -> None:
    found = chosen(config_of(), H200_SIZES, measured(4.6, 22.0))
    tuned = load_config(PROJECT_ROOT / "configs" / "h200_1_laps.yaml", {})
    assert found["laps.max_step_ms"] == pytest.approx(tuned.laps.max_step_ms, rel=0.05)
    assert found["laps.max_mixed_step_ms"] == pytest.approx(tuned.laps.max_mixed_step_ms, rel=0.05)
    assert found["laps.max_busy_step_ms"] == pytest.approx(tuned.laps.max_busy_step_ms, rel=0.05)
    assert found["edge.max_queued_tokens"] == pytest.approx(tuned.edge.max_queued_tokens, rel=0.15)
    # (17 * 4.6 - 4.6) / 0.022 = 3,345 tokens, in whole 64
    assert found["scheduler.max_num_batched_tokens"] == 3328


@pytest.mark.parametrize(
    ("decode_ms", "token_us", "step_ms", "mixed_ms", "busy_ms", "tokens"),
    [
        (0.5, 2.0, 20.0, 8.0, 40.0, 8192),  # a small model: launches dominate
        (2.6, 12.0, 20.8, 8.0, 44.2, 3456),
        (18.0, 126.0, 144.0, 54.0, 306.0, 2240),
        (55.0, 360.0, 250.0, 100.0, 500.0, 1216),  # a slow GPU: answers would visibly stop
        (600.0, 9000.0, 250.0, 100.0, 500.0, 512),  # not even one decode step: two rows a token
    ],
)
def test_step_times_follow_the_decode_step_within_bounds(
    decode_ms: float, token_us: float, step_ms: float, mixed_ms: float, busy_ms: float, tokens: int
) -> None:
    found = chosen(config_of(), H200_SIZES, measured(decode_ms, token_us))
    assert found["laps.max_step_ms"] == pytest.approx(step_ms)
    assert found["laps.max_mixed_step_ms"] == pytest.approx(mixed_ms)
    assert found["laps.max_busy_step_ms"] == pytest.approx(busy_ms)
    assert found["scheduler.max_num_batched_tokens"] == tokens


def test_no_step_is_larger_than_those_that_were_measured() -> None:
    calibration = measured(4.6, 1.0, max_tokens=1024)
    assert calibration.max_tokens_within(10.0) == 1024
    found = chosen(config_of(), H200_SIZES, calibration)
    assert found["scheduler.max_num_batched_tokens"] == 1024
    # A step that happened to be faster than a shorter one does not hide the longer ones.
    odd = Calibration(
        decode_s=0.010, chunks=((16, 0.012), (64, 0.011), (128, 0.030)), samples=(), took_s=0.1
    )
    assert odd.max_tokens_within(0.0205) == 96
    assert odd.max_tokens_within(0.001) == 0


def test_numbers_that_are_given_stay_beside_those_that_are_measured() -> None:
    config = config_of(laps__max_step_ms=31.0, scheduler__max_num_batched_tokens=900)
    limits = choose_limits(config, H200_SIZES, measured(4.6, 22.0))
    assert (limits.laps.max_step_ms, limits.laps.max_mixed_step_ms) == (31.0, 13.8)
    assert limits.scheduler.max_num_batched_tokens == 900


def test_the_log_line_says_what_was_chosen_for_what_and_why() -> None:
    sizes = choose_sizes(config_of(), gpu("L4"), QWEN3)
    calibration = measured(55.0, 360.0, max_tokens=1024)
    line = describe(gpu("L4"), choose_limits(config_of(), sizes, calibration), calibration)
    assert "\n" not in line
    for words in (
        "NVIDIA L4 (compute capability 8.9, 58 SMs, 22 GiB, 99 KiB shared memory a block)",
        "scheduler.max_num_seqs 24 (KV memory for about 25,075 tokens)",
        "laps.batch_prefill_max_rows 24 (",
        "laps.max_step_ms 250 (8 x 55.00 ms of a decode step, 20 to 250)",
        "scheduler.max_num_batched_tokens 1,024 (steps of 500 ms; built for 2,048)",
        "edge.max_queued_tokens 12,000 (5 s at 2,417 tokens/s)",
        "steps measured in 1.5 s",
    ):
        assert words in line


def test_a_cpu_has_sizes_too() -> None:
    sizes = choose_sizes(
        config_of(model__device="cpu", workers__num_gpus=0),
        device_properties(torch.device("cpu")),
        QWEN3,
    )
    assert (sizes.max_rows, sizes.max_tokens) == (32, 512)


def test_rows_that_cannot_grow_long_are_more() -> None:
    bounded = config_of(model__max_model_len=256)
    assert choose_sizes(bounded, gpu("L4"), QWEN3).max_rows == 96


def test_a_large_number_is_written_in_full() -> None:
    choice = Choice(key="edge.max_queued_tokens", value=1_234_500, why="so")
    assert choice.describe() == "edge.max_queued_tokens 1,234,500 (so)"
