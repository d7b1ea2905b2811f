"""Held-out scores of the saved demonstration models (bf16 weights, computed in float32)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from corpus import END, Document
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

WINDOW = 1024
SAMPLE_WINDOWS = 16


@dataclass(frozen=True)
class Score:
    """Mean loss in nats per token, and the same total in bits per byte of source text."""

    loss: float
    bits_per_byte: float
    tokens: int


def scoring_windows(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[torch.Tensor]:
    """Cut each document into windows in which every token but the first is predicted once.

    A document is preceded and ended by ``<|end|>``, and consecutive windows share one token.
    """
    end = tokenizer.token_to_id(END)
    windows = []
    for document in documents:
        ids = [end, *tokenizer.encode(document.text).ids, end]
        begins = range(0, len(ids) - 1, WINDOW)
        windows += [torch.tensor(ids[begin : begin + WINDOW + 1]) for begin in begins]
    return windows


@torch.no_grad()
def score(model: PreTrainedModel, tokenizer: Tokenizer, windows: Sequence[torch.Tensor]) -> Score:
    """Average a model's loss over windows from ``scoring_windows``."""
    nats, tokens, size = 0.0, 0, 0
    by_length: dict[int, list[torch.Tensor]] = {}
    for window in windows:
        by_length.setdefault(len(window), []).append(window)
    for group in by_length.values():
        for begin in range(0, len(group), 16):
            batch = torch.stack(group[begin : begin + 16]).to(model.device)
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits.float()
            targets = batch[:, 1:].flatten()
            nats += functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").item()
            tokens += targets.numel()
    for window in windows:
        text = tokenizer.decode(window[1:].tolist(), skip_special_tokens=True)
        size += len(text.encode())
    return Score(nats / tokens, nats / math.log(2) / max(size, 1), tokens)


@torch.no_grad()
def agreement(
    first: PreTrainedModel, second: PreTrainedModel, windows: Sequence[torch.Tensor]
) -> float:
    """Share of positions at which two models choose the same next token."""
    same, total = 0, 0
    for window in windows:
        ids = window[None, :-1].to(first.device)
        best = first(input_ids=ids, use_cache=False).logits.argmax(-1)
        same += int((best == second(input_ids=ids, use_cache=False).logits.argmax(-1)).sum())
        total += ids.numel()
    return same / max(total, 1)


def score_saved(
    folder: Path, documents: Sequence[Document], device: torch.device, sample_only: bool = False
) -> dict[str, object]:
    """Score ``folder/laps-demo`` and ``folder/laps-demo-draft`` on held-out documents.

    ``sample`` scores the first windows only, so that a test can repeat them in seconds.
    """
    tokenizer = Tokenizer.from_file(str(folder / "laps-demo" / "tokenizer.json"))
    windows = scoring_windows(tokenizer, documents)
    sample = windows[:SAMPLE_WINDOWS]
    models: dict[str, PreTrainedModel] = {}
    for name in ("laps-demo", "laps-demo-draft"):
        loaded = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        torch.nn.Module.to(loaded, device)
        models[name] = loaded.train(False)
    result: dict[str, object] = {}
    for name, model in models.items():
        scores: dict[str, object] = {"sample_loss": score(model, tokenizer, sample).loss}
        if not sample_only:
            scores |= asdict(score(model, tokenizer, windows))
        scores["parameters"] = sum(p.numel() for p in model.parameters())
        result[name] = scores
    result["agreement"] = agreement(
        models["laps-demo"], models["laps-demo-draft"], sample if sample_only else windows
    )
    return result
