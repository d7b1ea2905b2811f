"""One worker's engine in this process, which keeps a hash of every line of logits of one request.

Real scheduler, block cache, handoff books and executor; random neighbours; no Ray, no threads.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.schema import SchedulerConfig
from engine.clock import MonotonicClock
from engine.core import EngineCore
from engine.kv.cache import BlockCache, check_blocks
from engine.kv.hashes import RequestHasher
from engine.kv.layout import KvDtype, KvLayout
from engine.kv.store import KvStore
from engine.kv.transfer import (
    HandoffProgress,
    HandoffReady,
    HandoffRetracted,
    IncomingHandoffs,
    JoiningRank,
    OutgoingEvent,
    OutgoingHandoffs,
)
from engine.messages import WorkerIdentity
from engine.models.llama import CausalLM, attention_shape
from engine.models.registry import build_model
from engine.models.spec import load_spec
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.runner.executor import Executor
from engine.runner.executor_options import ExecutorOptions
from engine.runner.graphs import CudaRecorder
from engine.runner.warm_up import warm_up
from engine.sampling.sampler import Sampler
from engine.scheduling.contracts import StepOutput
from engine.scheduling.finish import FinishRules
from engine.scheduling.scheduler import Scheduler
from kernels.attention.names import AttentionNames
from kernels.attention.phased import Phases
from kernels.attention.select import build_attention
from kernels.kv.scales import KvScales
from tests.actors.kv_transfer.line_sampler import LineSampler
from tests.actors.kv_transfer.token_by_token import build_token_by_token
from tests.harness.tiny_models import VOCAB_SIZE

BLOCK_SIZE = 16
NUM_BLOCKS = 160
MAX_ROWS = 8
MAX_MODEL_LEN = 256  # of tests/harness/tiny_models.py
MAX_NUM_BATCHED_TOKENS = 300
STEP_TOKENS = (8, 11, 40, 150, MAX_NUM_BATCHED_TOKENS)  # one of them in each trial
MAX_STEPS = 2000  # of a trial on one worker: far more than any takes
WATCHED = RequestKey("0" * 32)


@dataclass(frozen=True)
class Watched:
    """The request that is computed again and again."""

    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Seen:
    """What one worker made of the watched request."""

    tokens: list[int]
    lines: list[str]  # a hash of the logits behind each token
    blocks: list[int]  # digests of its full KV blocks; [] where it went on elsewhere
    num_preemptions: int


class NotingScheduler(Scheduler):
    """The real one, and the watched request once it is here."""

    watched: Request | None = None

    def add(self, request: Request) -> None:
        self.watched = request if request.key == WATCHED else self.watched
        super().add(request)

    def join(self, request: Request) -> None:
        self.watched = request
        super().join(request)


class HashedWorker:
    """An executor, and for each trial a new scheduler with its books, neighbours and limits."""

    def __init__(
        self, folder: Path, device: str, *, captures: bool = False, in_fp8: bool = False
    ) -> None:
        """`captures`: decode steps replay CUDA graphs. Deterministic mode on a GPU.

        in_fp8: K and V are kept as e4m3 numbers.
        """
        self._device = torch.device(device)
        model, attention = _build_model(folder, self._device, in_fp8=in_fp8)
        self._spec = spec = model.spec
        self.layout = layout_of(folder, device, in_fp8=in_fp8)
        scales = KvScales.of(torch.full((spec.num_layers, 2, spec.num_kv_heads), 0.3).to(device))
        self._sampler = LineSampler(
            Sampler(model.spec.vocab_size, MAX_ROWS, model.spec.eos_token_ids, self._device)
        )
        self._executor = Executor(
            model,
            layout=self.layout,
            num_blocks=NUM_BLOCKS,
            max_rows=MAX_ROWS,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            sampler=self._sampler,
            attention=attention,
            options=ExecutorOptions(sends_blocks=True, kv_scales=scales if in_fp8 else None),
        )
        self._captures = captures

    def use_store(self, store: KvStore) -> None:
        """Compute in `store`, which channels can read and write; before the first trial."""
        assert store.num_blocks == NUM_BLOCKS, f"{store.num_blocks} blocks"
        self._executor._passes.kv_store = store

    @property
    def store(self) -> KvStore:
        return self._executor.kv_store

    def get_ready(self) -> None:
        if self._device.type != "cuda":
            return
        warm_up(
            self._executor,
            num_rows=MAX_ROWS,
            num_blocks=NUM_BLOCKS,
            max_tokens=MAX_NUM_BATCHED_TOKENS,
            max_row_tokens=MAX_MODEL_LEN - 1,
        )
        if self._captures:
            self._executor.capture_graphs(CudaRecorder(), print, prompts=None)

    # ---- a trial --------------------------------------------------------------------------------

    def begin(
        self, watched: Watched, seed: int, *, max_num_batched_tokens: int | None = None
    ) -> None:
        """New books and random neighbours, some of which have a part of the watched prompt."""
        self.rng = rng = random.Random(seed)
        self._watched = watched
        self._sampler.watch(watched.prompt)
        self._tokens: list[int] = []
        self._block_ids: list[int] = []
        self._has_ended = False
        self._num_neighbours = 0
        self._num_steps = 0
        self._taken: list[int] = []
        self.shared: list[int] = []
        self.ready: HandoffReady | None = None
        clock = MonotonicClock()
        self.cache = BlockCache(
            NUM_BLOCKS, enable_prefix_caching=rng.random() < 0.7, protected_share=0.8
        )
        hasher = RequestHasher(b"k" * 32, model="m", dtype=self.layout.dtype, block_size=BLOCK_SIZE)
        self.outgoing = OutgoingHandoffs(self.cache, self._on_outgoing)
        self.scheduler = NotingScheduler(
            SchedulerConfig(
                max_num_batched_tokens=max_num_batched_tokens or rng.choice(STEP_TOKENS),
                max_num_seqs=MAX_ROWS,
            ),
            cache=self.cache,
            hasher=hasher,
            handoff_queue=self.outgoing,
            block_size=BLOCK_SIZE,
            finish_rules=FinishRules(self._spec.eos_token_ids, MAX_MODEL_LEN),
        )
        self.incoming = IncomingHandoffs(
            [JoiningRank(cache=self.cache, scheduler=self.scheduler)],
            hasher=hasher,
            identity=self.identity,
            clock=clock,
            lease_s=1e6,
            max_rows=MAX_ROWS,
        )
        self._core = EngineCore(self.scheduler, self._executor, clock, overlap=rng.random() < 0.5)
        for _ in range(rng.randrange(5)):
            self.add_neighbour()
        for _ in range(rng.randrange(12)):
            self.step()

    @property
    def identity(self) -> WorkerIdentity:
        return WorkerIdentity(
            name="worker",
            incarnation="1",
            role="unified",
            model="m",
            layout=self.layout,
            max_model_len=MAX_MODEL_LEN,
            pid=1,
        )

    def add_watched(
        self, emitted: Sequence[int] = (), decode_worker: str | None = None, salt: str = ""
    ) -> None:
        """`emitted`: what another worker has sampled of it already.

        salt: with one, no neighbour's blocks are found for it.
        """
        watched = self._watched
        self.scheduler.add(
            Request(
                spec=RequestSpec(params=watched.params, salt=salt),
                key=WATCHED,
                ingress_id="test",
                tokens=[*watched.prompt, *emitted],
                num_prompt_tokens=len(watched.prompt),
                arrival_s=time.monotonic(),
                num_emitted_tokens=len(emitted),
                decode_worker=decode_worker,
            )
        )

    def add_neighbour(self) -> None:
        rng = self.rng
        num_tokens = rng.randrange(1, 120)
        tokens = [rng.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)]
        if rng.random() < 0.3:
            tokens = self._watched.prompt[: rng.randrange(len(self._watched.prompt))] + tokens
        params = SamplingParams(
            max_tokens=rng.randrange(1, 60),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(2**60),
            ignore_eos=True,
        )
        self._add_neighbour(tokens[:190], params)

    def add_growing(self, number: int) -> None:
        """Neighbours that soon compute a token a step for long, and need blocks for them."""
        for _ in range(number):
            tokens = [self.rng.randrange(3, VOCAB_SIZE) for _ in range(self.rng.randrange(1, 8))]
            params = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
            self._add_neighbour(tokens, params)

    def step(self) -> None:
        """One step, maybe with another neighbour from then on."""
        counts = self.scheduler.statistics()
        has_room = counts.num_waiting == 0 and counts.num_running < MAX_ROWS - 2
        if has_room and self.rng.random() < 0.1:
            self.add_neighbour()
        self._note_blocks()
        self._num_steps += 1
        assert self._num_steps < MAX_STEPS, f"{len(self._tokens)} tokens after {MAX_STEPS} steps"
        self._hear(self._core.step())

    def run(self, num_tokens: int) -> None:
        """Until the watched request has so many tokens here, or all it may have."""
        while len(self._tokens) < num_tokens and not self._has_ended:
            self.step()

    def run_preempted(self) -> None:
        """Take all blocks until the watched request has lost its own; then give them back."""
        num_before = self.num_preemptions
        while self.num_preemptions == num_before and not self._has_ended:
            self._squeeze()
        if self.rng.random() < 0.5:
            self.take_blocks()  # and with them what the prefix cache had of it
        self.give_blocks()

    def squeeze_prompt(self) -> None:
        """The same while its prompt computes, if others need blocks meanwhile."""
        num_before = self.num_preemptions
        while self.is_computing and self.num_preemptions == num_before:
            self._squeeze()
        self.give_blocks()

    def take_blocks(self) -> None:
        self._taken += self.cache.allocate(self.cache.num_available) or []

    def give_blocks(self) -> None:
        self.cache.release(self._taken)
        self._taken = []

    @property
    def is_computing(self) -> bool:
        """Whether the watched request's prompt is under way."""
        return bool(self._blocks_of_watched()) and not self._tokens

    @property
    def num_preemptions(self) -> int:
        """Of the watched request, here."""
        watched = self.scheduler.watched
        return 0 if watched is None else watched.num_preemptions

    def end(self, *, with_blocks: bool) -> Seen:
        """What was seen; every other request is dropped, and the books are checked."""
        self._hear(self._core.settle())
        self.scheduler.abort(WATCHED)
        blocks = []
        if with_blocks:
            known = len(self._watched.prompt) + self._watched.params.max_tokens
            num_full = (known - 1) // BLOCK_SIZE  # the last token's KV is never computed
            assert len(self._block_ids) >= num_full, f"{self._block_ids} for {num_full}"
            blocks = self.store.digest(self._block_ids[:num_full])
        for key in self.scheduler.requests_of("test"):
            self.scheduler.abort(key)
        self.outgoing.release(WATCHED)
        self.give_blocks()
        owners = [*self.scheduler.owners(), *self.outgoing.owners(), *self.incoming.owners()]
        check_blocks(self.cache, owners)
        assert not owners, f"left behind: {owners}"
        lines = self._sampler.lines
        assert len(lines) == len(self._tokens), f"{len(lines)} lines, {len(self._tokens)} tokens"
        return Seen(self._tokens, lines, blocks, self.num_preemptions)

    # ---- parts ----------------------------------------------------------------------------------

    def _add_neighbour(self, tokens: list[int], params: SamplingParams) -> None:
        self._num_neighbours += 1
        self.scheduler.add(
            Request(
                spec=RequestSpec(params=params),
                key=RequestKey(f"{self._num_neighbours:032x}"),
                ingress_id="test",
                tokens=tokens,
                num_prompt_tokens=len(tokens),
                arrival_s=time.monotonic(),
            )
        )

    def _on_outgoing(self, event: OutgoingEvent) -> None:
        match event:
            case HandoffProgress():
                self.shared = event.block_ids
            case HandoffRetracted():
                self.shared = []
                self.outgoing.let_go(event.key)  # nothing reads between two steps
            case HandoffReady():
                self.ready = event
            case _:
                pass

    def _hear(self, output: StepOutput) -> None:
        assert not output.failures, f"failed: {output.failures}"
        for _, record in output.tokens:
            if record.key == WATCHED:
                self._tokens.append(record.token_id)
                self._has_ended = record.finish is not None

    def _blocks_of_watched(self) -> list[int]:
        watched = self.scheduler.watched
        return [] if watched is None else list(watched.block_ids)

    def _note_blocks(self) -> None:
        self._block_ids = self._blocks_of_watched() or self._block_ids

    def _squeeze(self) -> None:
        """A step with every other block taken, if the watched request has its own."""
        if self._blocks_of_watched():
            self.take_blocks()
        else:
            self.give_blocks()
        self.step()


def layout_of(folder: Path, device: str, *, in_fp8: bool = False) -> KvLayout:
    dtype: KvDtype = "bfloat16" if device.startswith("cuda") else "float32"
    if in_fp8:
        dtype = "fp8_e4m3"
    return load_spec(folder).kv_layout(block_size=BLOCK_SIZE, dtype=dtype)


def _build_model(folder: Path, device: torch.device, *, in_fp8: bool) -> tuple[CausalLM, Phases]:
    if device.type == "cpu":
        return build_token_by_token(folder, BLOCK_SIZE, in_fp8=in_fp8)
    model = build_model(folder, dtype=torch.bfloat16, device=device, is_deterministic=True)
    attention = build_attention(
        AttentionNames(prefill="auto", decode="auto"),
        attention_shape(model.spec),
        block_size=BLOCK_SIZE,
        dtype=model.dtype,
        device=device,
        fixed_tile=True,
        is_fp8=in_fp8,
    )
    return model, attention
