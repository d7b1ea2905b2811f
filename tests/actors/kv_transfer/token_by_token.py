"""A model on a CPU whose numbers for a token are the same bits whatever else a step computes.

Products of several rows at once round differently from those of one row in the CPU's libraries, so
deterministic mode promises nothing there. One token at a time, through the same layers, does: then
what is left to differ is what was stored, moved, or computed again.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.layers.context import ForwardContext
from engine.models.llama import CausalLM, ForwardResult, attention_shape
from engine.models.registry import build_model
from kernels.attention.latent import LatentShape
from kernels.attention.latent_reference import ReferenceLatent
from kernels.attention.phased import PhasedMetadata, Phases
from kernels.attention.protocol import AttentionStep, build_step
from kernels.attention.reference import ReferenceAttention, ReferenceMetadata


class TokenAttention:
    """Plans every token of a step as a step of its own; the keys before it are in the store."""

    def __init__(self, model: CausalLM, block_size: int, *, in_fp8: bool = False) -> None:
        shape = attention_shape(model.spec)
        backend: Any = ReferenceLatent if isinstance(shape, LatentShape) else ReferenceAttention
        more = {"is_fp8": True} if in_fp8 else {}
        self.of_one = backend(
            shape, block_size=block_size, dtype=model.dtype, device=model.device, **more
        )

    def plan(self, step: AttentionStep) -> list[ReferenceMetadata]:
        """[T] in token order."""
        return [
            self.of_one.plan(build_step([1], [position], [step.row_blocks(row).tolist()], "cpu"))
            for row in range(step.num_rows)
            for position in _new_positions(step, row)
        ]

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("the model runs each token by itself")


def _new_positions(step: AttentionStep, row: int) -> range:
    first = int(step.num_computed_tokens[row])
    return range(first, first + int(step.num_new_tokens[row]))


class TokenByToken(CausalLM):
    """The model of a folder, asked for one token after the other."""

    def __init__(self, inner: CausalLM, attention: TokenAttention) -> None:
        self.spec = inner.spec
        self.layers = inner.layers
        self.rotary = inner.rotary
        self._inner = inner
        self._attention = attention
        self._embedding = inner._embedding
        self._head = inner._head

    @property
    def can_skip_queries(self) -> bool:
        return False

    def forward(
        self,
        input_ids: Tensor,
        ctx: ForwardContext,
        logit_indices: Tensor | None = None,
        *,
        checks_finite: bool = False,
    ) -> ForwardResult:
        phased: PhasedMetadata = ctx.attention_metadata
        (part,) = phased.parts
        results = []
        for i, metadata in enumerate(part.metadata):
            one = slice(i, i + 1)
            angles = tuple(
                replace(each, cos=each.cos[one], sin=each.sin[one], _kv_targets=None)
                for each in ctx.rotary
            )
            ctx_of_one = replace(
                ctx,
                rotary=angles,
                slots=ctx.slots[one],
                attention=self._attention.of_one,
                attention_metadata=metadata,
            )
            results.append(
                self._inner.forward(input_ids[one], ctx_of_one, checks_finite=checks_finite)
            )
        hidden = torch.cat([result.hidden for result in results])
        flags = [result.is_finite for result in results if result.is_finite is not None]
        return ForwardResult(
            hidden=hidden if logit_indices is None else hidden.index_select(0, logit_indices),
            is_finite=torch.cat(flags) if flags else None,
        )

    def own_logits(self, hidden: Tensor) -> Tensor:
        return torch.cat([self._inner.own_logits(line) for line in hidden.split(1)])


def build_token_by_token(
    folder: Path, block_size: int, *, in_fp8: bool = False
) -> tuple[CausalLM, Phases]:
    """The fp32 model of a folder on the CPU, and the attention that goes with it."""
    inner = build_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    attention = TokenAttention(inner, block_size, in_fp8=in_fp8)
    phases = Phases(prefill=attention, decode=attention, graph=None)
    return TokenByToken(inner, attention), phases
