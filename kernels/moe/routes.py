"""Which experts compute which tokens, as tensors that a router leaves on the device."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """The routes of T tokens to k experts each; route t k + j is the j-th of token t."""

    # int32 [T, k]  an expert, descending by its share; -1 = no expert: padding
    ids: Tensor
    # fp32 [T, k]  what the expert's output is multiplied by
    weights: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selection:
    """How experts are chosen where it is not by the largest softmax alone (DeepSeek-V2, V3).

    Experts are in `num_groups` equal groups, one group after the other; a token's experts are in
    the best `num_chosen_groups`. With softmax a group counts as its best expert, with sigmoid as
    the sum of its best two. arXiv:2405.04434 section 2.2.2, arXiv:2412.19437 section 2.1.2.
    """

    scores: Literal["softmax", "sigmoid"]
    # fp32 [E]  added to the scores for choosing, not to the weights; None = 0
    bias: Tensor | None
    num_groups: int
    num_chosen_groups: int
    scale: float  # of the weights, after `normalises`
