"""Loads from the host tier that stall, trickle or come late: first tokens, on a virtual clock.

    python -m load_tests.lab.stalled_loads
    python -m load_tests.lab.stalled_loads --runs 500 --device-speed 1.25     # costs are off

The engine's scheduler over costs of an 8B model on one Hopper GPU, and in place of memory a tier
that predicts one speed and has another. Each prompt runs twice: with nothing stored, and with a
part of it stored in a tier that behaves as said. Alone: one prompt in an idle engine, and the ratio
of each pair. Among others: a queue of them, half with a stored part, and the ratios of the mean, of
the quantile and of the largest of all, because who comes first changes.

    in time       as predicted
    never         nothing lands
    stops         the load stands still at a random point, for ever
    last block    all lands but the last piece
    trickles      5 to 50 times slower than predicted
    late          nothing until about the time at which a request gives up, then all
"""

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from configs.resolved import ResolvedLaps, ResolvedScheduler
from engine.clock import ManualClock
from engine.core import EngineCore
from engine.cost_model import PRIOR
from engine.kv.cache import BlockCache
from engine.kv.hashes import RequestHasher
from engine.kv.host.tier import piece_size
from engine.plan import StepPlan, StepResult
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.scheduling.finish import FinishRules
from engine.scheduling.scheduler import Scheduler
from load_tests.simulation.real_worker import BLOCK_SIZE, HandoffSink, result_of
from load_tests.tables import render_rows

NUM_BLOCKS = 40_000
COSTS = msgspec.structs.replace(PRIOR, num_samples=1)  # as an engine has them that has fitted them
IDLE_S = 0.05
FORGETS_S = 10.0  # a stalled load gives its blocks back so much later
HEADER = ("loads", "prompts", "gave up", "mean", "99 %", "largest")

# Share of a load that has landed, from: seconds since its begin over predicted seconds, a number
# drawn for the load from [0, 1), and predicted seconds of computing everything over those of it.
Behaviour = Callable[[float, float, float], float]
BEHAVIOURS: dict[str, Behaviour] = {
    "in time": lambda time, _, __: time,
    "never": lambda *_: 0.0,
    "stops": lambda time, drawn, _: min(time, drawn),
    "last block": lambda time, *_: min(time, 1 - 1e-9),
    "trickles": lambda time, drawn, _: time / (5 + 45 * drawn),
    "late": lambda time, drawn, compute: float(time > (0.05 + 0.1 * drawn) * compute),
}


@dataclass(slots=True, eq=False, kw_only=True)
class VirtualLoad:
    """A load whose blocks land as its behaviour says; see `TierLoad` of host_loads.py."""

    num_blocks: int
    block_bytes: int
    clock: ManualClock
    share: Callable[[float], float]  # of the blocks, by seconds since the begin
    began_s: float
    cancelled_s: float | None = None

    @property
    def num_landed(self) -> int:
        until_s = self.clock.now_s() if self.cancelled_s is None else self.cancelled_s
        num_moved, landed = self.share(until_s - self.began_s) * self.num_blocks, 0
        while landed < self.num_blocks:
            end = landed + piece_size(landed, self.num_blocks, self.block_bytes)
            if min(end, self.num_blocks) > num_moved:
                break
            landed = min(end, self.num_blocks)
        return landed

    @property
    def is_over(self) -> bool:
        is_let_go = self.cancelled_s is not None and (
            self.clock.now_s() - self.cancelled_s > FORGETS_S
        )
        return self.num_landed == self.num_blocks or is_let_go

    def cancel(self) -> None:
        self.cancelled_s = self.clock.now_s()

    def resume(self) -> None:
        self.cancelled_s = None


@dataclass(slots=True, kw_only=True)
class VirtualTier:
    """A `HostTier` of host_loads.py."""

    clock: ManualClock
    behaviour: Behaviour
    block_bytes: int
    block_s: float  # predicted
    rng: random.Random
    stored: set[bytes] = field(default_factory=set)
    loads: list[VirtualLoad] = field(default_factory=list)
    is_active: bool = False
    stores: Literal["evicted", "answers"] = "evicted"

    def now_s(self) -> float:
        return self.clock.now_s()

    def begin_save(self, evicted: Sequence[tuple[int, bytes]]) -> None:
        raise AssertionError("what is stored is drawn before")

    def settle(self) -> None:
        self.loads = [load for load in self.loads if not load.is_over]

    def look(self, hashes: Sequence[bytes]) -> list[bytes]:
        found = []
        for block_hash in hashes:
            if block_hash not in self.stored:
                break
            found.append(block_hash)
        return found

    find = look

    def num_on_disk(self, blocks: Sequence[bytes]) -> int:
        return 0

    def load_seconds(self, blocks: Sequence[bytes]) -> float:
        return self.block_s * len(blocks)

    def load(self, blocks: Sequence[bytes], block_ids: Sequence[int]) -> VirtualLoad:
        predicted_s, drawn = self.load_seconds(blocks), self.rng.random()
        compute = COSTS.seconds(len(blocks) * BLOCK_SIZE, 0) / predicted_s

        def share(since_s: float) -> float:
            return self.behaviour(since_s / predicted_s, drawn, compute)

        load = VirtualLoad(
            num_blocks=len(blocks),
            block_bytes=self.block_bytes,
            clock=self.clock,
            share=share,
            began_s=self.clock.now_s(),
        )
        self.loads.append(load)
        return load


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request to come."""

    tokens: list[int]
    stored_share: float  # of it, in the tier
    at_s: float = 0.0


class VirtualDevice:
    """Steps take as long as predicted, divided by `speed`."""

    def __init__(self, clock: ManualClock, speed: float) -> None:
        self._clock = clock
        self._speed = speed
        self.scheduler: Scheduler

    def launch(self, plan: StepPlan) -> "_Step":
        return _Step(plan, self._clock, self.scheduler.newest_step_s / self._speed)


@dataclass(frozen=True, slots=True)
class _Step:
    plan: StepPlan
    clock: ManualClock
    duration_s: float

    @property
    def is_done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        self.clock.advance(self.duration_s)
        return result_of(self.plan)


def first_tokens(
    prompts: Sequence[Prompt], behaviour: Behaviour | None, args: argparse.Namespace
) -> tuple[list[float], int]:
    """Seconds from each prompt's arrival to its first token, and how many gave up waiting.

    behaviour: None = nothing is stored.
    """
    clock, rng = ManualClock(), random.Random(args.seed)
    device = VirtualDevice(clock, args.device_speed)
    block_bytes = round(1e6 * args.block_mb)
    block_s = block_bytes / 1e9 / args.load_gb_s
    chosen = BEHAVIOURS["never"] if behaviour is None else behaviour
    tier = VirtualTier(
        clock=clock, behaviour=chosen, block_bytes=block_bytes, block_s=block_s, rng=rng
    )
    cache = BlockCache(NUM_BLOCKS, enable_prefix_caching=True, protected_share=0.5)
    hasher = RequestHasher(bytes(16), model="m", dtype="bfloat16", block_size=BLOCK_SIZE)
    scheduler = device.scheduler = Scheduler(
        ResolvedScheduler(max_num_batched_tokens=8192, max_num_seqs=64, max_waiting=10**6),
        cache=cache,
        hasher=hasher,
        handoff_queue=HandoffSink(cache),
        block_size=BLOCK_SIZE,
        finish_rules=FinishRules((), NUM_BLOCKS * BLOCK_SIZE),
        laps=ResolvedLaps(),
        host_tier=tier,
    )
    # The engine fits these to its steps; here they are known.
    scheduler._prompts.model.costs = COSTS
    core = EngineCore(scheduler, device, clock, overlap=False)
    waiting = [(prompt.at_s, number) for number, prompt in enumerate(prompts)]
    first_s = [0.0] * len(prompts)
    while waiting or core.has_work:
        while waiting and waiting[0][0] <= clock.now_s():
            at_s, number = waiting.pop(0)
            request = _request(number, prompts[number], at_s)
            if behaviour is not None:
                hashes = hasher.chain(prompts[number].tokens, "")
                tier.stored.update(hashes[: int(prompts[number].stored_share * len(hashes))])
            scheduler.add(request)
        output = core.step()
        for _, record in output.tokens:
            number = int(record.key.request_id)
            first_s[number] = clock.now_s() - prompts[number].at_s
        if not output.has_progressed:
            until_s = waiting[0][0] - clock.now_s() if waiting else IDLE_S
            clock.advance(max(1e-6, min(core.idle_s(args.look_every_s), until_s)))
        if not waiting and all(first_s):
            break  # a stalled load may hold its blocks for long
    statistics = scheduler.host_statistics()
    return first_s, 0 if statistics is None else statistics.num_given_up


def _request(number: int, prompt: Prompt, at_s: float) -> Request:
    return Request(
        key=RequestKey(str(number)),
        ingress_id="lab",
        spec=RequestSpec(params=SamplingParams(max_tokens=1)),
        tokens=list(prompt.tokens),
        num_prompt_tokens=len(prompt.tokens),
        arrival_s=at_s,
    )


def _draw(rng: random.Random, args: argparse.Namespace) -> Prompt:
    low, high = args.prompt_tokens
    length = round(low * (high / low) ** rng.random())
    return Prompt(rng.choices(range(1, 30_000), k=length), rng.uniform(0.1, 1.0))


def alone(name: str, args: argparse.Namespace) -> list[str]:
    """A row: first tokens with stored parts over those of computing everything."""
    rng, ratios, num_given_up = random.Random(args.seed), list[float](), 0
    for _ in range(args.runs):
        prompt = _draw(rng, args)
        (computed_s,), _ = first_tokens([prompt], None, args)
        (found_s,), given_up = first_tokens([prompt], BEHAVIOURS[name], args)
        ratios.append(found_s / computed_s)
        num_given_up += given_up
    return [f"alone, {name}", *_cells(args.runs, num_given_up, _figures(ratios))]


def among_others(name: str, args: argparse.Namespace) -> list[str]:
    """A row: the same of each request of a queue; those without a stored part wait, too."""
    rng, ratios, num_given_up = random.Random(args.seed), list[float](), 0
    prompts, at_s = list[Prompt](), 0.0
    for _ in range(args.runs):
        drawn = _draw(rng, args)
        share = drawn.stored_share if rng.random() < 0.5 else 0.0
        prompts.append(Prompt(drawn.tokens, share, at_s))
        at_s += rng.expovariate(args.load / COSTS.seconds(len(drawn.tokens), 0))
    computed, _ = first_tokens(prompts, None, args)
    found, num_given_up = first_tokens(prompts, BEHAVIOURS[name], args)
    ratios = [a / b for a, b in zip(_figures(found), _figures(computed), strict=True)]
    return [f"among others, {name}", *_cells(args.runs, num_given_up, ratios)]


def _figures(numbers: Sequence[float]) -> tuple[float, float, float]:
    """Mean, 99 % and largest."""
    ordered = sorted(numbers)
    return sum(ordered) / len(ordered), ordered[int(0.99 * (len(ordered) - 1))], ordered[-1]


def _cells(num_prompts: int, num_given_up: int, figures: Sequence[float]) -> list[str]:
    return [str(num_prompts), str(num_given_up), *(f"{figure:.3f}" for figure in figures)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=300, help="prompts a row")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[512, 32_768])
    parser.add_argument("--load", type=float, default=0.7, help="of the device, by computing all")
    parser.add_argument("--block-mb", type=float, default=2.36, help="of Qwen3-8B in 16 bits")
    parser.add_argument("--load-gb-s", type=float, default=40.0, help="predicted speed of loads")
    parser.add_argument("--device-speed", type=float, default=1.0, help="1 = as the costs say")
    parser.add_argument("--look-every-s", type=float, default=1e-3, help="what a wake takes")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rows = [row(name, args) for row in (alone, among_others) for name in BEHAVIOURS]
    print("First tokens over those of computing everything\n")
    print(render_rows([HEADER, *map(tuple, rows)]))


if __name__ == "__main__":
    main()
