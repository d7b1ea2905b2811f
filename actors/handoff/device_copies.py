"""Copies of whole blocks between GPUs, queued one by one on the current stream at little cost.

By CUDA's own call: a copy of two tensor views takes the host five times as long to queue, longer
than a link between two GPUs needs for a block. Imported only where KV is on a GPU.
"""

from collections.abc import Iterable

import torch
from cuda.bindings import runtime
from torch import Tensor


def queue_copies(target: Tensor, source: Tensor, runs: Iterable[tuple[int, int, int]]) -> None:
    """For each (to, from, n): target[to : to + n] = source[from : from + n].

    target, source: contiguous [any, *block_shape] of one shape and dtype, on this GPU or another's
    memory mapped here. Raises RuntimeError when CUDA refuses a copy.
    """
    assert target.is_contiguous(), f"target of strides {target.stride()}"
    assert source.is_contiguous(), f"source of strides {source.stride()}"
    block_bytes = target[0].numel() * target.element_size()
    to_address, from_address = target.data_ptr(), source.data_ptr()
    stream = torch.cuda.current_stream(target.device).cuda_stream
    for to_block, from_block, num_blocks in runs:
        (status,) = runtime.cudaMemcpyAsync(
            to_address + to_block * block_bytes,
            from_address + from_block * block_bytes,
            num_blocks * block_bytes,
            runtime.cudaMemcpyKind.cudaMemcpyDefault,
            stream,
        )
        if status != runtime.cudaError_t.cudaSuccess:
            raise RuntimeError(f"copy of {num_blocks} blocks: {status.name}")
