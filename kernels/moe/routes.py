"""Which experts compute which tokens, as tensors that a router leaves on the device."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """The routes of T tokens to k experts each; route t k + j is the j-th of token t."""

    # int32 [T, k]  an expert, descending by its share; -1 = no expert: padding
    ids: Tensor
    # fp32 [T, k]  what the expert's output is multiplied by
    weights: Tensor
