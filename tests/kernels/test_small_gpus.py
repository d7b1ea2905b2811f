"""Kernels on GPUs with less shared memory than an H200: tiles that fit, and the same on an H200."""

from dataclasses import replace

import pytest
import torch

import kernels.attention.triton as attention
from kernels import rms_norm, silu_mul
from kernels.attention import decode_items, triton_decode, triton_prefill
from kernels.attention.protocol import AttentionShape, build_step
from kernels.device import DeviceProperties, stages_that_fit, why_unsupported
from kernels.kv import rotate_and_store
from kernels.kv.scales import KvScales
from kernels.linear import invariant, small
from kernels.moe import align, combine, few, grouped, router
from kernels.moe.tiles import ExpertShape, build_plan
from kernels.ops import HeadNorms
from kernels.sampling import rows_triton
from tests.harness.gpus import GPUS, gpu
from tests.kernels.cross_compile import compiled_for, weight_of

SHAPES = [
    AttentionShape(num_heads=32, num_kv_heads=8, head_dim=head_dim, layer_windows=(None,))
    for head_dim in (64, 128)
]
BUCKETS = (16, 32, 64)
NARROW = small.Shape.NARROW
# One GPU of each compute capability.
ONE_EACH = {capability: name for name, (capability, _, _) in GPUS.items()}
# One weight of each kind [out, in].
WEIGHTS = {
    small.Shape.NARROW: (6144, 4096),
    small.Shape.SQUARE: (4096, 4096),
    small.Shape.DEEP: (4096, 12288),
    small.Shape.WIDE: (32768, 4096),
    small.Shape.GATED: (24576, 4096),
}


@pytest.mark.parametrize("name", sorted(GPUS))
def test_every_tile_fits_the_shared_memory(name: str) -> None:
    device = gpu(name)
    limit = device.shared_memory_per_block_bytes
    for bucket in BUCKETS:
        for kind in small.Shape:
            config = small.fitted_config(bucket, kind, limit)
            assert config.num_stages >= 2
            assert config.num_stages * small.stage_bytes(config, bucket) < limit
    for num_rows in (4096, 16384):
        cut = invariant.fitted_config(num_rows, limit)
        assert cut.num_stages >= 2
        assert cut.num_stages * 2 * cut.block_k * (cut.block_m + cut.block_n) < limit
    for shape in SHAPES:
        for decode in (
            attention.FEW_ROWS_CONFIG,
            attention.SOME_ROWS_CONFIG,
            attention.MANY_ROWS_CONFIG,
        ):
            fitted = attention.fitted_decode(decode, shape, device)
            assert fitted.num_programs == 4 * device.num_sms
            assert fitted.num_stages * 4 * fitted.tile_keys * shape.head_dim < limit
        for prefill in (attention.FIXED_TILE_CONFIG, triton_prefill.PrefillConfig()):
            tiles = attention.fitted_prefill(prefill, shape, device)
            queries = 2 * tiles.tile_queries * shape.head_dim
            assert queries + tiles.num_stages * 4 * tiles.tile_keys * shape.head_dim < limit


def test_an_h200_keeps_the_tiles_that_were_measured_on_it() -> None:
    device = gpu("H200")
    limit = device.shared_memory_per_block_bytes
    for (bucket, kind), config in small._CONFIGS.items():
        assert small.fitted_config(bucket, kind, limit) == config
    assert invariant.fitted_config(4096, limit) == invariant._FEW_ROWS
    assert invariant.fitted_config(16384, limit) == invariant._MANY_ROWS
    for shape in SHAPES:
        default = triton_prefill.PrefillConfig()
        assert attention.fitted_prefill(default, shape, device) == default
        few = attention.FEW_ROWS_CONFIG
        assert attention.fitted_decode(few, shape, device) == few


def test_weights_of_other_models_are_shared_evenly() -> None:
    device = gpu("H200")
    limit, num_sms = device.shared_memory_per_block_bytes, device.num_sms
    for kind in small.Shape:  # as measured with these
        shared = small.shared_config(16, kind, WEIGHTS[kind][0], num_sms, limit)
        assert shared == small.fitted_config(16, kind, limit)
    # Qwen3-32B's by two ranks: 400 programs are 3 for each multiprocessor and 4 more, which two at
    # a time hide; 80 tiles in two parts leave 104 of 132 idle half of the time.
    gated = small.shared_config(16, small.Shape.GATED, 25600, num_sms, limit)
    assert (gated.block_k, gated.num_stages, gated.split_k) == (128, 5, 1)
    for kind in (small.Shape.DEEP, small.Shape.SQUARE, small.Shape.NARROW):
        cut = small.shared_config(16, kind, 5120, num_sms, limit)
        assert (cut.block_n, cut.split_k, cut.num_stages) == (64, 3, 5)
    assert 2 * (5 * small.stage_bytes(cut, 16) + 1024) <= limit + 1024


def test_a_product_that_ends_with_an_almost_empty_wave_is_left_to_the_library() -> None:
    device = gpu("H200")
    given = device.num_sms, device.shared_memory_per_block_bytes
    # 384 programs of 6,144 rows run at once, 512 of 8,192 in two waves of at most 396.
    idle = [n for n in (2560, 5120, 6144, 8192, 10240) if small.leaves_idle(NARROW, n, *given)]
    assert idle == [8192]


@pytest.mark.parametrize("name", ["H200", "L4"])
def test_any_weight_has_a_tiling_that_fits(name: str) -> None:
    device = gpu(name)
    limit = device.shared_memory_per_block_bytes
    for bucket, kind in small._CONFIGS:
        for num_rows in (16, 1024, 5120, 13696, 28672, 37888):
            cut = small.shared_config(bucket, kind, num_rows, device.num_sms, limit)
            assert cut.num_stages >= 2
            assert cut.num_stages * small.stage_bytes(cut, bucket) <= limit
            assert -(-num_rows // cut.block_n) <= small._MAX_TILES


def test_queries_that_leave_no_room_for_keys_are_an_error() -> None:
    shape = AttentionShape(num_heads=512, num_kv_heads=1, head_dim=128, layer_windows=(None,))
    with pytest.raises(ValueError, match=r"L4 has 101376 bytes.*512 queries"):
        attention.fitted_prefill(triton_prefill.PrefillConfig(), shape, gpu("L4"))


def test_stages_are_as_many_as_fit() -> None:
    def fit(num_stages: int, other_bytes: int) -> int:
        return stages_that_fit(
            num_stages, stage_bytes=30_000, other_bytes=other_bytes, shared_memory_bytes=101_376
        )

    assert [fit(4, 0), fit(2, 0), fit(4, 41_000), fit(4, 90_000), fit(4, 10**6)] == [3, 2, 1, 0, 0]


def test_a_gpu_before_ampere_is_refused_and_the_others_are_not() -> None:
    turing = DeviceProperties(
        name="Tesla T4",
        capability=(7, 5),
        memory_bytes=15 * 2**30,
        num_sms=40,
        shared_memory_per_block_bytes=64 * 1024,
    )
    reason = why_unsupported(turing)
    assert reason is not None
    assert "Tesla T4 has compute capability 7.5" in reason
    assert "8.0 or newer" in reason
    assert [why_unsupported(gpu(name)) for name in GPUS] == [None] * len(GPUS)


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(ONE_EACH.values()))
def test_the_compiler_needs_no_more_shared_memory_than_there_is(name: str) -> None:
    device = gpu(name)
    modules = small, invariant, attention, triton_decode, decode_items, triton_prefill
    with compiled_for(device, *modules) as found:
        counters = small.tile_counters(torch.device("cpu"))
        for bucket in BUCKETS:
            x = weight_of(bucket, 4096)
            for kind, (num_rows, num_columns) in WEIGHTS.items():
                weight = weight_of(num_rows, num_columns)
                x = weight_of(bucket, num_columns)
                product = (
                    small.small_gated_linear if kind is small.Shape.GATED else small.small_linear
                )
                product(x, weight, None, counters)
        for num_rows in (4096, 16384):
            invariant.invariant_linear(weight_of(3, 4096), weight_of(num_rows, 4096), None)
        for shape in SHAPES:
            for is_fp8 in (False, True):
                _attend(shape, fixed_tile=False, is_fp8=is_fp8)
                _attend(shape, fixed_tile=True, is_fp8=is_fp8)
    assert {"_small_linear_kernel", "_invariant_linear_kernel"} < set(found)
    assert {"_decode_kernel", "_prefill_kernel"} < set(found)
    assert max(found.values()) <= device.shared_memory_per_block_bytes, found


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(ONE_EACH.values()))
def test_kernels_without_tiles_compile_for_every_gpu(name: str) -> None:
    device = gpu(name)
    modules = (rms_norm, silu_mul, rotate_and_store, rows_triton)
    with compiled_for(device, *modules) as found:
        x = weight_of(3, 4096)
        rms_norm.rms_norm_add(x, x, x[0], 1e-6)
        silu_mul.silu_mul(weight_of(3, 24576))
        rows_triton.greedy(weight_of(3, 151936))
        norm, places = torch.empty(128, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int32)
        for dtype in (torch.bfloat16, torch.uint8):
            rotate_and_store.rotate_and_store(
                torch.empty(3, 48, 128, dtype=torch.bfloat16),
                HeadNorms(q_weight=norm, k_weight=norm, eps=1e-6),
                torch.empty(64, 128),
                places,
                torch.empty(8, 1, 2, 16, 8, 128, dtype=dtype),
                0,
                places,
                KvScales.of(torch.ones(1, 2, 8)) if dtype == torch.uint8 else None,
            )
    assert len(found) >= 4
    assert max(found.values()) <= device.shared_memory_per_block_bytes, found


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(ONE_EACH.values()))
def test_kernels_of_a_mixture_compile_for_every_gpu(name: str) -> None:
    device = gpu(name)
    shape = ExpertShape(num_experts=128, num_active=8, hidden=2048, inner=768)
    modules = (router, align, grouped, few, combine)
    gate_up, down = (weight_of(n, k).unsqueeze(0) for n, k in ((1536, 2048), (2048, 768)))
    with compiled_for(device, *modules) as found:
        for is_deterministic in (True, False):
            plan = build_plan(shape, device, is_deterministic=is_deterministic)
            for num_tokens in (1, *(end for end in plan.ends if end < 2048), 2048):
                x = weight_of(num_tokens, 2048)
                routes = router.route(
                    x, weight_of(128, 2048), 8, normalises=True, is_deterministic=is_deterministic
                )
                pair = plan.pair(num_tokens)
                blocks = align.align(routes.ids, 128, pair.gate_up.block_m)
                inner = grouped.grouped_gate_up(x, gate_up, routes, blocks, pair.gate_up)
                outputs = grouped.grouped_down(inner, down, routes, blocks, pair.down)
                prefetching = replace(pair.down, prefetch_k=256)
                grouped.grouped_down(inner, down, routes, blocks, prefetching)
                combine.combine(outputs, routes, x, x[:, :1])
                given = combine.ExpertOutputs(outputs=outputs, routes=routes)
                given.add_norm(x, weight_of(1, 2048)[0], 1e-6)
        routes = router.route(x[:1], weight_of(128, 2048), 8, normalises=True)
        shared = few.SharedMatrices(gate_up=weight_of(3072, 2048), down=weight_of(2048, 1536))
        for expert in (None, shared):
            inner = few.few_gate_up(x[:1], gate_up, routes, plan.few_gate_up, shared=expert)
            few.few_down(inner, down, routes, replace(plan.few_down, prefetch_k=256), expert)
    assert {
        *("_moe_grouped_kernel", "_moe_align_kernel", "_moe_few_down_kernel"),
        "_moe_combine_norm_kernel",
    } < set(found)
    assert max(found.values()) <= device.shared_memory_per_block_bytes, found


def _attend(shape: AttentionShape, *, fixed_tile: bool, is_fp8: bool) -> None:
    """Few, some and many decoding rows, and a prompt; is_fp8: over e4m3 numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            attention, "check_supported", lambda *_: None
        )  # of the device, which is not here
        backend = attention.TritonAttention(
            shape,
            block_size=16,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            fixed_tile=fixed_tile,
        )
    dtype = torch.uint8 if is_fp8 else torch.bfloat16
    store = torch.empty(8, 1, 2, 16, shape.num_kv_heads, shape.head_dim, dtype=dtype)
    scales = KvScales.of(torch.ones(1, 2, shape.num_kv_heads)) if is_fp8 else None
    for num_rows in (1, 20, 130):
        step = build_step(
            [1] * num_rows + [20], [3] * (num_rows + 1), [[0, 1]] * (num_rows + 1), "cpu"
        )
        num_tokens = num_rows + 20
        q = torch.empty(num_tokens, shape.num_heads, shape.head_dim, dtype=torch.bfloat16)
        backend.run(q, q, q, 0, store, backend.plan(step), None, None, scales)
