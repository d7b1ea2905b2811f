"""When two sets of fp32 logits count as equal."""

from torch import Tensor

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
