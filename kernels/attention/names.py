"""The names of attention backends, and the error if one cannot serve a model here."""

from dataclasses import dataclass
from typing import Literal

AttentionName = Literal[
    "auto", "reference", "triton", "flashinfer", "flash_attn", "flash_attn_4", "flex"
]


class BackendUnavailable(ValueError):  # noqa: N818  (a state of this machine, not a failure)
    """A backend cannot serve this model here; says why, how to get it, and what would work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNames:
    """The backend for rows with two or more new tokens, and the one for rows with one."""

    prefill: AttentionName
    decode: AttentionName
