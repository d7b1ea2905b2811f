"""Time on the device is counted once and goes to the right group."""

import csv
import json
import random
import re
import sys
from pathlib import Path

import pytest

from load_tests.lab.kernel_profile import (
    GROUPS,
    IDLE,
    OTHER,
    KernelRun,
    draw_profile,
    group_of,
    group_times_us,
    groups_of,
    longest_kernels,
    main,
    owned_us,
    read_rules,
    read_trace,
    render_kernels,
    render_profile,
)
from tests.harness.seeds import seed_of

SEED = seed_of(__name__)


def runs_of(*runs: tuple[str, float, float]) -> list[KernelRun]:
    return [KernelRun(name, start, end, i % 3) for i, (name, start, end) in enumerate(runs)]


def shares(runs: list[KernelRun]) -> dict[str, float]:
    return {run.name: share_us for run, share_us in owned_us(runs)}


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([("a", 0, 10), ("b", 10, 15)], {"a": 10, "b": 5}),
        ([("a", 0, 10), ("b", 4, 15)], {"a": 10, "b": 5}),  # overlap: the earlier has it
        ([("a", 0, 10), ("b", 2, 7)], {"a": 10, "b": 0}),  # within
        ([("a", 0, 10), ("b", 1, 20), ("c", 2, 15)], {"a": 10, "b": 10, "c": 0}),
        ([("b", 12, 20), ("a", 0, 10)], {"a": 10, "b": 8}),  # a gap, out of order
        ([("a", 0, 4), ("b", 1, 3), ("c", 2, 9)], {"a": 4, "b": 0, "c": 5}),
    ],
)
def test_the_earliest_started_of_those_running_owns_the_time(
    runs: list[tuple[str, float, float]], expected: dict[str, float]
) -> None:
    assert shares(runs_of(*runs)) == expected


def test_random_runs_own_what_a_count_by_instant_says() -> None:
    rng = random.Random(SEED)
    starts = rng.sample(range(200), 40)  # distinct: the earliest started is one
    runs = runs_of(*((f"k{i}", s, s + rng.randrange(1, 25)) for i, s in enumerate(starts)))
    expected = dict.fromkeys((run.name for run in runs), 0.0)
    for instant in range(230):
        running = [run for run in runs if run.start_us <= instant < run.end_us]
        if running:
            expected[min(running, key=lambda run: run.start_us).name] += 1
    assert shares(runs) == expected, f"seed {SEED}"


def test_groups_and_idle_time_add_up_to_the_wall_time() -> None:
    times = group_times_us(
        runs_of(
            ("nvjet_tst_128x256", 100, 130),
            ("_rms_norm_kernel", 125, 140),
            ("flash_fwd", 150, 170),
            ("elementwise", 170, 171),
        )
    )
    assert list(times) == list(GROUPS)
    assert times["linear"] == 30
    assert times["norm"] == 10
    assert times["attention"] == 20
    assert times[OTHER] == 1
    assert times[IDLE] == 10
    assert sum(times.values()) == 71


def test_nothing_on_the_device_is_an_error() -> None:
    with pytest.raises(ValueError, match="no kernels"):
        group_times_us([])


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_tst_192x128_64x6_2x1_v_bz_coopB_TNT", "linear"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x128x64", "linear"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "linear"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "linear"),
        ("_small_linear_kernel", "linear"),
        ("_moe_router_kernel", "experts"),
        ("_moe_top_k_kernel", "experts"),
        ("_moe_grouped_kernel", "experts"),
        ("_moe_combine_kernel", "experts"),
        ("fused_moe_kernel", "experts"),
        ("void vllm::moe::moe_align_block_size_kernel<int>", "experts"),
        ("void vllm::moe::topkGatingSoftmax<8, 128, 4, 16>", "experts"),
        ("_invariant_linear_kernel", "linear"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<", "attention"),
        ("flash::prepare_varlen_num_blocks_kernel", "attention"),
        ("void flash::FlashAttnFwdCombine<cute::C<64>>", "attention"),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<KTraits, LogitsCap>", "attention"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<", "attention"),
        ("flashinfer::PersistentVariableLengthMergeStatesKernel", "attention"),
        ("void flashinfer::PrefillWithKVCacheKernel<flashinfer::CollectiveMainloop<", "attention"),
        ("void flashinfer::sampling::TopKTopPSamplingFromProbKernel<", "sampling"),
        ("_decode_kernel", "attention"),
        ("_prefill_kernel", "attention"),
        ("_plan_kernel", "attention"),
        ("_rms_norm_kernel", "norm"),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>", "norm"),
        ("_rotate_and_store_kernel", "rope+kv"),
        ("void vllm::reshape_and_cache_flash_kernel<", "rope+kv"),
        ("flashinfer::AppendPagedKVCacheKernel", "rope+kv"),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ArgMaxOps",
            "sampling",
        ),
        ("void at::native::sbtopk::gatherTopK<float>", "sampling"),
        ("_greedy_kernel", "sampling"),
        ("_best_chunk_kernel", "sampling"),
        ("_large_linear_kernel", "linear"),
        ("_silu_mul_kernel", OTHER),
        ("_keep_kernel", "sampling"),
        ("_resolve_kernel", OTHER),
        ("void at::native::vectorized_elementwise_kernel<4, CopyProperties>", OTHER),
        ("Memcpy HtoD (Pinned -> Device)", OTHER),
    ],
)
def test_a_kernels_name_says_its_group(name: str, group: str) -> None:
    assert group_of(name) == group


def test_the_longest_kernels_come_first_with_all_their_runs() -> None:
    runs = runs_of(("a", 0, 4), ("b", 4, 14), ("a", 14, 17), ("c", 15, 18))
    assert longest_kernels(runs, 2) == [("b", 1, 10), ("a", 2, 7)]
    assert "| b " in render_kernels(longest_kernels(runs, 2))


def test_a_trace_is_read_for_what_ran_on_the_device(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 9, "args": {}},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 5.5, "dur": 2.25, "args": {"stream": 7}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "m", "ts": 8, "dur": 1, "args": {"stream": 20}},
        {"ph": "i", "cat": "kernel", "name": "mark", "ts": 5},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert read_trace(path) == [KernelRun("k", 5.5, 7.75, 7), KernelRun("m", 8, 9, 20)]
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"trace\.json.*traceEvents"):
        read_trace(path)


NSYS = """Start (ns),Duration (ns),CorrId,GrdX,Ctx,Strm,Name
5500,2250,7,132,1,7,"void flash::fwd<int, 128>(Params)"
8000,1000,8,,1,20,[CUDA memcpy Host-to-Device]
"""


def test_what_nsight_systems_saw_is_read_alike(tmp_path: Path) -> None:
    path = tmp_path / "seen_cuda_gpu_trace.csv"
    path.write_text(NSYS)
    assert read_trace(path) == [
        KernelRun("void flash::fwd<int, 128>(Params)", 5.5, 7.75, 7),
        KernelRun("[CUDA memcpy Host-to-Device]", 8.0, 9.0, 20),
    ]
    path.write_text("Name,Total\nk,5\n")
    with pytest.raises(ValueError, match="cuda_gpu_trace: no column 'Duration"):
        read_trace(path)


def test_rules_of_a_file_decide_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"flash|fmha": "attention", "MEMCPY": "copies", ".*": "rest"}))
    rules = read_rules(path)
    assert groups_of(rules) == ("attention", "copies", "rest", OTHER, IDLE)
    times = group_times_us(runs_of(("xFlash", 0, 4), ("[memcpy]", 4, 5), ("gemm", 6, 8)), rules)
    assert times == {"attention": 4, "copies": 1, "rest": 2, OTHER: 0, IDLE: 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "an object of patterns"),
        ('{"a": 1}', "an object of patterns"),
        ('{"(": "x"}', "is none"),
        ('{"a": "idle"}', "name the group otherwise"),
    ],
)
def test_rules_that_cannot_be_used_say_why(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "rules.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"rules\.json: .*{said}"):
        read_rules(path)


def test_a_page_and_a_csv_have_every_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, page, table = tmp_path / "t.csv", tmp_path / "p.html", tmp_path / "k.csv"
    trace.write_text(NSYS)
    given = ["profile", "--trace", f"<b>={trace}", "--html", str(page), "--csv", str(table)]
    monkeypatch.setattr(sys, "argv", given)
    main()
    assert "| <b> " in capsys.readouterr().out
    rows = list(csv.reader(table.read_text().splitlines()))
    assert rows == [
        ["work", "group", "kernel", "runs", "ms"],
        ["<b>", "attention", "void flash::fwd<int, 128>(Params)", "1", "0.002250"],
        ["<b>", OTHER, "[CUDA memcpy Host-to-Device]", "1", "0.001000"],
    ]
    text = page.read_text()
    assert "<h2>&lt;b&gt;: 0.004 ms</h2>" in text  # 3.5 us
    assert "flash::fwd&lt;int, 128&gt;" in text
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", text)]
    assert sum(widths) == pytest.approx(100, abs=0.01)
    assert widths[0] == pytest.approx(100 * 2.25 / 3.5, abs=0.001)


def test_a_table_has_milliseconds_and_shares() -> None:
    times = group_times_us(runs_of(("gemm", 0, 3000), ("_rms_norm_kernel", 4000, 5000)))
    [header, _, row] = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in render_profile({"decode": times}).splitlines()
    ]
    cells = dict(zip(header, row, strict=True))
    assert cells["wall ms"] == "5.000"
    assert cells["linear"] == "3.000 (60.0%)"
    assert cells[IDLE] == "1.000 (20.0%)"


def test_a_picture_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        draw_profile({"decode": group_times_us(runs_of(("gemm", 0, 1)))}, tmp_path / "x.png")
