"""The gate of experts inside kernels; formulas and torch twin: `kernels.moe.form`."""

import triton
import triton.language as tl


@triton.jit
def gated(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):  # noqa: ANN201
    """gate, up: fp32 of one shape; LIMIT 0: silu."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        inner = (up + 1.0) * gate * tl.sigmoid(ALPHA * gate)
    else:
        inner = gate * tl.sigmoid(gate) * up
    return inner
