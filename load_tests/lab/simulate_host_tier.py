"""The bench of the host tier (bench_host_tier.py) on a virtual clock, with figures of an H200.

    python -m load_tests.lab.simulate_host_tier --scale 1 --duration-s 40 --max-model-len 8192 \\
        --max-output-tokens 16 --at-once 2 --host-gib 6

Scheduler, block cache, tier and arena are the engine's own, with all of the tier's threads. In
place of a device there are times: of steps (costs that the scheduler has to learn), of the bus in
each direction, and of streams that wait for each other as in engine/kv/host/movers.py. A digest of
what was loaded waits for a kernel of the step beside it, which takes up to `--kernel-ms`. The
thread that steps has the interpreter for `--turn-ms` a step; another one that wants to go on gets
it after `--switch-ms` (see actors/lifecycle/threads.py).
"""

import argparse
import random
import secrets
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass

import msgspec

from actors.lifecycle.threads import SWITCH_S
from configs.resolved import ResolvedLaps, ResolvedScheduler
from engine.core import EngineCore
from engine.cost_model import PRIOR, StepCosts
from engine.kv.cache import BlockCache, check_blocks
from engine.kv.hashes import RequestHasher
from engine.kv.host.arena import HostArena
from engine.kv.host.movers import Copy
from engine.kv.host.staging import StagingRows
from engine.kv.host.tier import HostTier
from engine.plan import StepPlan, StepResult
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.scheduling.finish import FinishRules
from engine.scheduling.scheduler import Scheduler
from load_tests.http_load.schedule import Session
from load_tests.lab import bench_host_tier as bench
from load_tests.simulation.real_worker import HandoffSink, result_of
from load_tests.tables import render_rows
from load_tests.testbed.virtual_time import Signal, VirtualLane, VirtualTime

BLOCK_BYTES = 16 * 147_456  # Qwen3-8B in 16 bits
VOCABULARY = 30_000
# Measured on an H200: load_tests/results/host_tier.md.
BUS_BYTES_S = 49e9
BURST_BYTES = 10 * 2**20
BURST_S = 0.08e-3  # queueing one, and hearing of its end
STAGE_S, STAGE_BLOCK_S = 0.45e-3, 1.3e-6  # of a save, and of each of its blocks
DIGEST_S = 0.2e-3
LOAD_START_S = 0.5e-3  # until its thread has it
BESIDE_SAVE_S, BESIDE_LOAD_S = 0.33e-3, 0.74e-3  # that a step takes longer

COUNTED = ["hit_blocks", "stored", "dropped", "skipped"]
HEADER = [
    "run", "first token ms: mean", "p50", "p90", "turns/s", "found %", "from host %", "loads",
    "given up", "unworthy", "tokens computed", "load GB/s", *COUNTED, "steps held, ms", "longest",
]  # fmt: skip


class Stream:
    """What is queued runs one after the other."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self.free_s = 0.0

    @property
    def is_busy(self) -> bool:
        return self.free_s > self._time.now_s()

    def queue(self, seconds: float, after_s: float = 0.0) -> float:
        """Returns when it will have ended."""
        self.free_s = max(self.free_s, self._time.now_s(), after_s) + seconds
        return self.free_s


class VirtualGpu:
    """Executor and `BlockMover`: nothing is computed or moved, and all of it takes its time."""

    def __init__(self, time: VirtualTime, args: argparse.Namespace, num_blocks: int) -> None:
        self._time = time
        self._kernel_s, self._turn_s = args.kernel_ms / 1e3, args.turn_ms / 1e3
        self._switch_s = args.switch_ms / 1e3
        self._turn_end_s = 0.0  # until then the thread that steps has the interpreter
        self._costs = _true_costs(args.prefill_tokens_s)
        self._rng = random.Random(args.seed)
        self._steps, self._saves = Stream(time), Stream(time)
        self._up, self._down = Stream(time), Stream(time)
        self.rows = StagingRows(min(args.staged, num_blocks))
        self.scheduler: Scheduler
        self.held_s: list[float] = []  # by saves: the steps, and the thread that launches them

    def launch(self, plan: StepPlan) -> "_Step":
        self._turn_end_s = self._time.now_s() + self._turn_s
        self._time.wait_until(self._turn_end_s)
        newest = self.scheduler._in_flight.newest
        seconds = self._costs.step_seconds(newest.work) * self._rng.uniform(0.98, 1.02)
        seconds += BESIDE_SAVE_S * self._down.is_busy + BESIDE_LOAD_S * self._up.is_busy
        return _Step(plan, self._time, self._steps.queue(seconds), seconds)

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> Callable[[], list[int]]:
        rows = self.rows.take(len(block_ids))
        num_direct = len(block_ids) - len(rows)
        self._time.wait_until(self._time.now_s() + STAGE_S)
        held_up_s = self._rng.uniform(0.0, self._kernel_s) * self._steps.is_busy
        are_read_s = self._saves.queue(held_up_s + STAGE_BLOCK_S * len(rows))
        if num_direct:
            self._down.queue(num_direct * BLOCK_BYTES / BUS_BYTES_S, are_read_s)
            are_read_s = self._saves.free_s = self._down.free_s
        before_s = max(self._time.now_s(), self._steps.free_s)
        self._steps.free_s = max(self._steps.free_s, are_read_s)
        self.held_s.append(max(0.0, are_read_s - before_s) + STAGE_S)

        def wait() -> list[int]:
            self._wait_beside(are_read_s)
            for first, num in _bursts(len(rows)):
                self._wait_beside(self._down.queue(num * BLOCK_BYTES / BUS_BYTES_S) + BURST_S)
                self.rows.give_back(rows[first : first + num])
            return [0] * len(block_ids)

        return wait

    def begin_load(self) -> Copy:
        are_read_s = max(self._saves.free_s, self._time.now_s() + LOAD_START_S)

        def load(slots: Sequence[int], block_ids: Sequence[int]) -> list[int]:
            self._wait_beside(max(self._time.now_s(), are_read_s))
            for _, num in _bursts(len(slots)):
                self._wait_beside(self._up.queue(num * BLOCK_BYTES / BUS_BYTES_S) + BURST_S)
            held_up_s = self._rng.uniform(0.0, self._kernel_s) * self._steps.is_busy
            self._wait_beside(self._time.now_s() + DIGEST_S + held_up_s)
            return [0] * len(slots)

        return load

    def _wait_beside(self, until_s: float) -> None:
        """On a thread beside the one that steps: until then, and until it has the interpreter."""
        self._time.wait_until(until_s)
        now_s = self._time.now_s()
        self._time.wait_until(max(now_s, min(self._turn_end_s, now_s + self._switch_s)))


def _true_costs(prefill_tokens_s: float) -> StepCosts:
    """What steps take: the scheduler begins with others, and learns."""
    faster = 1 / (prefill_tokens_s * PRIOR.slopes_s[-1])
    slopes_s = tuple(faster * slope_s for slope_s in PRIOR.slopes_s)
    return msgspec.structs.replace(PRIOR, slopes_s=slopes_s, floor_s=3.7e-3)


def _bursts(num_blocks: int) -> Iterator[tuple[int, int]]:
    size = max(1, BURST_BYTES // BLOCK_BYTES)
    return ((i, min(size, num_blocks - i)) for i in range(0, num_blocks, size))


@dataclass(frozen=True, slots=True)
class _Step:
    plan: StepPlan
    time: VirtualTime
    end_s: float
    seconds: float

    @property
    def is_done(self) -> bool:
        return self.time.now_s() >= self.end_s

    def wait(self) -> StepResult:
        self.time.wait_until(max(self.time.now_s(), self.end_s))
        return msgspec.structs.replace(result_of(self.plan), duration_s=self.seconds)


class VirtualEngine:
    """A `Player`: all of an engine that decides."""

    def __init__(self, args: argparse.Namespace, num_blocks: int, num_stored: int) -> None:
        """num_stored: blocks of the arena; 0 = there is no tier."""
        self.time = time = VirtualTime()
        self._has_news = Signal(time)
        self.gpu = VirtualGpu(time, args, num_blocks)
        self.tier: HostTier | None = None
        if num_stored > 0:
            arena = _small_arena(num_stored)
            self.tier = HostTier(
                arena,
                self.gpu,
                num_staged=min(args.staged, num_blocks),
                clock=time,
                lane=lambda _: VirtualLane(time),
            )
            self.tier.on_progress(self._has_news.set)
        self.cache = BlockCache(
            num_blocks,
            enable_prefix_caching=True,
            protected_share=0.5,
            on_evict=None if self.tier is None else self.tier.save,
        )
        self.scheduler = self.gpu.scheduler = Scheduler(
            ResolvedScheduler(max_num_batched_tokens=8192, max_num_seqs=64, short_share=0.0),
            cache=self.cache,
            hasher=RequestHasher(
                bytes(16), model="m", dtype="bfloat16", block_size=bench.BLOCK_SIZE
            ),
            handoff_queue=HandoffSink(self.cache),
            block_size=bench.BLOCK_SIZE,
            finish_rules=FinishRules((), args.max_model_len),
            laps=ResolvedLaps(),
            host_tier=self.tier,
        )
        self.core = EngineCore(self.scheduler, self.gpu, time, overlap=True)
        self._num_requests = 0

    def begin(self, prompt: list[int], num_tokens: int) -> Hashable:
        self._num_requests += 1
        key = RequestKey(f"{self._num_requests:032x}")
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        self.scheduler.add(
            Request(
                spec=RequestSpec(params=params),
                key=key,
                ingress_id="lab",
                tokens=list(prompt),
                num_prompt_tokens=len(prompt),
                arrival_s=self.time.now_s(),
            )
        )
        return key

    def step(self) -> Sequence[bench.Progress]:
        self._has_news.clear()
        output = self.core.step()
        assert not output.failures, f"failed: {output.failures}"
        if not output.has_progressed:
            self._has_news.wait(self.core.idle_s(bench.IDLE_WAIT_S))
        return [
            bench.Progress(record.key, [record.token_id], record.num_cached_tokens or 0)
            for _, record in output.tokens
        ]

    def counts(self) -> Counter[str]:
        """Of the tier and its loads since the start; none without a tier."""
        loads = self.scheduler.host_statistics()
        if self.tier is None or loads is None:
            return Counter()
        found = asdict(loads) | asdict(self.tier.statistics())
        return Counter({name: found[name] for name in found if name.startswith("num_")})

    def close(self) -> None:
        """Raises AssertionError if a block is lost, on the device or on the host."""
        if self.tier is not None:
            while self.core.has_work:
                self.step()
            check_blocks(self.cache, self.scheduler.owners())
            self.tier.check_conservation()
            self.tier.close()


def _small_arena(num_blocks: int) -> HostArena:
    """With room for a word a block, which counts as `BLOCK_BYTES`."""
    word, name = 8, f"lab-{secrets.token_hex(8)}"
    room = num_blocks * (word + 56) + 2**21 + 4128
    arena = HostArena(name, num_bytes=room, block_bytes=word, fingerprint=bytes(16))
    arena.block_bytes = BLOCK_BYTES
    return arena


class Simulation:
    """Engines over the same conversations, and what each of them would take."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._sessions, self._num_blocks = bench.draw(args)
        self.rows = [HEADER]

    def run(self, host_gib: float) -> None:
        """Adds a row for each kind of prompts."""
        num_stored = int(host_gib * 2**30) // BLOCK_BYTES
        engine = VirtualEngine(self._args, self._num_blocks, num_stored)
        self._play(engine, self._sessions[:3], bench.WARM_SALT, 1, grows=False)  # fits the costs
        for grows, about in ((True, "conversations"), (False, "all different")):
            before = engine.counts()
            engine.gpu.held_s = [0.0]
            result = self._play(engine, self._sessions, 1, self._args.at_once, grows=grows)
            counts = engine.counts() - before
            result.num_loaded_tokens = counts["num_loaded"] * bench.BLOCK_SIZE
            result.num_loads = counts["num_waits"]
            result.num_given_up = counts["num_given_up"]
            result.num_unworthy = counts["num_unworthy_blocks"]
            result.load_gb_s = bench.load_gb_s(engine.tier, BLOCK_BYTES)
            named = dict(
                zip(bench.HEADER, [f"{about}, {host_gib:g} GiB", *result.cells()], strict=True)
            )
            cells = [named[name] for name in HEADER[: -len(COUNTED) - 2]]
            held_ms = [1e3 * s for s in engine.gpu.held_s]
            cells += [str(counts[f"num_{name}"]) for name in COUNTED]
            self.rows.append([*cells, f"{sum(held_ms):.1f}", f"{max(held_ms):.1f}"])
        engine.close()

    def _play(
        self,
        engine: VirtualEngine,
        sessions: Sequence[Session],
        salt: int,
        at_once: int,
        *,
        grows: bool,
    ) -> bench.Result:
        prompts = bench.Prompts(sessions, VOCABULARY, salt, grows=grows)
        asks = list(bench.in_order(sessions, self._args.gap_s))
        return bench.play(engine, prompts, asks, at_once, engine.time.now_s)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefill-tokens-s", type=float, default=60e3)
    parser.add_argument("--staged", type=int, default=1000, help="blocks, on their way to the host")
    parser.add_argument("--kernel-ms", type=float, default=1.0, help="that a digest may wait for")
    parser.add_argument("--turn-ms", type=float, default=1.0, help="of the host, a step")
    parser.add_argument(
        "--switch-ms", type=float, default=1e3 * SWITCH_S, help="of the interpreter; Python's is 5"
    )


def main() -> None:
    parser = bench.build_parser()
    add_options(parser)
    args = parser.parse_args()
    simulation = Simulation(args)
    for host_gib in (0.0, args.host_gib):
        simulation.run(host_gib)
    print(render_rows(simulation.rows))


if __name__ == "__main__":
    main()
