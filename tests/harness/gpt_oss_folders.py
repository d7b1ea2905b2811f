"""Folders of gpt-oss with experts in MXFP4, as they are published."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.harness.tiny_models import edit_config, save_model


def save_gpt_oss_mxfp4(folder: Path, seed: int, **settings: object) -> None:
    """A folder as gpt-oss is published: experts in blocks and scales, all else in bf16."""
    save_model(folder, "GptOssForCausalLM", seed=seed, dtype=torch.bfloat16, **settings)
    generator = torch.Generator().manual_seed(seed)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_columns, num_rows = tensors.pop(name).shape
        shape = (num_experts, num_rows, num_columns // 32)
        drawn = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_blocks"] = drawn
        drawn = torch.randint(120, 126, shape, dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = drawn
    # Blocks and their scales stand in two files.
    names = {name: "b" if name.endswith("_scales") else "a" for name in tensors}
    path.unlink()
    for file in "ab":
        part = {name: tensor for name, tensor in tensors.items() if names[name] == file}
        save_file(part, folder / f"{file}.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: f"{f}.safetensors" for n, f in names.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    edit_config(
        folder,
        quantization_config={
            "quant_method": "mxfp4",
            "dequantize": True,  # else transformers wants packages for a GPU
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        },
    )
