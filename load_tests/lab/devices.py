"""What a reader must know of the device and the libraries behind a figure."""

import torch

from load_tests.tables import describe_machine


def describe_device(device: torch.device | str) -> dict[str, object]:
    """The machine, the device by its name, and torch's version."""
    kind = torch.device(device).type
    name = torch.cuda.get_device_name(device) if kind == "cuda" else kind
    return describe_machine() | {"device": name, "torch": torch.__version__}
