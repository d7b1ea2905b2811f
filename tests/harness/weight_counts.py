"""What a model's tensors come to: how many numbers they hold, and their published shapes."""

import math

from engine.models.llama_weights import layer_tensors, outer_tensors
from engine.models.spec import ModelSpec
from engine.ranks.rank import WHOLE_MODEL, Rank


def published_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Published name -> shape, of every tensor that the model needs."""
    groups = [outer_tensors(spec), *(layer_tensors(spec, i) for i in range(spec.num_layers))]
    return {
        name: shape
        for group in groups
        for tensor in group.values()
        for name, shape in tensor.part_shapes()
    }


def num_parameters(spec: ModelSpec, rank: Rank = WHOLE_MODEL) -> int:
    """Numbers in one rank's tensors; a tied head counts once."""
    groups = [outer_tensors(spec), *(layer_tensors(spec, i) for i in range(spec.num_layers))]
    return sum(
        math.prod(tensor.of_rank(rank).shape)
        for group in groups
        for tensor in group.values()
        if tensor.is_on(rank)
    )
