"""TFLOP/s of each attention backend on prompts, with and without attention sinks, on one GPU.

    python -m load_tests.lab.bench_attention --json attention.json
    python -m load_tests.lab.bench_attention --block-size 128 --only flash_attn flash_attn_4
    python -m load_tests.lab.bench_attention --shape gpt-oss-20b
    python -m load_tests.lab.bench_attention --decode --only flash_attn

In bf16. A time is of one layer, the mean of several in a CUDA graph, whose keys together are far
more than an L2 cache holds: attention alone, and copies of keys if a backend makes them. Counted
are the products, 4 * heads * head_dim for every pair of a query and a key that it sees. `--decode`
has single tokens, and microseconds instead.
A backend that is not installed, or cannot do it, has a dash, and the reason below the table. Below
stands also what sinks cost: time with them over time without, measured right after each other. On
SIGTERM the output has what was measured until then.
Outputs are held against the Triton kernels'. Exits with 1 if one differs.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.attention.gathering import Reads
from kernels.attention.names import AttentionName
from kernels.attention.protocol import AttentionShape, AttentionStep, build_step
from kernels.attention.select import why_not
from load_tests.lab.child_processes import exit_on_sigterm
from load_tests.lab.moe_step import MAX_ERROR, graph_us
from load_tests.tables import render_rows

DEVICE = "cuda"
DTYPE = torch.bfloat16
SHAPES = {
    "qwen3-8b": AttentionShape(
        num_heads=32, num_kv_heads=8, head_dim=128, layer_windows=(None,) * 4
    ),
    "gpt-oss-20b": AttentionShape(
        num_heads=64, num_kv_heads=8, head_dim=64, layer_windows=(128, None) * 2
    ),
    "gemma-2-9b": AttentionShape(
        num_heads=16, num_kv_heads=8, head_dim=256, layer_windows=(4096, None) * 2, softcap=50.0
    ),
    "gemma-3-12b": AttentionShape(
        num_heads=16, num_kv_heads=8, head_dim=256, layer_windows=(*(1024,) * 5, None)
    ),
}
# Rows, tokens computed before, new tokens.
CASES = {
    "1 x 16000": (1, 0, 16000),
    "4 x 16000": (4, 0, 16000),
    "8 x 1024": (8, 0, 1024),
    "4 x 2048 on 8192": (4, 8192, 2048),
}
DECODE_CASES = {
    "1 x 1 on 128": (1, 127, 1),
    "16 x 1 on 128": (16, 127, 1),
    "64 x 1 on 128": (64, 127, 1),
    "64 x 1 on 4096": (64, 4095, 1),
}
DECODING = ("triton", "flash_attn", "flashinfer")
BASELINE = "triton"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A backend, or one of its ways to read keys."""

    label: str
    name: AttentionName
    reads: Reads | None = None  # of FlashAttention; None = as suits a step
    has_row_calls: bool = False  # of FlexAttention: a call for each row

    def build(self, shape: AttentionShape, block_size: int) -> Any:  # noqa: ANN401
        device = torch.device(DEVICE)
        given = {"block_size": block_size, "dtype": DTYPE, "device": device}
        return _CLASSES[self.name](self)(shape, **given)


def _flash_attn(contender: Contender) -> Callable[..., Any]:
    from kernels.attention.flash_attn import FlashAttention

    return partial(FlashAttention, reads=contender.reads)


def _flash_attn_4(contender: Contender) -> Callable[..., Any]:
    from kernels.attention.flash_attn_4 import FlashAttention4

    return partial(FlashAttention4, reads=contender.reads)


def _flashinfer(_: Contender) -> Callable[..., Any]:
    from kernels.attention.flashinfer import FlashInferAttention

    return FlashInferAttention


def _triton(_: Contender) -> Callable[..., Any]:
    from kernels.attention.triton import TritonAttention

    return partial(TritonAttention, fixed_tile=False)


def _flex(contender: Contender) -> Callable[..., Any]:
    from kernels.attention.flex import GPU_PACKING, FlexAttention

    if not contender.has_row_calls or DEVICE == "cpu":  # where each row has a call anyway
        return FlexAttention
    assert GPU_PACKING.query_sizes is not None, "a GPU's calls have sizes"
    packing = replace(GPU_PACKING, query_sizes=replace(GPU_PACKING.query_sizes, most=0))
    return partial(FlexAttention, packing=packing)


_CLASSES: dict[str, Callable[[Contender], Callable[..., Any]]] = {
    "flash_attn": _flash_attn,
    "flash_attn_4": _flash_attn_4,
    "flashinfer": _flashinfer,
    "triton": _triton,
    "flex": _flex,
}
# The baseline first; last what compiles longest.
CONTENDERS = (
    Contender(label="triton", name="triton"),
    Contender(label="flash_attn (FA3) table", name="flash_attn", reads=Reads.TABLE),
    Contender(label="flash_attn copied", name="flash_attn"),
    Contender(label="flash_attn_4", name="flash_attn_4"),
    Contender(label="flash_attn_4 gathered", name="flash_attn_4", reads=Reads.GATHERED),
    Contender(label="flash_attn_4 table", name="flash_attn_4", reads=Reads.TABLE),
    Contender(label="flex", name="flex"),
    Contender(label="flex, a call a row", name="flex", has_row_calls=True),
    Contender(label="flashinfer", name="flashinfer"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Of one contender on one case; `reason` says why there is no time."""

    contender: str
    case: str
    has_sinks: bool
    us_a_layer: float | None = None
    tflops: float | None = None
    # Norm of the difference from the baseline over the baseline's; None = there is no baseline.
    error: float | None = None
    reason: str | None = None

    @property
    def cell(self) -> str:
        if self.us_a_layer is None:
            return "-"
        figure = f"{self.us_a_layer:.1f} us" if self.tflops is None else f"{self.tflops:.0f}"
        return figure + ("" if self.is_right else f" WRONG {self.error:.0e}")

    @property
    def is_right(self) -> bool:
        return self.error is None or self.error <= MAX_ERROR  # a NaN is not


def num_pairs(num_computed: int, num_new: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees, of one row."""
    if window is None or window > num_computed + num_new:
        window = num_computed + num_new
    # The first queries see what is there, each one key more; those from `window` on, a window.
    num_growing = min(max(window - num_computed, 0), num_new)
    growing = num_growing * num_computed + num_growing * (num_growing + 1) // 2
    return growing + (num_new - num_growing) * window


class Case:
    """One step over random keys, and what the baseline makes of it."""

    def __init__(
        self, name: str, rows: tuple[int, int, int], shape: AttentionShape, block_size: int
    ) -> None:
        """rows: how many there are, and of each the tokens computed before and the new ones."""
        num_rows, num_computed, num_new = rows
        self.name = name
        self.block_size = block_size
        self.is_decode = num_new == 1
        self._shape = shape
        num_blocks = -(-(num_computed + num_new) // block_size)
        blocks = torch.randperm(num_rows * num_blocks).view(num_rows, num_blocks).tolist()
        self._step: AttentionStep = build_step(
            [num_new] * num_rows, [num_computed] * num_rows, blocks, DEVICE
        )
        heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        windows = shape.layer_windows
        size = (num_rows * num_blocks, len(windows), 2, block_size, kv_heads, head_dim)
        self._store = torch.randn(size, dtype=DTYPE, device=DEVICE)
        self._q = torch.randn(num_rows * num_new, heads, head_dim, dtype=DTYPE, device=DEVICE)
        self._sinks = torch.randn(heads, device=DEVICE).bfloat16().float()
        pairs = sum(num_pairs(num_computed, num_new, window) for window in windows)
        self._flops = 4.0 * heads * head_dim * num_rows * pairs / len(windows)
        self._new_keys = [self._new_keys_of(layer) for layer in range(len(windows))]
        self._expected: dict[bool, Tensor] = {}

    def shape(self, *, has_sinks: bool) -> AttentionShape:
        return replace(self._shape, has_sinks=has_sinks)

    def _new_keys_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """[T, kv_heads, head_dim] each, what the store has of the new tokens."""
        k, v = [], []
        for row in range(self._step.num_rows):
            blocks = torch.from_numpy(self._step.row_blocks(row)).to(DEVICE).long()
            start = int(self._step.num_computed_tokens[row])
            end = start + int(self._step.num_new_tokens[row])
            planes = self._store[blocks, layer].transpose(0, 1).flatten(1, 2)
            k.append(planes[0, start:end])
            v.append(planes[1, start:end])
        return torch.cat(k), torch.cat(v)

    @torch.inference_mode()
    def measure(self, contender: Contender, *, has_sinks: bool) -> Result:
        """Raises whatever the backend does."""
        backend = contender.build(self.shape(has_sinks=has_sinks), self.block_size)
        metadata = backend.plan(self._step)
        calls = [
            partial(
                backend.run,
                self._q,
                *new_keys,
                layer,
                self._store,
                metadata,
                sinks=self._sinks if has_sinks else None,
            )
            for layer, new_keys in enumerate(self._new_keys)
        ]
        out = calls[-1]().float()
        if contender.label == BASELINE:
            self._expected[has_sinks] = out
        error = None
        expected = self._expected.get(has_sinks)
        if expected is not None:
            error = float((out - expected).norm() / expected.norm())
        us = graph_us(calls)
        return Result(
            contender=contender.label,
            case=self.name,
            has_sinks=has_sinks,
            us_a_layer=us,
            tflops=None if self.is_decode else self._flops / us / 1e6,
            error=error,
        )


def results(
    contenders: Sequence[Contender],
    shape: AttentionShape,
    cases: Mapping[str, tuple[int, int, int]],
    block_size: int,
) -> Iterator[Result]:
    for name, rows in cases.items():
        case = Case(name, rows, shape, block_size)
        for contender in contenders:
            for has_sinks in (False, True):
                yield _result(case, contender, has_sinks=has_sinks)
        del case
        torch.cuda.empty_cache()


def _result(case: Case, contender: Contender, *, has_sinks: bool) -> Result:
    device = torch.device(DEVICE)
    given = {"block_size": case.block_size, "dtype": DTYPE, "device": device}
    reason = why_not(contender.name, case.shape(has_sinks=has_sinks), **given)  # type: ignore[arg-type]
    if case.is_decode and contender.name not in DECODING:
        reason = "it is for prompts, or slow without"
    if reason is None:
        try:
            return case.measure(contender, has_sinks=has_sinks)
        except Exception as error:  # noqa: BLE001 - another backend's line must not be lost
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return Result(contender=contender.label, case=case.name, has_sinks=has_sinks, reason=reason)


def table(found: Sequence[Result]) -> str:
    """Figures by contender and case, without | with sinks; costs of sinks; reasons of dashes."""
    by_place = {(result.contender, result.case, result.has_sinks): result for result in found}
    cases = list(dict.fromkeys(result.case for result in found))
    lines = [["TFLOP/s, without | with sinks", *cases]]
    costs = [["time with sinks / without", *cases]]
    for contender in dict.fromkeys(result.contender for result in found):
        pairs = [
            [by_place.get((contender, case, sinks)) for sinks in (False, True)] for case in cases
        ]
        lines.append([contender, *(" | ".join(r.cell for r in pair if r) for pair in pairs)])
        costs.append([contender, *(_sink_cost(*pair) for pair in pairs)])
    reasons = dict.fromkeys(f"{r.contender}: {r.reason}" for r in found if r.reason is not None)
    return "\n".join([render_rows(lines), "", render_rows(costs), *reasons])


def _sink_cost(without: Result | None, with_sinks: Result | None) -> str:
    times = [result.us_a_layer if result else None for result in (without, with_sinks)]
    if times[0] is None or times[1] is None:
        return "-"
    return f"{times[1] / times[0]:.3f}"


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    contenders = [
        contender
        for contender in CONTENDERS
        if not args.only or contender.name in args.only or contender.label == BASELINE
    ]
    cases = DECODE_CASES if args.decode else CASES
    found: list[Result] = []
    started = time.perf_counter()
    try:
        for result in results(contenders, SHAPES[args.shape], cases, args.block_size):
            found.append(result)
            sinks = "with sinks" if result.has_sinks else "without"
            words = f"{result.contender}, {result.case}, {sinks}: {result.cell}"
            print(f"{time.perf_counter() - started:6.1f} s  {words}", file=sys.stderr)
    finally:
        print(table(found), flush=True)
        if args.json:
            _write(args, found)
    return 0 if all(result.is_right for result in found) else 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--decode", action="store_true", help="single tokens instead of prompts")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--only", nargs="*", choices=list(_CLASSES), help="these, and the baseline")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    return parser.parse_args(argv)


def _write(args: argparse.Namespace, found: Sequence[Result]) -> None:
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    record = {"about": about, "shape": args.shape, "block_size": args.block_size}
    args.json.write_text(json.dumps({**record, "results": [asdict(r) for r in found]}))


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
