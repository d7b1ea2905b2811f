"""The mixed bench on a small engine: every variant is served, timed and written down."""

import json
from pathlib import Path

import pytest

from configs.schema import AppConfig
from load_tests.lab.bench_mixed import build_parser, build_variants, engine_config, run
from load_tests.lab.in_process import EngineInProcess
from load_tests.lab.one_batch import Batch, OneBatch

MODEL = Path(__file__).resolve().parents[3] / "demo_model" / "laps-demo"
TINY = ["--model", str(MODEL), "--weights", "safetensors", "--device", "cpu",
        "--max-rows", "16",
        "--max-model-len", "512", "--max-num-batched-tokens", "256", "--num-blocks", "512",
        "--shrink", "64", "--output-tokens", "4", "--duration-s", "1",
        "--warm-up-s", "1"]  # fmt: skip


def config_of(*switches: str, overrides: dict[str, object] | None = None) -> AppConfig:
    return engine_config(MODEL, build_parser().parse_args([*TINY, *switches]), overrides or {})


def test_only_variants_that_differ_are_run() -> None:
    switches = "--queue fcfs laps --mix exclusive fill --window none adaptive --graphs auto off"
    variants = build_variants(build_parser().parse_args(switches.split()))
    assert [variant.label for variant in variants[:5]] == [
        "fcfs",
        "laps, exclusive",
        "laps, exclusive, window adaptive",
        "laps, fill",
        "laps, fill, window adaptive",
    ]
    assert [variant.label for variant in variants[5:6]] == ["fcfs, graphs off"]
    assert len(variants) == 10


def test_a_variant_is_what_the_configuration_says() -> None:
    switches = ["--queue", "laps", "priority", "--mix", "fill", "--window", "adaptive"]
    switches += ["--graphs", "off"]
    laps, priority = build_variants(build_parser().parse_args(switches))
    config = config_of("--set", "laps.max_step_ms=30", overrides=laps.overrides)
    assert (config.laps.queue, config.laps.mix, config.laps.window) == ("laps", "fill", "adaptive")
    assert config.laps.queue == "laps"
    assert config.laps.enable_batch_prefill_cuda_graph is False
    assert config.laps.max_step_ms == 30
    assert config_of(overrides=priority.overrides).laps.queue == "priority"
    gpu = ["--device", "cuda", "--graphs", "grid"]
    [grid] = build_variants(build_parser().parse_args(gpu))
    assert config_of(*gpu, overrides=grid.overrides).laps.batch_prefill_form == "grid"


@pytest.mark.parametrize(
    "switches",
    [
        "--search",
        "--search --limits 1,1,1 --rates",
        "--url http://x --one-batch",
        "--start configs/unified_cpu.yaml",
        "--url http://x --queue fcfs",
        "--url http://x --max-rows 8",
        "--url http://x --set laps.queue=fcfs",
        "--clients 2",
        "--config configs/gpu.yaml --queue fcfs",
        "--config configs/gpu.yaml --max-rows 8",
        "--tensor-parallel 2 --queue laps fcfs",
        "--tensor-parallel 2 --one-batch",
        "--url http://x --expert-parallel",
    ],
)
def test_switches_that_contradict_each_other_are_refused(switches: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--"):
        run(build_parser().parse_args(switches.split()), tmp_path)


@pytest.mark.slow
def test_a_run_measures_every_variant_on_one_engine(tmp_path: Path) -> None:
    path = tmp_path / "mixed.json"
    switches = [*TINY, "--queue", "fcfs", "laps", "--rates", "20", "--seeds", "7", "8"]
    switches += ["--limits", "60000,60000,60000", "--json", str(path)]
    results = run(build_parser().parse_args(switches), tmp_path)
    written = json.loads(path.read_text())
    assert [point["variant"] for point in written["points"]] == ["fcfs", "laps, exclusive"]
    fcfs, laps = written["points"]
    assert (
        fcfs["requests"] == laps["requests"] == sum(len(r.served) for r in results.points[0].runs)
    )
    for point in (fcfs, laps):
        assert 0 < point["short_ttft_p50_ms"] <= point["short_ttft_p90_ms"]
        assert 0 < point["tpot_p50_ms"] <= point["tpot_p99_ms"]
        assert point["output_tokens_per_s"] > 0
        assert point["share_within_limits"] == 1.0
    assert set(written["step_costs"]) == {"fcfs", "laps, exclusive"}
    assert written["step_costs"]["fcfs"]["num_samples"] > 0
    assert written["about"]["left_out"] == []
    host = written["about"]["host ms a step (processor), fcfs at 20/s"]
    assert [part.split()[0] for part in host.split(", ")] == ["plan", "launch", "commit"]
    table = results.render()
    assert "| 20         | laps, exclusive |" in table


@pytest.mark.slow
def test_a_configuration_file_is_measured_as_it_is_and_says_what_it_chose(tmp_path: Path) -> None:
    switches = ["--model", str(MODEL), "--device", "cpu", "--config", "configs/gpu.yaml"]
    switches += ["--max-model-len", "512", "--num-blocks", "512", "--weights", "safetensors"]
    switches += ["--shrink", "64", "--output-tokens", "4", "--duration-s", "1"]
    switches += ["--warm-up-s", "1", "--rates", "20", "--seeds", "7"]
    args = build_parser().parse_args(switches)
    config = engine_config(MODEL, args, {})
    assert (config.scheduler.max_num_seqs, config.laps.max_step_ms) == ("auto", "auto")
    results = run(args, tmp_path)
    assert [point.variant for point in results.points] == ["gpu.yaml"]
    chosen = results.about["chosen, gpu.yaml"]
    assert isinstance(chosen, list)
    assert len(chosen) == 7
    json.loads(results.to_json())


@pytest.mark.slow
def test_the_same_engine_goes_on_under_another_configuration() -> None:
    ours = EngineInProcess(config_of())
    prompts = [[10 + i, 20, 30] for i in range(3)]
    tokens = ours.generate(prompts, 5)
    ours.restart(config_of(overrides={"laps.queue": "fcfs", "cache.num_blocks": None}))
    assert ours.engine.cache.num_blocks == 512
    assert ours.generate(prompts, 5) == tokens
    ours.add(prompts[0], 5)
    with pytest.raises(AssertionError, match="requests are running"):
        ours.restart(config_of())


@pytest.mark.slow
def test_history_of_a_batch_is_found_in_the_cache() -> None:
    with_cache = OneBatch(EngineInProcess(config_of("--set", "cache.enable_prefix_caching=true")))
    batch = Batch(num_rows=2, num_tokens=5, num_cached=32)
    rounds_ms = with_cache.wall_rounds_ms(batch)
    assert len(rounds_ms) == 9
    assert min(rounds_ms) > 0
    with pytest.raises(AssertionError, match="0 cached tokens"):
        OneBatch(EngineInProcess(config_of())).wall_rounds_ms(batch)


@pytest.mark.gpu
def test_a_step_on_the_device_takes_less_than_a_client_waits() -> None:
    switches = ["--device", "cuda", "--set", "cache.enable_prefix_caching=true"]
    bench = OneBatch(EngineInProcess(config_of(*switches)))
    for batch in (
        Batch(num_rows=1, num_tokens=64),
        Batch(num_rows=2, num_tokens=32, num_cached=64),
    ):
        device_ms, wall_ms = bench.device_rounds_ms(batch), bench.wall_rounds_ms(batch)
        assert len(device_ms) == 9
        assert 0 < sorted(device_ms)[4] < sorted(wall_ms)[4]


@pytest.mark.gpu
def test_a_gpu_serves_the_load_under_every_form_of_graphs(tmp_path: Path) -> None:
    switches = [*TINY, "--device", "cuda", "--rates", "20", "--seeds", "7"]
    switches += ["--graphs", "ragged", "grid", "off", "--one-batch"]
    switches += [
        "--max-model-len",
        "2048",
        "--max-num-batched-tokens",
        "1024",
        "--num-blocks",
        "1024",
    ]
    results = run(build_parser().parse_args(switches), tmp_path)
    names = [point.variant for point in results.points]
    assert names == [f"laps, exclusive, graphs {form}" for form in ("ragged", "grid", "off")]
    assert [figure.what for figure in results.batches].count("device") == 5


@pytest.mark.slow
@pytest.mark.nightly  # the other bench shows by day that two ranks are one engine
def test_two_ranks_serve_as_one_engine(tmp_path: Path) -> None:
    switches = [*TINY, "--rates", "20", "--seeds", "7", "--tensor-parallel", "2"]
    results = run(build_parser().parse_args(switches), tmp_path)
    [point] = results.points
    assert all(len(run.served) > 0 for run in point.runs)
    assert results.about["tensor_parallel"] == 2
