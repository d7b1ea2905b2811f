"""What drafts that the device looks up gain a batch that starts together, on virtual time.

    python -m load_tests.simulation.speculation_batch
    python -m load_tests.simulation.speculation_batch --carried

As `load_tests.lab.bench_accepted --sweep --ngrams device` measures it: all rows begin at once, each
has 128 more tokens after its first, and each draft after accepted ones counts with one probability.
Real: `EngineCore`, `Scheduler`, `Drafting`, the controller, the fitted costs. Virtual: time. A step
takes what `load_tests.simulation.speculation` says of its rows, tokens and keys, and one with
drafts besides what it took more on an H200 (`_VERIFIED_S`). The controller begins anew with each
acceptance, and with each number of rows too (`--carried`: it goes on to the next one).

Two gains over plain steps: until all rows have all tokens (rows that come last in ever smaller
steps count), and a token of each while all rows run.
"""

import argparse
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.clock import ManualClock
from engine.core import EngineCore
from engine.plan import NEWEST, StepPlan, given
from engine.request import Request, RequestKey
from engine.runner.graph_sizes import verify_sizes
from engine.scheduling.drafting import Drafting
from engine.speculation.controller import SpeculationController
from engine.speculation.drafter import HostDrafter, RequestNgrams
from engine.speculation.rules import SpeculationRules
from load_tests.simulation.real_worker import BLOCK_SIZE
from load_tests.simulation.speculation import geometric, step_s
from load_tests.simulation.speculation_engine import (
    LAUNCH_S,
    RIGHT,
    TURN_S,
    VirtualStep,
    result_of,
    virtual_request,
    virtual_scheduler,
)
from load_tests.tables import render_rows

NUM_NEW = 128  # tokens of a row after its first
_PROMPT_TOKENS = 128
MAX_GRAPH_TOKENS = 512  # of steps with drafts, as an H200 has by default
# What a step with drafts that the device looked up took beyond a plain one of as many tokens, by
# its tokens, on an H200: 4.58 ms (1 row, 5 tokens), 4.89 (16, 64), 9.25 (64, 320), 20.5 (256, 768),
# 26.97 (256, 1,024), 36.48 (256, 1,280, which no graph holds).
_VERIFIED_TOKENS = (5, 64, 320, 768, 1024, 1280)
_VERIFIED_S = (0.27e-3, 0.1e-3, 0.1e-3, 1.4e-3, 2.6e-3, 6.9e-3)
_NO_GRAPH_HOST_S = 37e-3  # besides: 48 ms at 256 rows with four drafts, where others used the host


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Seconds of the host beyond a plain step. A step in flight hides them, if there is one."""

    step_s: float  # of a step with drafts
    row_s: float  # of each row that has some in it
    asked_s: float = 0.0  # of each row whose drafts the host looks up, as it does the first ones
    told_s: float = 0.0  # of each row whose text the device is told, for those that follow


# Turns of 1.88 ms at 1 row, 2.16 at 16, 3.08 at 64, and 7.81 at 256, each with three drafts.
HOST = HostCosts(step_s=1.25e-3, row_s=0.023e-3)
# Turns of 3.2 to 4.6 ms at 1 and at 16 rows, 5.3 to 6.4 at 64, 9.4 to 11.2 at 256. 256 rows that
# were asked every 33 steps, and got none, lost 27 ms in 128 steps, and 64 rows 11. A row whose text
# of 130 tokens is told takes about what it takes in any step with drafts: twice, on a CPU.
SLOW_HOST = HostCosts(step_s=2.7e-3, row_s=0.03e-3, asked_s=0.022e-3, told_s=0.035e-3)


def verified_s(num_tokens: int) -> float:
    """Seconds that a step with drafts of so many tokens took beyond a plain one of as many."""
    return float(np.interp(num_tokens, _VERIFIED_TOKENS, _VERIFIED_S))


class LookedUp(HostDrafter):
    """Drafts of which only the device knows the tokens, for every row at any time."""

    pass_s = spent_s = 0.0

    def __init__(self, clock: ManualClock, host: HostCosts) -> None:
        self._clock = clock
        self._host = host
        self._texts = RequestNgrams()

    @property
    def can_propose_ahead(self) -> bool:
        return True

    def propose(self, asked: Sequence[tuple[Request, int]]) -> list[list[int]]:
        self._clock.advance(self._host.asked_s * len(asked))
        return [[RIGHT] * num for _, num in asked]

    def propose_ahead(self, asked: Sequence[tuple[Request, int, int]]) -> list[list[int]]:
        self._clock.advance(self._host.asked_s * sum(num == 0 for _, _, num in asked))
        return [
            [given(place) for place in range(num)] if num_in_flight else [RIGHT] * num
            for _, num, num_in_flight in asked
        ]

    def tell(self, request: Request) -> list[tuple[int, list[int]]]:
        return self._texts.tell(request)

    def add_finished(self, request: Request) -> None:
        """Does nothing: answers mean nothing."""

    def forget(self, request: Request) -> None:
        self._texts.forget(request)


def padded(num_tokens: int, sizes: Sequence[int]) -> int:
    """To the least size of a graph that holds them. sizes: ascending; beyond them, as they are."""
    at = bisect_left(sizes, num_tokens)
    return sizes[at] if at < len(sizes) else num_tokens


class VirtualDevice:
    """An executor without a model, whose rows get as many drafts as are drawn here."""

    noise = 0.005  # of a step's duration, relative

    def __init__(
        self, clock: ManualClock, sizes: Sequence[int], seed: int, host: HostCosts = HOST
    ) -> None:
        """sizes: tokens of the graphs of steps with drafts, ascending."""
        self.acceptance = 0.0
        self.num_drafted_rows: list[int] = []  # of each step with drafts
        self._clock = clock
        self._sizes = sizes
        self._host = host
        self._free_s = 0.0
        self._rng = np.random.default_rng(seed)

    def launch(self, plan: StepPlan) -> VirtualStep:
        start_s = max(self._clock.now_s(), self._free_s)
        drafts = {i: sum(token_id != NEWEST for token_id in ids) for i, ids in plan.drafts}
        num_told = sum(start == 0 for _, start, _ in plan.texts)
        self._clock.advance(self._host_s(drafts) + num_told * self._host.told_s)
        if any(drafts.values()):
            self.num_drafted_rows.append(sum(num > 0 for num in drafts.values()))
        took_s = self._seconds(plan, drafts) * float(self._rng.normal(1.0, self.noise))
        self._free_s = max(self._clock.now_s(), self._free_s) + took_s
        tokens = [
            [RIGHT] * (1 + self._num_accepted(drafts.get(i, 0))) if num else []
            for i, num in enumerate(plan.num_samples)
        ]
        result = result_of(plan, tokens, self._free_s - start_s)
        return VirtualStep(clock=self._clock, end_s=self._free_s, result=result)

    def _host_s(self, drafts: dict[int, int]) -> float:
        """drafts: of each row that has any planned, how many."""
        num_rows, num_drafts = sum(num > 0 for num in drafts.values()), sum(drafts.values())
        if num_rows == 0:
            return LAUNCH_S
        has_graph = len(drafts) + num_drafts <= self._sizes[-1]
        host_s = self._host.step_s + num_rows * self._host.row_s + LAUNCH_S
        return host_s if has_graph else host_s + _NO_GRAPH_HOST_S

    def _seconds(self, plan: StepPlan, drafts: dict[int, int]) -> float:
        """What the device takes, without noise."""
        num_rows, num_tokens = len(plan.rows), plan.num_tokens
        if not any(drafts.values()):
            return step_s(num_rows, num_tokens)
        return step_s(num_rows, padded(num_tokens, self._sizes)) + verified_s(num_tokens)

    def _num_accepted(self, num_drafts: int) -> int:
        return geometric(float(self._rng.random()), self.acceptance, num_drafts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """Seconds a token of each row."""

    all_s: float  # until each has all
    together_s: float  # while all run


class Batches:
    """One engine, given one batch after the other."""

    def __init__(
        self,
        num_rows: int,
        *,
        drafts: bool,
        rules: SpeculationRules | None = None,
        seed: int = 0,
        host: HostCosts = HOST,
        graph_tokens: int = MAX_GRAPH_TOKENS,
    ) -> None:
        rules = rules or SpeculationRules()
        self.clock = ManualClock()
        num_blocks = 2 * num_rows * -(-(_PROMPT_TOKENS + NUM_NEW + 16) // BLOCK_SIZE) + 64
        most = min(num_rows * (1 + rules.max_drafts), graph_tokens)
        sizes = tuple(sorted({size.num_tokens for size in verify_sizes(num_rows, most)}))
        self.controller = SpeculationController(rules)
        self.device = VirtualDevice(self.clock, sizes, seed, host)
        drafter, policy = (LookedUp(self.clock, host), self.controller) if drafts else (None, None)
        drafting = Drafting(drafter, policy, graph_tokens=sizes)
        self.scheduler = virtual_scheduler(num_rows, 16384, num_blocks, drafting)
        self._core = EngineCore(self.scheduler, self.device, self.clock, overlap=True)
        self._num_requests = 0

    def run(self, num_rows: int, num_new: int = NUM_NEW) -> Took:
        """A batch of so many rows, of `num_new` tokens each after the first."""
        nums = {self._add(num_new): 0 for _ in range(num_rows)}
        first_s, marks = 0.0, list[tuple[float, int]]()
        while self._core.has_work:
            output = self._core.step()
            for _, record in output.tokens:
                nums[record.key] += 1
            if first_s == 0.0 and min(nums.values()) > 0:
                first_s = self.clock.now_s()
            if min(nums.values()) > 0 and max(nums.values()) < 1 + num_new:
                marks.append((self.clock.now_s(), sum(nums.values())))
            self.clock.advance(TURN_S)
        (begin_s, before), (end_s, after) = marks[0], marks[-1]
        return Took(
            all_s=(self.clock.now_s() - first_s) / num_new,
            together_s=(end_s - begin_s) * num_rows / (after - before),
        )

    def _add(self, num_new: int) -> RequestKey:
        self._num_requests += 1
        given = self._num_requests, _PROMPT_TOKENS, 1 + num_new, self.clock.now_s()
        request = virtual_request(*given)
        self.scheduler.add(request)
        return request.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A batch beside the same without drafts."""

    all_rows_end: float
    while_all_run: float
    rows_a_step: float  # that had drafts, of steps with any; 0 = none had

    def __str__(self) -> str:
        return f"{self.all_rows_end:.3f} ({self.while_all_run:.2f}, {self.rows_a_step:.0f})"


def gains(
    num_rows: Sequence[int],
    acceptance: float,
    *,
    carried: bool = False,
    rules: SpeculationRules | None = None,
    seed: int = 0,
    host: HostCosts = HOST,
    graph_tokens: int = MAX_GRAPH_TOKENS,
) -> list[Gain]:
    """Of a batch of each number of rows."""

    def begin(most_rows: int) -> Batches:
        return Batches(
            most_rows, drafts=True, rules=rules, seed=seed, host=host, graph_tokens=graph_tokens
        )

    found: list[Gain] = []
    drafted = begin(max(num_rows))
    for rows in num_rows:
        plain = Batches(rows, drafts=False, seed=seed).run(rows)
        if not carried:
            drafted = begin(rows)
        drafted.device.acceptance = acceptance
        if carried:
            drafted.run(rows, NUM_NEW // 4)
        drafted.device.num_drafted_rows.clear()
        took = drafted.run(rows)
        nums = drafted.device.num_drafted_rows
        found.append(
            Gain(
                all_rows_end=plain.all_s / took.all_s,
                while_all_run=plain.together_s / took.together_s,
                rows_a_step=sum(nums) / len(nums) if nums else 0.0,
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--acceptances", type=float, nargs="+", default=[0, 0.25, 0.5, 0.75, 1])
    parser.add_argument("--carried", action="store_true", help="one controller for all rows")
    parser.add_argument("--max-drafts", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--graph-tokens", type=int, default=MAX_GRAPH_TOKENS)
    parser.add_argument("--slow-host", action="store_true", help="twice as slow as at its best")
    args = parser.parse_args()
    print("gain until all rows end (while all run, rows with drafts a step); least of the seeds\n")
    rules = SpeculationRules(max_drafts=args.max_drafts)
    host = SLOW_HOST if args.slow_host else HOST
    columns = []
    for acceptance in args.acceptances:
        runs = [
            gains(args.rows, acceptance, carried=args.carried, rules=rules, seed=seed, host=host)
            for seed in range(args.seeds)
        ]
        cells = zip(*runs, strict=True)
        columns.append([min(cell, key=lambda one: one.all_rows_end) for cell in cells])
    lines = [list(map(str, line)) for line in zip(args.rows, *columns, strict=True)]
    print(render_rows([["rows", *(f"{a:g}" for a in args.acceptances)], *lines]))


if __name__ == "__main__":
    main()
