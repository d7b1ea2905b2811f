"""What the formats' own libraries have packed is read as they meant it (`writers.py`)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from engine.layers.quantized_weight import dequantize
from engine.models.config_file import ConfigFile
from engine.models.llama_weights import StackedTensor
from engine.models.quantization.config import read_quantization
from engine.models.quantization.loading import DecodedStack, QuantizedStack
from engine.models.quantization.published_tensors import NeededTensor, published_tensors
from engine.ranks.rank import WHOLE_MODEL
from tests.engine.models.writers import NUM_INPUTS, NUM_OUTPUTS, source

PACKED = Path(__file__).with_name("packed_by_writers.safetensors")
MODULE = "model.layers.0.mlp.down_proj"
# The largest error of a number between -1 and 1, in which two of the map differ by 0.6 on average.
ERRORS = {
    "int8": 0.5 / 127,
    "packed 8": 1.5 * 0.5 / 127,
    "packed 4": 1.5 * 0.5 / 7,
    "auto_round 8": 0.5 / 127,
    "auto_round:auto_gptq 8": 0.5 / 127,
    "auto_round": 0.5 / 7,
    "fp8": 2**-4,
    "mxfp8": 2**-4,
    "mxfp4": 0.25,
    "nvfp4": 1 / 6,
    "bitsandbytes": 1 / 6,
    "modelopt mxfp8": 2**-4,
    "modelopt nvfp4": 1 / 6,
    "quark": 0.25,
}
ROUNDED = 2e-3  # scales to 16 bits


def _formats() -> dict[str, dict[str, object]]:
    with safe_open(PACKED, "pt") as file:
        return {name: json.loads(text) for name, text in sorted(file.metadata().items())}


FORMATS = _formats()


class _Copier:
    def copy(self, source: Tensor, destination: Tensor) -> None:
        destination.copy_(source)


def _tensors(name: str) -> dict[str, Tensor]:
    with safe_open(PACKED, "pt") as file:
        names = [key for key in file.keys() if key.startswith(f"{name}.")]  # noqa: SIM118
        return {key.removeprefix(f"{name}."): file.get_tensor(key) for key in names}


def test_every_format_is_there() -> None:
    assert len(FORMATS) == 31


@pytest.mark.parametrize("name", FORMATS)
def test_a_map_is_what_its_writer_packed(name: str) -> None:
    config = ConfigFile(PACKED, {"quantization_config": FORMATS[name]})
    quantization = read_quantization(config, has_head=False)
    assert quantization is not None
    stacked = StackedTensor(num_rows={f"{MODULE}.weight": NUM_OUTPUTS}, num_columns=NUM_INPUTS)
    kind = DecodedStack if quantization.is_made_matrix else QuantizedStack
    device = torch.device("cpu")
    stack = kind(stacked, quantization, dtype=torch.float32, device=device, rank=WHOLE_MODEL)
    tensors, published = _tensors(name), published_tensors(quantization)
    for target, part in stack.destinations().items():
        suffix = target.removeprefix(f"{MODULE}.")
        tensor = tensors.get(suffix)
        if tensor is None:
            assert published[suffix].is_optional, f"{suffix} is missing"
            part.leave_out()
            continue
        needed = NeededTensor(shape=published[suffix].shape(NUM_OUTPUTS, NUM_INPUTS))
        assert needed.fits(tuple(tensor.shape)), f"{suffix} is {list(tensor.shape)}"
        part.take(lambda _, whole=tensor: whole, _Copier())  # type: ignore[misc]
    weight = stack.weight(bias=None)
    found = weight.data if weight.scales is None else dequantize(weight.data, weight.scales)
    most = max((key for key in ERRORS if name.startswith(key)), key=len)
    assert (found - source()).abs().max() <= ERRORS[most] + ROUNDED
