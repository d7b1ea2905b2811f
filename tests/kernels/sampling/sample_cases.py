"""Rows of logits, what may be drawn from them, and the checks that judge a draw.

The judge is float64: a token must be among those the cuts keep, and no token that is surely kept
may have a clearly better score. "Surely" leaves 1e-5 of mass around top_p, and nothing elsewhere.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling.choices import Draws
from kernels.sampling.noise import gumbel
from tests.harness.seeds import fresh_seed

_MASS_TOLERANCE = 1e-5
_SCORE_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """How one row is drawn."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


# Alone and together, at their extremes and between.
ALL_KNOBS = [
    Knobs(),
    Knobs(temperature=1e-6),
    Knobs(temperature=1e-30),
    Knobs(temperature=1e30),
    Knobs(temperature=50.0, top_p=0.9),
    Knobs(top_k=1),
    Knobs(top_k=20, temperature=0.6, top_p=0.95),
    Knobs(top_k=300, top_p=0.8),
    Knobs(top_k=1000),
    Knobs(top_p=1e-9),
    Knobs(top_p=0.5),
    Knobs(top_p=0.95, temperature=1.5),
    Knobs(top_p=0.9999999),
    Knobs(min_p=1.0),
    Knobs(min_p=0.05, temperature=2.0),
    Knobs(top_k=50, top_p=0.9, min_p=0.02, temperature=1.3),
]


def fresh_generator() -> torch.Generator:
    seed = fresh_seed()
    return torch.Generator().manual_seed(seed)


def random_logits(
    generator: torch.Generator, num_rows: int, vocab_size: int, dtype: torch.dtype
) -> Tensor:
    """Rows from nearly flat to peaked, every fourth with many ties and some tokens ruled out."""
    spreads = torch.tensor([1e-4, 1.0, 3.0, 10.0])[torch.arange(num_rows) % 4]
    logits = torch.randn((num_rows, vocab_size), generator=generator) * spreads[:, None]
    logits[1::4] = (logits[1::4] * 2).round() / 2
    logits[1::4, ::7] = -torch.inf
    return logits.to(dtype)


def build_draws(
    generator: torch.Generator, lines: list[int], knobs: list[Knobs], device: str
) -> Draws:
    """Line lines[p] is drawn as knobs[p] say, with random seeds and indices."""
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(lines),), generator=generator)
    indices = torch.randint(0, 2**32, (len(lines),), generator=generator)
    depths = [abs(math.log(k.min_p)) if k.min_p > 0 else math.inf for k in knobs]
    return Draws(
        lines=torch.tensor(lines, dtype=torch.int64, device=device),
        seeds=seeds.to(device),
        indices=indices.to(device),
        temperatures=torch.tensor([k.temperature for k in knobs], device=device),
        top_ks=torch.tensor([k.top_k for k in knobs], dtype=torch.int32, device=device),
        top_ps=torch.tensor([k.top_p for k in knobs], device=device),
        max_depths=torch.tensor(depths, dtype=torch.float32, device=device),
    )


def check_draws(logits: Tensor, draws: Draws, token_ids: list[int]) -> None:
    """Each line of fp32, bf16 or fp16 [S, vocab] drew a token it may draw."""
    logits = logits.cpu().float()
    lines, top_ks = draws.lines.tolist(), draws.top_ks.tolist()
    tokens = torch.arange(logits.shape[1])
    for p, (line, token_id) in enumerate(zip(lines, token_ids, strict=True)):
        best = logits[line].max()
        depths = (best - logits[line]) / draws.temperatures[p].cpu()
        kept, surely_kept = _kept(
            depths, top_ks[p], float(draws.top_ps[p]), float(draws.max_depths[p])
        )
        noise = gumbel(draws.seeds[p : p + 1].cpu(), draws.indices[p : p + 1].cpu(), tokens)[0]
        scores = noise.double() - depths.double()
        message = f"draw {p} of line {line}: token {token_id}, {draws}"
        assert kept[token_id], message
        assert scores[token_id] >= scores[surely_kept].max() - _SCORE_TOLERANCE, message


def _kept(depths: Tensor, top_k: int, top_p: float, max_depth: float) -> tuple[Tensor, Tensor]:
    """Which tokens of fp32 [vocab] the cuts may keep, and which they must keep; bool [vocab]."""
    is_left = torch.ones_like(depths, dtype=torch.bool)
    if 0 < top_k < depths.shape[0]:
        is_left = depths <= depths.kthvalue(top_k).values
    may, must = is_left.clone(), is_left.clone()
    if top_p < 1.0:
        masses = (-depths.double()).exp() * is_left
        values, places = torch.unique(depths, return_inverse=True)  # ascending
        by_value = torch.zeros(len(values), dtype=torch.float64).index_add_(0, places, masses)
        before = (by_value.cumsum(0) - by_value)[places] / masses.sum()  # of strictly better tokens
        is_best = depths == 0
        may &= (before < top_p + _MASS_TOLERANCE) | is_best
        must &= (before < top_p - _MASS_TOLERANCE) | is_best
    is_near = depths <= max_depth
    return may & is_near, must & is_near
