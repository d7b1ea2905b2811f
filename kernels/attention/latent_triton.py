"""The project's own backend of latent attention on a GPU: absorbed for single tokens, made keys
for prompts.

In a graph every token, of prompts too, is attended to as a row of its own, absorbed: how many keys
would have to be made differs from replay to replay. With fixed tiles they always are, and without a
split: then a request's results are bitwise equal alone and in any batch, in chunks or at once. The
price is more products in prompts and no split of long rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.latent import LatentShape
from kernels.attention.latent_decode import latent_decode
from kernels.attention.latent_prefill import (
    PIECE_BYTES,
    LatentPrefill,
    LatentPrefillConfig,
    config_for,
    keys_a_piece,
    latent_prefill,
    plan_prefill,
    prefill_bytes,
    prepare_pieces,
)
from kernels.attention.latent_work import (
    LatentConfig,
    LatentWork,
    fitted_config,
    open_latent,
    plan_latent,
)
from kernels.attention.protocol import AttentionStep, RowTensors
from kernels.attention.token_rows import expand_rows, open_token_rows
from kernels.device import device_properties
from kernels.kv.scales import KvScales
from kernels.linear.by_head import product_by_head


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonLatentMetadata:
    """A step's rows by kernel; owns all scratch memory, so steps may overlap."""

    decode: LatentWork | None  # the first tokens of the step, each a row
    prefill: LatentPrefill | None
    # Rows of several tokens, of which those of `decode` are made; None = they are the step's own.
    expanded: RowTensors | None = None


def attend_absorbed(
    q: Tensor,
    up: Tensor,
    layer: int,
    store: Tensor,
    work: LatentWork,
    out: Tensor,
    scales: KvScales | None = None,
    *,
    is_deterministic: bool = False,
) -> None:
    """Attention of the tokens of `work`, absorbed; arguments as of `LatentBackend.run`."""
    shape = work.shape
    size = (len(q), shape.num_heads, shape.rank)
    q_latent, means = (torch.empty(size, dtype=q.dtype, device=q.device) for _ in range(2))
    to_latents, to_values = up[:, : shape.nope_dim], up[:, shape.nope_dim :].transpose(1, 2)
    product_by_head(
        q[..., : shape.nope_dim], to_latents, q_latent, is_deterministic=is_deterministic
    )
    latent_decode(q_latent, q, means, layer, store, work, scales)
    product_by_head(means, to_values, out, is_deterministic=is_deterministic)


class TritonLatent:
    """A `GraphLatent`; keeps no state of a step."""

    can_capture_prompts = True
    reads_single_lengths_on_device = True  # keys of prompts are made, as many as the host says

    def __init__(
        self,
        shape: LatentShape,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        fixed_tile: bool = False,
        decode_config: LatentConfig | None = None,
        prefill_config: LatentPrefillConfig | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """Raises ValueError for a device whose shared memory is too small."""
        self._shape = shape
        self._block_size = block_size
        self._dtype, self._device = dtype, device
        self._is_fixed_tile = fixed_tile
        self._decode_config = decode_config or fitted_config(
            shape, device_properties(device), whole_rows=fixed_tile
        )
        self._prefill_config = prefill_config or config_for(shape)
        self._max_piece_keys = keys_a_piece(shape, dtype, piece_bytes)

    def prepare(self, *, max_rows: int, max_row_tokens: int, max_row_keys: int) -> None:
        if self._is_fixed_tile:
            return  # no keys are made
        del max_rows, max_row_tokens, max_row_keys
        prepare_pieces(
            self._shape,
            self._prefill_config,
            block_size=self._block_size,
            dtype=self._dtype,
            device=self._device,
        )

    def working_bytes(self, *, max_tokens: int, max_rows: int, max_row_keys: int) -> int:
        if self._is_fixed_tile:
            return 0
        return prefill_bytes(
            self._shape,
            self._dtype,
            num_tokens=max_tokens,
            num_keys=max_rows * max_row_keys,
            max_piece_keys=self._max_piece_keys,
        )

    def plan(self, step: AttentionStep) -> TritonLatentMetadata:
        if self._is_fixed_tile:
            return self._plan_tokens(step)
        num_single = step.num_single_rows
        decode = prefill = None
        if num_single:
            decode = self._open(step.device_rows.part(0, num_single), step.max_keys)
        if num_single < step.num_rows:
            prefill = plan_prefill(
                step,
                num_single,
                self._shape,
                self._prefill_config,
                block_size=self._block_size,
                max_piece_keys=self._max_piece_keys,
            )
        return TritonLatentMetadata(decode=decode, prefill=prefill)

    def run(
        self,
        q: Tensor,
        latent_new: Tensor,
        up: Tensor,
        layer: int,
        store: Tensor,
        metadata: TritonLatentMetadata,
        out: Tensor | None = None,
        scales: KvScales | None = None,
    ) -> Tensor:
        """Reads the fresh latents from `store`, like all others."""
        shape = self._shape
        if out is None:
            size = (len(q), shape.num_heads * shape.value_dim)
            out = torch.empty(size, dtype=q.dtype, device=q.device)
        if metadata.decode is not None:
            num_rows = len(metadata.decode.row_parts)
            attend_absorbed(
                q[:num_rows],
                up,
                layer,
                store,
                metadata.decode,
                out[:num_rows],
                scales,
                is_deterministic=self._is_fixed_tile,
            )
        if metadata.prefill is not None:
            latent_prefill(q, up, out, layer, store, metadata.prefill, scales)
        return out

    def open_graph(
        self,
        rows: RowTensors,
        *,
        max_keys: int,
        max_tokens: int | None = None,
        max_row_tokens: int | None = None,
    ) -> TritonLatentMetadata:
        del max_row_tokens
        expanded = None if max_tokens is None else rows
        if max_tokens is not None:
            rows = open_token_rows(rows, max_tokens)
        work = open_latent(rows, max_keys, self._shape, self._decode_config)
        return TritonLatentMetadata(decode=work, prefill=None, expanded=expanded)

    def begin(self, metadata: TritonLatentMetadata) -> None:
        work = metadata.decode
        assert work is not None, "metadata of no graph"
        if metadata.expanded is not None:
            expand_rows(metadata.expanded, work.split.rows)
        plan_latent(work)

    def _plan_tokens(self, step: AttentionStep) -> TritonLatentMetadata:
        """Each token as a row."""
        is_single = step.num_single_rows == step.num_rows
        max_tokens = None if is_single else step.num_tokens
        metadata = self.open_graph(step.device_rows, max_keys=step.max_keys, max_tokens=max_tokens)
        self.begin(metadata)
        return metadata

    def refresh(self, metadata: TritonLatentMetadata, step: AttentionStep) -> None:
        """Does nothing: the device plans from the rows' own buffers."""

    def _open(self, rows: RowTensors, max_keys: int) -> LatentWork:
        work = open_latent(rows, max_keys, self._shape, self._decode_config)
        plan_latent(work)
        return work
