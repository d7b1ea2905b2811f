"""Selects the backend for rows of a few new tokens: decode attention that verifies drafts."""

import torch

from kernels.attention.latent import LatentShape
from kernels.attention.names import AttentionNames, BackendUnavailable
from kernels.attention.phased import Phases
from kernels.attention.protocol import AttentionShape, GraphAttention
from kernels.attention.reference import ReferenceAttention
from kernels.attention.select import automatic_name
from kernels.attention.select_latent import Target, build_latent_verification
from kernels.device import device_properties

_INSTEAD = "leave speculation.attention_backend at prefill"


def add_verification(
    phases: Phases,
    names: AttentionNames,
    shape: AttentionShape | LatentShape,
    *,
    max_queries: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    fixed_tile: bool,
    is_fp8: bool = False,
) -> None:
    """From now on `phases` attends rows of 2 to `max_queries` new tokens by the decode backend.

    is_fp8: as in `build_attention`. Raises BackendUnavailable where there is none that reads a
    row's keys once for all of them.
    """
    if fixed_tile:
        raise BackendUnavailable(
            f"model.deterministic computes rows of any length with one kernel; {_INSTEAD}"
        )
    if isinstance(shape, LatentShape):
        target = Target(
            shape=shape, block_size=block_size, dtype=dtype, device=device, is_fp8=is_fp8
        )
        verify, graph = build_latent_verification(names.decode, target, max_queries=max_queries)
        phases.verify_with(verify, max_queries, graph)
        return
    name = names.decode
    if name == "auto":
        name = automatic_name("decode", shape, device_properties(device))
    if name == "reference":
        reference = ReferenceAttention(
            shape, block_size=block_size, dtype=dtype, device=device, is_fp8=is_fp8
        )
        phases.verify_with(reference, max_queries)
        return
    if name != "triton":
        raise BackendUnavailable(
            f"{name} has no kernel that verifies; set model.attention.decode to triton, or"
            f" {_INSTEAD}"
        )
    from kernels.attention.triton_verify import TritonVerify

    try:
        backend: GraphAttention = TritonVerify(
            shape, max_queries=max_queries, block_size=block_size, dtype=dtype, device=device
        )
    except ValueError as error:
        raise BackendUnavailable(f"triton cannot verify here: {error}; {_INSTEAD}") from error
    phases.verify_with(backend, max_queries, graph=backend)
