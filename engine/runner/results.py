"""A launched step on its way back: copies to the host, and the `StepResult` made from them.

    forward pass -> ComputedStep -> sampling -> PendingStep -> wait() -> StepResult

Copies are queued behind the step in its stream; `wait` blocks until they are there. What the host
keeps of a step until then is a `StepSlot`, made once and used in turn, because making page-locked
memory or an event for every step would cost more than launching it:

    take()  launch ... wait  give_back()         a slot belongs to one step at a time

`StepTimer` measures how long a step keeps its device busy, on a GPU by events in the stream, so
that neither the host's launches nor its waiting count twice. `WrittenBlocks` has the digests of the
blocks that the step wrote, for workers that send blocks away: when a step's tokens are on the host,
so are the digests. A block that is not full is digested with every step that adds to it.
"""

import time
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kv.store import KvStore, to_host
from engine.kv.tables import BlockTables
from engine.plan import StepPlan, StepResult, TokenLogprobs
from engine.runner.graphs import GraphOutput
from engine.runner.inputs import InputBatch
from engine.runner.prompt_logprobs import PromptTensors
from engine.sampling.sampled import LabelTensors, LogprobTensors


class ComputedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step's forward pass, queued."""

    batch: InputBatch
    logits: Tensor | None  # [S, vocab]; None = no row samples
    # by a graph, which kept each line's best token; None = without one
    replayed: GraphOutput | None
    # [T] bool; None = the logits tell
    is_finite_token: Tensor | None
    prompt: PromptTensors | None = None  # None = no row wants log-probabilities of its prompt


class StepTimer:
    """Times steps one after the other; on a CPU, where a launch computes, by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._start = torch.cuda.Event(enable_timing=True) if is_cuda else None
        self._end = torch.cuda.Event(enable_timing=True) if is_cuda else None
        # Looked up once a step: that costs as much as recording an event.
        self._stream: torch.cuda.Stream | None = None
        self._started_s = 0.0
        self._took_s = 0.0

    def start(self) -> None:
        """Starts the timing of a step; the one timed before was waited for."""
        if self._start is not None:
            self._stream = torch.cuda.current_stream()
            self._start.record(self._stream)
        else:
            self._started_s = time.perf_counter()

    def stop(self) -> None:
        """Ends the timing: all work of the step is queued, in the stream in which it began."""
        if self._end is not None:
            self._end.record(self._stream)
        else:
            self._took_s = time.perf_counter() - self._started_s

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._end is None or self._end.query()

    def wait(self) -> float:
        """Block until the device has done the step; returns its seconds."""
        if self._start is None or self._end is None:
            return self._took_s
        self._end.synchronize()
        milliseconds: float = self._start.elapsed_time(self._end)
        return 1e-3 * milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenBlocks:
    """The blocks of one launched step, and their digests, complete when the stream gets there."""

    block_ids: list[int]
    digests: Tensor  # int64 [n], on the host
    store: KvStore

    def keep(self) -> None:
        """Stores the digests; the step must have been waited for."""
        self.store.digests.keep(self.block_ids, self.digests.tolist())


def digest_written(plan: StepPlan, block_tables: BlockTables, store: KvStore) -> WrittenBlocks:
    """Queue the digests of all blocks that `plan`, launched just now, writes a token to.

    The plan has rows, and its admissions and new blocks were applied to `block_tables`.
    """
    block_size = store.layout.block_size
    num_before = np.array(plan.num_computed_tokens, dtype=np.int64)
    num_after = num_before + np.array(plan.num_new_tokens, dtype=np.int64)
    first = num_before // block_size
    rows = np.array(plan.rows, dtype=np.int64)
    block_ids = block_tables.slices(rows, first, -(-num_after // block_size) - first)
    digests = store.queue_digests(store.index(block_ids))
    return WrittenBlocks(block_ids=block_ids, digests=to_host(digests), store=store)


class StepSlot:
    """A step's timer, and the host memory that its tokens are copied to."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.timer = StepTimer(device)
        self._drawn = torch.zeros(max_rows, dtype=torch.int32, pin_memory=device.type == "cuda")

    def copy_drawn(self, drawn: Tensor) -> None:
        """Queue the copy of int32 [S] to the host; complete when the stream gets there."""
        self._drawn[: len(drawn)].copy_(drawn, non_blocking=True)

    def drawn(self, num_sampled: int) -> NDArray[np.int32]:
        """[S]  what was copied last, once that is done; the slot's own memory."""
        values: NDArray[np.int32] = self._drawn.numpy()
        return values[:num_sampled]


class StepSlots:
    """Device slots of steps in flight: as many as were ever in flight at once."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._device = device
        self._free: list[StepSlot] = []

    def take(self) -> StepSlot:
        """Returns a slot that no step uses."""
        return self._free.pop() if self._free else StepSlot(self._max_rows, self._device)

    def give_back(self, slot: StepSlot) -> None:
        """Takes a slot back whose step has ended and whose copies were read."""
        assert slot not in self._free, "a step was waited for twice"
        self._free.append(slot)


NOT_FINITE = -1  # in place of a token, as `kernels.input_ids` has it
_NOT_SAMPLED = -2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """The tensors of a step that are copied to the host."""

    # [S] int32  a token or `NOT_FINITE`; None: no row of the step samples
    drawn: Tensor | None
    # [T] bool; None = the sampled rows' logits suffice
    is_finite_token: Tensor | None
    # Of the few rows that ask; None = there is none.
    logprobs: LogprobTensors | None = None
    labels: LabelTensors | None = None
    prompt: PromptTensors | None = None
    # Of a worker that sends its blocks; on the host, or on the way there.
    written: WrittenBlocks | None = None


class PendingStep:
    """A step with rows; its results are final once `wait` returns."""

    def __init__(
        self,
        plan: StepPlan,
        batch: InputBatch,
        slots: StepSlots,
        slot: StepSlot,
        left: StepTensors,
    ) -> None:
        """Queues copies of what is `left`, and stops the timer of `slot` behind them."""
        self._plan = plan
        self._batch = batch
        self._slots = slots
        self._slot = slot
        if left.drawn is not None:
            slot.copy_drawn(left.drawn)
        self._logprobs = left.logprobs.map(_to_host) if left.logprobs else None
        self._labels = left.labels.map(_to_host) if left.labels else None
        self._prompt = left.prompt.map(_to_host) if left.prompt else None
        self._written = left.written
        flags = left.is_finite_token
        self._is_finite_token = None if flags is None else _to_host(flags)
        slot.timer.stop()

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._slot.timer.is_done

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host. Called once."""
        duration_s = self._slot.timer.wait()
        if self._written is not None:
            self._written.keep()
        sampled_places = self._batch.plan_rows[self._batch.sampling]
        # [R]  by plan row
        drawn = np.full(self._batch.num_rows, _NOT_SAMPLED, dtype=np.int32)
        drawn[sampled_places] = self._slot.drawn(len(sampled_places))
        self._slots.give_back(self._slot)
        if self._is_finite_token is not None:
            drawn[~self._finite_chunks(self._is_finite_token)] = NOT_FINITE
        if self._prompt is not None:
            drawn[self._prompt.not_finite()] = NOT_FINITE
        token_ids: list[int] = drawn.tolist()
        tokens = [[token_id] if token_id >= 0 else [] for token_id in token_ids]
        labels = self._label_values(sampled_places, token_ids)
        for place in labels:
            tokens[place] = []
        return StepResult(
            step=self._plan.step,
            tokens=tokens,
            logprobs=self._logprob_records(sampled_places.tolist(), token_ids),
            is_finite=(drawn != NOT_FINITE).tolist(),
            duration_s=duration_s,
            labels=labels,
            prompt_logprobs=self._prompt.records() if self._prompt else {},
        )

    def _finite_chunks(self, is_finite_token: Tensor) -> NDArray[np.bool_]:
        """[R] by plan row: whether every token of its chunk was computed from finite numbers."""
        flags = is_finite_token.numpy()
        by_plan_row = np.empty(self._batch.num_rows, dtype=bool)
        by_plan_row[self._batch.plan_rows] = np.logical_and.reduceat(
            flags, self._batch.first_tokens
        )
        return by_plan_row

    def _logprob_records(
        self, sampled_places: list[int], token_ids: list[int]
    ) -> list[list[TokenLogprobs] | None]:
        """[R] of the rows that asked and got a token."""
        by_plan_row: list[list[TokenLogprobs] | None] = [None] * len(token_ids)
        if self._logprobs is not None:
            records = self._logprobs.records(len(sampled_places))
            for place, record in zip(sampled_places, records, strict=True):
                if record is not None and token_ids[place] >= 0:
                    by_plan_row[place] = [record]
        return by_plan_row

    def _label_values(
        self, sampled_places: NDArray[np.int64], token_ids: list[int]
    ) -> dict[int, list[float]]:
        """Place in the plan -> label scores of a row that ends with its prompt, if finite."""
        if self._labels is None:
            return {}
        places: list[int] = sampled_places.tolist()
        by_line = self._labels.by_line()
        return {places[i]: v for i, v in by_line.items() if token_ids[places[i]] >= 0}


class EmptyStep:
    """A step without rows: it only changed the rows' tables or zeroed blocks."""

    def __init__(self, step: int) -> None:
        self._step = step

    @property
    def is_done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return StepResult(step=self._step, tokens=[], logprobs=[], is_finite=[])


def _to_host(tensor: Tensor) -> Tensor:
    """Returns a host copy, complete when the stream gets there; on a CPU the tensor itself."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
