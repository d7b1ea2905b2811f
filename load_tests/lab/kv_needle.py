"""Attention that looks for one key among 128k: what K and V in e4m3 change, against float64.

    python -m load_tests.lab.kv_needle
    python -m load_tests.lab.kv_needle --device cuda --heads 32 8

One query a head over random keys and values, drawn so that one key, anywhere in the last nine
tenths, scores as asked and the others by chance. By how K and V are stored:

    weight      of the needle, in float64: of the keys as drawn, and as stored (mean over heads)
    result      the attention that an engine runs, relative to float64 of K and V as drawn; and
                relative to float64 of K and V as stored, which is the kernel's own part of it
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kv_calibration import scales_for
from kernels.attention.protocol import AttentionShape, build_step
from kernels.attention.reference import ReferenceAttention
from kernels.kv.scales import KvScales, from_e4m3, to_e4m3
from load_tests.tables import render_rows

BLOCK_SIZE = 16
CALIBRATION_MARGIN = 2.0  # as engine/kv_calibration.py by default
HEADER = ("score", "K and V", "weight as drawn", "as stored", "result off by", "of it the kernel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Haystack:
    """K and V of one row, and what looks for one key."""

    keys: Tensor  # [num_keys, kv_heads, head_dim]
    values: Tensor
    query: Tensor  # [heads, head_dim]
    place: int

    @classmethod
    def draw(
        cls, num_keys: int, heads: tuple[int, int], head_dim: int, score: float, like: Tensor
    ) -> "Haystack":
        """heads: of queries, of keys. score: of the needle, after the division by sqrt(head_dim).

        like: has the device and the dtype.
        """
        size = (num_keys, heads[1], head_dim)
        keys, values = (torch.randn(size).to(like) for _ in range(2))
        place = int(torch.randint(num_keys // 10, num_keys, ()))
        key = keys[place].double()
        query = score * math.sqrt(head_dim) * key / key.square().sum(-1, keepdim=True)
        query = query.repeat_interleave(heads[0] // heads[1], 0).to(like)
        return cls(keys=keys, values=values, query=query, place=place)

    def exact(self, keys: Tensor, values: Tensor) -> tuple[Tensor, float]:
        """In float64: the result [heads, head_dim], and the needle's weight."""
        group = self.query.shape[0] // keys.shape[1]
        results, weights = [], []
        for head, query in enumerate(self.query.double()):
            scores = keys[:, head // group].double() @ query / math.sqrt(query.shape[0])
            shares = scores.softmax(0)
            results.append(shares @ values[:, head // group].double())
            weights.append(float(shares[self.place]))
        return torch.stack(results), sum(weights) / len(weights)


def attend(hay: Haystack, store: Tensor, scales: KvScales | None) -> Tensor:
    """The query's attention as an engine runs it: [heads, head_dim]. store: one layer's blocks."""
    num_keys, num_kv_heads, head_dim = hay.keys.shape
    device = store.device
    num_heads = len(hay.query)
    shape = AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layer_windows=(None,),
    )
    given: dict[str, Any] = {"block_size": BLOCK_SIZE, "dtype": hay.keys.dtype, "device": device}
    if device.type == "cuda":
        from kernels.attention.triton import TritonAttention

        backend: Any = TritonAttention(shape, **given)
    else:
        backend = ReferenceAttention(shape, **given, is_fp8=scales is not None)
    step = build_step([1], [num_keys - 1], [list(range(len(store)))], device)
    newest = hay.keys[-1:], hay.values[-1:]
    found: Tensor = backend.run(
        hay.query[None], *newest, 0, store, backend.plan(step), scales=scales
    )
    return found.view(num_heads, -1).double()


def _blocks(planes: Sequence[Tensor]) -> Tensor:
    """K and V [num_keys, kv_heads, width] as [blocks, 1, 2, block_size, kv_heads, width]."""
    by_block = [plane.view(-1, BLOCK_SIZE, *plane.shape[1:]) for plane in planes]
    return torch.stack(by_block, 1)[:, None].contiguous()


def measure(hay: Haystack) -> Iterator[tuple[str, float, float, float, float]]:
    """What is stored how: weights as drawn and as stored, errors of the result and the kernel's."""
    expected, weight = hay.exact(hay.keys, hay.values)
    largest = torch.stack([plane.abs().amax((0, 2)).float() for plane in (hay.keys, hay.values)])
    ways = {
        "as computed": None,
        "e4m3, scales 1": torch.ones_like(largest),
        "e4m3, calibrated": scales_for(largest, CALIBRATION_MARGIN),
    }
    for name, scale in ways.items():
        scales, planes = None, [hay.keys, hay.values]
        stored = _blocks(planes)
        if scale is not None:
            scales = KvScales.of(scale[None])
            codes = [to_e4m3(plane, scales.inverse[0, i]) for i, plane in enumerate(planes)]
            stored = _blocks(codes)
            factors = [scales.factors(0, i).double()[:, None] for i in range(2)]
            planes = [
                from_e4m3(code, torch.float32).double() * factor
                for code, factor in zip(codes, factors, strict=True)
            ]
        of_stored, weight_stored = hay.exact(planes[0], planes[1])
        found = attend(hay, stored, scales)
        yield name, weight, weight_stored, _off(found, expected), _off(found, of_stored)


def _off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--keys", type=int, default=128 * 1024, help="a multiple of 16")
    parser.add_argument("--heads", type=int, nargs=2, default=[4, 2], help="of queries, of keys")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--scores", type=float, nargs="*", default=[12.0, 14.0, 16.0, 20.0])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    like, rows = torch.empty(0, dtype=dtype, device=args.device), []
    with torch.inference_mode():
        for score in args.scores:
            hay = Haystack.draw(args.keys, tuple(args.heads), args.head_dim, score, like)
            for name, *weights, error, kernels in measure(hay):
                cells = [f"{weight:.4f}" for weight in weights]
                rows.append((f"{score:g}", name, *cells, f"{error:.1e}", f"{kernels:.1e}"))
    print(f"{args.keys} keys, {args.heads} heads of {args.head_dim}, {dtype} on {args.device}\n")
    print(render_rows([HEADER, *rows]))


if __name__ == "__main__":
    main()
