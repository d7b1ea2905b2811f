"""Weights of the right shapes and no meaning, made on the device, so that speed can be measured.

Needs a folder's config.json and nothing else. What the model then says is noise.
"""

import torch

from engine.models.spec import ModelSpec
from engine.models.weights import ModelWeights, allocate_weights

# Small and not constant: matrix multiplication draws less power on simple data and then runs
# faster than it would with a trained model's.
_LARGEST = 1e-3


def random_weights(
    spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> ModelWeights:
    """Every linear, bias and embedding uniform in [-1e-3, 1e-3]; norm weights are 1.

    Norm weights as small as the others would shrink each layer's input until every activation is
    nearly zero, and with it the data that the speed of a matrix multiplication depends on.
    """
    weights, parts = allocate_weights(spec, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, part in parts.items():
        if name.endswith("norm.weight"):
            part.fill_(1.0)
        else:
            part.uniform_(-_LARGEST, _LARGEST, generator=generator)
    return weights
