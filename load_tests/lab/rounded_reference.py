"""What rounding the inputs of products to e4m3 changes, by transformers in float64 and on a CPU.

The twin of what an engine does on a GPU with more tokens than it multiplies as they are: weights
are the matrices that the numbers of a format stand for, and every input of their products is
rounded as `kernels.quant.coded_tokens.reference` does, token by token, in groups of 128 columns
beside weights in tiles of 128, else a whole row. All else is computed in float64.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor, nn

from kernels.quant.coded_tokens import InputForm, decoded, reference

# Forms whose inputs are rounded -> columns that share a scale; None = a token's whole row.
ROUNDED_FORMS: dict[str, int | None] = {
    "fp8-block": 128,
    "fp8-tensor": None,
    "ct-fp8-channel": None,
    "ct-fp8-tensor": None,
    "modelopt-fp8": None,
}


def rounded(x: Tensor, group: int | None) -> Tensor:
    """x: [..., columns]. Returns what its codes stand for, in x's dtype."""
    rows = x.reshape(-1, x.shape[-1])
    codes = reference(rows.float(), InputForm(pieces=1, group=group or x.shape[-1]))
    return decoded(codes).to(x.dtype).view(x.shape)


class Float64Scorer:
    """All logits of one prompt at a time, of a folder of transformers' own."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        loader: Any = AutoModelForCausalLM
        self._model = loader.from_pretrained(folder, dtype=torch.float64).eval()
        self._hooks: list[Any] = []

    def round_inputs(self, group: int | None) -> None:
        """From now on, of all linear maps in layers; group: columns that share a scale."""
        for layer in self._model.model.layers:
            for module in layer.modules():
                if isinstance(module, nn.Linear):
                    hook = lambda _, given: (rounded(given[0], group),)  # noqa: E731
                    self._hooks.append(module.register_forward_pre_hook(hook))

    def log_probabilities(self, token_ids: Sequence[int]) -> Tensor:
        """[T, vocab] fp32, of what follows each token."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(token_ids)])).logits[0]
        return F.log_softmax(logits, dim=-1).float()
