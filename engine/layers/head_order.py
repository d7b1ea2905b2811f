"""Orders a head's numbers so that a rotation of all of them leaves those alone that none rotates.

    published   [a a' | b b']     a, a' are rotated as pairs; b and b', of equal length, are not
    in memory   [a b | a' b']     halves are pairs: those of b and b' turn by 0 radians a token

The rows of q and k that make them are reordered, and the weights of their norms; a score is the
same sum in another order. So kernels know of whole rotations alone.
"""

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.linear import LinearWeight
from kernels.ops import HeadNorms


class HeadOrder:
    """The order of one model's heads."""

    def __init__(self, head_dim: int, num_rotated: int) -> None:
        """num_rotated: numbers of a head, an even one, and so is that of the others."""
        assert num_rotated % 2 == head_dim % 2 == 0, f"{num_rotated} of {head_dim} are no pairs"
        first, second = torch.arange(num_rotated), torch.arange(num_rotated, head_dim)
        # [head_dim]  the published place of each number
        self._order = torch.cat(
            [torch.cat(half) for half in zip(first.chunk(2), second.chunk(2), strict=True)]
        )

    def of_rows(self, qkv: LinearWeight, num_heads: int) -> LinearWeight:
        """qkv: [(heads of q and k, and of v) * head_dim, in]; num_heads: of q and k.

        Raises ConfigError where tiles of a quantised weight would be torn.
        """
        heads = torch.arange(num_heads)[:, None] * len(self._order) + self._order
        others = torch.arange(heads.numel(), len(qkv.data))
        rows = torch.cat((heads.flatten(), others)).to(qkv.data.device)
        if qkv.scales is not None and qkv.scales.tears(rows):
            raise ConfigError(
                f"quantization_config: tiles of {qkv.scales.rows} rows do not hold whole heads of"
                f" {len(self._order)}, whose numbers are reordered; take another format"
            )
        return qkv.reordered(rows)

    def of_norms(self, norms: HeadNorms | None) -> HeadNorms | None:
        """With the weights of both norms in the order of the rows."""
        if norms is None:
            return None
        return HeadNorms(
            q_weight=self._of(norms.q_weight), k_weight=self._of(norms.k_weight), eps=norms.eps
        )

    def _of(self, weight: Tensor) -> Tensor:
        return weight[self._order.to(weight.device)]
