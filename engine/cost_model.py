"""Predicts how long a step takes: piecewise linear in its tokens, fitted online to measured steps.

    seconds = floor + sum_k slope_k * (new tokens in segment k)        weights, launches, GEMMs
            + a * sum L (L + 2 H) + h * sum H                          attention of prompt rows
            + r * decode rows + k * decode keys                        cost of decoding

L and H are the new and the cached tokens of a prompt row. New tokens are those of all rows; a
decode row has one. Segments end at `KNOTS`. A single straight line would miss the knee where
reading weights stops being the bottleneck. No coefficient is negative, so more work never costs
less.

The fit minimises relative errors. Each coefficient is pulled weakly towards a prior. The prior's
scale is measured first, so coefficients without data keep the prior's proportions. Samples are kept
per kind of step, so that thousands of decode steps do not displace the prompts. A step slowed by a
pause gets little weight (Huber's weights). Knows no queue, no clock and no device.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import lru_cache

import msgspec
import numpy as np
import numpy.ma  # np.median imports it in the first fit, which then takes 20 times as long
import numpy.typing as npt

KNOTS = (64, 128, 256, 512, 1024, 2048, 4096)  # tokens
SEGMENTS = tuple(zip((0, *KNOTS), (*KNOTS, math.inf), strict=True))

Vector = npt.NDArray[np.float64]


class StepWork(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The quantities of a step that its duration depends on."""

    num_prompt_tokens: int = 0  # sum of L over prompt rows
    num_attended: int = 0  # sum of L (L + 2 H): twice the pairs of query and key
    num_history_tokens: int = 0  # sum of H
    num_decode_rows: int = 0
    num_decode_keys: int = 0  # tokens that the decode rows attend to

    @classmethod
    def of_prompts(cls, prompts: Iterable[tuple[int, int]]) -> "StepWork":
        """Work of prompt rows of (new, cached) tokens in one step; faster than adding each one."""
        num_prompt_tokens = num_attended = num_history_tokens = 0
        for num_new, num_cached in prompts:
            num_prompt_tokens += num_new
            num_attended += num_new * (num_new + 2 * num_cached)
            num_history_tokens += num_cached
        return cls(
            num_prompt_tokens=num_prompt_tokens,
            num_attended=num_attended,
            num_history_tokens=num_history_tokens,
        )

    @property
    def num_new_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_decode_rows

    def with_prompt(self, num_new: int, num_cached: int) -> "StepWork":
        """This work plus a prompt row of `num_new` tokens after `num_cached` ones."""
        return StepWork(
            num_prompt_tokens=self.num_prompt_tokens + num_new,
            num_attended=self.num_attended + num_new * (num_new + 2 * num_cached),
            num_history_tokens=self.num_history_tokens + num_cached,
            num_decode_rows=self.num_decode_rows,
            num_decode_keys=self.num_decode_keys,
        )

    def with_work(self, other: "StepWork") -> "StepWork":
        """The sum of both, as one step."""
        return StepWork(
            num_prompt_tokens=self.num_prompt_tokens + other.num_prompt_tokens,
            num_attended=self.num_attended + other.num_attended,
            num_history_tokens=self.num_history_tokens + other.num_history_tokens,
            num_decode_rows=self.num_decode_rows + other.num_decode_rows,
            num_decode_keys=self.num_decode_keys + other.num_decode_keys,
        )


NO_WORK = StepWork()


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The coefficients at one moment: encodable, and sufficient for a prediction.

    None is negative, so a prediction never falls when work is added.
    """

    floor_s: float
    slopes_s: tuple[float, ...]  # per new token, one for each of `SEGMENTS`
    attended_s: float  # per L (L + 2 H)
    history_s: float  # per cached token of a prompt row
    decode_row_s: float
    decode_key_s: float
    num_samples: int = 0  # steps that it was fitted to; 0 = a prior

    @property
    def is_fitted(self) -> bool:
        return self.num_samples > 0

    def seconds(self, new_tokens: int, cached_tokens: int) -> float:
        """Predicted duration of a step that computes one prompt, or its rest, and nothing else."""
        return self.step_seconds(NO_WORK.with_prompt(new_tokens, cached_tokens))

    def step_seconds(self, work: StepWork) -> float:
        """Predicted duration of a step that does all of `work`."""
        seconds = (
            self.floor_s
            + self.attended_s * work.num_attended
            + self.history_s * work.num_history_tokens
            + self.decode_row_s * work.num_decode_rows
            + self.decode_key_s * work.num_decode_keys
        )
        num_tokens = work.num_new_tokens
        for (start, end), slope_s in zip(SEGMENTS, self.slopes_s, strict=True):
            if num_tokens <= start:
                break
            seconds += slope_s * (min(num_tokens, end) - start)
        return seconds

    def max_chunk_tokens(
        self, *, num_cached: int, other_work: StepWork, max_step_s: float, max_tokens: int
    ) -> int:
        """Length of the longest chunk after `num_cached` tokens that keeps a step in `max_step_s`.

        `other_work` is that of the step. At most `max_tokens`; 0 if no token fits.
        """

        def step_seconds(num_new: int) -> float:
            return self.step_seconds(other_work.with_prompt(num_new, num_cached))

        if max_tokens > 0 and step_seconds(max_tokens) <= max_step_s:
            return max_tokens
        return bisect_right(range(1, max_tokens + 1), max_step_s, key=step_seconds)


# An 8 billion parameter model in 16 bits on one Hopper GPU; `CostModel` measures the true scale.
PRIOR = StepCosts(
    floor_s=4.6e-3,
    slopes_s=(4e-6, 8e-6, 13e-6, 20e-6, 21e-6, 22e-6, 22e-6, 22e-6),
    attended_s=5e-10,
    history_s=3.5e-8,
    decode_row_s=8e-6,
    decode_key_s=3.2e-8,
)


class CostModel:
    """Fits `StepCosts` to measured steps; `costs` is always usable.

    `observe` adds a step, and `fit_if_due`, which takes longer, fits to those that were added.
    """

    MIN_SAMPLES = 16  # with fewer, the prior is used
    REFIT_EVERY = 64  # samples, up to NUM_EARLY of them; a fit takes a few milliseconds
    NUM_EARLY = 1024
    LATE_REFIT_EVERY = 512
    NUM_KEPT = 64  # samples of each kind of step
    NUM_ROUNDS = 5  # rounds of reweighting in a fit
    PRIOR_WEIGHT = 0.01  # a coefficient twice its prior is as bad as one step predicted 10 % off
    MIN_SPREAD = 0.01  # of relative errors; a smaller spread is raised to this
    TUNING = 1.5  # an error of more than this many spreads gets less weight
    MIN_SHARE = 0.01  # of the scaled prior: lower bound of a prediction used as a divisor

    def __init__(self, prior: StepCosts = PRIOR) -> None:
        assert prior.floor_s > 0, f"the floor of a step must take time: {prior.floor_s}"
        self.costs = prior
        self._prior = _to_vector(prior)
        num_places = 2 * len(SEGMENTS) * self.NUM_KEPT
        self._features = np.zeros((num_places, len(self._prior)))  # [places, coefficients]
        self._seconds = np.zeros(num_places)  # 0 = empty place
        self._num_seen = [0] * (2 * len(SEGMENTS))  # by kind of step
        self._num_samples = 0
        self._is_fit_due = False

    def observe(self, work: StepWork, seconds: float) -> None:
        """Add the sample of a step that ran alone on the device for `seconds`.

        A step without tokens is ignored, and so is one of zero duration, which a coarse clock may
        report.
        """
        assert math.isfinite(seconds), f"a step of {seconds} s"
        if work.num_new_tokens == 0 or seconds <= 0.0:
            return
        kind = 2 * bisect_left(KNOTS, work.num_new_tokens) + int(work.num_prompt_tokens > 0)
        place = kind * self.NUM_KEPT + self._num_seen[kind] % self.NUM_KEPT
        self._num_seen[kind] += 1
        self._features[place] = _features(work)
        self._seconds[place] = seconds
        self._num_samples += 1
        self._is_fit_due |= self._ends_interval()

    def fit_if_due(self) -> None:
        """Fit, if there are enough new samples; call it when nobody waits for a step's tokens."""
        if self._is_fit_due:
            self._fit()

    def learn(self, samples: Iterable[tuple[StepWork, float]]) -> None:
        """Add samples of before the first request, and fit the model to them at once."""
        for work, seconds in samples:
            self.observe(work, seconds)
        if self._num_samples > 0:
            self._fit()

    def _ends_interval(self) -> bool:
        """Whether the newest sample is the one after which a fit is due."""
        is_early = self._num_samples <= self.NUM_EARLY
        every = self.REFIT_EVERY if is_early else self.LATE_REFIT_EVERY
        return self._num_samples == self.MIN_SAMPLES or self._num_samples % every == 0

    def _fit(self) -> None:
        """Reweighted non-negative least squares of relative errors, in units of the prior."""
        self._is_fit_due = False
        is_kept = self._seconds > 0.0
        features, seconds = self._features[is_kept], self._seconds[is_kept]
        prior = self._prior * np.median(seconds / (features @ self._prior))
        parts_s = features * prior  # [samples, coefficients]: each term's seconds by the prior
        least_s = self.MIN_SHARE * parts_s.sum(axis=1)
        factors = np.ones_like(prior)
        identity = np.eye(len(prior))
        for _ in range(self.NUM_ROUNDS):
            predicted_s = np.maximum(parts_s @ factors, least_s)
            errors = np.abs(seconds / predicted_s - 1.0)
            spread = max(1.4826 * float(np.median(errors)), self.MIN_SPREAD)
            weights = 1.0 / np.maximum(1.0, errors / (self.TUNING * spread))
            shares = parts_s / predicted_s[:, None]
            weighted = shares * weights[:, None]
            gram = weighted.T @ shares + self.PRIOR_WEIGHT * identity
            target = weighted.T @ (seconds / predicted_s) + self.PRIOR_WEIGHT
            factors = solve_non_negative(gram, target, factors)
        self.costs = _from_vector(factors * prior, self._num_samples)


def solve_non_negative(gram: Vector, target: Vector, start: Vector) -> Vector:
    """argmin over x >= 0 of x'Gx / 2 - t'x, by the active-set method of Lawson and Hanson.

    `gram` [n, n] is positive definite, `target` is [n]. `start` [n] >= 0 only affects the number of
    iterations: the minimum is unique.
    """
    x = start
    is_free = x > 0.0
    tolerance = 1e-10 * float(np.abs(target).max())
    for _ in range(3 * len(x)):  # bounded: rounding may make a coefficient toggle; x is feasible
        x, is_free = _descend(gram, target, x, is_free)
        descent = np.where(is_free, -np.inf, target - gram @ x)
        best = int(np.argmax(descent))
        if descent[best] <= tolerance:
            break
        is_free[best] = True
    return x


def _descend(
    gram: Vector, target: Vector, x: Vector, is_free: npt.NDArray[np.bool_]
) -> tuple[Vector, npt.NDArray[np.bool_]]:
    """The minimum over the free coefficients, from `x`; those that cross zero are fixed at 0."""
    while True:
        goal = np.zeros(len(x))
        goal[is_free] = np.linalg.solve(gram[np.ix_(is_free, is_free)], target[is_free])
        is_crossing = is_free & (goal <= 0.0)
        if not is_crossing.any():
            return goal, is_free
        crossing = x[is_crossing]
        x = x + float(np.min(crossing / (crossing - goal[is_crossing] + 1e-300))) * (goal - x)
        is_free = is_free & ~(is_crossing & (x <= 1e-12))
        x[~is_free] = 0.0


def _features(work: StepWork) -> list[float]:
    """The factor of each coefficient, in the order of `_to_vector`."""
    return [
        1.0,
        *_by_segment(work.num_new_tokens),
        work.num_attended,
        work.num_history_tokens,
        work.num_decode_rows,
        work.num_decode_keys,
    ]


@lru_cache(maxsize=256)
def _by_segment(num_tokens: int) -> tuple[float, ...]:
    """New tokens in each of `SEGMENTS`; cached, as decode steps of the same rows repeat."""
    return tuple(max(0.0, min(num_tokens, end) - start) for start, end in SEGMENTS)


def _to_vector(costs: StepCosts) -> Vector:
    assert len(costs.slopes_s) == len(SEGMENTS), f"{len(costs.slopes_s)} slopes"
    return np.array(
        [
            costs.floor_s,
            *costs.slopes_s,
            costs.attended_s,
            costs.history_s,
            costs.decode_row_s,
            costs.decode_key_s,
        ]
    )


def _from_vector(coefficients: Vector, num_samples: int) -> StepCosts:
    floor_s, *slopes_s, attended_s, history_s, row_s, key_s = coefficients.tolist()
    return StepCosts(
        floor_s=floor_s,
        slopes_s=tuple(slopes_s),
        attended_s=attended_s,
        history_s=history_s,
        decode_row_s=row_s,
        decode_key_s=key_s,
        num_samples=num_samples,
    )
