"""A sampler's tensors brought to the host, to be compared as lists."""

from dataclasses import dataclass

from torch import Tensor

from engine.plan import TokenLogprobs
from engine.sampling.sampled import SampledTensors
from engine.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    is_finite: list[bool]


def to_host(sampled: SampledTensors) -> Drawn:
    num_lines = sampled.token_ids.shape[0]
    logprobs: list[TokenLogprobs | None] = [None] * num_lines
    if sampled.logprobs is not None:
        logprobs = sampled.logprobs.map(Tensor.cpu).records(num_lines)
    return Drawn(
        token_ids=sampled.token_ids.tolist(),
        logprobs=logprobs,
        is_finite=sampled.is_finite.tolist(),
    )


def sample(sampler: Sampler, logits: Tensor, rows: list[int]) -> Drawn:
    return to_host(sampler.sample(logits, rows))
