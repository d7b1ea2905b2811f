"""Requests that generate nothing: what they ask of their prompts. Plain records."""

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


PromptOnly = Scoring | Reranking | PairScoring | Embedding
