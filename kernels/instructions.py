"""Which instructions of a GPU kernels may use; Triton's interpreter has none of them."""

from functools import cache

import torch
import triton

_E4M3_CAPABILITY = (8, 9)


@cache
def knows_e4m3(device: torch.device) -> bool:
    """Whether the GPU converts e4m3 by itself; the interpreter does not."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) >= _E4M3_CAPABILITY


def uses_ptx(device: torch.device) -> bool:
    """Whether kernels may hold instructions of the GPU; the interpreter has none."""
    return device.type == "cuda" and not triton.knobs.runtime.interpret
