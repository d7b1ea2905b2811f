"""What drafts that the device looks up cost and gain under the mixed load, on virtual time.

    python -m load_tests.simulation.speculation_mixed --rates 16 24

Arrivals as `load_tests.lab.bench_mixed --accepted 3:2.5` has them. Real: `EngineCore`, `Scheduler`
with its length-aware queue, `Drafting`, the controller, the fitted costs. Virtual: time. A step
takes what `load_tests.simulation.speculation` says of its tokens, padded to the graph that it
replays, and of the rows that decode. Besides, prompts have their attention by the costs' prior, and
steps with drafts and no prompt what these took more on an H200. The host launches steps with drafts
more slowly, too. That steps with more lines of logits than their graph has replay none costs
nothing here.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from configs.resolved import ResolvedLaps
from engine.clock import ManualClock
from engine.core import EngineCore
from engine.cost_model import PRIOR, StepWork
from engine.plan import StepPlan
from engine.request import RequestKey
from engine.runner.graph_sizes import decode_sizes, ragged_sizes, verify_sizes
from engine.scheduling.drafting import Drafting
from engine.speculation.controller import SpeculationController
from engine.speculation.drafter import DraftPolicy
from engine.speculation.rules import SpeculationRules
from load_tests.mixed_load import WARM_UP_SEED, Arrival, MixedLoad, Served, Stamps
from load_tests.mixed_report import COLUMNS, quantiles_ms
from load_tests.simulation.speculation import step_s
from load_tests.simulation.speculation_batch import (
    HOST,
    MAX_GRAPH_TOKENS,
    SLOW_HOST,
    HostCosts,
    LookedUp,
    VirtualDevice,
    padded,
    verified_s,
)
from load_tests.simulation.speculation_engine import (
    TURN_S,
    virtual_request,
    virtual_scheduler,
)
from load_tests.tables import render_rows

MAX_ROWS, MAX_TOKENS, NUM_BLOCKS = 256, 8192, 18_000
_WARM_UP_S = 5.0


class MixedDevice(VirtualDevice):
    """Steps with prompts, too."""

    noise = 0.01

    def __init__(
        self, clock: ManualClock, acceptance: float, seed: int, host: HostCosts = HOST
    ) -> None:
        verifies = [size.num_tokens for size in verify_sizes(MAX_ROWS, MAX_GRAPH_TOKENS)]
        super().__init__(clock, verifies, seed, host)
        self.acceptance = acceptance
        self._decodes = [size.num_tokens for size in decode_sizes(MAX_ROWS)]
        self.prompts = ragged_sizes(MAX_ROWS, MAX_TOKENS)

    def _seconds(self, plan: StepPlan, drafts: dict[int, int]) -> float:
        prompts = [
            (num_new, num_computed)
            for i, (num_new, num_computed) in enumerate(
                zip(plan.num_new_tokens, plan.num_computed_tokens, strict=True)
            )
            if i not in drafts and num_new > 1
        ]
        num_decodes = len(plan.rows) - len(prompts)
        seconds = 0.0
        if prompts:
            sizes: Sequence[int] = self.prompts.graph_token_sizes
            seconds = PRIOR.attended_s * StepWork.of_prompts(prompts).num_attended
        elif any(drafts.values()):
            sizes = self._sizes
            seconds = verified_s(plan.num_tokens)
        else:
            sizes = self._decodes
        return seconds + step_s(num_decodes, padded(plan.num_tokens, sizes))


class MixedEngine:
    """One engine under one load after the other; `policy` None: without drafts."""

    def __init__(
        self,
        policy: DraftPolicy | None,
        acceptance: float,
        *,
        laps: ResolvedLaps,
        seed: int,
        host: HostCosts = HOST,
    ) -> None:
        self._clock = ManualClock()
        self.device = MixedDevice(self._clock, acceptance, seed, host)
        verifies = tuple(size.num_tokens for size in verify_sizes(MAX_ROWS, MAX_GRAPH_TOKENS))
        drafter = None if policy is None else LookedUp(self._clock, host)
        drafting = Drafting(drafter, policy, graph_tokens=verifies)
        self.scheduler = virtual_scheduler(
            MAX_ROWS,
            MAX_TOKENS,
            NUM_BLOCKS,
            drafting,
            laps=laps,
            graph_token_sizes=self.device.prompts.graph_token_sizes,
        )
        self._core = EngineCore(
            self.scheduler, self.device, self._clock, overlap=True, defers_planning=True
        )
        self._num_requests = 0

    def serve(self, load: MixedLoad) -> list[Served]:
        arrivals, start_s = load.arrivals(), self._clock.now_s()
        stamps, numbers = Stamps(arrivals), dict[RequestKey, int]()
        due = list(reversed(list(enumerate(arrivals))))
        while due or self._core.has_work:
            while due and start_s + due[-1][1].at_s <= self._clock.now_s():
                number, arrival = due.pop()
                numbers[self._add(arrival, load.num_output_tokens)] = number
            next_s = start_s + due[-1][1].at_s if due else float("inf")
            if not self._core.has_work:
                self._clock.advance(next_s - self._clock.now_s())
                continue
            wait_s = min(self._core.defer_s(), next_s - self._clock.now_s())
            if wait_s > 1e-9:
                self._clock.advance(wait_s)
                continue
            for _, record in self._core.step().tokens:
                stamps.add(numbers[record.key], self._clock.now_s() - start_s)
            self._clock.advance(TURN_S)
        return stamps.served(load.num_output_tokens)

    def _add(self, arrival: Arrival, num_tokens: int) -> RequestKey:
        self._num_requests += 1
        given = self._num_requests, arrival.num_tokens, num_tokens, self._clock.now_s()
        request = virtual_request(*given)
        self.scheduler.add(request)
        return request.key


def figures(
    load: MixedLoad,
    acceptance: float | None,
    seeds: Sequence[int],
    rules: SpeculationRules | None = None,
    laps: ResolvedLaps | None = None,
    host: HostCosts = HOST,
) -> dict[str, float]:
    """Of all seeds' requests together, by the names of `COLUMNS`; acceptance None = no drafts."""
    served: list[Served] = []
    for seed in seeds:
        policy = None if acceptance is None else SpeculationController(rules or SpeculationRules())
        given = laps or ResolvedLaps(queue="laps")
        engine = MixedEngine(policy, acceptance or 0.0, laps=given, seed=seed, host=host)
        engine.serve(replace(load, seed=WARM_UP_SEED, duration_s=_WARM_UP_S))
        served += engine.serve(replace(load, seed=seed))
    return dict(quantiles_ms(served))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rates", type=float, nargs="+", default=[16.0, 24.0], help="requests/s")
    parser.add_argument("--acceptances", type=float, nargs="+", default=[0.69])
    parser.add_argument("--max-drafts", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8, 9])
    parser.add_argument("--duration-s", type=float, default=60.0)
    parser.add_argument("--slow-host", action="store_true", help="twice as slow as at its best")
    args = parser.parse_args()
    rules = SpeculationRules(max_drafts=args.max_drafts, first_drafts=min(4, args.max_drafts))
    table = [["rate /s", "accepted", *COLUMNS.values()]]
    for rate in args.rates:
        load = MixedLoad(rate=rate, duration_s=args.duration_s, seed=0)
        for acceptance in (None, *args.acceptances):
            host = SLOW_HOST if args.slow_host else HOST
            found = figures(load, acceptance, args.seeds, rules, host=host)
            shown = "no drafts" if acceptance is None else f"{acceptance:g}"
            numbers = [f"{found[name]:,.1f}" for name in COLUMNS]
            table.append([f"{rate:g}", shown, *numbers])
    print("times in ms\n")
    print(render_rows(table))


if __name__ == "__main__":
    main()
