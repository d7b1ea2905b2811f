"""Whether a kernel may start while the one before it still runs (programmatic dependent launch).

Such a kernel waits (`griddepcontrol.wait`) before it reads what an earlier kernel wrote and before
it writes anything. Before the wait it may read only constants, and what was written before an
earlier kernel that has waited; it may prefetch anything. It lets its successor start
(`griddepcontrol.launch_dependents`) at once, because the successor waits in turn, or later. Early
is not always sooner: programs that come while others still run stay where there was room. Where a
multiprocessor has room for more than its share, the first that is free gets twice that and the last
none. So either there is no such room (`kernels.device.stages_for`), or the successor is let in when
nearly all is done. Programs with nothing to do may leave without waiting, as long as one of the
kernel waits: else the kernel could end before those that came before it, for which its successor
waits no more.
"""

from functools import cache

import torch
import triton
import triton.language as tl


@cache
def pdl_supported(device: torch.device) -> bool:
    """True for a GPU of compute capability 9.0 or later; the interpreter does not support it."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def prefetch(pointers) -> None:
    """Fetch the cache lines of `pointers` to L2; before the wait too, as nothing is read."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
