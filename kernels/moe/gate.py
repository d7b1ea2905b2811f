"""The gate of experts inside kernels, as two factors; formulas and torch twin: `kernels.moe.form`.

inner = gate_factor(gate) * up_factor(up)

What is not a number stays so within the limit, too.
"""

import triton
import triton.language as tl


@triton.jit
def gate_factor(gate, ALPHA: tl.constexpr, LIMIT: tl.constexpr):  # noqa: ANN201
    """gate: fp32; LIMIT 0: silu."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        factor = gate * tl.sigmoid(gate * ALPHA)
    else:
        factor = gate * tl.sigmoid(gate)
    return factor


@triton.jit
def up_factor(up, LIMIT: tl.constexpr):  # noqa: ANN201
    """up: fp32; LIMIT 0: as it is."""
    if LIMIT > 0:
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL) + 1.0
    return up
