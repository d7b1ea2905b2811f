"""How long weights take from a warm page cache to the device, in gigabytes a second.

    python -m load_tests.lab.bench_load --shapes qwen3-8b --folder /tmp/weights

Writes a model of random weights to the folder, in files as large as published ones, unless it is
there already; reads every file once, so that the page cache holds it, and loads it several times.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.models.registry import build_model
from engine.models.spec import load_spec
from engine.models.weights import Part, allocate_weights
from load_tests.lab.shapes import SHAPES, write_shapes
from load_tests.tables import Figure, describe_machine, median_figure, render

FILE_BYTES = 4 * 2**30  # published models are cut into files of about this size
NUM_ROUNDS = 3
READ_BYTES = 64 * 2**20


def write_model(name: str, folder: Path, device: torch.device) -> Path:
    """`name`'s config.json and files of random bfloat16 weights; returns the model's folder."""
    model = write_shapes(name, folder)
    spec = load_spec(model)
    _, parts = allocate_weights(spec, dtype=torch.bfloat16, device=device)
    files: dict[str, str] = {}
    tensors = {name: part.tensor for name, part in parts.items() if isinstance(part, Part)}
    for i, part in enumerate(_cut(tensors, FILE_BYTES)):
        for tensor in part.values():
            tensor.uniform_(-1e-3, 1e-3)
        on_host = {name: tensor.cpu().contiguous() for name, tensor in part.items()}
        file_name = f"model-{i}.safetensors"
        save_file(on_host, str(model / file_name))
        files |= dict.fromkeys(part, file_name)
    index = json.dumps({"weight_map": files})
    (model / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    return model


def read_once(model: Path) -> int:
    """Every file's bytes, into the page cache; returns how many there are."""
    num_bytes = 0
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            while chunk := file.read(READ_BYTES):
                num_bytes += len(chunk)
    return num_bytes


def load_rounds_s(model: Path, device: torch.device) -> list[float]:
    """From the folder to a model on `device`, several times; nothing of one is left in the next."""
    rounds_s = []
    for _ in range(NUM_ROUNDS):
        started_s = time.perf_counter()
        loaded = build_model(model, dtype=torch.bfloat16, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        rounds_s.append(time.perf_counter() - started_s)
        del loaded
        gc.collect()
    return rounds_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--folder", type=Path, required=True, help="where the model is kept")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    device = torch.device(args.device)
    model = args.folder / args.shapes
    if not model.exists():
        write_model(args.shapes, args.folder, device)
    num_bytes = read_once(model)
    rounds_s = load_rounds_s(model, device)
    rate = num_bytes / statistics.median(rounds_s) / 1e9
    figures = [
        median_figure(f"load {num_bytes / 1e9:.1f} GB", rounds_s, "s"),
        Figure(name="rate", value=rate, unit="GB/s"),
    ]
    print(render(figures))
    print(describe_machine())


def _cut(tensors: dict[str, Tensor], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """In runs of at most so many bytes, or of one tensor."""
    part: dict[str, Tensor] = {}
    part_bytes = 0
    for name, tensor in tensors.items():
        if part and part_bytes + tensor.nbytes > max_bytes:
            yield part
            part, part_bytes = {}, 0
        part[name] = tensor
        part_bytes += tensor.nbytes
    if part:
        yield part


if __name__ == "__main__":
    main()
