"""FlashAttention-3 for prompts with latent attention: Hopper, bf16 and fp16.

    latents -> up c = [key | value] of each head -> keys joined with the rotated key -> the library

Keys and values of all of a step's rows are made at once, as in `latent_prefill`. Where they are
more than one piece of bounded size, that module's kernel goes from piece to piece instead: the
library's causal mask ends with a row's last key, and a piece may end before.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.attention import flash_attn
from kernels.attention.latent import FLASH_HEADS, LatentShape
from kernels.attention.latent_keys import join_keys
from kernels.attention.latent_prefill import (
    PIECE_BYTES,
    LatentPrefill,
    LatentPrefillConfig,
    keys_a_piece,
    latent_prefill,
    made_keys,
    plan_prefill,
    prefill_bytes,
    prepare_pieces,
)
from kernels.attention.protocol import AttentionStep
from kernels.kv.scales import KvScales

# Strides of what the library reads through the GPU's copy engine are multiples of it.
_TMA_BYTES = 16


def why_not(
    shape: LatentShape, block_size: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why `FlashLatent` cannot serve this model on this machine; None = it can."""
    of_heads = None
    if shape.head_sizes != FLASH_HEADS:
        of_heads = (
            "FlashAttention-3 has queries and values of {} and {} numbers, not {} and {}".format(
                *FLASH_HEADS, *shape.head_sizes
            )
        )
    return flash_attn.why_not_here(of_heads, block_size, dtype, device)


class FlashLatent:
    """A `LatentBackend` for rows of any number of new tokens; keeps no state of a step."""

    def __init__(
        self,
        shape: LatentShape,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """Raises ValueError if `why_not` gives a reason."""
        reason = why_not(shape, block_size, dtype, device)
        if reason is not None:
            raise ValueError(reason)
        self._attend: Callable[..., Tensor] = flash_attn.import_library().flash_attn_varlen_func
        self._shape = shape
        self._block_size = block_size
        self._dtype, self._device = dtype, device
        self._config = LatentPrefillConfig()
        self._max_piece_keys = keys_a_piece(shape, dtype, piece_bytes)

    def prepare(self, *, max_rows: int, max_row_tokens: int, max_row_keys: int) -> None:
        del max_rows, max_row_tokens, max_row_keys
        prepare_pieces(
            self._shape,
            self._config,
            block_size=self._block_size,
            dtype=self._dtype,
            device=self._device,
        )

    def working_bytes(self, *, max_tokens: int, max_rows: int, max_row_keys: int) -> int:
        """Joined keys come on top of what they are made of."""
        return prefill_bytes(
            self._shape,
            self._dtype,
            num_tokens=max_tokens,
            num_keys=max_rows * max_row_keys,
            max_piece_keys=self._max_piece_keys,
            num_more=self._shape.num_heads * self._shape.query_dim,
        )

    def plan(self, step: AttentionStep) -> LatentPrefill:
        return plan_prefill(
            step,
            0,
            self._shape,
            self._config,
            block_size=self._block_size,
            max_piece_keys=self._max_piece_keys,
        )

    def run(
        self,
        q: Tensor,
        latent_new: Tensor,
        up: Tensor,
        layer: int,
        store: Tensor,
        metadata: LatentPrefill,
        out: Tensor | None = None,
        scales: KvScales | None = None,
    ) -> Tensor:
        """Reads the fresh latents from `store`, like all others."""
        shape = self._shape
        if out is None:
            size = (len(q), shape.num_heads * shape.value_dim)
            out = torch.empty(size, dtype=q.dtype, device=q.device)
        if len(metadata.pieces) > 1:
            latent_prefill(q, up, out, layer, store, metadata, scales)
        else:
            (piece,) = metadata.pieces
            made, vectors = made_keys(up, layer, store, piece, shape, scales)
            self._run_whole(q, made, vectors, metadata, out)
        return out

    def _run_whole(
        self, q: Tensor, made: Tensor, vectors: Tensor, work: LatentPrefill, out: Tensor
    ) -> None:
        shape = self._shape
        self._attend(
            q=_with_aligned_rows(q),
            k=join_keys(made, vectors, shape),
            v=made[..., shape.nope_dim :],
            max_seqlen_q=work.max_new_tokens,
            cu_seqlens_q=work.cu_tokens,
            max_seqlen_k=work.max_keys,
            cu_seqlens_k=work.cu_keys,
            softmax_scale=shape.scale,
            causal=True,
            fa_version=3,
            out=out.view(len(q), shape.num_heads, shape.value_dim),
        )


def _with_aligned_rows(q: Tensor) -> Tensor:
    """`q`, copied if the stride between its tokens is none that the library takes."""
    return q if q.stride(0) * q.element_size() % _TMA_BYTES == 0 else q.contiguous()
