"""The torch twins against their formulas in float64, at odd sizes and on strided input."""

import math

import pytest
import torch
from torch import Tensor

from kernels.kv.append import slot_lines
from kernels.linear.packed import can_pack, pack_weight, packed_linear, padded_rows
from kernels.ops import HeadNorms
from kernels.reference import TorchOps, qk_norm, rms_norm, rms_norm_add, rope, silu_mul
from tests.kernels.ops_checks import Heads, OpsChecks, exact_norm

# One rounding of the result, a few more inside; a wrong formula is off by orders of magnitude.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2}


@pytest.fixture
def generator() -> torch.Generator:
    made = torch.Generator()
    print(f"seed {made.seed()}")
    return made


def _strided(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """A view whose first axis skips every other entry of its memory."""
    return torch.randn((shape[0] * 2, *shape[1:]), generator=generator).to(dtype)[::2]


def _assert_near(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == dtype
    error = (ours.double() - exact).abs().max()
    assert error <= TOLERANCES[dtype] * exact.abs().max(), f"off by {error}"


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("size", [1, 7, 129])
def test_rms_norm_is_its_formula(dtype: torch.dtype, size: int, generator: torch.Generator) -> None:
    x = _strided(generator, dtype, 5, size)
    weight = torch.randn(size, generator=generator).to(dtype)
    _assert_near(rms_norm(x, weight, 0.1), exact_norm(x, weight, 0.1), dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_residual_is_added_before_the_norm(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    x, residual = (_strided(generator, dtype, 3, 33) for _ in range(2))
    before = residual.clone()
    weight = torch.randn(33, generator=generator).to(dtype)
    normed, added = rms_norm_add(x, residual, weight, 1e-5)
    assert torch.equal(added, x + before)
    assert torch.equal(residual, before)
    _assert_near(normed, exact_norm(added, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_qk_norm_takes_each_head_by_itself(dtype: torch.dtype, generator: torch.Generator) -> None:
    qk = torch.randn((4, 9, 6), generator=generator).to(dtype)[:, 2:7]
    before = qk.clone()
    q_weight, k_weight = torch.randn((2, 6), generator=generator).to(dtype)
    norms = HeadNorms(q_weight=q_weight, k_weight=k_weight, eps=1e-6)
    weight = torch.stack((*[q_weight] * 3, *[k_weight] * 2))
    _assert_near(qk_norm(qk, norms, 3), exact_norm(qk, weight, 1e-6), dtype)
    assert torch.equal(qk, before)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("head_dim", [2, 6, 64])
def test_rope_turns_pairs_half_a_head_apart(
    dtype: torch.dtype, head_dim: int, generator: torch.Generator
) -> None:
    x = torch.randn((3, 7, head_dim), generator=generator).to(dtype)[:, 1:6]
    angles = torch.randn((3, 1, head_dim // 2), generator=generator)
    cos, sin = angles.cos(), angles.sin()
    ours = rope(x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    first, second = x.double().chunk(2, -1)
    pairs = torch.complex(first, second) * torch.polar(torch.ones_like(first), angles.double())
    _assert_near(ours, torch.cat((pairs.real, pairs.imag), -1), dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_silu_mul_is_its_formula(dtype: torch.dtype, generator: torch.Generator) -> None:
    gate_up = _strided(generator, dtype, 5, 2 * 13) * 4
    gate, up = gate_up.double().chunk(2, -1)
    _assert_near(silu_mul(gate_up), gate / (1 + (-gate).exp()) * up, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (64, 48), (131, 257)])
def test_a_packed_weight_gives_the_plain_product(
    dtype: torch.dtype, has_bias: bool, shape: tuple[int, int], generator: torch.Generator
) -> None:
    weight = torch.randn(shape, generator=generator).to(dtype)
    assert can_pack(weight)
    bias = torch.randn(shape[0], generator=generator).to(dtype) if has_bias else None
    packed = pack_weight(weight)
    for num_rows in (0, 1, 2, 3, 16, 17, 65):
        x = torch.randn((num_rows, shape[1]), generator=generator).to(dtype)
        exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        found = packed_linear(x, packed, bias)
        assert found.shape == exact.shape
        if num_rows == 0:
            continue
        error = (found.double() - exact).abs().max()
        # Rounding goes by the terms, not by their sum: they may cancel.
        squares = x.double() ** 2 @ weight.double().T ** 2
        size = (squares + (0.0 if bias is None else bias.double() ** 2)).sqrt().max()
        bound = TOLERANCES[dtype] * math.sqrt(shape[1]) * size
        assert error <= bound, f"{num_rows} rows: off by {error}"


def test_steps_of_all_sizes_make_the_library_compile_for_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It keeps half a megabyte for each: a worker under mixed load grew by hundreds."""
    weight = torch.randn(5, 3)
    packed, multiply = pack_weight(weight), torch.ops.mkldnn._linear_pointwise
    sizes: set[int] = set()

    def count(x: torch.Tensor, *others: object) -> torch.Tensor:
        sizes.add(x.shape[0])
        return torch.as_tensor(multiply(x, *others))

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", count)
    for num_rows in range(1, 513):
        assert packed_linear(torch.ones(num_rows, 3), packed, None).shape == (num_rows, 5)
    assert len(sizes) == 56
    assert max(padded_rows(n) / n for n in range(1, 10_000)) <= 1.125
    assert all(padded_rows(n) == n for n in range(17))


def test_only_cpu_weights_of_a_known_type_are_packed() -> None:
    assert not can_pack(torch.zeros((2, 2), dtype=torch.float16))
    assert not can_pack(torch.zeros((2, 2), device="meta"))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_operations_of_a_layer_are_their_formulas(dtype: torch.dtype) -> None:
    checks = OpsChecks(TorchOps(), dtype)
    checks.rms_norm(3, 33)
    checks.rms_norm_add(3, 33)
    checks.silu_mul(3, 13)
    checks.gelu_mul(3, 13)
    checks.norms_with_fp32_weights(3, 33)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("has_norms", [False, True])
def test_keys_and_values_go_to_their_slots_once_rotated(
    dtype: torch.dtype, num_tokens: int, has_norms: bool
) -> None:
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=6, block_size=3, has_norms=has_norms)
    OpsChecks(TorchOps(), dtype).rotate_and_store(heads, num_tokens)
    OpsChecks(TorchOps(), dtype).rotate_and_store(heads, num_tokens, in_fp8=True)


@pytest.mark.parametrize("of_pairs", [False, True])
@pytest.mark.parametrize("num_heads", [0, 3])
def test_latents_are_normalised_rotated_and_stored(num_heads: int, of_pairs: bool) -> None:
    checks = OpsChecks(TorchOps(), torch.float32)
    for in_fp8 in (False, True):
        checks.rotate_and_store_latent(5, num_heads, 20, (6, 10), of_pairs=of_pairs, in_fp8=in_fp8)


def test_a_slot_is_a_line_of_its_block() -> None:
    store = torch.empty((4, 3, 2, 5, 1, 2))
    slots = torch.tensor([0, 4, 5, 19], dtype=torch.int32)
    k_lines = [0, 4, 30, 94]
    assert slot_lines(slots, store).tolist() == [k_lines, [line + 5 for line in k_lines]]


def test_a_step_with_other_slots_is_not_written_to_the_first_ones() -> None:
    ops, store = TorchOps(), torch.zeros((2, 1, 2, 2, 1, 2))
    rotary = ops.rotary(torch.randn(3, 2), torch.tensor([2], dtype=torch.int32))
    for slot in (1, 2):
        qkv, slots = torch.randn(1, 3, 2), torch.tensor([slot], dtype=torch.int32)
        _, k, v = ops.rotate_and_store(qkv, None, rotary, store, 0, slots)
        assert torch.equal(store[slot // 2, 0, :, slot % 2], torch.cat((k, v)))
