"""The Triton operations against float64, interpreted here and compiled on a GPU."""

import pytest
import torch
import triton
from torch import Tensor

from kernels.compilation import CompilationCounter
from kernels.fused import TritonOps
from kernels.ops import HeadNorms
from kernels.reference import TorchOps
from tests.kernels.interpreter import run_interpreted
from tests.kernels.ops_checks import Heads, OpsChecks

SMALL_HEADS = [
    Heads(num_heads=4, num_kv_heads=2, head_dim=16, block_size=3, has_norms=True),
    Heads(num_heads=5, num_kv_heads=1, head_dim=6, block_size=1, has_norms=False),
    Heads(num_heads=3, num_kv_heads=3, head_dim=24, block_size=4, has_norms=True),
]
REAL_HEADS = [
    Heads(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, has_norms=True),
    Heads(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, has_norms=False),
    Heads(num_heads=14, num_kv_heads=2, head_dim=64, block_size=32, has_norms=False),
    Heads(num_heads=8, num_kv_heads=4, head_dim=256, block_size=16, has_norms=True),
    Heads(num_heads=40, num_kv_heads=10, head_dim=80, block_size=16, has_norms=True),
]


# ---- interpreted ---------------------------------------------------------------------------------


def check_interpreted() -> None:
    for dtype in (torch.float32, torch.float16):
        checks = OpsChecks(TritonOps(), dtype)
        for num_rows, n in [(1, 1), (3, 88), (5, 129), (2, 1024)]:
            checks.rms_norm(num_rows, n)
            checks.rms_norm_add(num_rows, n)
        for num_rows, n in [(1, 7), (3, 88), (2, 2051)]:
            checks.silu_mul(num_rows, n)
            checks.gelu_mul(num_rows, n)
        checks.norms_with_fp32_weights(3, 129)
        for heads in SMALL_HEADS:
            checks.rotate_and_store(heads, num_tokens=5)
        checks.rotate_and_store(SMALL_HEADS[0], num_tokens=3, in_fp8=True)
        checks.rotate_and_store(REAL_HEADS[0], num_tokens=3)
        checks.rotate_and_store_latent(4, 3, 20, (6, 10), of_pairs=True)
        checks.rotate_and_store_latent(3, 0, 16, (0, 8), of_pairs=False, in_fp8=True)
        checks.rotate_and_store_latent(4, 2, 20, (6, 10), of_pairs=True, in_fp8=True)
        _check_no_tokens(checks)


def _check_no_tokens(checks: OpsChecks) -> None:
    ops, weight = checks.ops, checks.random(8)
    assert ops.rms_norm(checks.random(0, 8), weight, 1e-6).shape == (0, 8)
    assert ops.silu_mul(checks.random(0, 8)).shape == (0, 4)


@pytest.mark.slow
def test_the_formulas_in_the_interpreter() -> None:
    run_interpreted("tests.kernels.test_fused_kernels:check_interpreted")


# ---- on a GPU ------------------------------------------------------------------------------------

GPU_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


@pytest.fixture
def checks() -> OpsChecks:
    return OpsChecks(TritonOps(), torch.bfloat16, "cuda")


@pytest.mark.gpu
@GPU_DTYPES
@pytest.mark.parametrize("num_rows", [1, 3, 257])
@pytest.mark.parametrize("n", [1, 129, 1000, 4096, 5120, 16384])
def test_norms_on_a_gpu(dtype: torch.dtype, num_rows: int, n: int) -> None:
    checks = OpsChecks(TritonOps(), dtype, "cuda")
    checks.rms_norm(num_rows, n)
    checks.rms_norm_add(num_rows, n)
    checks.norms_with_fp32_weights(num_rows, n)


@pytest.mark.gpu
@GPU_DTYPES
@pytest.mark.parametrize("num_rows", [1, 3, 257])
@pytest.mark.parametrize("n", [7, 88, 2051, 12288])
def test_the_gate_on_a_gpu(dtype: torch.dtype, num_rows: int, n: int) -> None:
    checks = OpsChecks(TritonOps(), dtype, "cuda")
    checks.silu_mul(num_rows, n)
    checks.gelu_mul(num_rows, n)


@pytest.mark.gpu
@GPU_DTYPES
@pytest.mark.parametrize("num_tokens", [1, 5, 131])
@pytest.mark.parametrize("heads", [*SMALL_HEADS, *REAL_HEADS])
def test_rotation_on_a_gpu(dtype: torch.dtype, num_tokens: int, heads: Heads) -> None:
    OpsChecks(TritonOps(), dtype, "cuda").rotate_and_store(heads, num_tokens)


@pytest.mark.gpu
@GPU_DTYPES
@pytest.mark.parametrize("num_tokens", [1, 5, 131])
@pytest.mark.parametrize("heads", [*SMALL_HEADS, *REAL_HEADS])
def test_k_and_v_are_rounded_to_e4m3_on_a_gpu(
    dtype: torch.dtype, num_tokens: int, heads: Heads
) -> None:
    OpsChecks(TritonOps(), dtype, "cuda").rotate_and_store(heads, num_tokens, in_fp8=True)


@pytest.mark.gpu
@GPU_DTYPES
@pytest.mark.parametrize("of_pairs", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 131])
def test_latents_on_a_gpu(dtype: torch.dtype, num_tokens: int, of_pairs: bool) -> None:
    checks = OpsChecks(TritonOps(), dtype, "cuda")
    for num_heads in (0, 3, 16, 128):
        for in_fp8 in (False, True):
            checks.rotate_and_store_latent(
                num_tokens, num_heads, 512, (128, 64), of_pairs=of_pairs, in_fp8=in_fp8
            )


@pytest.mark.gpu
@GPU_DTYPES
def test_extremes_of_the_gate_are_those_of_torch(dtype: torch.dtype) -> None:
    gates = torch.tensor([-torch.inf, -100.0, -0.0, 100.0, torch.inf, torch.nan]).to(dtype)
    gate_up = torch.cat((gates, torch.full((6,), 1.5, dtype=dtype)))[None].cuda()
    ours, torchs = TritonOps().silu_mul(gate_up), TorchOps().silu_mul(gate_up)
    assert torch.allclose(ours, torchs, atol=1e-6, rtol=1e-2, equal_nan=True)


@pytest.mark.gpu
def test_a_row_has_the_same_bits_in_any_batch(checks: OpsChecks) -> None:
    x, residual, weight = (checks.random(*s) for s in [(300, 4096), (300, 4096), (4096,)])
    normed = checks.ops.rms_norm(x, weight, 1e-6)
    added, stream = checks.ops.rms_norm_add(x.clone(), residual.clone(), weight, 1e-6)
    for row in (0, 7, 299):
        one = slice(row, row + 1)
        alone = checks.ops.rms_norm(x[one], weight, 1e-6)
        assert torch.equal(alone, normed[one])
        alone, alone_stream = checks.ops.rms_norm_add(
            x[one].clone(), residual[one].clone(), weight, 1e-6
        )
        assert torch.equal(alone, added[one])
        assert torch.equal(alone_stream, stream[one])


@pytest.mark.gpu
def test_slots_past_two_billion_elements_are_reached(checks: OpsChecks) -> None:
    num_blocks, num_layers, block_size = 33_000, 2, 16
    store = torch.full(
        (num_blocks, num_layers, 2, block_size, 8, 128),
        torch.nan,
        dtype=torch.bfloat16,
        device="cuda",
    )
    assert store.numel() > 2**31
    slots = torch.tensor(
        [num_blocks * block_size - 1, 5, (num_blocks - 2) * block_size], dtype=torch.int32
    )
    cos_sin = torch.randn((9, 128), generator=checks.generator).cuda()
    rotary = checks.ops.rotary(cos_sin, torch.tensor([8, 0, 3], dtype=torch.int32).cuda())
    qkv = checks.random(3, 48, 128)
    _, k, v = checks.ops.rotate_and_store(qkv, None, rotary, store, 1, slots.cuda())
    for token, slot in enumerate(slots.tolist()):
        block, place = divmod(slot, block_size)
        assert torch.equal(store[block, 1, 0, place], k[token])
        assert torch.equal(store[block, 1, 1, place], v[token])
    blocks = torch.tensor([0, num_blocks - 2, num_blocks - 1], device="cuda")
    assert int((~store[blocks].isnan()).sum()) == 3 * 2 * 8 * 128


class _LayersWithoutProducts:
    """All operations of a layer, one right after the other and over the same buffers."""

    def __init__(self, checks: OpsChecks, num_tokens: int) -> None:
        random = checks.random
        self.ops = checks.ops
        self.weight = random(6144)
        self.norms = HeadNorms(q_weight=random(128), k_weight=random(128), eps=1e-6)
        self.cos_sin = torch.randn((64, 128), generator=checks.generator).cuda()
        # Odd places of a longer buffer, as the parts of a step's inputs are.
        indices = torch.arange(2 * num_tokens + 1, dtype=torch.int32, device="cuda")
        indices[num_tokens + 1 :] %= 64
        self.slots, self.positions = indices[1 : num_tokens + 1], indices[num_tokens + 1 :]
        self.store = random(num_tokens // 16 + 1, 3, 2, 16, 8, 128)
        self.x, self.residual = random(num_tokens, 6144), random(num_tokens, 6144)

    def run(self, waits: bool = False) -> list[Tensor]:
        """Returns the streams and the store; `waits`: no operation overlaps another."""
        wait = torch.cuda.synchronize if waits else lambda: None
        x, residual, store = self.x.clone(), self.residual.clone(), self.store.clone()
        rotary = self.ops.rotary(self.cos_sin, self.positions)
        for layer in (0, 1, 2, 0, 1, 2):
            wait()
            x, residual = self.ops.rms_norm_add(x, residual, self.weight, 1e-6)
            wait()
            qkv = x.view(-1, 48, 128)
            self.ops.rotate_and_store(qkv, self.norms, rotary, store, layer, self.slots)
            wait()
            gated = self.ops.silu_mul(x)
            wait()
            x[:, :3072] = self.ops.rms_norm(gated, self.weight[:3072], 1e-6)
        return [x, residual, store]


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 17, 300, 5000])
def test_operations_that_overlap_see_what_the_one_before_wrote(
    checks: OpsChecks, num_tokens: int
) -> None:
    layer = _LayersWithoutProducts(checks, num_tokens)
    expected = layer.run(waits=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer.run()
    for _ in range(5):
        graph.replay()
        for ours, theirs in zip([*captured, *layer.run()], [*expected, *expected], strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.gpu
def test_a_new_number_of_tokens_compiles_nothing(
    checks: OpsChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    _LayersWithoutProducts(checks, 3).run()
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", None)
    counter = CompilationCounter()
    counter.install()
    for num_tokens in (1, 2, 16, 17, 32, 100, 4096):
        _LayersWithoutProducts(checks, num_tokens).run()
    assert counter.names == []
