"""Whether a kernel may start while the one before it still runs (programmatic dependent launch).

Such a kernel waits (`griddepcontrol.wait`) before it reads what an earlier kernel wrote and before
it writes anything. Before the wait it may touch only constants. It lets its successor start
(`griddepcontrol.launch_dependents`) at once, because the successor waits in turn.
"""

from functools import cache

import torch
import triton


@cache
def pdl_supported(device: torch.device) -> bool:
    """True for a GPU of compute capability 9.0 or later; the interpreter does not support it."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
