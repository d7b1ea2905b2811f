"""What answers say of prompts, and the arithmetic from log-probabilities to scores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Asks, for each prompt, how likely each label is as its next token."""

    apply_softmax: bool  # among the labels; else among all tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Reranking:
    """Asks how relevant each document is, by the labels for yes and no, in this order."""

    documents: Sequence[str]
    num_results: int
    returns_documents: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PairScoring:
    """Asks how relevant the second text of each pair is, by the labels for yes and no."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """Asks for each prompt's embedding."""

    num_dimensions: int | None  # the first ones; None = all
    is_normalised: bool  # to a length of 1, after shortening too
    as_base64: bool  # of float32, little-endian; else a list of numbers


def probabilities(logprobs: Sequence[float], *, apply_softmax: bool) -> list[float]:
    """Returns each label's probability, or its share among the labels.

    A label that the model rules out (-inf) has 0; if it rules out all of them, each share is 0.
    """
    if not apply_softmax:
        return [math.exp(value) for value in logprobs]
    best = max(logprobs)
    if best == -math.inf:
        return [0.0] * len(logprobs)
    weights = [math.exp(value - best) for value in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
