"""What drafts gain in the engine with overlapped steps: its loop and scheduler, a virtual device.

    python -m load_tests.simulation.speculation_engine --rows 1 16 64 --acceptances 0 0.5 1

Real: `EngineCore`, `Scheduler`, `Drafting`, the controller, the fitted costs. Virtual: time. A step
takes what `load_tests.simulation.speculation` says of its rows, tokens and keys. The host takes
`LAUNCH_S` to launch a step and `TURN_S` for everything else of a turn of the loop: both hide behind
a step in flight and cost time where there is none, as when all rows are held for their drafts. As
on a GPU, a step's own duration begins when its launch does. The drafter is right with one
probability a token, and tokens mean nothing: `RIGHT` is every answer's next token. The gain
compares the same requests on the same engine without a drafter.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from configs.resolved import ResolvedLaps, ResolvedScheduler
from engine.clock import ManualClock
from engine.core import EngineCore
from engine.kv.cache import BlockCache
from engine.plan import StepPlan, StepResult
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.scheduling.drafting import Drafting
from engine.scheduling.finish import FinishRules
from engine.scheduling.scheduler import DEFAULT_LAPS, Scheduler
from engine.speculation.acceptance import accepted
from engine.speculation.controller import SpeculationController
from engine.speculation.drafter import HostDrafter
from load_tests.simulation.real_worker import BLOCK_SIZE, HandoffSink, NoHasher
from load_tests.simulation.speculation import plain_samples, step_s
from load_tests.tables import render_rows

RIGHT, WRONG = 1, 2
LAUNCH_S = 0.4e-3
TURN_S = 0.2e-3
_PROMPT_TOKENS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests that run all the time, one after the other in each row."""

    num_rows: int
    acceptance: float
    pass_s: float = 0.0  # of the drafter
    is_overlapped: bool = True
    request_tokens: int = 256
    num_tokens: int = 20_000  # sampled in the run
    seed: int = 0


class Drafter(HostDrafter):
    """Right with one probability, independently."""

    def __init__(self, acceptance: float, pass_s: float, clock: ManualClock, seed: int) -> None:
        self.pass_s = pass_s
        self.spent_s = 0.0
        self._acceptance = acceptance
        self._clock = clock
        self._rng = np.random.default_rng(seed)

    def propose(self, asked: Sequence[tuple[Request, int]]) -> list[list[int]]:
        self.spent_s = self.pass_s * max((num for _, num in asked), default=0)
        self._clock.advance(self.spent_s)
        return [
            np.where(self._rng.random(num) < self._acceptance, RIGHT, WRONG).tolist()
            for _, num in asked
        ]

    def add_finished(self, request: Request) -> None:
        """Does nothing: answers mean nothing."""

    def forget(self, request: Request) -> None:
        """Does nothing: nothing is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualStep:
    """A step on the device until `end_s`."""

    clock: ManualClock
    end_s: float
    result: StepResult

    @property
    def is_done(self) -> bool:
        return self.clock.now_s() >= self.end_s

    def wait(self) -> StepResult:
        self.clock.advance(max(0.0, self.end_s - self.clock.now_s()))
        return self.result


def result_of(plan: StepPlan, tokens: list[list[int]], duration_s: float) -> StepResult:
    """tokens: of each row, none where it samples none."""
    return StepResult(
        step=plan.step,
        tokens=tokens,
        logprobs=[None] * len(plan.rows),
        duration_s=duration_s,
        is_finite=[True] * len(plan.rows),
    )


def virtual_scheduler(
    max_rows: int,
    max_tokens: int,
    num_blocks: int,
    drafting: Drafting,
    *,
    laps: ResolvedLaps = DEFAULT_LAPS,
    graph_token_sizes: Sequence[int] = (),
) -> Scheduler:
    """A real one, of a model without an end of sequence, that has learnt what plain steps take.

    graph_token_sizes: of steps with prompts.
    """
    cache = BlockCache(num_blocks, enable_prefix_caching=False, protected_share=0.5)
    scheduler = Scheduler(
        ResolvedScheduler(
            max_num_batched_tokens=max_tokens, max_num_seqs=max_rows, max_waiting=10**6
        ),
        cache=cache,
        hasher=NoHasher(),
        handoff_queue=HandoffSink(cache),
        block_size=BLOCK_SIZE,
        finish_rules=FinishRules((), num_blocks * BLOCK_SIZE),
        laps=laps,
        graph_token_sizes=graph_token_sizes,
        drafting=drafting,
    )
    scheduler.learn(plain_samples())
    return scheduler


def virtual_request(number: int, num_prompt: int, num_tokens: int, now_s: float) -> Request:
    """Tokens mean nothing. number: of the request, for its key."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return Request(
        spec=RequestSpec(params=params),
        key=RequestKey(f"{number:032x}"),
        ingress_id="",
        tokens=[RIGHT] * num_prompt,
        num_prompt_tokens=num_prompt,
        arrival_s=now_s,
    )


class VirtualDevice:
    """An executor without a model: one step after the other."""

    def __init__(self, clock: ManualClock, seed: int) -> None:
        self._clock = clock
        self._free_s = 0.0
        self._rng = np.random.default_rng(seed)

    def launch(self, plan: StepPlan) -> VirtualStep:
        start_s = max(self._clock.now_s(), self._free_s)
        self._clock.advance(LAUNCH_S)
        num_keys = sum(plan.num_computed_tokens) + plan.num_tokens
        seconds = step_s(len(plan.rows), plan.num_tokens, num_keys // len(plan.rows))
        seconds *= float(self._rng.normal(1.0, 0.02))
        self._free_s = max(self._clock.now_s(), self._free_s) + seconds
        drafts = dict(plan.drafts)
        tokens = [
            accepted([RIGHT] * num, drafts.get(i, ())) if num else []
            for i, num in enumerate(plan.num_samples)
        ]
        result = result_of(plan, tokens, self._free_s - start_s)
        return VirtualStep(clock=self._clock, end_s=self._free_s, result=result)


class Engine:
    """One engine under a load; `drafts` False: without a drafter."""

    def __init__(self, load: Load, *, drafts: bool) -> None:
        self._load = load
        self.clock = ManualClock()
        num_blocks = 2 * load.num_rows * -(-(_PROMPT_TOKENS + load.request_tokens) // BLOCK_SIZE)
        drafter = Drafter(load.acceptance, load.pass_s, self.clock, load.seed) if drafts else None
        self.controller = SpeculationController()
        drafting = Drafting(drafter, self.controller if drafts else None, holds=load.is_overlapped)
        self.scheduler = virtual_scheduler(load.num_rows, 8192, num_blocks, drafting)
        self._core = EngineCore(
            self.scheduler,
            VirtualDevice(self.clock, load.seed),
            self.clock,
            overlap=load.is_overlapped,
        )
        self._num_requests = 0
        self.refill()

    def refill(self) -> None:
        """A request for each row, of lengths that do not end together."""
        load = self._load
        for row in range(load.num_rows):
            self._add(1 + (row + 1) * load.request_tokens // load.num_rows)

    def drain(self) -> None:
        """Step until no request is left."""
        while self._core.has_work:
            self._core.step()
            self.clock.advance(TURN_S)

    def _add(self, num_tokens: int) -> None:
        self._num_requests += 1
        given = self._num_requests, _PROMPT_TOKENS, num_tokens, self.clock.now_s()
        self.scheduler.add(virtual_request(*given))

    def run(self) -> float:
        """Seconds a token, over `num_tokens` of them, from now on."""
        num_tokens, start_s = 0, self.clock.now_s()
        while num_tokens < self._load.num_tokens:
            output = self._core.step()
            num_tokens += len(output.tokens)
            for _ in output.left:
                self._add(self._load.request_tokens)
            self.clock.advance(TURN_S)
        return (self.clock.now_s() - start_s) / num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A run beside the same run without drafts."""

    gain: float
    accepted_length: float | None
    num_stops: int


def gain_of(load: Load) -> Gain:
    plain_s = Engine(load, drafts=False).run()
    drafted = Engine(load, drafts=True)
    gain = plain_s / drafted.run()
    found = drafted.controller.statistics()
    return Gain(gain=gain, accepted_length=found.accepted_length, num_stops=found.num_stops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--acceptances", type=float, nargs="+", default=[0.0, 0.3, 0.5, 0.8, 1.0])
    parser.add_argument("--pass-ms", type=float, default=0.0, help="of the drafter, a position")
    parser.add_argument("--steps", type=int, default=800, help="of the run without drafts, about")
    parser.add_argument("--in-turn", action="store_true", help="steps that do not overlap")
    args = parser.parse_args()
    table = [["rows", *(f"{acceptance:g}" for acceptance in args.acceptances)]]
    least = float("inf")
    for num_rows in args.rows:
        load = Load(
            num_rows=num_rows,
            acceptance=0.0,
            pass_s=args.pass_ms / 1000,
            is_overlapped=not args.in_turn,
            num_tokens=args.steps * num_rows,
        )
        found = [gain_of(replace(load, acceptance=acceptance)) for acceptance in args.acceptances]
        least = min(least, *(one.gain for one in found))
        shown = [f"{one.gain:.2f} ({one.accepted_length or 0:.2f})" for one in found]
        table.append([str(num_rows), *shown])
    print("gain over the engine without drafts (accepted length)\n")
    print(render_rows(table))
    print(f"\nleast gain {least:.3f}")


if __name__ == "__main__":
    main()
