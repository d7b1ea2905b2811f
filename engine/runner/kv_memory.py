"""How many KV blocks fit a GPU, measured and not estimated.

A trial executor has few blocks and does everything else that takes memory: the largest step, every
kind of sampling, every graph. What it leaves of the allowed share is used for blocks.
"""

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.context import SINGLE_RANK, Comm
from engine.ranks.agreement import least


def num_blocks_that_fit(
    run_trial: Callable[[], None],
    *,
    trial_blocks: int,
    block_bytes: int,
    share: float,
    num_staged: int = 0,
    comm: Comm = SINGLE_RANK,
) -> int:
    """The number of KV blocks that fit in `share` of the memory of each rank's GPU.

    `run_trial` builds, warms up and drops an executor of `trial_blocks` blocks. `num_staged`:
    blocks that the host tier will take (engine/kv/host/staging.py). Raises ConfigError when less
    than the trial's own blocks fit.
    """
    run_trial()
    torch.cuda.synchronize()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    taken_bytes = total_bytes - free_bytes + (num_staged - trial_blocks) * block_bytes
    num_blocks = least(comm, int(share * total_bytes - taken_bytes) // block_bytes)
    if num_blocks < trial_blocks:
        raise ConfigError(
            f"cache.gpu_memory_utilization: {share:.0%} of {total_bytes / 2**30:.1f} GiB leaves"
            f" room for {max(0, num_blocks)} KV blocks beside {taken_bytes / 2**30:.1f} GiB of"
            f" weights, activations, graphs and staged blocks; one step needs {trial_blocks}. Raise"
            " it, lower scheduler.max_num_batched_tokens or max_num_seqs, or use a smaller model"
        )
    gc.collect()
    torch.cuda.empty_cache()
    return num_blocks


def held_again(device: torch.device) -> Tensor:
    """As much memory as steps on `device` took and gave back, which torch keeps for later steps.

    Whoever holds it while graphs are captured has it kept: before each capture torch gives the GPU
    what nobody holds, and a trial would not count it.
    """
    num_bytes = 0
    if device.type == "cuda":
        num_bytes = torch.cuda.memory_reserved(device)
        torch.cuda.empty_cache()
        num_bytes -= torch.cuda.memory_reserved(device)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
