"""How many KV blocks fit a GPU: measured on a trial executor, not estimated.

The trial has few blocks and does all that takes memory besides them: the largest step, every
kind of sampling, every graph. What that leaves of the allowed share is the store's.
"""

import gc
from collections.abc import Callable

import torch

from engine.errors import ConfigError


def num_blocks_that_fit(
    run_trial: Callable[[], None], *, trial_blocks: int, block_bytes: int, share: float
) -> int:
    """`run_trial` builds, warms up and drops an executor of `trial_blocks` blocks.

    Raises ConfigError when less than the trial's own blocks fit.
    """
    run_trial()
    torch.cuda.synchronize()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    taken_bytes = total_bytes - free_bytes - trial_blocks * block_bytes
    num_blocks = int(share * total_bytes - taken_bytes) // block_bytes
    if num_blocks < trial_blocks:
        raise ConfigError(
            f"cache.gpu_memory_share: {share:.0%} of {total_bytes / 2**30:.1f} GiB leaves room for"
            f" {max(0, num_blocks)} KV blocks beside {taken_bytes / 2**30:.1f} GiB of weights,"
            f" activations and graphs; one step needs {trial_blocks}. Raise the share, lower"
            " scheduler.max_step_tokens or max_rows, or use a smaller model"
        )
    gc.collect()
    torch.cuda.empty_cache()
    return num_blocks
