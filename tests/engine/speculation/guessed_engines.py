"""Engines whose drafts come from a test: of an exact small model, or of the shipped one."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from configs.load import load_config
from engine.build import Engine, build_engine
from engine.clock import MonotonicClock
from engine.kv.cache import check_blocks
from engine.kv.transfer import OutgoingEvent
from engine.layers.context import SINGLE_RANK, Comm
from engine.models.llama import CausalLM
from engine.models.registry import AS_PUBLISHED, WeightSource, build_model
from engine.ranks.rank import WHOLE_MODEL, Rank
from engine.request import Request, SamplingParams
from engine.scheduling.drafting import Drafting
from engine.speculation.drafter import FixedDrafts
from kernels.ops import Ops
from tests.engine.ranks.exact_models import CPU, SnappingOps, save_whole_numbers
from tests.harness.drafters import Guesser
from tests.harness.in_process import Answer, answer
from tests.harness.tiny_models import VOCAB_SIZE, save_model

Asked = tuple[Sequence[int], SamplingParams]
Kind = Mapping[str, Any]  # of a request: fields of its SamplingParams


def with_shared_prefix(seed: int, kinds: Sequence[Kind]) -> list[Asked]:
    """A request of each kind; their prompts of 35 tokens begin with the same 13."""
    draw = random.Random(seed)
    shared = draw.choices(range(3, VOCAB_SIZE), k=13)
    given = {"max_tokens": 11, "ignore_eos": True}
    return [
        (
            shared + draw.choices(range(3, VOCAB_SIZE), k=22),
            SamplingParams(**{**given, "seed": draw.getrandbits(60), **kind}),
        )
        for kind in kinds
    ]


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


def save_exact_model(
    folder: Path, architecture: str = "LlamaForCausalLM", *, seed: int, **settings: object
) -> None:
    save_model(folder, architecture, seed=seed, **settings)
    save_whole_numbers(folder, seed)


def exact_model(
    folder: Path,
    ops: Ops | None = None,
    rank: Rank = WHOLE_MODEL,
    source: WeightSource = AS_PUBLISHED,
) -> CausalLM:
    """ops: instead of those that end on a grid."""
    given = ops or SnappingOps()
    return build_model(
        folder, dtype=torch.float32, device=CPU, ops=given, rank=rank, source=source
    )


def start_exact(
    folder: Path, *, ops: Ops | None = None, comm: Comm = SINGLE_RANK, **overrides: object
) -> Engine:
    """An engine of a model of whole numbers; step it within `exact_arithmetic`.

    ops: instead of those that end on a grid, for models of other numbers. comm: to the other ranks.
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
    source = WeightSource(sharing=config.workers.expert_sharing)
    model = exact_model(folder, ops, comm.rank, source)
    return build_engine(config, "test", MonotonicClock(), _no_handoff, model=model, comm=comm)


def guess(
    engine: Engine,
    asked: Sequence[Asked],
    answers: Sequence[Answer],
    *,
    num_drafts: int,
    error_rate: float,
    seed: int = 0,
) -> None:
    """From now on the engine's drafts are the tokens of `answers`, some of them wrong."""
    known = [found.tokens for found in answers]

    def answer_of(request: Request) -> Sequence[int]:
        return known[int(request.key.request_id, 16)]

    guesser = Guesser(
        answer_of, vocab_size=engine.spec.vocab_size, error_rate=error_rate, seed=seed
    )
    scheduler = engine.core.scheduler
    holds = scheduler.drafting.holds
    scheduler.drafting = Drafting(guesser, FixedDrafts(num_drafts), holds=holds)


def run(engine: Engine, asked: Sequence[Asked]) -> list[Answer]:
    """The answers; afterwards nothing is held."""
    found = answer(engine, asked)
    scheduler = engine.core.scheduler
    check_blocks(engine.cache, list(scheduler.owners()))
    assert engine.cache.num_held == 0
    assert scheduler.num_free_rows == scheduler._config.max_num_seqs
    assert scheduler.drafting.kept_keys() == set()
    return found


def assert_same(ours: Sequence[Answer], theirs: Sequence[Answer]) -> None:
    """Every record with every number; only what a prefix hit changes may differ."""
    for our, their in zip(ours, theirs, strict=True):
        assert our.tokens == their.tokens
        assert our.finish == their.finish
        for ours_, theirs_ in zip(our.records, their.records, strict=True):
            assert (ours_.index, ours_.stop_token_id) == (theirs_.index, theirs_.stop_token_id)
            assert ours_.logprobs == theirs_.logprobs


def _no_handoff(event: OutgoingEvent) -> None:
    raise AssertionError(f"a unified engine hands nothing over: {event}")
