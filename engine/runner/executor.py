"""Runs a `StepPlan` on one rank's part of the model and returns a `StepResult`.

`launch` only queues work. A step's sampled tokens stay on the device, where the next step reads
them; they are also copied to the host asynchronously. So a step may be launched before the previous
one has been waited for. Knows no requests: a row is a slot in its tables. The plan decides whose
row it is, when it runs and which blocks it gets.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.kv.layout import KvLayout
from engine.kv.store import KvStore
from engine.kv.tables import BlockTables, concat_ranges
from engine.layers.context import SINGLE_RANK, Comm
from engine.models.llama import CausalLM
from engine.plan import StepPlan
from engine.runner.captured_steps import CapturedSteps
from engine.runner.decode_run import DecodeInputs, DecodeRun
from engine.runner.dp_meetings import DpMeetings, Meeting
from engine.runner.dp_steps import DpStep, DpSteps
from engine.runner.executor_options import DEFAULT_OPTIONS, ExecutorOptions
from engine.runner.expert_load import ExpertLoads
from engine.runner.exports import ExportKeeper
from engine.runner.forward_passes import ForwardPasses
from engine.runner.graph_sizes import GraphSize, PromptSizes
from engine.runner.graphs import ExecutorStatistics, Recorder, StepGraphs
from engine.runner.guessed_rows import GuessedRows, StepGuesses, TokenTable
from engine.runner.inputs import InputBatch, write_idle_batch, write_input_batch
from engine.runner.overlap.rule import OverlapRule
from engine.runner.overlap.two_batches import TwoBatches
from engine.runner.prompt_logprobs import PromptChunk, PromptLogprobRows
from engine.runner.prompt_passes import PromptPasses
from engine.runner.request_rows import RequestRows
from engine.runner.results import (
    NOTHING_ALLOWED,
    ComputedStep,
    EmptyStep,
    IdleStep,
    PendingStep,
    StepSlots,
    StepTensors,
    WrittenBlocks,
    digest_written,
)
from engine.runner.row_texts import RowTexts, text_bytes
from engine.runner.rows import Rows
from engine.runner.shared_stream import SharedExpertStream
from engine.runner.step_buffers import StepBuffers
from engine.runner.step_graph_set import StepGraphSet
from engine.sampling.sampled import RowSampler, SampledTensors
from engine.speculation.ngram import NgramRules
from kernels.attention.phased import Phases
from kernels.input_ids import keep_last_tokens

# For smaller steps, the extra attention plan costs more than the skipped last-layer queries.
_MIN_TOKENS_TO_SKIP_QUERIES = 1024


class Executor:
    """Owns the model, the KV store and the rows' tables of one worker.

    Not thread-safe: one thread launches steps. Between steps, others may read or write blocks
    through `kv_store` as far as they hold them in the block pool.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        layout: KvLayout,
        num_blocks: int,
        max_rows: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        sampler: RowSampler,
        attention: Phases,
        options: ExecutorOptions = DEFAULT_OPTIONS,
        comm: Comm = SINGLE_RANK,
    ) -> None:
        """comm: to the other ranks of `model`; each has an executor and launches the same plans.

        Raises ConfigError for a second stream of a model without shared experts.
        """
        _check_options(options, model, layout)
        limit = model.rotary.max_tokens
        assert max_model_len <= limit, f"{max_model_len} tokens for a model built for {limit}"
        self.layout = layout
        is_ordered = options.sums_in_order
        self._dp = DpSteps(comm, is_ordered=is_ordered) if model.spec.has_dp_attention else None
        self._comm = SINGLE_RANK if self._dp else comm  # then all but the experts is whole here
        store = KvStore(layout, num_blocks=num_blocks, device=model.device, tensor=options.blocks)
        self._passes = ForwardPasses(
            model, store, attention, self._comm, self._dp, max_rows=max_rows, options=options
        )
        self._sends_blocks = options.sends_blocks
        self._max_rows = max_rows
        self._max_tokens = max_num_batched_tokens
        self._max_row_samples = 1 + options.max_drafts
        most = min(max_rows * self._max_row_samples, max_num_batched_tokens)
        self._max_samples = max(max_rows, most)
        self._max_model_len = max_model_len
        self._max_blocks_per_row = layout.num_blocks_for(max_model_len)
        tokens = RequestRows(max_rows=max_rows, max_model_len=max_model_len)
        self._rows = Rows(
            tokens=tokens,
            blocks=BlockTables(max_rows=max_rows, max_blocks_per_row=self._max_blocks_per_row),
            sampler=sampler,
            prompt_logprobs=PromptLogprobRows(tokens, self._logits, model.device),
            num_blocks=num_blocks,
        )
        self._num_in_flight = 2
        self._table = TokenTable(max_rows, options.max_drafts, model.device)
        self.guesses: StepGuesses | None = None  # None = all drafts come from the host
        self._buffers = self._step_buffers(max_num_batched_tokens)
        self._slots = StepSlots(self._max_samples, model.device)
        self._graphs = StepGraphSet(max_rows, self._step_buffers)
        self._meetings = DpMeetings(self._dp, self._graphs, attention) if self._dp else None
        self._newest: PendingStep | None = None  # the step launched last; None = it has no rows
        self._decode_run: DecodeRun | None = None
        self._keeper: ExportKeeper | None = None
        self._prompt_passes: PromptPasses | None = None
        second = options.second_stream_tokens
        self._shared_stream = SharedExpertStream(model, second) if second else None
        self.expert_loads: ExpertLoads | None = None  # told of every step; None = not counted

    @property
    def model(self) -> CausalLM:
        """This rank's part of the model."""
        return self._passes.model

    @property
    def kv_store(self) -> KvStore:
        """This rank's K and V."""
        return self._passes.kv_store

    @property
    def comm(self) -> Comm:
        """To the other ranks that launch the same plans."""
        return self._comm

    @property
    def max_in_flight(self) -> int:
        """Steps that may be launched and not waited for when another one is launched."""
        return self._num_in_flight

    @property
    def max_row_tokens(self) -> int:
        """Tokens of a prompt, at most: one more is sampled."""
        return self._max_model_len - 1

    def keep_exports(self, keeper: ExportKeeper) -> None:
        """From now on `keeper` gets what the model exports in each step."""
        self._keeper = keeper

    def compute_prompts_with(self, passes: PromptPasses) -> None:
        """From now on `passes` are launched behind steps, for rows that plans name for them."""
        self._prompt_passes = passes

    def overlap_two_batches(self, rule: OverlapRule, *, threshold: float) -> None:
        """From now on, steps that replay no graph are computed as two batches where `rule` says so.

        threshold: see `engine.runner.overlap.batch_splits`. All ranks of a model get the same.
        """
        block_size = self.layout.block_size
        self._passes.two_batches = TwoBatches(
            self.model, rule, threshold=threshold, block_size=block_size
        )

    @property
    def min_exchanged_tokens(self) -> int | None:
        """As of `ExecutorOptions`; may be set between steps, on all ranks alike, for those that
        replay no graph."""
        return self._passes.min_exchanged_tokens

    @min_exchanged_tokens.setter
    def min_exchanged_tokens(self, num_tokens: int | None) -> None:
        self._passes.min_exchanged_tokens = num_tokens

    @property
    def may_split(self) -> bool:
        """Whether a step may be computed as two batches."""
        return self._passes.two_batches is not None

    @property
    def two_batches(self) -> TwoBatches:
        """Only after `overlap_two_batches`."""
        assert self._passes.two_batches is not None, "no step is computed as two batches"
        return self._passes.two_batches

    @property
    def can_plan_ahead(self) -> bool:
        """Whether rows may be planned before the lengths that their drafts give are known.

        On a CPU, which computes at once, plans can be made true instead.
        """
        return self._passes.attention.reads_lengths_on_device or self.model.device.type == "cpu"

    def draft_for(self, target: "Executor") -> None:
        """Draft for `target`, which allows drafts; call it before graphs are captured."""
        num_samples, device = target._max_row_samples, self.model.device
        rows = GuessedRows(target._table, num_samples)
        target.guesses = StepGuesses(rows, target._table, target._passes.attention)
        self._table = TokenTable(self._max_rows, num_samples, device)
        attention = self._passes.attention
        self.guesses = StepGuesses(rows, self._table, attention, drafts_for=target._table)
        self._num_in_flight = 2 * num_samples  # all passes of a step, and the last one's
        self._buffers = self._step_buffers(self._max_tokens)

    def look_up_drafts(self, rules: NgramRules) -> None:
        """Find drafts that plans leave to the device in the rows' texts; with drafts allowed."""
        rows = GuessedRows(self._table, self._max_row_samples)
        drafts, max_len = self._table.entries, self._max_model_len
        texts = RowTexts(rows.states, drafts, max_len=max_len, rules=rules)
        self.guesses = StepGuesses(rows, self._table, self._passes.attention, texts=texts)

    def bytes_to_look_up_drafts(self, rules: NgramRules) -> int:
        """Memory that `look_up_drafts` takes on the device."""
        return text_bytes(self._max_rows, self._max_model_len, rules)

    def give_drafts(self, place: int) -> None:
        """Queue that what the pass launched last drew is draft number `place` of the target's rows.

        Of rows that were not in that pass anything; see `engine.plan.given`.
        """
        assert self.guesses is not None, "nobody's drafts"
        self.guesses.give(place)

    def capture_graphs(
        self,
        recorder: Recorder,
        report: Callable[[str], None],
        *,
        prompts: PromptSizes | None,
        verify: Sequence[GraphSize] = (),
    ) -> None:
        """Capture graphs; from now on a step replays one if one is large enough.

        Decode steps need a decode backend that can be captured. `prompts`: sizes for the other
        steps, which need a prefill backend that can be captured; None = capture none for them.
        `verify`: sizes for steps with drafts whose rows are short, ascending; () = none.
        """
        self._graphs.capture(
            self._captured_steps(),
            recorder,
            report,
            prompts=prompts,
            verify=verify,
            row_tokens=self._max_row_samples,
        )
        assert self._graphs.decode is not None, "captured just now"
        buffers, rows = self._graphs.decode.buffers, self._rows
        self._decode_run = DecodeRun(buffers, rows.tokens, rows.blocks, self.layout.block_size)

    def capture_split_decodes(
        self, recorder: Recorder, report: Callable[[str], None], *, min_rows: int
    ) -> None:
        """Capture decode steps of at least so many rows as two batches, beside the whole ones.

        The rule given to `overlap_two_batches` says which of both a step replays.
        """
        self._graphs.capture_split_decodes(
            self._captured_steps(), self.two_batches, recorder, report, min_rows=min_rows
        )

    def capture_split_verification(
        self, recorder: Recorder, report: Callable[[str], None], *, min_tokens: int
    ) -> None:
        """Likewise of steps with drafts of at least so many tokens, if such steps were captured."""
        self._graphs.capture_split_verification(
            self._captured_steps(), self.two_batches, recorder, report, min_tokens=min_tokens
        )

    def _captured_steps(self) -> CapturedSteps:
        return CapturedSteps(
            self.model,
            self._passes.attention,
            last_tokens=self._table.flat,
            max_model_len=self._max_model_len,
            make_context=self._passes.context,
            comm=self._comm,
            exchanges=self._passes.exchanges if self.model.can_capture_exchange else None,
            shared_stream=self._shared_stream,
        )

    @property
    def attends_few_tokens_apart(self) -> bool:
        """Whether rows of a few new tokens have a kernel of their own."""
        return self._passes.attention.max_few_tokens > 1

    def statistics(self) -> ExecutorStatistics:
        return self._graphs.statistics(self._passes.two_batches)

    def launch(self, plan: StepPlan) -> PendingStep | EmptyStep | IdleStep:
        """Queue a step: apply admissions and blocks, compute, sample, and keep the tokens.

        A row with non-finite values gets no token, and its `is_finite` is False. Other rows are
        unaffected, as long as its blocks are zeroed before they are used again. With
        `plan.awaited_rows`, blocks until the previous step has ended.

        With DP attention, `plan` is of all ranks, and the step is this rank's part of it; a plan of
        one rank is that of every rank.
        """
        shared = self._dp.of(plan) if self._dp else None
        if shared is not None:
            plan = shared.own
        previous, self._newest = self._newest, None
        if not plan.rows and (shared is None or shared.is_idle):
            with torch.inference_mode():
                self._apply_rows(plan)
            return EmptyStep(plan.step)
        slot = self._slots.take()
        with torch.inference_mode():
            slot.timer.start()
            plan = self.guesses.fetch(plan) if self.guesses else plan
            self._apply_rows(plan)
            if shared is not None and not plan.rows:
                self._compute_idle(shared)
                if self.expert_loads is not None:
                    self.expert_loads.on_step()
                return IdleStep(plan.step, self._slots, slot)
            computed = self._compute(plan, shared)
            if self._keeper is not None:
                assert computed.exported is not None, "the model exports nothing in such a step"
                self._keeper.keep(computed.exported, computed.batch, self._rows.blocks)
            if plan.awaited_rows:
                assert previous is not None, f"step {plan.step} awaits tokens of no step"
                self._rows.accept(plan.awaited_rows, previous.wait_drawn(plan.awaited_rows))
            left = self._sample(computed, _drafts_by_row(plan))
            if self.guesses is not None:
                left = self.guesses.settle(plan, computed.batch, left)
            if self._sends_blocks:
                left = replace(left, written=self._digest(plan))
            if self.expert_loads is not None:
                self.expert_loads.on_step()
            self._newest = PendingStep(plan, computed.batch, self._slots, slot, left)
            return self._newest

    def _digest(self, plan: StepPlan) -> WrittenBlocks:
        """Queue the digests of what the step wrote, a draft model's part of it included."""
        if plan.drafter_rows:
            assert self._prompt_passes is not None, "nothing drafts"
            self._prompt_passes.launch(plan)
        return digest_written(plan, self._rows.blocks, self.kv_store)

    def forward_logits(self, plan: StepPlan, *, of_all_tokens: bool = False) -> Tensor:
        """Run a step without sampling; returns fp32 [R, vocab], each row's last logits.

        Of all tokens: fp32 [T, vocab]. Both are in plan order.

        With DP attention, this rank has rows in `plan`, as of `launch`; no rank replays a graph.
        """
        with torch.inference_mode():
            meeting = None
            if self._dp is not None and self._meetings is not None:
                shared = self._dp.of(plan)
                plan = shared.own
                meeting = self._meetings.without_graph(shared, self._passes.two_batches)
            self._apply_rows(plan)
            batch = self._write_batch(plan, self._buffers)
            hidden = self._passes.forward(batch, self._table.flat, meeting=meeting).hidden
            ends = np.empty_like(batch.first_tokens)
            ends[batch.plan_rows] = batch.first_tokens + batch.attention.num_new_tokens
            counts = plan.num_new_tokens if of_all_tokens else [1] * len(plan.rows)
            num_logits = np.array(counts, dtype=np.int64)
            lines = torch.from_numpy(concat_ranges(ends - num_logits, num_logits))
            return self._logits(hidden.index_select(0, lines.to(hidden.device))).float()

    def _apply_rows(self, plan: StepPlan) -> None:
        """Apply the changes that precede the step: zero blocks, then release and admit rows."""
        if plan.zero_block_ids:
            self.kv_store.zero(plan.zero_block_ids)
        if self._decode_run is not None and (plan.released_rows or plan.admissions):
            self._decode_run.end()
        if self._decode_run is not None and (plan.verified_tokens or plan.drafts):
            self._decode_run.end()  # their ids are given, and not the newest ones on the device
        self._rows.apply(plan)

    # ---- one step -------------------------------------------------------------------------------

    def _meet(self, shared: DpStep) -> Meeting:
        """How ranks compute a step together."""
        assert self._meetings is not None, "the plan of one rank"
        meeting = self._meetings.of(shared, self._passes.two_batches)
        run, graphs = self._decode_run, meeting.graphs
        if run is not None:
            is_decode = graphs is not None and self._graphs.is_decode(graphs)
            if not is_decode or run.size != meeting.size:
                run.end()
        return meeting

    def _compute_idle(self, shared: DpStep) -> None:
        """Take part in what the other ranks exchange."""
        meeting = self._meet(shared)
        graphs, size = meeting.graphs, meeting.size
        if graphs is not None and size is not None:
            assert self._decode_run is not None, "captured with the graphs"
            self._decode_run.end()  # its inputs are overwritten
            graphs.replay(size, write_idle_batch(graphs.buffers, padded_to=size).attention)
            return
        batch = write_idle_batch(self._buffers)
        self._passes.forward(batch, self._table.flat, batch.logit_indices, meeting=meeting)

    def _compute(self, plan: StepPlan, shared: DpStep | None) -> ComputedStep:
        meeting = None if shared is None else self._meet(shared)
        chunks = self._rows.prompt_logprobs.due(plan)
        if chunks:
            return self._compute_everywhere(plan, chunks, meeting)
        inputs = self._decode_run.go_on(plan) if self._decode_run else None
        if inputs is not None:
            graphs = self._graphs.of_decodes(inputs.size) if meeting is None else meeting.graphs
            assert graphs is not None, "the run would have ended"
            return self._replay(graphs, inputs)
        if meeting is None:
            graphs, size = self._graphs.choose(plan)
        else:
            graphs, size = meeting.graphs, meeting.size
            if not plan.is_decode and (graphs is None or not self._graphs.is_verify(graphs)):
                self._graphs.count(plan, size)
        if graphs is not None and size is not None:
            inputs = DecodeInputs(batch=self._write_batch(plan, graphs.buffers, size), size=size)
            begins = self._graphs.is_decode(graphs) and not plan.drafts
            if begins and self._decode_run is not None:
                self._decode_run.begin(plan, inputs)
            return self._replay(graphs, inputs)
        batch = self._write_batch(plan, self._buffers)
        samples = len(batch.sampling) > 0
        is_long = batch.num_tokens >= _MIN_TOKENS_TO_SKIP_QUERIES
        if is_long and samples and not plan.drafts and self.model.can_skip_queries:
            result = self._passes.forward_to_last(batch, self._table.flat)
            hidden = result.hidden.index_select(0, batch.sampled_lines)
        else:
            result = self._passes.forward(
                batch,
                self._table.flat,
                batch.logit_indices,
                checks_finite=not plan.is_decode,
                meeting=meeting,
            )
            hidden = result.hidden
        return ComputedStep(
            batch=batch,
            own_logits=self.model.own_logits(hidden) if samples else None,
            replayed=None,
            is_finite_token=result.is_finite,
            exported=result.exported,
        )

    def _compute_everywhere(
        self, plan: StepPlan, chunks: list[PromptChunk], meeting: Meeting | None
    ) -> ComputedStep:
        """A step with prompt log-probabilities: needs hidden states everywhere, so no graph."""
        self._graphs.count_unreplayed(plan)
        batch = self._write_batch(plan, self._buffers)
        result = self._passes.forward(batch, self._table.flat, checks_finite=True, meeting=meeting)
        lines = batch.logit_indices
        hidden = result.hidden if lines is None else result.hidden.index_select(0, lines)
        return ComputedStep(
            batch=batch,
            own_logits=self.model.own_logits(hidden) if len(batch.sampling) > 0 else None,
            replayed=None,
            is_finite_token=result.is_finite,
            prompt=self._rows.prompt_logprobs.read(chunks, batch, result.hidden),
            exported=result.exported,
        )

    def _replay(self, graphs: StepGraphs, inputs: DecodeInputs) -> ComputedStep:
        batch, size = inputs.batch, inputs.size
        num_sampled = len(batch.sampling)
        output = graphs.replay(size, batch.attention).first(num_sampled, batch.end_token)
        return ComputedStep(
            batch=batch,
            own_logits=output.own_logits if num_sampled else None,
            replayed=output,
            is_finite_token=output.is_finite_token,
            exported=output.exported,
        )

    def _sample(self, computed: ComputedStep, drafts: dict[int, list[int]] | None) -> StepTensors:
        """Draw a token for each row that samples, and keep it on the device.

        drafts: by row; what such a row draws is kept nowhere.
        """
        batch, replayed, flags = computed.batch, computed.replayed, computed.is_finite_token
        prompt = computed.prompt
        if computed.own_logits is None:
            return StepTensors(drawn=None, is_finite_token=flags, prompt=prompt)
        row_list = batch.sampled_row_list
        sampled = self._sample_rows(computed.own_logits, computed, drafts)
        if drafts is None:
            self._rows.tokens.count_sampled(batch.rows[batch.sampling])
        else:
            advancing = [row for row in row_list if row not in drafts]
            if advancing:
                self._rows.tokens.count_sampled(np.array(advancing, dtype=np.int64))
        if replayed is not None and sampled.is_choice(replayed.greedy):
            drawn = replayed.drawn
        else:
            drawn = keep_last_tokens(
                sampled.token_ids, sampled.is_finite, batch.sampled_rows, self._table.flat
            )
            if sampled.allows_nothing is not None:
                drawn.masked_fill_(sampled.allows_nothing, NOTHING_ALLOWED)
        return StepTensors(
            drawn=drawn,
            logprobs=sampled.logprobs,
            labels=sampled.labels,
            embeddings=sampled.embeddings,
            is_finite_token=flags,
            prompt=prompt,
        )

    def _sample_rows(
        self, own: Tensor, computed: ComputedStep, drafts: dict[int, list[int]] | None
    ) -> SampledTensors:
        """Of lines whose best tokens are enough, the ranks do not gather the logits."""
        batch, replayed, sampler = computed.batch, computed.replayed, self._rows.sampler
        rows, choice = batch.sampled_row_list, replayed.greedy if replayed else None
        if sampler.is_plain(rows):
            best = self.model.best_tokens(own, self._comm) if choice is None else choice
            return sampler.take(rows, best)
        logits = self.model.whole_logits(own, self._comm)
        if drafts is None:
            return sampler.sample(logits, rows, choice)
        return sampler.sample(logits, rows, choice, drafts, batch.behind)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden, self._comm)

    # ---- parts ----------------------------------------------------------------------------------

    def _write_batch(
        self, plan: StepPlan, buffers: StepBuffers, padded_to: GraphSize | None = None
    ) -> InputBatch:
        batch = write_input_batch(
            plan,
            self._rows.tokens,
            self._rows.blocks,
            self.layout,
            buffers,
            padded_to=padded_to,
            max_few_tokens=self._passes.attention.max_few_tokens,
            extra=self.guesses.to_send if self.guesses else None,
        )
        if self.guesses is None:
            return batch
        return self.guesses.prepare(plan, batch, buffers, self.layout.block_size)

    def _step_buffers(self, max_tokens: int) -> StepBuffers:
        return StepBuffers(
            max_rows=self._max_rows,
            max_tokens=max_tokens,
            max_block_ids=self._max_rows * self._max_blocks_per_row,
            device=self.model.device,
            max_samples=self._max_samples,
            num_in_flight=self._num_in_flight,
        )


def _check_options(options: ExecutorOptions, model: CausalLM, layout: KvLayout) -> None:
    is_fp8 = layout.dtype == "fp8_e4m3"
    assert is_fp8 or options.kv_scales is None, f"scales for {layout}"
    can_exchange = model.can_exchange or options.min_exchanged_tokens is None
    assert can_exchange, "the model's ranks cannot have shares of the tokens"


def _drafts_by_row(plan: StepPlan) -> dict[int, list[int]] | None:
    """None = no row has drafts."""
    return {plan.rows[index]: drafts for index, drafts in plan.drafts} if plan.drafts else None
