"""What arrives when: lengths and times drawn from distributions, or recorded arrival lists.

    lengths   `mix`       a share of short prompts (lognormal, 8-256 tokens), the others uniform in
                          2048-8191; 64 output tokens; share 0.8 is the load of the peer's figures
              `sharegpt`  ShareGPT conversations cut at 8k tokens, through these points of their
                          distribution: 17.1 % <= 256, 36.2 % <= 1024, p50 1730, p90 5696, p99 7434
                          tokens; output p50 415, p90 834
              `lmsys`     10,000 first messages of LMSYS-Chat-1M: min 1, p25 9, p50 17, p75 47, p90
                          128, p95 270, p99 881, max 13208 tokens; output exponential, mean 214
    times     Poisson, or gamma gaps with a coefficient of variation: 1 is Poisson, 3 is bursty

One seed gives one workload, whatever serves it: policies are compared on the same requests.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Lengths = Callable[[np.random.Generator, int], tuple[Counts, Counts]]  # prompt and output tokens
Chain = tuple[int, ...]  # names of a prompt's full blocks, each of which implies all before it

Quantiles = tuple[tuple[float, float], ...]  # (share of requests, at most so many tokens)

_SHAREGPT_PROMPT: Quantiles = (
    (0.0, 4), (0.171, 256), (0.362, 1024), (0.5, 1730), (0.9, 5696), (0.99, 7434), (1.0, 8192),
)  # fmt: skip
_SHAREGPT_OUTPUT: Quantiles = ((0.0, 4), (0.5, 415), (0.9, 834), (1.0, 1200))
_LMSYS_PROMPT: Quantiles = (
    (0.0, 1), (0.25, 9), (0.5, 17), (0.75, 47), (0.9, 128), (0.95, 270), (0.99, 881), (1.0, 13208),
)  # fmt: skip
_LMSYS_OUTPUT_MEAN = 214


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in the order of their arrival; all arrays [requests]."""

    name: str
    arrival_s: Floats  # ascending, from 0
    prompt_tokens: Counts  # at least 1
    output_tokens: Counts  # at least 1
    chains: Sequence[Chain] | None = None  # None = no two prompts share anything
    block_tokens: int = 512  # tokens of one block of a chain

    def __post_init__(self) -> None:
        counts = {len(self.arrival_s), len(self.prompt_tokens), len(self.output_tokens)}
        assert len(counts) == 1, f"{self.name}: arrays of {sorted(counts)} requests"
        assert np.all(np.diff(self.arrival_s) >= 0), f"{self.name}: arrivals out of order"
        assert min(self.prompt_tokens, default=1) > 0, f"{self.name}: an empty prompt"
        assert min(self.output_tokens, default=1) > 0, f"{self.name}: a request without output"

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def duration_s(self) -> float:
        return float(self.arrival_s[-1]) if len(self) else 0.0

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self) / self.duration_s if self.duration_s > 0 else 0.0

    def at_rate(self, rate: float) -> "Workload":
        """The same requests, closer together or further apart."""
        return replace(self, arrival_s=self.arrival_s * (self.rate / rate))

    def first(self, num_requests: int) -> "Workload":
        """The first of them."""
        return replace(
            self,
            arrival_s=self.arrival_s[:num_requests],
            prompt_tokens=self.prompt_tokens[:num_requests],
            output_tokens=self.output_tokens[:num_requests],
            chains=None if self.chains is None else self.chains[:num_requests],
        )


def recorded(name: str, arrivals: Iterable[tuple[float, int, int]]) -> Workload:
    """An arrival list as a load test keeps it: (seconds, prompt tokens, output tokens) each."""
    rows = sorted(arrivals)
    return Workload(
        name=name,
        arrival_s=np.array([row[0] for row in rows], dtype=np.float64),
        prompt_tokens=np.array([row[1] for row in rows], dtype=np.int64),
        output_tokens=np.array([row[2] for row in rows], dtype=np.int64),
    )


def drawn(
    name: str, lengths: Lengths, *, rate: float, num_requests: int, seed: int, cv: float = 1.0
) -> Workload:
    """`num_requests` at `rate` a second; `cv` of the gaps between them."""
    rng = np.random.default_rng(seed)
    prompt_tokens, output_tokens = lengths(rng, num_requests)
    gaps = rng.gamma(1.0 / cv**2, cv**2, num_requests)  # of mean 1, so that rates share their draws
    return Workload(
        name=name,
        arrival_s=np.cumsum(gaps) / rate,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )


@dataclass(frozen=True, slots=True)
class Mix:
    """Short prompts with a probability, long ones else."""

    short_share: float

    def __call__(self, rng: np.random.Generator, num: int) -> tuple[Counts, Counts]:
        """Prompt and output tokens [num]."""
        short = np.clip(rng.lognormal(4.3, 0.8, num), 8, 256).astype(np.int64)
        long = rng.integers(2048, 8192, num)
        prompt_tokens = np.where(rng.random(num) < self.short_share, short, long)
        return prompt_tokens, np.full(num, 64, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Pairs of recorded lengths, drawn with replacement; arrays [rows]."""

    prompt_tokens: Counts
    output_tokens: Counts

    def __call__(self, rng: np.random.Generator, num: int) -> tuple[Counts, Counts]:
        """Prompt and output tokens [num]."""
        picked = rng.integers(0, len(self.prompt_tokens), num)
        return self.prompt_tokens[picked], self.output_tokens[picked]


def sharegpt(rng: np.random.Generator, num: int) -> tuple[Counts, Counts]:
    """See above."""
    return _by_quantiles(_SHAREGPT_PROMPT, rng, num), _by_quantiles(_SHAREGPT_OUTPUT, rng, num)


def lmsys(rng: np.random.Generator, num: int) -> tuple[Counts, Counts]:
    """See above."""
    output = np.ceil(rng.exponential(_LMSYS_OUTPUT_MEAN, num))
    return _by_quantiles(_LMSYS_PROMPT, rng, num), np.clip(output, 1, 4096).astype(np.int64)


def _by_quantiles(points: Quantiles, rng: np.random.Generator, num: int) -> Counts:
    """Log-linear between the points: lengths spread over orders of magnitude."""
    shares, tokens = np.array(points).T
    drawn_tokens = np.exp(np.interp(rng.random(num), shares, np.log(tokens)))
    counts: Counts = np.maximum(1, np.round(drawn_tokens)).astype(np.int64)
    return counts
