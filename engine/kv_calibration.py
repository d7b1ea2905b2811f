"""Finds scales for K and V in e4m3: what a model's heads reach on texts, and a margin.

    python -m engine.kv_calibration MODEL TEXT [TEXT ...] --output scales.safetensors
    python -m engine.kv_calibration MODEL TEXT --output scales.safetensors --device cuda

The file is for `cache.kv_scales`; it has all KV heads, so it serves any number of ranks. Of latent
attention it has one scale for a layer's latents and one for its rotated keys. A scale is the
largest number of the head, times the margin, by 448: e4m3's largest. A margin of 2 costs the
smallest numbers a bit, and leaves room for texts that reach further.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.models.kv_scales import num_scaled_heads, write_kv_scales
from engine.models.llama import attention_shape
from engine.models.registry import build_model
from engine.models.spec import ModelSpec, load_spec
from engine.plan import RowAdmission, StepPlan
from engine.request import SamplingParams
from engine.runner.executor import Executor
from engine.runner.warm_up import release_step
from engine.sampling.sampler import Sampler
from engine.text.tokenizing import load_tokenizer
from kernels.attention.names import AttentionNames
from kernels.attention.select import build_attention
from kernels.kv.scales import MAX_E4M3

WINDOW = 2048  # tokens of a prompt, at most
BLOCK_SIZE = 16
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


def largest_numbers(folder: Path, prompts: Sequence[Sequence[int]], device: str) -> Tensor:
    """fp32, as scales are, on the host: the largest sizes of K and V in all prompts.

    Each prompt is one step of at most `WINDOW` tokens.
    """
    on_gpu = device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = build_model(folder, dtype=dtype, device=torch.device(device))
    spec = model.spec
    longest = max(map(len, prompts))
    assert longest <= min(WINDOW, spec.max_model_len), f"a prompt of {longest} tokens"
    layout = spec.kv_layout(block_size=BLOCK_SIZE, dtype="bfloat16" if on_gpu else "float32")
    executor = Executor(
        model,
        layout=layout,
        num_blocks=layout.num_blocks_for(longest),
        max_rows=1,
        max_model_len=longest,
        max_num_batched_tokens=longest,
        sampler=Sampler(spec.vocab_size, 1, spec.eos_token_ids, model.device),
        attention=build_attention(
            AttentionNames(prefill="auto", decode="auto"),
            attention_shape(spec),
            block_size=BLOCK_SIZE,
            dtype=dtype,
            device=model.device,
            fixed_tile=False,
        ),
    )
    largest = torch.zeros((spec.num_layers, 2, num_scaled_heads(spec)), device=model.device)
    for prompt in prompts:
        executor.forward_logits(_plan(prompt, layout.num_blocks_for(len(prompt))))
        # What no prompt has written yet is zero, what an earlier one wrote has been counted.
        largest = torch.maximum(largest, _largest(executor.kv_store.tensor, spec))
        executor.launch(release_step(1)).wait()
    return largest.cpu()


def _largest(store: Tensor, spec: ModelSpec) -> Tensor:
    """fp32 [layers, 2, heads with scales] of [blocks, layers, planes, block_size, heads, width]."""
    latent = spec.latent
    sizes = [spec.head_dim] if latent is None else [latent.rank, latent.rope_dim]
    return torch.cat(
        [part.float().abs().amax(dim=(0, 3, 5)) for part in torch.split(store, sizes, 5)], dim=1
    )


def _plan(prompt: Sequence[int], num_blocks: int) -> StepPlan:
    admission = RowAdmission(
        row=0,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        params=_PARAMS,
        block_ids=list(range(num_blocks)),
    )
    return StepPlan(
        step=0,
        admissions=[admission],
        rows=[0],
        num_new_tokens=[len(prompt)],
        num_computed_tokens=[0],
        num_samples=[0],
        new_block_ids=[[]],
    )


def scales_for(largest: Tensor, margin: float) -> Tensor:
    """Raises ConfigError for a head whose numbers are all zero, or not finite."""
    if not bool((largest.isfinite() & (largest > 0)).all()):
        raise ConfigError("a head's K or V is zero or not finite in all of the texts")
    return largest * margin / MAX_E4M3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="the model's folder")
    parser.add_argument("texts", type=Path, nargs="+", help="files with texts like those served")
    parser.add_argument("--output", type=Path, required=True, help="a safetensors file to write")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--prompts", type=int, default=32, help="at most, evenly from all texts")
    parser.add_argument("--margin", type=float, default=2.0)
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in args.texts]
    windows: list[list[int]] = []
    for ids in tokenizer.encode_batch(texts, add_special_tokens=True):
        assert isinstance(ids, list)
        windows += [ids[i : i + WINDOW - 1] for i in range(0, len(ids), WINDOW - 1)]
    prompts = windows[:: max(1, len(windows) // args.prompts)][: args.prompts]
    scales = scales_for(largest_numbers(args.model, prompts, args.device), args.margin)
    write_kv_scales(args.output, scales, is_latent=load_spec(args.model).latent is not None)
    print(
        f"{args.output}: {scales.numel()} scales from {scales.min():.3g} to {scales.max():.3g},"
        f" of {sum(map(len, prompts))} tokens in {len(prompts)} prompts"
    )


if __name__ == "__main__":
    main()
