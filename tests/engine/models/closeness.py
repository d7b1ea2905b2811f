"""When two sets of fp32 logits count as equal, and what bfloat16 may move them by."""

from pathlib import Path

import torch
from torch import Tensor

from engine.models.registry import build_model
from tests.engine.runner.step_driver import StepDriver
from tests.harness.tiny_models import VOCAB_SIZE, reference_logits

MAX_RELATIVE_ERROR = 1e-4
MAX_TIE = 1e-3


def assert_same_logits(ours: Tensor, theirs: Tensor, *, label: str = "") -> None:
    """Every position within 1e-4 of the largest logit, argmax equal unless the top two tie.

    ours, theirs: [T, vocab].
    """
    assert ours.shape == theirs.shape, f"{label}: {list(ours.shape)} and {list(theirs.shape)}"
    largest = theirs.abs().max()
    worst = (ours - theirs).abs().max()
    assert worst <= MAX_RELATIVE_ERROR * largest, f"{label}: off by {worst} where max is {largest}"
    top = theirs.topk(2, dim=-1).values
    is_tie = top[:, 0] - top[:, 1] <= MAX_TIE * largest
    is_same = ours.argmax(-1) == theirs.argmax(-1)
    assert bool((is_same | is_tie).all()), f"{label}: another best token at {(~is_same).nonzero()}"


def errors_in_bfloat16(folder: Path, seed: int) -> tuple[Tensor, Tensor]:
    """What our logits of a random prompt, and transformers', differ by from fp32 logits.

    Both round at every operation and at different places, so they cannot agree to better than what
    rounding alone moves the logits; fp32 on the same weights is the truth for both. The prompt is
    long, because the ratio of the two depends on what is drawn. Returns [T, vocab] and [T, vocab].
    """
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, VOCAB_SIZE, (250,), generator=generator).tolist()
    truth = reference_logits(folder, token_ids)
    theirs = reference_logits(folder, token_ids, torch.bfloat16)
    model = build_model(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    driver = StepDriver(model, seed=seed)
    driver.admit(0, token_ids)
    return driver.logits_in_chunks(0, 24) - truth, theirs - truth


def assert_no_further_than(theirs: Tensor, ours: Tensor) -> None:
    """Errors of logits, compared by their root mean square."""
    our_error, their_error = (float(errors.pow(2).mean().sqrt()) for errors in (ours, theirs))
    assert our_error <= 1.1 * their_error, f"ours {our_error}, theirs {their_error}"
