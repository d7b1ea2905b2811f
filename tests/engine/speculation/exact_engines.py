"""Engines of small models whose sums are exact, so that any batch and any ranks give the same bits.

Other processes import this file, which is why it leaves out what takes seconds: transformers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

from configs.load import load_config
from engine.build import build_engine
from engine.clock import MonotonicClock
from engine.engine import Engine
from engine.kv.transfer import OutgoingEvent
from engine.layers.context import SINGLE_RANK, Comm
from engine.messages import Role
from engine.models.llama import CausalLM
from engine.models.registry import AS_PUBLISHED, WeightSource, build_model
from engine.ranks.rank import WHOLE_MODEL, Rank
from kernels.ops import Ops
from tests.engine.ranks.exact_models import CPU, SnappingOps


def _exact_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float,
) -> torch.Tensor:
    """In float64 and rounded to 1/8, so that another order of sums gives the same bits."""
    scores = q.double() @ k.double().transpose(-1, -2) * scale
    if attn_mask is not None:
        scores = scores + attn_mask.double()
    elif is_causal:
        scores = scores + torch.full_like(scores[..., :, :], -torch.inf).triu(1)
    return (torch.round(scores.softmax(-1) @ v.double() * 8) / 8).float()


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Attention ends on a grid, so that all later sums are exact: any batch gives the same bits."""
    with patch.object(torch.nn.functional, "scaled_dot_product_attention", _exact_attention):
        yield


def exact_model(
    folder: Path,
    ops: Ops | None = None,
    rank: Rank = WHOLE_MODEL,
    source: WeightSource = AS_PUBLISHED,
) -> CausalLM:
    """ops: instead of those that end on a grid."""
    given = ops or SnappingOps()
    return build_model(folder, dtype=torch.float32, device=CPU, ops=given, rank=rank, source=source)


def start_exact(
    folder: Path,
    *,
    ops: Ops | None = None,
    comm: Comm = SINGLE_RANK,
    role: Role = "unified",
    notify: Callable[[OutgoingEvent], None] | None = None,
    **overrides: object,
) -> Engine:
    """An engine of a model of whole numbers; step it within `exact_arithmetic`.

    ops: instead of those that end on a grid, for models of other numbers. comm: to the other ranks.
    notify: see `build_engine`, for a role that hands over; all of them have the same block key.
    """
    dotted: dict[str, object] = {
        "model.path": str(folder),
        "cache.num_blocks": 256,
        "cache.block_size": 4,
        "scheduler.max_num_seqs": 6,
        "scheduler.max_num_batched_tokens": 32,
        "speculation.drafter": "ngram",
        "speculation.adaptive": False,
        "workers.tensor_parallel_size": comm.rank.size,
        **{key.replace("__", "."): value for key, value in overrides.items()},
    }
    if dotted["speculation.drafter"] == "none":
        del dotted["speculation.adaptive"]
    config = load_config(None, dotted)
    source = WeightSource(sharing=config.workers.expert_sharing_of(comm.rank.size))
    model = exact_model(folder, ops, comm.rank, source)
    given = config, "test", MonotonicClock(), notify or _no_handoff, bytes(32)
    return build_engine(*given, model=model, role=role, comm=comm)


def _no_handoff(event: OutgoingEvent) -> None:
    raise AssertionError(f"a unified engine hands nothing over: {event}")
