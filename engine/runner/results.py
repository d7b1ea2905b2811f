"""Copies a launched step's results to the host and makes the `StepResult` from them.

    forward pass -> ComputedStep -> sampling -> PendingStep -> wait() -> StepResult

Copies are queued after the step in its stream; `wait` blocks until they are complete. The host's
memory and events of a step are a `StepSlot`. Slots are reused, because allocating page-locked
memory or an event for every step would cost more than launching it:

    take()  launch ... wait  give_back()         a slot belongs to one step at a time

`StepTimer` measures how long a step keeps its device busy. On a GPU it uses events in the stream,
so neither the host's launches nor its waiting are counted. `WrittenBlocks` has the digests of the
blocks that the step wrote, for workers that send blocks away: they reach the host with the step's
tokens. A partially filled block is digested again with every step that adds to it.
"""

import time
from collections.abc import Sequence
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
from engine.speculation.acceptance import NO_DRAFT, count_accepted


class ComputedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step's queued forward pass."""

    batch: InputBatch
    own_logits: Tensor | None  # [S, ids], of `CausalLM.own_logits`; None = no row samples
    # output of the replayed graph, including each line's best token; None = no graph
    replayed: GraphOutput | None
    # [T] bool; None = only the logits are checked
    is_finite_token: Tensor | None
    prompt: PromptTensors | None = None  # None = no row asks for prompt log-probabilities
    exported: Tensor | None = None  # as of `ForwardResult`; of a graph, with padding at its end


class StepTimer:
    """Times steps one at a time; on a CPU, where a launch computes, by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._start = torch.cuda.Event(enable_timing=True) if is_cuda else None
        self._end = torch.cuda.Event(enable_timing=True) if is_cuda else None
        self._stream: torch.cuda.Stream | None = None  # looked up once a step: as slow as a record
        self._started_s = 0.0
        self._took_s = 0.0

    def start(self) -> None:
        """Call before the step's first work; the previous timed step was waited for."""
        if self._start is not None:
            self._stream = torch.cuda.current_stream()
            self._start.record(self._stream)
        else:
            self._started_s = time.perf_counter()

    def stop(self) -> None:
        """Call when all work of the step is queued, in the stream in which it began."""
        if self._end is not None:
            self._end.record(self._stream)
        else:
            self._took_s = time.perf_counter() - self._started_s

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._end is None or self._end.query()

    def wait(self) -> float:
        """Block until the device has finished the step; returns its duration in seconds."""
        if self._start is None or self._end is None:
            return self._took_s
        self._end.synchronize()
        milliseconds: float = self._start.elapsed_time(self._end)
        return 1e-3 * milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenBlocks:
    """Blocks that one launched step wrote; `digests` is valid once the stream has reached it."""

    block_ids: list[int]
    digests: Tensor  # int64 [n], on the host
    store: KvStore

    def keep(self) -> None:
        """Record the digests in the store; the step must have been waited for."""
        self.store.digests.keep(self.block_ids, self.digests.tolist())


def digest_written(plan: StepPlan, block_tables: BlockTables, store: KvStore) -> WrittenBlocks:
    """Queue the digests of all blocks to which `plan`, just launched, writes a token.

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
    """One step's timer, and the host memory for its tokens."""

    def __init__(self, max_samples: int, device: torch.device) -> None:
        self.timer = StepTimer(device)
        size, is_pinned = 2 * max_samples, device.type == "cuda"
        self._tokens = torch.zeros(size, dtype=torch.int32, pin_memory=is_pinned)

    def copy_tokens(self, tokens: Tensor) -> None:
        """Queue the copy of int32 [S] or [2, S] to the host; complete when the stream is there."""
        self._tokens[: tokens.numel()].copy_(tokens.view(-1), non_blocking=True)

    def tokens(self, number: int) -> NDArray[np.int32]:
        """The first so many tokens copied last, once that copy is complete; the slot's memory."""
        values: NDArray[np.int32] = self._tokens.numpy()
        return values[:number]


class StepSlots:
    """A pool of slots that grows to the largest number of steps in flight."""

    def __init__(self, max_samples: int, device: torch.device) -> None:
        self._max_samples = max_samples
        self._device = device
        self._free: list[StepSlot] = []

    def take(self) -> StepSlot:
        """A slot that no step uses."""
        return self._free.pop() if self._free else StepSlot(self._max_samples, self._device)

    def give_back(self, slot: StepSlot) -> None:
        """Return the slot of a step that was waited for and whose tokens were read."""
        assert slot not in self._free, "a step was waited for twice"
        self._free.append(slot)


NOT_FINITE = -1  # in place of a token, as in `kernels.input_ids`
_NOT_SAMPLED = -2
NOTHING_ALLOWED = -3  # in place of a token, where the model's numbers are finite


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """A step's results on the device that are copied to the host."""

    # [S] int32  a token, `NOT_FINITE` or `NOTHING_ALLOWED`; None: no row of the step samples
    drawn: Tensor | None
    # [T] bool; None = checking the sampled rows' logits suffices
    is_finite_token: Tensor | None
    # [2, S] int32  `drawn`, and the draft after each sample's place, as of `kernels.guesses.judge`;
    # None = the plan has all drafts
    judged: Tensor | None = None
    # For the few rows that ask for them; None = there is none.
    logprobs: LogprobTensors | None = None
    labels: LabelTensors | None = None
    # fp32 [S, hidden]; None = the model makes none
    embeddings: Tensor | None = None
    prompt: PromptTensors | None = None
    # On a worker that sends blocks away; on the host already, or being copied there.
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
        """Queue copies of the tensors in `left` and stop the timer of `slot` after them."""
        self._plan = plan
        self._batch = batch
        self._slots = slots
        self._slot = slot
        if (tokens := left.drawn if left.judged is None else left.judged) is not None:
            slot.copy_tokens(tokens)
        self._is_judged = left.judged is not None
        self._logprobs = left.logprobs.map(_to_host) if left.logprobs else None
        self._labels = left.labels.map(_to_host) if left.labels else None
        self._embeddings = None if left.embeddings is None else _to_host(left.embeddings)
        self._prompt = left.prompt.map(_to_host) if left.prompt else None
        self._written = left.written
        # [S], or of a judged step [2 S]: `drawn`, then what follows; None = not waited for yet
        self._tokens: NDArray[np.int32] | None = None
        flags = left.is_finite_token
        self._is_finite_token = None if flags is None else _to_host(flags)
        slot.timer.stop()

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._slot.timer.is_done

    def wait_drawn(self, rows: Sequence[int]) -> list[int]:
        """Block until the step has ended; what it drew for rows that sample once.

        May be called after `wait`: a rank that follows ends its steps when it likes. Returns a
        token for each of `rows`, or what stands in place of one.
        """
        if self._tokens is None:
            self._slot.timer.wait()
        drawn = self._take_drawn().tolist()
        by_row = dict(zip(self._batch.sampled_row_list, drawn, strict=True))
        return [by_row[row] for row in rows]

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host. Called once."""
        duration_s = self._slot.timer.wait()
        if self._written is not None:
            self._written.keep()
        if self._plan.drafts:
            return self._with_drafts(duration_s)
        sampled_places = self._batch.plan_rows[self._batch.sampling]
        # [R]  by plan row
        drawn = np.full(self._batch.num_rows, _NOT_SAMPLED, dtype=np.int32)
        drawn[sampled_places] = self._take_drawn()
        self._slots.give_back(self._slot)
        if self._is_finite_token is not None:
            drawn[~self._finite_chunks(self._is_finite_token)] = NOT_FINITE
        if self._prompt is not None:
            drawn[self._prompt.not_finite()] = NOT_FINITE
        token_ids: list[int] = drawn.tolist()
        tokens = [[token_id] if token_id >= 0 else [] for token_id in token_ids]
        labels = self._label_values(sampled_places, token_ids)
        embeddings = self._embedding_bytes(sampled_places, token_ids)
        for place in (*labels, *embeddings):
            tokens[place] = []
        return StepResult(
            step=self._plan.step,
            tokens=tokens,
            logprobs=self._logprob_records(sampled_places.tolist(), token_ids),
            is_finite=(drawn != NOT_FINITE).tolist(),
            allows_nothing=np.flatnonzero(drawn == NOTHING_ALLOWED).tolist(),
            duration_s=duration_s,
            labels=labels,
            embeddings=embeddings,
            prompt_logprobs=self._prompt.records() if self._prompt else {},
        )

    def _take_drawn(self) -> NDArray[np.int32]:
        """[S]  what the step, which has ended, drew; its slot may be another step's afterwards."""
        return self._take_tokens()[: len(self._batch.sampling)]

    def _take_tokens(self) -> NDArray[np.int32]:
        if self._tokens is None:
            number = len(self._batch.sampling) * (2 if self._is_judged else 1)
            self._tokens = self._slot.tokens(number).copy()
        return self._tokens

    def _with_drafts(self, duration_s: float) -> StepResult:
        """The result of a step in which some rows have drafts, and perhaps several samples."""
        batch, drawn = self._batch, self._take_drawn()
        self._slots.give_back(self._slot)
        # [R] by plan row: a row's lines lie side by side
        nums, starts = np.empty((2, batch.num_rows), dtype=np.int64)
        in_batch = np.bincount(batch.sampling, minlength=batch.num_rows)
        nums[batch.plan_rows] = in_batch
        starts[batch.plan_rows] = in_batch.cumsum() - in_batch
        (sampling,) = nums.nonzero()
        # The first sample of a row with drafts counts in any case; the others' records are cut.
        firsts = np.full(batch.num_rows, _NOT_SAMPLED)
        firsts[sampling] = drawn[starts[sampling]]
        is_finite = firsts != NOT_FINITE
        if self._is_finite_token is not None:
            is_finite &= self._finite_chunks(self._is_finite_token)
        if self._prompt is not None:
            is_finite[self._prompt.not_finite()] = False
        counts = np.zeros_like(nums)
        following = self._next_tokens(starts, nums)
        counts[sampling] = count_accepted(drawn, following, starts[sampling], nums[sampling])
        counts[~is_finite] = 0
        labels = {}
        if self._labels is not None:
            places = batch.plan_rows[batch.sampling].tolist()
            by_line = self._labels.by_line()
            labels = {places[line]: v for line, v in by_line.items() if counts[places[line]]}
        token_ids: list[int] = drawn.tolist()
        spans = list(zip(starts.tolist(), (starts + counts).tolist(), strict=True))
        logprobs = self._logprobs_of(spans)
        for place in labels:
            spans[place] = (0, 0)
        return StepResult(
            step=self._plan.step,
            tokens=[token_ids[start:end] for start, end in spans],
            logprobs=logprobs,
            is_finite=is_finite.tolist(),
            allows_nothing=np.flatnonzero(is_finite & (firsts == NOTHING_ALLOWED)).tolist(),
            duration_s=duration_s,
            labels=labels,
            prompt_logprobs=self._prompt.records() if self._prompt else {},
        )

    def _next_tokens(self, starts: NDArray[np.int64], nums: NDArray[np.int64]) -> NDArray[np.int32]:
        """[S]  the draft after each sample's place; after a row's last one anything.

        starts, nums: [R] by plan row, the lines of each.
        """
        if self._is_judged:
            return self._take_tokens()[len(self._batch.sampling) :]
        found = np.full(len(self._batch.sampling), NO_DRAFT, dtype=np.int32)
        lines = list(zip(starts.tolist(), nums.tolist(), strict=True))
        for place, drafts in self._plan.drafts:
            start, num = lines[place]
            if num > 1:
                assert len(drafts) >= num - 1, f"{num} samples for {len(drafts)} drafts"
                found[start : start + num - 1] = drafts[1 - num :]
        return found

    def _logprobs_of(self, spans: Sequence[tuple[int, int]]) -> list[list[TokenLogprobs] | None]:
        """[R]  a record for each token, of rows that asked for them; None for the others.

        spans: [R] by plan row, the lines that give its tokens.
        """
        if self._logprobs is None:
            return [None] * len(spans)
        records = self._logprobs.records(len(self._batch.sampling))
        kept = [[r for r in records[start:end] if r is not None] for start, end in spans]
        return [its_records or None for its_records in kept]

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
        """[R]  records of rows that asked for them and got a token; None for the others."""
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
        """Index in the plan -> label log-probabilities of a prompt-only row with finite logits."""
        if self._labels is None:
            return {}
        places: list[int] = sampled_places.tolist()
        by_line = self._labels.by_line()
        return {places[i]: v for i, v in by_line.items() if token_ids[places[i]] >= 0}

    def _embedding_bytes(
        self, sampled_places: NDArray[np.int64], token_ids: list[int]
    ) -> dict[int, bytes]:
        """Index in the plan -> embedding of a row whose prompt is computed and finite."""
        if self._embeddings is None:
            return {}
        places: list[int] = sampled_places.tolist()
        by_place = zip(places, self._embeddings.numpy(), strict=True)
        return {place: line.tobytes() for place, line in by_place if token_ids[place] >= 0}


class EmptyStep:
    """A step without rows: it only changed the rows' tables or zeroed blocks."""

    def __init__(self, step: int) -> None:
        self._step = step

    @property
    def is_done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return StepResult(step=self._step, tokens=[], logprobs=[], is_finite=[])


class IdleStep:
    """A step in which this rank has no rows and others have: it took part in their exchanges."""

    def __init__(self, step: int, slots: StepSlots, slot: StepSlot) -> None:
        """Stops the timer of `slot`."""
        self._step, self._slots, self._slot = step, slots, slot
        slot.timer.stop()

    @property
    def is_done(self) -> bool:
        return self._slot.timer.is_done

    def wait(self) -> StepResult:
        duration_s = self._slot.timer.wait()
        self._slots.give_back(self._slot)
        return StepResult(
            step=self._step, tokens=[], logprobs=[], is_finite=[], duration_s=duration_s
        )


def _to_host(tensor: Tensor) -> Tensor:
    """A copy that is complete when the stream reaches it; on the CPU, the tensor itself."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
