"""Many workers, one placement and one clock: from a workload to the time of every token.

Events in the order of time: arrivals, the plan moments of workers, KV that has moved. Everything
is deterministic: ties go to arrivals first, then to what was scheduled first.
"""

import math
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

import numpy as np

from engine.cost_model import StepCosts
from engine.messages import RouteRequest
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from load_tests.simulation.fleet import Decoders, Prefillers
from load_tests.simulation.load_view import DecodeView, LoadView
from load_tests.simulation.prefix_cache import Chains, PrefixCache
from load_tests.simulation.real_worker import RealWorker
from load_tests.simulation.routing import Policy, PoolSizes, Router
from load_tests.simulation.worker import LightWorker, Outcome, Worker, WorkerSpec
from load_tests.simulation.workload import Counts, Floats, Workload

BLOCK_SIZE = 16  # tokens of a KV block, for the choice of who decodes


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """What serves: `num_prefill` workers, and what becomes of a request after its first token."""

    worker: WorkerSpec = field(default_factory=WorkerSpec)  # unified if it keeps decodes
    decode_costs: StepCosts | None = None  # of workers that decode alone; None = the worker's
    num_prefill: int = 1
    num_decode: int = 0  # 0 and not unified: a request ends with its first token
    policy: Policy = Policy.LAPS
    # From the first token to a row elsewhere, as on two H200s (load_tests/results/h200_handoff.md):
    # all but the last part of the KV has moved by then.
    handoff_s: float = 0.0027
    handoff_token_s: float = 6e-8
    is_real: bool = False  # the whole scheduler in each worker that prefills, and `route` itself

    def __post_init__(self) -> None:
        assert self.num_prefill > 0, "nobody prefills"
        is_split = self.num_decode > 0
        assert not (is_split and self.worker.keeps_decodes), "unified workers beside decoders"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What became of a workload; arrays [requests]."""

    workload: Workload
    first_s: Floats  # time of the first token
    last_s: Floats  # of the last one that was simulated
    cached_tokens: Counts  # of the prompt, found where it was computed
    num_decoded: Counts  # tokens after the first
    pool_sizes: list[PoolSizes]
    moves: tuple[str, ...]  # why workers changed pools

    @property
    def ttft_s(self) -> Floats:
        return self.first_s - self.workload.arrival_s

    @property
    def latency_s(self) -> Floats:
        """Until the last token; of first tokens alone where nothing decodes."""
        return self.last_s - self.workload.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """Seconds per token after the first; 0 for requests without one."""
        return (self.last_s - self.first_s) / np.maximum(self.num_decoded, 1)


class Cluster:
    """Serves one workload."""

    def __init__(self, spec: ClusterSpec, workload: Workload) -> None:
        self._spec = spec
        self._workload = workload
        num, unified = spec.num_prefill, spec.worker.keeps_decodes
        self._ends_first = not unified and spec.num_decode == 0
        # For the choice of a policy it does not matter who decodes what nobody decodes.
        prefillers = Prefillers(_names("prefill", num), is_unified=spec.num_decode == 0)
        decoders = Decoders(_names("decode", spec.num_decode)) if spec.num_decode else None
        self._prefillers, self._decoders = prefillers, decoders
        self._router = Router(
            spec.policy,
            laps=spec.worker.laps,
            costs=spec.worker.costs,
            prefillers=prefillers,
            decoders=decoders,
            is_exact=spec.is_real,
        )
        self._chains = None if workload.chains is None else Chains(workload.block_tokens)
        self._workers = [self._build_worker(i) for i in range(num)]
        self._decode_workers = [self._build_decoder() for _ in range(spec.num_decode)]
        self._loads = LoadView(prefillers, lambda i: self._workers[i].load())
        self._decode_loads = None
        if decoders is not None:
            self._decode_loads = DecodeView(
                decoders, max_kv_tokens=spec.worker.max_kv_tokens, block_size=BLOCK_SIZE
            )
        num_requests = len(workload)
        self._first_s = np.full(num_requests, math.nan)
        self._last_s = np.full(num_requests, math.nan)
        self._cached = np.zeros(num_requests, dtype=np.int64)
        self._params: dict[int, SamplingParams] = {}  # by the number of tokens: few differ
        self._decode_of: dict[Request, int] = {}
        # (when, serial, worker or -1, request that joins); the serial of a worker's plan moment
        # is kept, for an older one is worth nothing.
        self._events: list[tuple[float, int, int, Request | None]] = []
        self._serial = 0
        self._plan_serials = [0] * (num + spec.num_decode)

    def run(self) -> Served:
        """Serve all of it, to the last token."""
        index, arrivals = 0, self._workload.arrival_s.tolist()
        while index < len(arrivals) or self._events:
            event_s = self._events[0][0] if self._events else math.inf
            if index < len(arrivals) and arrivals[index] <= event_s:
                self._arrive(index, arrivals[index])
                index += 1
                continue
            now_s, serial, i, request = heappop(self._events)
            if request is not None:
                self._join(request, now_s)
            elif self._plan_serials[i] == serial:
                self._plan(i, now_s)
        assert not np.isnan(self._last_s).any(), "a request never ended"
        num_decoded = np.zeros_like(self._workload.output_tokens)
        return Served(
            workload=self._workload,
            first_s=self._first_s,
            last_s=self._last_s,
            cached_tokens=self._cached,
            num_decoded=num_decoded if self._ends_first else self._workload.output_tokens - 1,
            pool_sizes=self._router.sizes,
            moves=tuple(
                f"{m.at_s:.0f} s: {m.worker} to {m.pool}, {m.reason}"
                for m in self._router.pools.moves
            ),
        )

    # ---- events ---------------------------------------------------------------------------------

    def _arrive(self, index: int, now_s: float) -> None:
        """Place a request and submit it at once."""
        request = self._build_request(index, now_s)
        hits = {}
        if self._chains is not None and self._workload.chains is not None:
            chain = self._workload.chains[index]
            self._chains.of[request.key] = chain
            hits = dict(self._chains.hit_tokens(chain))
        if self._spec.policy is not Policy.ROUND_ROBIN:
            self._loads.expire(now_s)
        prompt = RouteRequest(num_prompt_tokens=request.num_prompt_tokens)
        assign = self._router.route(prompt, hits, now_s)
        if self._spec.policy is not Policy.ROUND_ROBIN:
            self._loads.note(assign, now_s)
        if assign.decode_worker is not None and request.params.max_tokens > 1:
            self._send_to_decoder(request, assign.decode_worker)
        i = self._prefillers.index[assign.prefill_worker]
        self._workers[i].add(request, now_s)
        self._schedule(i)

    def _plan(self, i: int, now_s: float) -> None:
        """A worker's plan moment."""
        num_prefill = len(self._workers)
        if i >= num_prefill:
            outcome = self._decode_workers[i - num_prefill].plan(now_s)
        else:
            outcome = self._workers[i].plan(now_s)
            if outcome.load is not None:
                self._loads.report(i, outcome.load)
        self._schedule(i)
        self._take(outcome)

    def _take(self, outcome: Outcome) -> None:
        for request, at_s in outcome.first_tokens:
            index = int(request.key.request_id)
            self._first_s[index] = at_s
            self._cached[index] = request.num_cached_tokens or 0
            if self._chains is not None:
                del self._chains.of[request.key]
            if request in self._decode_of:
                moved_s = self._spec.handoff_token_s * request.num_prompt_tokens
                self._push(at_s + self._spec.handoff_s + moved_s, -1, request)
            elif self._ends_first or request.params.max_tokens == 1:
                self._last_s[index] = at_s
        for request, at_s in outcome.finished:
            if self._first_s[int(request.key.request_id)] < at_s:
                self._end_decode(request, at_s)

    def _join(self, request: Request, now_s: float) -> None:
        """The KV of a prompt has arrived."""
        i = self._decode_of[request]
        self._decode_workers[i].join(request, now_s)
        self._schedule(len(self._workers) + i)

    def _end_decode(self, request: Request, at_s: float) -> None:
        self._last_s[int(request.key.request_id)] = at_s
        i = self._decode_of.pop(request, None)
        if i is not None and self._decode_loads is not None:
            self._decode_loads.leave(i, request.num_prompt_tokens + request.params.max_tokens)

    # ---- parts ----------------------------------------------------------------------------------

    def _send_to_decoder(self, request: Request, worker: str) -> None:
        assert self._decoders is not None, f"{worker} of no decoders"
        assert self._decode_loads is not None, f"{worker} of no decoders"
        i = self._decoders.index[worker]
        self._decode_of[request] = i
        self._decode_loads.enter(i, request.num_prompt_tokens + request.params.max_tokens)

    def _schedule(self, i: int) -> None:
        """Its next plan moment may have changed."""
        num_prefill = len(self._workers)
        worker = self._workers[i] if i < num_prefill else self._decode_workers[i - num_prefill]
        self._plan_serials[i] = self._serial  # of the event pushed next, if any
        if worker.next_plan_s < math.inf:
            self._push(worker.next_plan_s, i, None)
        else:
            self._serial += 1

    def _push(self, at_s: float, i: int, request: Request | None) -> None:
        heappush(self._events, (at_s, self._serial, i, request))
        self._serial += 1

    def _build_request(self, index: int, now_s: float) -> Request:
        num_tokens = int(self._workload.prompt_tokens[index])
        max_tokens = 1 if self._ends_first else int(self._workload.output_tokens[index])
        params = self._params.get(max_tokens)
        if params is None:
            params = self._params[max_tokens] = SamplingParams(max_tokens=max_tokens)
        return Request(
            spec=RequestSpec(params=params),
            key=RequestKey(str(index)),
            ingress_id="",
            tokens=[0] * num_tokens,
            num_prompt_tokens=num_tokens,
            arrival_s=now_s,
        )

    def _build_worker(self, i: int) -> Worker:
        spec = self._spec.worker
        if self._spec.is_real:
            assert self._chains is None, "the whole scheduler is simulated without prefix hits"
            return RealWorker(spec)
        cache = None if self._chains is None else PrefixCache(self._chains, i, spec.max_kv_tokens)
        return LightWorker(spec, cache)

    def _build_decoder(self) -> LightWorker:
        return LightWorker(_decoder_spec(self._spec))


def _decoder_spec(cluster: ClusterSpec) -> WorkerSpec:
    """The same device, for decodes alone."""
    costs = cluster.decode_costs or cluster.worker.costs
    return replace(cluster.worker, costs=costs, keeps_decodes=True, predicts=False)


def _names(role: str, num: int) -> list[str]:
    """In ascending order, also as text."""
    return [f"{role}-{i:05d}" for i in range(num)]


def serve(spec: ClusterSpec, workload: Workload) -> Served:
    """What becomes of the workload."""
    return Cluster(spec, workload).run()
