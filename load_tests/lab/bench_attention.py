"""TFLOP/s of each attention backend on prompts, with and without attention sinks, on one GPU.

    python -m load_tests.lab.bench_attention --json attention.json
    python -m load_tests.lab.bench_attention --block-size 128 --only flash_attn flash_attn_4

32 query and 8 KV heads of 128 in bf16. A time is of one layer: attention alone, in a CUDA graph
over several layers, whose keys together are far more than an L2 cache holds. Counted are the
products of causal attention, 4 * heads * head_dim for every pair of a query and a key that it sees.
A backend that is not installed, or cannot do it, has a dash, and the reason below the table. On
SIGTERM the table has what was measured until then.
Outputs are held against the Triton kernels'. Exits with 1 if one differs.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.attention.names import AttentionName
from kernels.attention.protocol import AttentionShape, AttentionStep, build_step
from kernels.attention.select import why_not
from load_tests.lab.moe_step import MAX_ERROR, graph_us
from load_tests.tables import render_rows

NUM_LAYERS = 4
DEVICE = "cuda"
DTYPE = torch.bfloat16
SHAPE = AttentionShape(
    num_heads=32, num_kv_heads=8, head_dim=128, layer_windows=(None,) * NUM_LAYERS
)
# Rows, tokens computed before, new tokens.
CASES = {
    "1 x 16000": (1, 0, 16000),
    "4 x 16000": (4, 0, 16000),
    "8 x 1024": (8, 0, 1024),
    "4 x 2048 on 8192": (4, 8192, 2048),
}
BASELINE = "triton"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A backend, or one of its ways to read keys."""

    label: str
    name: AttentionName
    reads: str | None = None  # of FlashAttention-4

    def build(self, shape: AttentionShape, block_size: int) -> Any:  # noqa: ANN401
        device = torch.device(DEVICE)
        given = {"block_size": block_size, "dtype": DTYPE, "device": device}
        return _CLASSES[self.name](self.reads)(shape, **given)


def _flash_attn(_: str | None) -> Callable[..., Any]:
    from kernels.attention.flash_attn import FlashAttention

    return FlashAttention


def _flash_attn_4(reads: str | None) -> Callable[..., Any]:
    from kernels.attention.flash_attn_4 import FlashAttention4, Reads

    return partial(FlashAttention4, reads=None if reads is None else Reads[reads])


def _flashinfer(_: str | None) -> Callable[..., Any]:
    from kernels.attention.flashinfer import FlashInferAttention

    return FlashInferAttention


def _triton(_: str | None) -> Callable[..., Any]:
    from kernels.attention.triton import TritonAttention

    return partial(TritonAttention, fixed_tile=False)


def _flex(_: str | None) -> Callable[..., Any]:
    from kernels.attention.flex import FlexAttention

    return FlexAttention


_CLASSES: dict[str, Callable[[str | None], Callable[..., Any]]] = {
    "flash_attn": _flash_attn,
    "flash_attn_4": _flash_attn_4,
    "flashinfer": _flashinfer,
    "triton": _triton,
    "flex": _flex,
}
# The baseline first; last what was written most recently, for a fault on the GPU ends all others.
CONTENDERS = (
    Contender(label="triton", name="triton"),
    Contender(label="flash_attn (FA3)", name="flash_attn"),
    Contender(label="flashinfer", name="flashinfer"),
    Contender(label="flex", name="flex"),
    Contender(label="flash_attn_4", name="flash_attn_4"),
    Contender(label="flash_attn_4 gathered", name="flash_attn_4", reads="GATHERED"),
    Contender(label="flash_attn_4 table", name="flash_attn_4", reads="TABLE"),
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
        if self.tflops is None:
            return "-"
        return f"{self.tflops:.0f}" + ("" if self.is_right else f" WRONG {self.error:.0e}")

    @property
    def is_right(self) -> bool:
        return self.error is None or self.error <= MAX_ERROR  # a NaN is not


class Case:
    """One step over random keys, and what the baseline makes of it."""

    def __init__(self, name: str, *, has_sinks: bool, block_size: int) -> None:
        num_rows, num_computed, num_new = CASES[name]
        self.name = name
        self.shape = replace(SHAPE, has_sinks=has_sinks)
        self.block_size = block_size
        num_blocks = -(-(num_computed + num_new) // block_size)
        blocks = torch.randperm(num_rows * num_blocks).view(num_rows, num_blocks).tolist()
        self.step: AttentionStep = build_step(
            [num_new] * num_rows, [num_computed] * num_rows, blocks, DEVICE
        )
        heads, kv_heads, head_dim = SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.head_dim
        size = (num_rows * num_blocks, NUM_LAYERS, 2, block_size, kv_heads, head_dim)
        self.store = torch.randn(size, dtype=DTYPE, device=DEVICE)
        self.q = torch.randn(num_rows * num_new, heads, head_dim, dtype=DTYPE, device=DEVICE)
        self.sinks = torch.randn(heads, device=DEVICE) if has_sinks else None
        pairs = num_new * num_computed + num_new * (num_new + 1) / 2
        self.flops = 4.0 * heads * head_dim * num_rows * pairs
        self.new_keys = [self._new_keys(layer) for layer in range(NUM_LAYERS)]
        self.expected: Tensor | None = None

    def _new_keys(self, layer: int) -> tuple[Tensor, Tensor]:
        """[T, kv_heads, head_dim] each, what the store has of the new tokens."""
        k, v = [], []
        for row in range(self.step.num_rows):
            blocks = torch.from_numpy(self.step.row_blocks(row)).to(DEVICE).long()
            start = int(self.step.num_computed_tokens[row])
            end = start + int(self.step.num_new_tokens[row])
            planes = self.store[blocks, layer].transpose(0, 1).flatten(1, 2)
            k.append(planes[0, start:end])
            v.append(planes[1, start:end])
        return torch.cat(k), torch.cat(v)

    @torch.inference_mode()
    def measure(self, contender: Contender) -> Result:
        """Raises whatever the backend does."""
        backend = contender.build(self.shape, self.block_size)
        metadata = backend.plan(self.step)
        calls = [
            partial(
                backend.run,
                self.q,
                *self.new_keys[layer],
                layer,
                self.store,
                metadata,
                sinks=self.sinks,
            )
            for layer in range(NUM_LAYERS)
        ]
        out = calls[-1]().float()
        if contender.label == BASELINE:
            self.expected = out
        error = None
        if self.expected is not None:
            error = float((out - self.expected).norm() / self.expected.norm())
        us = graph_us(calls)
        return Result(
            contender=contender.label,
            case=self.name,
            has_sinks=self.shape.has_sinks,
            us_a_layer=us,
            tflops=self.flops / us / 1e6,
            error=error,
        )


def results(contenders: Sequence[Contender], block_size: int) -> Iterator[Result]:
    for has_sinks in (False, True):
        for name in CASES:
            case = Case(name, has_sinks=has_sinks, block_size=block_size)
            for contender in contenders:
                yield _result(case, contender)
            del case
            torch.cuda.empty_cache()


def _result(case: Case, contender: Contender) -> Result:
    device = torch.device(DEVICE)
    given = {"block_size": case.block_size, "dtype": DTYPE, "device": device}
    reason = why_not(contender.name, case.shape, **given)  # type: ignore[arg-type]
    if reason is None:
        try:
            return case.measure(contender)
        except Exception as error:  # noqa: BLE001 - another backend's line must not be lost
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return Result(
        contender=contender.label, case=case.name, has_sinks=case.shape.has_sinks, reason=reason
    )


def table(found: Sequence[Result]) -> str:
    """TFLOP/s by contender and case, without | with sinks; then the reasons of dashes."""
    by_place = {(result.contender, result.case, result.has_sinks): result for result in found}
    lines = [["TFLOP/s, without | with sinks", *CASES]]
    for contender in dict.fromkeys(result.contender for result in found):
        cells = [
            " | ".join(
                by_place[contender, case, sinks].cell
                for sinks in (False, True)
                if (contender, case, sinks) in by_place
            )
            for case in CASES
        ]
        lines.append([contender, *cells])
    reasons = dict.fromkeys(f"{r.contender}: {r.reason}" for r in found if r.reason is not None)
    return "\n".join([render_rows(lines), *reasons])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--only", nargs="*", choices=list(_CLASSES), help="these, and the baseline")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    args = parser.parse_args(argv)
    contenders = [
        contender
        for contender in CONTENDERS
        if not args.only or contender.name in args.only or contender.label == BASELINE
    ]
    found: list[Result] = []
    try:
        for result in results(contenders, args.block_size):
            found.append(result)
            print(result.contender, result.case, result.has_sinks, result.cell, file=sys.stderr)
    finally:
        print(table(found), flush=True)
    if args.json:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        record = {"about": about, "block_size": args.block_size}
        args.json.write_text(json.dumps({**record, "results": [asdict(r) for r in found]}))
    return 0 if all(result.is_right for result in found) else 1


def _stop(*_: object) -> None:
    raise SystemExit("stopped before its end")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
