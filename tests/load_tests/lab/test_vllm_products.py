"""What products of vLLM are given: rounded inputs and scales, laid out as they ask for."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.layers.quantized_weight import dequantize
from kernels.quant.coded_tokens import InputForm, reference
from load_tests.lab import vllm_products
from load_tests.lab.bench_quant import make_weight
from load_tests.lab.vllm_products import vllm_ways

NUM_ROWS, NUM_COLUMNS, NUM_TOKENS = 256, 384, 8


def _rounded(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    coded = reference(x, InputForm(pieces=1, group=group))
    return coded.codes[0], coded.scales


def _spread(scales: Tensor, shape: tuple[int, ...]) -> Tensor:
    for axis, length in enumerate(shape):
        scales = scales.repeat_interleave(length // scales.shape[axis], axis)
    return scales


def _cutlass(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: Any) -> Tensor:
    """By the rules of its docstring; K is adjacent in b."""
    assert b.stride(0) == 1
    if scale_a.shape[1] > 1:
        assert scale_a.stride() == (1, NUM_TOKENS)
    elif scale_b.shape == (b.shape[1], 1):
        scale_b = scale_b.t()
    wide_a = a.float() * _spread(scale_a, tuple(a.shape))
    return (wide_a @ (b.float() * _spread(scale_b, tuple(b.shape)))).to(out_dtype)


def _deep_gemm(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out: Tensor, **given: bool
) -> None:
    assert given == {"is_deep_gemm_e8m0_used": False}
    out.copy_(_cutlass(a[0], b[0].t(), scale_a=a[1], scale_b=b[1].t(), out_dtype=out.dtype))


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = "vllm.model_executor.layers.quantization.utils.fp8_utils"
    given: dict[str, dict[str, Any]] = {
        "vllm._custom_ops": {"cutlass_scaled_mm": _cutlass},
        "vllm.utils.deep_gemm": {"fp8_gemm_nt": _deep_gemm},
        utils: {"deepgemm_post_process_fp8_weight_block": lambda wq, ws, **_: (wq, ws)},
    }
    for name, functions in given.items():
        module = ModuleType(name)
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(vllm_products, "quantize_tokens", _rounded)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("weight_format", "num_tokens", "names"),
    [
        ("fp8-row", NUM_TOKENS, ["cutlass"]),
        ("fp8-block", NUM_TOKENS, ["cutlass", "deepgemm"]),
        ("fp8-block", 3, []),
    ],
)
def test_products_are_those_of_the_weights(
    weight_format: str, num_tokens: int, names: list[str]
) -> None:
    weight = make_weight(weight_format, NUM_ROWS, NUM_COLUMNS, "cpu")
    assert weight.scales is not None
    x = torch.randn(num_tokens, NUM_COLUMNS, dtype=torch.bfloat16)
    expected = x.double() @ dequantize(weight.data, weight.scales).double().T
    ways = dict(vllm_ways(weight_format, [weight], num_tokens))
    assert list(ways) == names
    for products in ways.values():
        error = (products[0](x).double() - expected).norm() / expected.norm()
        assert 1e-3 < error < 6e-2


def test_without_vllm_there_are_none_which_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(vllm_products, "_told", [])
    weight = make_weight("fp8-row", NUM_ROWS, NUM_COLUMNS, "cpu")
    assert not [*vllm_ways("fp8-row", [weight], 16), *vllm_ways("fp8-row", [weight], 16)]
    assert capsys.readouterr().out.count("vllm is not installed") == 1
