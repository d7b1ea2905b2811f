"""Stand-ins that obey the real contracts, and an oracle for what requests must output.

`FakeExecutor` computes nothing but keeps books a model would need: every KV slot remembers which
token, at which position, after which history was written there. A plan that would make a real
model read another request's block, a lost one or one that is not finite fails at once. As on a
device, steps take effect in the order of their launch, the tokens they sample stay in the rows' own
memory, and a result is known only to who waits for it, the oldest first. What it "samples" is a
pure function of a request's seed and tokens, so `expected_output` knows every request's tokens
without any scheduling. Drafts that only the device has are what `draft` says when the step runs.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from typing import Literal, NamedTuple

import msgspec

from engine.plan import NEWEST, RowAdmission, StepPlan, StepResult, TokenLogprobs, given
from engine.request import Request, RequestKey, SamplingParams

VOCAB_SIZE = 97
EOS_TOKEN_ID = 0


class Written(NamedTuple):
    """What one KV slot holds; `history` names all tokens up to and including this one."""

    token_id: int
    position: int
    history: int


EMPTY = Written(-1, -1, 0)
NOT_FINITE = Written(-2, -2, 0)


def extend_histories(histories: list[int], token_ids: Sequence[int]) -> None:
    """Append to `histories` the name of every prefix of `token_ids` it does not cover yet."""
    for token_id in token_ids[len(histories) :]:
        histories.append(hash((histories[-1] if histories else 7, token_id)))


def next_token(seed: int, history: int) -> int:
    """The token after a history; hashing integers does not depend on PYTHONHASHSEED."""
    return hash((seed, history)) % VOCAB_SIZE


def expected_output(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    max_model_len: int,
    eos_token_ids: Sequence[int] = (EOS_TOKEN_ID,),
) -> tuple[list[int], Literal["stop", "length"]]:
    """All output tokens of a request and why they end, from the rules of the API alone."""
    stop_ids = set(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids.update(eos_token_ids)
    histories: list[int] = []
    output: list[int] = []
    while True:
        extend_histories(histories, [*prompt, *output])
        output.append(next_token(params.seed, histories[-1]))
        if output[-1] in stop_ids:
            return output, "stop"
        if len(output) == params.max_tokens or len(prompt) + len(output) == max_model_len:
            return output, "length"


Draft = Callable[[int, Sequence[int], int], list[int]]  # a row's seed, tokens, number of drafts


@dataclass(slots=True)
class _Row:
    """A row's memory on the device; `tokens` has those sampled by launched steps, too."""

    seed: int
    tokens: list[int]
    histories: list[int]
    block_ids: list[int] = field(default_factory=list)
    num_computed: int | None = None  # None before its first step
    is_finite: bool = True
    is_given_up: bool = False  # the host knows that it is not finite
    unverified: list[int] = field(default_factory=list)  # got in steps with drafts


@dataclass(frozen=True, slots=True, eq=False)
class FakePendingStep:
    """A launched step; what the host must not know before `wait` is in `_result`."""

    plan: StepPlan  # with true numbers
    rows: list[_Row]  # parallel to the plan's rows
    _result: StepResult
    _on_wait: Callable[["FakePendingStep"], None]
    _is_idle: Callable[[], bool]

    @property
    def block_ids(self) -> set[int]:
        """Blocks that the step zeroes, reads or writes."""
        return {b for row in self.rows for b in row.block_ids} | set(self.plan.zero_block_ids)

    @property
    def is_done(self) -> bool:
        return self._is_idle()

    def wait(self) -> StepResult:
        self._on_wait(self)
        for row, is_finite in zip(self.rows, self._result.is_finite, strict=True):
            row.is_given_up |= not is_finite
        return self._result


class FakeExecutor:
    """An `engine.core.Executor` over integers. AssertionError = the plan would go wrong."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_in_flight: int = 1,
        draft: Draft | None = None,
    ) -> None:
        """`max_in_flight`: how many launched steps may be waited for at any time.

        `draft`: makes the drafts that plans name by `given`; None = none does.
        """
        self.plans: list[StepPlan] = []
        self.num_waited = 0  # of `plans`
        self.step_s: float | None = None  # what a step is said to have taken
        self.is_idle = False  # whether all launched steps are said to have ended
        self._in_flight: deque[FakePendingStep] = deque()
        self.max_in_flight = max_in_flight
        self._draft = draft
        self._block_size = block_size
        self._max_rows = max_rows
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._store = [[EMPTY] * block_size for _ in range(num_blocks)]
        self._rows: dict[int, _Row] = {}
        self._poisoned: dict[int, int] = {}  # seed -> position
        self._poison_id: int | None = None  # a token

    # ---- for tests ------------------------------------------------------------------------------

    def poison(self, seed: int, position: int) -> None:
        """The step that computes `position` of the request with `seed` yields no finite number."""
        self._poisoned[seed] = position

    def poison_token(self, token_id: int) -> None:
        """The steps that compute this token yield no finite number for its row."""
        self._poison_id = token_id

    def content(self, block_id: int, slot: int) -> Written:
        """What a token's place in a block holds, steps in flight included."""
        return self._store[block_id][slot]

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """What a KV channel does: the content of some blocks arrives in others.

        On a device that is in no order with steps in flight: none may write what is copied, or
        touch what is written.
        """
        in_use = self.blocks_unsettled.intersection(sources)
        in_use |= self.blocks_in_flight.intersection(targets)
        assert not in_use, f"a step in flight and a handoff both use blocks {in_use}"
        for source, target in zip(sources, targets, strict=True):
            self._store[target] = list(self._store[source])

    @property
    def occupied_rows(self) -> set[int]:
        return set(self._rows)

    @property
    def blocks_in_flight(self) -> set[int]:
        """Blocks that steps not waited for yet zero, read or write."""
        return {block_id for step in self._in_flight for block_id in step.block_ids}

    @property
    def blocks_unsettled(self) -> set[int]:
        """Of those, the ones that they zero or write."""
        unsettled: set[int] = set()
        for step in self._in_flight:
            unsettled.update(step.plan.zero_block_ids)
            spans = zip(step.plan.num_computed_tokens, step.plan.num_new_tokens, strict=True)
            for row, (start, num_new) in zip(step.rows, spans, strict=True):
                first, last = start // self._block_size, (start + num_new - 1) // self._block_size
                unsettled.update(row.block_ids[first : last + 1])
        return unsettled

    # ---- engine.core.Executor -------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> FakePendingStep:
        assert len(self._in_flight) < self.max_in_flight, f"step {plan.step} is launched too soon"
        self._check_columns(plan)
        self.plans.append(plan)
        for block_id in plan.zero_block_ids:
            self._store[block_id] = [EMPTY] * self._block_size
        for row in plan.released_rows:
            assert row in self._rows, f"step {plan.step} releases row {row}, which is free"
            del self._rows[row]
        for admission in plan.admissions:
            self._admit(plan, admission)
        for row, block_ids in zip(plan.rows, plan.new_block_ids, strict=True):
            self._append_blocks(row, block_ids)
        for row, token_ids in plan.verified_tokens:
            self._verify(row, token_ids)
        plan = self._true_plan(plan)
        for index, drafts in plan.drafts:
            state = self._rows[plan.rows[index]]
            self._append(state, state.unverified + drafts)
            assert plan.num_new_tokens[index] == plan.num_samples[index] == 1 + len(drafts)
        self._run(plan)
        result = self._sample(plan)
        rows = [self._rows[row] for row in plan.rows]
        step = FakePendingStep(plan, rows, result, self._waited, lambda: self.is_idle)
        self._in_flight.append(step)
        return step

    # ---- parts ----------------------------------------------------------------------------------

    def _waited(self, step: FakePendingStep) -> None:
        assert self._in_flight, f"step {step.plan.step} was waited for twice"
        oldest = self._in_flight.popleft()
        assert oldest is step, f"step {step.plan.step} is waited for before {oldest.plan.step}"
        self.num_waited += 1

    def _check_columns(self, plan: StepPlan) -> None:
        num_rows = len(plan.rows)
        columns = (
            plan.num_new_tokens,
            plan.num_computed_tokens,
            plan.num_samples,
            plan.new_block_ids,
        )
        assert all(len(column) == num_rows for column in columns), f"ragged plan {plan}"
        assert plan.step == len(self.plans), f"step {plan.step} is not number {len(self.plans)}"
        assert len(set(plan.rows)) == num_rows, f"step {plan.step}: a row twice in {plan.rows}"
        assert all(n >= 1 for n in plan.num_new_tokens), f"an idle row in {plan}"
        assert plan.num_tokens <= self._max_num_batched_tokens, (
            f"step {plan.step}: {plan.num_tokens} tokens, the budget is"
            f" {self._max_num_batched_tokens}"
        )
        num_finished = num_rows + len(plan.zero_block_ids) + len(plan.released_rows)
        assert num_finished > 0, f"step {plan.step} does nothing"

    def _admit(self, plan: StepPlan, admission: RowAdmission) -> None:
        row = admission.row
        assert 0 <= row < self._max_rows, f"there is no row {row}"
        assert row not in self._rows, f"step {plan.step} admits to row {row}, which is occupied"
        assert row in plan.rows, f"step {plan.step} admits to row {row}, which does not run"
        assert 0 < admission.num_prompt_tokens <= len(admission.token_ids) < self._max_model_len
        histories: list[int] = []
        extend_histories(histories, admission.token_ids)
        self._rows[row] = _Row(admission.params.seed, list(admission.token_ids), histories)
        self._append_blocks(row, admission.block_ids)

    def _append_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        known = self._rows[row].block_ids
        for block_id in block_ids:
            assert 0 <= block_id < len(self._store), f"there is no block {block_id}"
            assert block_id not in known, f"row {row} has block {block_id} twice"
            assert NOT_FINITE not in self._store[block_id], f"block {block_id} holds NaN"
            known.append(block_id)

    def _verify(self, row: int, token_ids: list[int]) -> None:
        state = self._rows[row]
        got = state.unverified[: len(token_ids)]
        assert token_ids == got, f"row {row} got {state.unverified}, not {token_ids}"
        assert token_ids, "no token to add"
        del state.unverified[: len(token_ids)]
        self._append(state, token_ids)

    def _append(self, state: _Row, token_ids: Sequence[int]) -> None:
        state.tokens += token_ids
        extend_histories(state.histories, state.tokens)

    def _true_plan(self, plan: StepPlan) -> StepPlan:
        """The plan with the drafts that the device has, and rows where they are."""
        num_computed, drafts = list(plan.num_computed_tokens), dict(plan.drafts)
        for index, its_drafts in plan.drafts:
            row = plan.rows[index]
            state = self._rows[row]
            num_due = its_drafts.count(NEWEST) if index in plan.ahead else 0
            assert its_drafts[:num_due] == [NEWEST] * num_due, f"row {row}: {its_drafts}"
            assert bool(state.unverified) <= bool(num_due), f"row {row}: nobody named its tokens"
            shortfall = num_due - len(state.unverified)
            assert shortfall >= 0, f"row {row} got {state.unverified}, at most {num_due} were due"
            last = num_computed[index] + plan.num_new_tokens[index] - 1
            self._place_of(row, last)  # its inputs are written there before they are moved
            num_computed[index] -= shortfall
            drafts[index] = self._drafts_of(state, its_drafts[num_due:])
        assert set(plan.ahead) <= set(drafts), f"step {plan.step}: {plan.ahead} without drafts"
        return msgspec.structs.replace(
            plan, num_computed_tokens=num_computed, drafts=list(drafts.items()), ahead=[]
        )

    def _drafts_of(self, state: _Row, drafts: list[int]) -> list[int]:
        if not drafts or drafts[0] >= 0:
            return drafts
        assert drafts == [given(place) for place in range(len(drafts))], f"drafts {drafts}"
        assert self._draft is not None, "nobody drafts on this device"
        return self._draft(state.seed, state.tokens + state.unverified, len(drafts))

    def _run(self, plan: StepPlan) -> None:
        writers: dict[tuple[int, int], int] = {}
        spans = list(
            zip(
                plan.rows,
                plan.num_computed_tokens,
                plan.num_new_tokens,
                plan.num_samples,
                strict=True,
            )
        )
        drafted = dict(plan.drafts)
        for i, (row, num_computed, num_new, samples) in enumerate(spans):
            state = self._rows[row]
            assert not state.is_given_up, f"step {plan.step}: row {row} is not finite, but goes on"
            assert state.num_computed in (None, num_computed), (
                f"step {plan.step}: row {row} goes on at {num_computed}, not {state.num_computed}"
            )
            state.num_computed = num_computed + num_new
            num_known = len(state.tokens)  # with those in flight
            assert num_computed + num_new <= num_known, f"row {row} computes what nobody knows"
            is_end = num_computed + num_new == num_known
            assert bool(samples) == is_end, (
                f"row {row} samples: {samples}, reaches its end: {is_end}"
            )
            is_named = i in drafted or not state.unverified
            assert is_named, f"row {row} got {state.unverified}, and nobody said so"
            self._check_present(row, num_computed)
        for row, num_computed, num_new, _ in spans:
            for position in range(num_computed, num_computed + num_new):
                block_id, slot = self._place_of(row, position)
                other = writers.setdefault((block_id, slot), row)
                assert other == row, f"rows {other} and {row} both write block {block_id}"
                self._store[block_id][slot] = self._content(row, position)
        for row, num_computed, num_new, _ in spans:
            self._check_present(row, num_computed + num_new)

    def _check_present(self, row: int, num_tokens: int) -> None:
        """Every one of the first tokens of a row is in its blocks, computed after its history."""
        state = self._rows[row]
        if not state.is_finite:
            return  # what it reads and writes is worthless, and stays in its own blocks
        slots = chain.from_iterable(self._store[block_id] for block_id in state.block_ids)
        found = list(islice(slots, num_tokens))
        due = [*islice(zip(state.tokens, count(), state.histories, strict=False), num_tokens)]
        assert len(found) == len(due) == num_tokens, f"row {row}: {num_tokens} tokens, {state}"
        if found != due:  # looked at one by one only then: this is most of a simulation's time
            place = next(i for i in range(num_tokens) if found[i] != due[i])
            block_id, _ = self._place_of(row, place)
            raise AssertionError(
                f"row {row} needs {due[place]} in block {block_id}, finds {found[place]}"
            )

    def _place_of(self, row: int, position: int) -> tuple[int, int]:
        block, slot = divmod(position, self._block_size)
        block_ids = self._rows[row].block_ids
        assert block < len(block_ids), f"row {row}: position {position} has no block: {block_ids}"
        return block_ids[block], slot

    def _content(self, row: int, position: int) -> Written:
        state = self._rows[row]
        return Written(state.tokens[position], position, state.histories[position])

    def _sample(self, plan: StepPlan) -> StepResult:
        tokens: list[list[int]] = []
        is_finite: list[bool] = []
        logprobs: list[list[TokenLogprobs] | None] = []
        drafts = dict(plan.drafts)
        for i, row in enumerate(plan.rows):
            start = plan.num_computed_tokens[i]
            computed = range(start, start + plan.num_new_tokens[i])
            state = self._rows[row]
            state.is_finite &= self._poisoned.get(state.seed) not in computed
            state.is_finite &= self._poison_id not in state.tokens[start : computed.stop]
            is_finite.append(state.is_finite)
            tokens.append([])
            logprobs.append(None)
            if not is_finite[-1]:
                self._spoil(row, computed)
            if i in drafts:
                tokens[-1] += self._sample_drafted(state, drafts[i]) if is_finite[-1] else []
                self._forget_drafts(state, len(drafts[i]), tokens[-1])
            elif plan.num_samples[i]:
                token_id = next_token(state.seed, state.histories[-1])
                state.tokens.append(token_id)  # a device draws from NaN, too, and goes on with it
                extend_histories(state.histories, state.tokens)
                tokens[-1] += [token_id] if is_finite[-1] else []
        return StepResult(
            duration_s=self.step_s,
            step=plan.step,
            tokens=tokens,
            logprobs=logprobs,
            is_finite=is_finite,
        )

    def _sample_drafted(self, state: _Row, drafts: list[int]) -> list[int]:
        """The row's new tokens."""
        ends = range(len(state.tokens) - len(drafts), len(state.tokens) + 1)
        samples = [next_token(state.seed, state.histories[end - 1]) for end in ends]
        while len(samples) > 1 and samples[: len(samples) - 1] != drafts[: len(samples) - 1]:
            samples.pop()
        return samples

    def _forget_drafts(self, state: _Row, num_drafts: int, got: list[int]) -> None:
        """What the row got in steps with drafts it is told when the host knows it."""
        num_told = len(state.tokens) - len(state.unverified) - num_drafts
        del state.tokens[num_told:], state.histories[num_told:]
        state.unverified += got
        state.num_computed = num_told + len(state.unverified) - 1

    def _spoil(self, row: int, positions: range) -> None:
        for position in positions:
            block_id, slot = self._place_of(row, position)
            self._store[block_id][slot] = NOT_FINITE


class RecordingHandoffQueue:
    """An `engine.scheduling.contracts.HandoffQueue` that says what happened."""

    def __init__(self) -> None:
        self.num_unreserved_blocks = 0
        self.events: list[tuple[str, RequestKey]] = []
        self.advances: list[tuple[RequestKey, int]] = []  # with the full blocks by then
        self.retracted: list[RequestKey] = []
        self.held: dict[RequestKey, Request] = {}  # added, with their blocks

    def start(self, request: Request) -> None:
        self.events.append(("start", request.key))

    def advance(self, request: Request) -> None:
        if request.decode_worker is not None:
            self.advances.append((request.key, request.num_indexed_blocks))

    def retract(self, key: RequestKey) -> None:
        self.retracted.append(key)

    def add(self, request: Request) -> None:
        self.events.append(("add", request.key))
        self.held[request.key] = request

    def drop(self, key: RequestKey) -> None:
        self.events.append(("drop", key))
