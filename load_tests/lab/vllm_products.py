"""Products of FP8 numbers from an installed vLLM, raced beside ours: CUTLASS and DeepGEMM.

    cutlass     scales of rows, or of tiles: `vllm._custom_ops.cutlass_scaled_mm`
    deepgemm    scales of tiles: `vllm.utils.deep_gemm.fp8_gemm_nt`, compiled at its first call

Inputs are rounded before, without the time that this takes. vLLM is imported by the first product
that runs. Written for 0.26.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from engine.layers.linear import LinearWeight
from kernels.quant.fp8_blocks import TILE_COLUMNS
from kernels.quant.token_groups import quantize_tokens

Product = Callable[[Tensor], Tensor]

ALIGNED_TOKENS = 4  # scales of tiles are read by TMA, 16 bytes of fp32 at a time
_told: list[str] = []


def vllm_ways(
    weight_format: str, weights: Sequence[LinearWeight], num_tokens: int
) -> Iterator[tuple[str, list[Product]]]:
    """A name and a product for each weight; nothing without vLLM, which is printed once."""
    if importlib.util.find_spec("vllm") is None:
        _tell("vllm is not installed: no products of CUTLASS and DeepGEMM")
        return
    if weight_format == "fp8-row":
        yield "cutlass", [_cutlass(weight, weight.data.shape[1]) for weight in weights]
    elif weight_format == "fp8-block" and num_tokens % ALIGNED_TOKENS == 0:
        yield "cutlass", [_cutlass(weight, TILE_COLUMNS) for weight in weights]
        yield "deepgemm", [_deepgemm(weight) for weight in weights]


def _tell(words: str) -> None:
    if words not in _told:
        _told.append(words)
        print(words, flush=True)


class _Rounded:
    """Inputs rounded once, by where they lie."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._found: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [T, K], and scales [T, groups] whose tokens are adjacent in memory."""
        if x.data_ptr() not in self._found:
            codes, scales = quantize_tokens(x, self._group)
            self._found[x.data_ptr()] = codes, scales.t()
        return self._found[x.data_ptr()]


def _cutlass(weight: LinearWeight, group: int) -> Product:
    assert weight.scales is not None, "an FP8 weight"
    values, inputs = weight.scales.values, _Rounded(group)
    # [N, 1] of rows; [K / 128, N / 128] of tiles, whose columns are adjacent.
    scale_b = values.view(-1, 1) if weight.scales.rows == 1 else values.t()

    def product(x: Tensor) -> Tensor:
        ops: Any = importlib.import_module("vllm._custom_ops")
        codes, scales = inputs.of(x)
        y: Tensor = ops.cutlass_scaled_mm(
            codes, weight.data.t(), scale_a=scales, scale_b=scale_b, out_dtype=x.dtype
        )
        return y

    return product


def _deepgemm(weight: LinearWeight) -> Product:
    assert weight.scales is not None, "an FP8 weight"
    values, inputs = weight.scales.values, _Rounded(TILE_COLUMNS)
    prepared: list[tuple[Tensor, Tensor]] = []

    def product(x: Tensor) -> Tensor:
        deep_gemm: Any = importlib.import_module("vllm.utils.deep_gemm")
        if not prepared:
            quantization = "vllm.model_executor.layers.quantization.utils.fp8_utils"
            utils: Any = importlib.import_module(quantization)
            tile = TILE_COLUMNS, TILE_COLUMNS
            prepared.append(
                utils.deepgemm_post_process_fp8_weight_block(
                    wq=weight.data, ws=values, quant_block_shape=tile, use_e8m0=False
                )
            )
        y = x.new_empty((len(x), weight.data.shape[0]))
        deep_gemm.fp8_gemm_nt(inputs.of(x), prepared[0], y, is_deep_gemm_e8m0_used=False)
        return y

    return product
