"""What the controller of drafts gains, on a virtual clock: acceptance x rows, beside every fixed k.

    python -m load_tests.simulation.speculation                             # drafts cost nothing
    python -m load_tests.simulation.speculation --pass-ms 0.25 --png sweep.png   # a draft model's
    python -m load_tests.simulation.speculation --measured --png sweep.png       # as an engine took

    steps      as measured on one H200 (Qwen3-8B shapes, bf16; load_tests/results/h200.md): products
               and norms by tokens, attention by rows; each with 2 % of noise
    requests   as many as rows, one after another; each accepts every draft with its own probability
    costs      a `CostModel` that saw plain steps and prompts, and observes every step that follows
    gain       the time of plain steps for the same tokens, over that of the run

With `--measured` a step with drafts takes what one took in the engine on an H200 with n-gram drafts
of the host (load_tests/results/speculation.md): the device's time and the host's gap, in which it
had nothing to do. The costs that the controller reads know nothing of that.

A fixed k needs no run: it gains (1 + a + ... + a^k) tokens for the time of a step with k drafts a
row. A run begins with a controller that knows nothing.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from engine.cost_model import CostModel, StepWork
from engine.speculation.controller import (
    SpeculationController,
    StepDrafts,
    StepOffer,
    verify_work,
)
from engine.speculation.rules import SpeculationRules
from load_tests.tables import render_rows

ACCEPTANCES = tuple(round(0.1 * i, 1) for i in range(11))
ROWS = (1, 4, 16, 64, 128, 256)
MAX_FIXED = 8  # drafts

# One H200, bf16: seconds by tokens without attention, and of attention by rows at 128 keys each.
_TOKENS = (1, 16, 64, 256, 512, 2048)
_TOKENS_S = (4.00e-3, 4.15e-3, 4.41e-3, 7.52e-3, 11.9e-3, 43.6e-3)
_ATTENTION_ROWS = (1, 16, 64, 256)
_ATTENTION_S = (0.27e-3, 0.385e-3, 0.53e-3, 1.88e-3)
_KEY_S = 3.4e-8  # each key beyond 128 of a row: 64 x 4,096 take 9.2 ms
_ATTENTION_KEYS = 128
# What a step with drafts took beyond a plain one of as many tokens, by its tokens: three drafts at
# 1, 16, 64 and 256 rows of 128 keys, of which 2.5 tokens a row counted. Milliseconds a token there
# were 2.067, 2.767, 4.140 and 11.698, with the rows that came and went.
_VERIFIED_TOKENS = (4, 64, 256, 1024)
_VERIFIED_S = (0.88e-3, 2.12e-3, 2.30e-3, 4.92e-3)
_HOST_S = 0.5e-3  # between a result and the next step, if that has to wait for it
_NOISE = 0.02  # standard deviation of a step's seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One cell of the sweep."""

    num_rows: int
    acceptances: Sequence[float]  # of each request in turn
    num_keys: int = 128  # of each row
    pass_s: float = 0.0
    surcharge_s: float = 0.0  # of each step with drafts, which the costs know nothing of at first
    is_measured: bool = False  # steps with drafts take `measured_surcharge_s` besides
    pause_share: float = 0.0  # of all steps, with drafts or not, that the machine pauses
    pause_s: float = 0.0
    # A row that may have drafts is held back for a step, since its newest token must be known; if
    # none is left, the device waits for the host.
    is_holding: bool = False
    request_tokens: int = 256
    num_steps: int = 2000
    seed: int = 0
    rules: SpeculationRules = field(default_factory=SpeculationRules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to."""

    gain: float  # the time of plain steps for the same tokens, over that of the run
    accepted_length: float  # tokens a row and step
    wasted_share: float  # of all drafts
    predicted_error: float  # mean of |predicted - measured| / measured seconds


def step_s(num_rows: int, num_tokens: float, num_keys: int = _ATTENTION_KEYS) -> float:
    """Seconds of a step of rows with `num_keys` each that computes so many tokens."""
    slope = (_TOKENS_S[-1] - _TOKENS_S[-2]) / (_TOKENS[-1] - _TOKENS[-2])
    seconds = float(np.interp(num_tokens, _TOKENS, _TOKENS_S))
    seconds += slope * max(num_tokens - _TOKENS[-1], 0)
    seconds += float(np.interp(num_rows, _ATTENTION_ROWS, _ATTENTION_S))
    return seconds + _KEY_S * num_rows * (num_keys - _ATTENTION_KEYS)


def measured_surcharge_s(num_tokens: float) -> float:
    """Seconds that a step with drafts of so many tokens took beyond `step_s`."""
    return float(np.interp(num_tokens, _VERIFIED_TOKENS, _VERIFIED_S))


def _surcharge_s(setting: Setting, num_tokens: float, num_drafts: int) -> float:
    if num_drafts == 0:
        return 0.0
    measured_s = measured_surcharge_s(num_tokens) if setting.is_measured else 0.0
    return setting.surcharge_s + measured_s


def fixed_gain(setting: Setting, acceptance: float, num_drafts: int) -> float:
    """Expected gain when every row of every step verifies `num_drafts`."""
    rows, keys = setting.num_rows, setting.num_keys
    tokens = sum(acceptance**i for i in range(num_drafts + 1))
    num_tokens = rows * (num_drafts + 1)
    seconds = step_s(rows, num_tokens, keys) + num_drafts * setting.pass_s
    seconds += _surcharge_s(setting, num_tokens, num_drafts)
    pause_s = setting.pause_share * setting.pause_s
    return tokens * (step_s(rows, rows, keys) + pause_s) / (seconds + pause_s)


def plain_samples() -> list[tuple[StepWork, float]]:
    """Steps of decodes and of prompts, without drafts, and their seconds."""
    decodes = [(rows, keys) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256) for keys in (128, 1024)]
    return [
        *[(_decodes(rows, keys), step_s(rows, rows, keys)) for rows, keys in decodes],
        *[
            (StepWork.of_prompts([(tokens, 0)]), step_s(1, tokens, _ATTENTION_KEYS))
            for tokens in (16, 64, 128, 256, 512, 1024, 2048)
        ],
    ]


def learned_costs() -> CostModel:
    """A model that saw plain steps and prompts, and no draft."""
    model = CostModel()
    model.learn(plain_samples())
    return model


def _decodes(num_rows: int, num_keys: int) -> StepWork:
    return StepWork(num_decode_rows=num_rows, num_decode_keys=num_rows * num_keys)


class Run:
    """One cell, step by step."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._rng = np.random.default_rng(setting.seed)
        self._controller = SpeculationController(setting.rules)
        self._costs = learned_costs()
        self._keys = list(range(setting.num_rows))  # a request's number
        self._left = [  # tokens, so that the first requests do not end together
            1 + (i + 1) * setting.request_tokens // setting.num_rows
            for i in range(setting.num_rows)
        ]
        self._num_requests = setting.num_rows
        self._held: list[int] = []  # rows that the next step leaves out
        self.num_tokens = self.num_drafts = self.num_accepted = self.num_row_steps = 0
        self.seconds = 0.0
        self.error = 0.0

    def step(self) -> None:
        setting, controller = self._setting, self._controller
        rows = [row for row in range(setting.num_rows) if row not in self._held]
        has_waited = not rows
        rows = rows or list(self._held)
        keys = [self._keys[row] for row in rows]
        work = _decodes(len(rows), setting.num_keys)
        offer = StepOffer(
            keys=keys,
            max_drafts=controller.max_drafts(keys),
            work=work,
            draft_pass_s=setting.pass_s,
            num_plain_rows=setting.num_rows,
        )
        drafts = controller.plan(offer, self._costs.costs)
        seconds = self._seconds(work, drafts) + (_HOST_S if has_waited else 0.0)
        num_tokens = self._accept(rows, drafts)
        controller.observe_step(drafts, num_tokens, seconds)
        self.seconds += seconds
        self.num_tokens += num_tokens
        self.error += abs(drafts.step_s - seconds) / seconds
        if setting.is_holding:
            most = controller.max_drafts([self._keys[row] for row in rows])
            self._held = [row for row, num in zip(rows, most, strict=True) if num]

    def _seconds(self, work: StepWork, drafts: StepDrafts) -> float:
        """Seconds of the step on the device; the cost model observes them without the drafter."""
        setting, num_drafts = self._setting, sum(drafts.num_drafts)
        num_tokens = work.num_decode_rows + num_drafts
        model_s = step_s(work.num_decode_rows, num_tokens, setting.num_keys)
        model_s += _surcharge_s(setting, num_tokens, num_drafts)
        model_s *= float(self._rng.normal(1.0, _NOISE))
        if setting.pause_share and self._rng.random() < setting.pause_share:
            model_s += setting.pause_s
        self._costs.observe(verify_work(work, num_drafts), max(0.0, model_s - drafts.surcharge_s))
        self._costs.fit_if_due()
        return model_s + max(drafts.num_drafts) * setting.pass_s

    def _accept(self, rows: Sequence[int], drafts: StepDrafts) -> int:
        """Accept what the requests accept; returns the tokens sampled."""
        setting, num_tokens = self._setting, 0
        draws = self._rng.random(len(rows))
        for row, num_drafts, draw in zip(rows, drafts.num_drafts, draws, strict=True):
            key = self._keys[row]
            num_accepted = 0
            if num_drafts:
                acceptance = setting.acceptances[key % len(setting.acceptances)]
                num_accepted = geometric(float(draw), acceptance, num_drafts)
                self._controller.observe([key], [num_drafts], [num_accepted])
            num_tokens += num_accepted + 1
            self.num_drafts += num_drafts
            self.num_accepted += num_accepted
            self.num_row_steps += 1
            self._left[row] -= num_accepted + 1
            if self._left[row] <= 0:
                self._controller.forget(key)
                self._keys[row] = self._num_requests
                self._left[row] = setting.request_tokens
                self._num_requests += 1
        return num_tokens


def geometric(draw: float, acceptance: float, num_drafts: int) -> int:
    """How many of `num_drafts` are accepted one after the other, by one uniform `draw`."""
    num, survival = 0, acceptance
    while num < num_drafts and draw < survival:
        num += 1
        survival *= acceptance
    return num


def simulate(setting: Setting) -> Outcome:
    """Run the controller for `num_steps`."""
    run = Run(setting)
    for _ in range(setting.num_steps):
        run.step()
    rows = setting.num_rows
    plain_s = step_s(rows, rows, setting.num_keys) + setting.pause_share * setting.pause_s
    plain_s *= run.num_tokens / rows
    return Outcome(
        gain=plain_s / run.seconds,
        accepted_length=run.num_tokens / run.num_row_steps,
        wasted_share=1 - run.num_accepted / max(run.num_drafts, 1),
        predicted_error=run.error / setting.num_steps,
    )


def best_fixed(setting: Setting, acceptance: float) -> tuple[float, int]:
    """The gain of the best fixed number of drafts, none included, and that number."""
    return max((fixed_gain(setting, acceptance, k), -k) for k in range(MAX_FIXED + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell of the sweep, with what the best fixed number of drafts would gain."""

    num_rows: int
    acceptance: float
    outcome: Outcome
    best_gain: float
    best_drafts: int


def sweep(rows: Sequence[int], acceptances: Sequence[float], base: Setting) -> list[Cell]:
    """`base` with each number of rows and each acceptance, row by row."""
    cells = []
    for num_rows in rows:
        for acceptance in acceptances:
            setting = replace(base, num_rows=num_rows, acceptances=[acceptance])
            gain, drafts = best_fixed(setting, acceptance)
            cells.append(
                Cell(
                    num_rows=num_rows,
                    acceptance=acceptance,
                    outcome=simulate(setting),
                    best_gain=gain,
                    best_drafts=-drafts,
                )
            )
    return cells


def render_sweep(cells: Sequence[Cell]) -> str:
    """A row for each number of rows: gain, that of the best fixed k, and this k."""
    acceptances = sorted({cell.acceptance for cell in cells})
    table = [["rows", *(f"{a:g}" for a in acceptances)]]
    for num_rows in sorted({cell.num_rows for cell in cells}):
        line = [cell for cell in cells if cell.num_rows == num_rows]
        shown = [f"{c.outcome.gain:.2f} ({c.best_gain:.2f}, {c.best_drafts})" for c in line]
        table.append([str(num_rows), *shown])
    return render_rows(table)


def write_plot(cells: Sequence[Cell], path: Path) -> None:
    """Gain against acceptance, a panel for each number of rows. Needs matplotlib."""
    from matplotlib.figure import Figure

    rows = sorted({cell.num_rows for cell in cells})
    figure = Figure(figsize=(3.2 * len(rows), 3.2), layout="constrained")
    for panel, num_rows in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        line = [cell for cell in cells if cell.num_rows == num_rows]
        x = [cell.acceptance for cell in line]
        panel.plot(x, [c.best_gain for c in line], "--", color="#8a8a94", label="best fixed k")
        panel.plot(x, [c.outcome.gain for c in line], color="#1f6fb4", label="controller")
        panel.axhline(0.98, color="#c22f3d", linewidth=0.8, label="0.98")
        panel.set(title=f"{num_rows} rows", xlabel="acceptance", yscale="log")
        panel.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        panel.minorticks_off()
    figure.axes[0].set_ylabel("gain over plain steps")
    figure.axes[0].legend()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--keys", type=int, default=_ATTENTION_KEYS, help="of each row")
    parser.add_argument("--pass-ms", type=float, default=0.0, help="of the drafter, a position")
    parser.add_argument("--surcharge-ms", type=float, default=0.0, help="of steps with drafts")
    parser.add_argument("--measured", action="store_true", help="steps with drafts as on an H200")
    parser.add_argument("--pauses", type=float, nargs=2, default=(0.0, 0.0), help="share, ms")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--request-tokens", type=int, default=256)
    parser.add_argument("--stops-always", action="store_true", help="at acceptance below 0.5")
    parser.add_argument("--holding", action="store_true", help="rows sit out every other step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    base = Setting(
        num_rows=1,
        acceptances=[0.0],
        num_keys=options.keys,
        pass_s=options.pass_ms / 1000,
        surcharge_s=options.surcharge_ms / 1000,
        is_measured=options.measured,
        pause_share=options.pauses[0],
        pause_s=options.pauses[1] / 1000,
        request_tokens=options.request_tokens,
        num_steps=options.steps,
        seed=options.seed,
        is_holding=options.holding,
        rules=SpeculationRules(stops_always=options.stops_always),
    )
    cells = sweep(options.rows, ACCEPTANCES, base)
    print(render_sweep(cells))
    least = min(cells, key=lambda c: c.outcome.gain)
    farthest = min(cells, key=lambda c: c.outcome.gain / c.best_gain)
    print(f"\nleast gain {least.outcome.gain:.3f}: {least.num_rows} rows, {least.acceptance:g}")
    share = farthest.outcome.gain / farthest.best_gain
    print(f"least share of the best fixed k {share:.3f}: ", end="")
    print(f"{farthest.num_rows} rows, {farthest.acceptance:g}")
    error = max(cell.outcome.predicted_error for cell in cells)
    print(f"seconds of a step predicted to {error:.1%} (worst cell's mean)")
    if options.png:
        write_plot(cells, options.png)


if __name__ == "__main__":
    main()
