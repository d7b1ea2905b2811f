"""The training loop of the demonstration models: batches, schedule, losses, averaging.

It knows nothing about where text comes from or where weights go.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from corpus import IGNORED, MAX_CONTEXT, Stream
from torch.nn import functional
from transformers import LlamaForCausalLM

WARMUP, DECAY = 0.02, 0.7  # of a model's training time; between them the rate is constant
AVERAGING = 0.998  # of the exponential average of the weights, per step
FIRST_CHECK, CHECK_EVERY = 0.1, 0.05  # of a model's training time


@dataclass(frozen=True)
class Recipe:
    """How fast one model learns and how it is regularized."""

    rate: float
    dropout: float
    weight_decay: float


@dataclass(frozen=True)
class Mixture:
    """Batches of ``batch_tokens`` tokens drawn from several streams in fixed shares."""

    streams: list[tuple[Stream, float]]
    batch_tokens: int

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and wanted tokens; short windows and full-context windows take turns."""
        length = min(512 if step % 2 == 0 else MAX_CONTEXT, self.batch_tokens)
        rows = self.batch_tokens // length
        total = sum(share for _, share in self.streams)
        counts = [int(rows * share / total) for _, share in self.streams]
        counts[0] += rows - sum(counts)
        parts = [s.windows(n, length) for (s, _), n in zip(self.streams, counts, strict=True) if n]
        return torch.cat([ids for ids, _ in parts]), torch.cat([wanted for _, wanted in parts])


@dataclass(frozen=True)
class Limit:
    """How long to train: a number of steps, or else a number of seconds."""

    steps: int | None
    seconds: float

    def progress(self, step: int, started: float) -> float:
        """Share of the training done, from 0 to 1."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        return min(1.0, (time.monotonic() - started) / self.seconds)


@dataclass
class Best:
    """The weights of the best held-out loss so far."""

    loss: float = float("inf")
    weights: dict[str, torch.Tensor] | None = None
    averaged: bool = False
    at: float = 0.0

    def offer(self, model: LlamaForCausalLM, loss: float, averaged: bool, at: float) -> None:
        """Keep a copy of the weights if their loss is no worse."""
        if loss <= self.loss:
            self.loss, self.averaged, self.at = loss, averaged, at
            self.weights = {k: v.detach().clone() for k, v in model.state_dict().items()}


def rate_at(progress: float) -> float:
    """Learning rate over its peak: linear warm-up, constant, linear decay to nothing."""
    return max(0.0, min(1.0, progress / WARMUP + 0.01, (1.0 - progress) / DECAY))


def add_dropout(model: LlamaForCausalLM, rate: float) -> None:
    """Drop part of what attention and the feed-forward add to the stream, while training."""

    def hook(module: torch.nn.Module, _: object, output: torch.Tensor) -> torch.Tensor:
        return functional.dropout(output, rate, training=module.training)

    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            module.register_forward_hook(hook)


def half_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """bf16 autocast on a GPU, nothing on a CPU."""
    if device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def teaching_loss(
    logits: torch.Tensor, teacher_logits: torch.Tensor, counted: torch.Tensor
) -> torch.Tensor:
    """Mean KL divergence from a teacher over the positions counted.

    ``logits`` and ``teacher_logits`` are ``[rows, length, vocabulary]``, ``counted`` a boolean
    ``[rows, length]``. Hinton, Vinyals and Dean 2015, https://arxiv.org/abs/1503.02531.
    """
    divergence = functional.kl_div(
        logits.float().log_softmax(-1),
        teacher_logits.float().log_softmax(-1),
        reduction="none",
        log_target=True,
    ).sum(-1)
    return (divergence * counted).sum() / counted.sum().clamp(min=1)


def batch_loss(
    forward: Callable[[torch.Tensor], torch.Tensor],
    teacher: Callable[[torch.Tensor], torch.Tensor] | None,
    batch: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """The loss of one batch against the text, or against a teacher; both map ids to logits."""
    ids, wanted = batch
    logits, following = forward(ids)[:, :-1], wanted[:, 1:]
    if teacher is None:
        return functional.cross_entropy(
            logits.flatten(0, 1).float(), following.flatten(), ignore_index=IGNORED
        )
    with torch.no_grad():
        teacher_logits = teacher(ids)[:, :-1]
    return teaching_loss(logits, teacher_logits, following != IGNORED)


def new_optimizers(model: torch.nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for embeddings and norms."""
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in named if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(
            matrices,
            lr=recipe.rate,
            weight_decay=recipe.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]


@torch.no_grad()
def update_average(average: LlamaForCausalLM, model: LlamaForCausalLM, step: int) -> None:
    """Move the averaged weights towards the model's, faster in the first steps."""
    kept = min(AVERAGING, (1 + step) / (10 + step))
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast, 1.0 - kept)


def logits_of(
    model: Callable[..., Any], device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from token ids to logits, in half precision where the device has it."""

    def forward(ids: torch.Tensor) -> torch.Tensor:
        with half_precision(device):
            logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        return logits

    return forward


def train(
    model: LlamaForCausalLM,
    recipe: Recipe,
    mixture: Mixture,
    limit: Limit,
    teacher: LlamaForCausalLM | None,
    held_out_loss: Callable[[LlamaForCausalLM], float],
    compiled: bool,
) -> tuple[int, Best]:
    """Train in place and load the weights, plain or averaged, of the best held-out loss.

    Returns the number of steps done and that best.
    """
    add_dropout(model, recipe.dropout)
    averaged = copy.deepcopy(model).requires_grad_(False)
    optimizers = new_optimizers(model, recipe)
    forward = logits_of(torch.compile(model, dynamic=False) if compiled else model, model.device)
    teach = None if teacher is None else logits_of(teacher, model.device)
    best = Best()
    model.train()
    step, started, next_check = 0, time.monotonic(), FIRST_CHECK
    while (progress := limit.progress(step, started)) < 1.0:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate * rate_at(progress)
        loss = batch_loss(forward, teach, mixture.batch(step))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        update_average(averaged, model, step)
        step += 1
        done = limit.progress(step, started)
        if done < next_check and done < 1.0:
            continue
        next_check = done + CHECK_EVERY
        plain, smooth = (held_out_loss(m.train(False)) for m in (model, averaged))
        model.train()
        best.offer(model, plain, averaged=False, at=done)
        best.offer(averaged, smooth, averaged=True, at=done)
        seconds = time.monotonic() - started
        print(
            f"{done:5.0%} {seconds:4.0f} s step {step} train {loss.item():.4f} held-out "
            f"{plain:.4f} averaged {smooth:.4f} "
            f"({step * mixture.batch_tokens / seconds:,.0f} tokens/s)",
            flush=True,
        )
    if best.weights is not None:
        model.load_state_dict(best.weights)
    return step, best
