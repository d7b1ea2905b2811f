"""Tracks the requests that have a row and the free rows, and builds the plan of a step.

    add() -> prompts -> decodes -> paused -> remove()
             computes   computes   its last token here is in flight: nothing is left to compute
             chunks     one token

A request passes these states in this order each time it gets a row, and may be removed from any of
them. Each step plans all `decodes` as columns of an array that is rebuilt when a request joins or
leaves. Knows the size of a block and nothing else of blocks, and no tensors.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from engine.cost_model import StepWork
from engine.plan import RowAdmission, StepPlan
from engine.request import Request, RequestKey
from engine.scheduling.drafting import PlannedDrafts
from engine.scheduling.finish import FinishRules


class RowSlots:
    """Rows [0, max_rows), each free or given to one request."""

    def __init__(self, max_rows: int) -> None:
        self._free = list(reversed(range(max_rows)))  # taken from the end
        self._entered: list[Request] = []  # given a row since the last plan, in that order
        self._released: list[int] = []  # rows that earlier plans admitted, freed since the last one

    @property
    def num_free(self) -> int:
        return len(self._free)

    def give(self, request: Request) -> None:
        """Put a request without a row into a free one."""
        assert request.row is None, f"{request.key} has row {request.row}"
        request.row = self._free.pop()
        self._entered.append(request)

    def take_back(self, request: Request) -> None:
        """Free a request's row; nothing happens if it has none."""
        if request.row is None:
            return
        if self.is_entering(request):
            self._entered.remove(request)  # no plan has admitted it yet
        else:
            self._released.append(request.row)
        self._free.append(request.row)
        request.row = None

    def is_entering(self, request: Request) -> bool:
        """Whether the next plan admits the request, with all the blocks it has by then."""
        return request in self._entered

    def take_changes(self) -> tuple[list[RowAdmission], list[int]]:
        """Admissions and released rows since the last call, for the next plan."""
        admissions = [_admission(request) for request in self._entered]
        released = self._released
        self._entered, self._released = [], []
        return admissions, released


def row_of(request: Request) -> int:
    assert request.row is not None, f"{request.key} runs without a row"
    return request.row


def _admission(request: Request) -> RowAdmission:
    return RowAdmission(
        row=row_of(request),
        token_ids=list(request.tokens),
        num_prompt_tokens=request.num_prompt_tokens,
        params=request.params,
        block_ids=list(request.block_ids),
        num_computed_tokens=request.num_computed_tokens,
    )


_NEVER = 2**62  # steps to the first last token, where nothing decodes


class DecodeColumns:
    """The decoding requests, in order, as columns; `advance` also mutates the requests."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self.requests = list(requests)
        self.rows = [r.row for r in self.requests if r.row is not None]
        self.constrained = [r for r in self.requests if r.params.is_constrained]
        self._last_counts: NDArray[np.int64] | None = None  # [R]  None = not asked for yet
        self.count_again()

    def count_again(self) -> None:
        """Take over the requests' computed tokens, which others have changed."""
        # [R]
        self._num_computed: NDArray[np.int64] = np.array(
            [request.num_computed_tokens for request in self.requests], dtype=np.int64
        )
        self._sum_computed = int(self._num_computed.sum())
        self._at_block_boundary: list[Request] | None = None  # cache; None after `advance`
        self._num_steps_to_last: int | None = None  # None = not computed yet

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_computed_tokens(self) -> list[int]:
        """[R]"""
        num_computed: list[int] = self._num_computed.tolist()
        return num_computed

    @property
    def work(self) -> StepWork:
        """The work of the next step's decodes."""
        num_rows = len(self.requests)
        return StepWork(num_decode_rows=num_rows, num_decode_keys=self._sum_computed + num_rows)

    def at_block_boundary(self, block_size: int) -> list[Request]:
        """Requests whose computed tokens fill their last block; `block_size` must not change."""
        if self._at_block_boundary is None:
            (places,) = (self._num_computed % block_size == 0).nonzero()
            self._at_block_boundary = [self.requests[place] for place in places.tolist()]
        return self._at_block_boundary

    def at_last_token(self, rules: FinishRules) -> list[Request]:
        """`rules.at_last_token` of the decodes; every call must have the same `rules`."""
        if self._last_counts is None:
            self._last_counts = np.array([rules.last_count(r) for r in self.requests], np.int64)
        if self._num_steps_to_last is None:
            left = self._last_counts - self._num_computed
            self._num_steps_to_last = int(left.min(initial=_NEVER))
        return rules.at_last_token(self.requests) if self._num_steps_to_last <= 0 else []

    def advance(self) -> None:
        """Count the planned step: it computes one token of each request."""
        self._num_computed += 1
        self._sum_computed += len(self.requests)
        self._at_block_boundary = None
        if self._num_steps_to_last is not None:
            self._num_steps_to_last -= 1
        for request in self.requests:
            request.num_computed_tokens += 1

    def advance_drafts(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """Count as well what it verifies, by index, as if all of it were right."""
        if not drafts:
            return
        counts = {index: len(its_drafts) for index, its_drafts in drafts.items()}
        self._num_computed[list(counts)] += list(counts.values())
        self._sum_computed += sum(counts.values())
        for index, count in counts.items():
            self.requests[index].num_computed_tokens += count
        self._at_block_boundary = self._num_steps_to_last = None


class RunningRequests:
    """Ordered dicts by key: `prompts` and all in admission order, `decodes` in order of entry."""

    def __init__(self) -> None:
        self._all: dict[RequestKey, Request] = {}
        self.prompts: dict[RequestKey, Request] = {}
        self.decodes: dict[RequestKey, Request] = {}
        self._columns: DecodeColumns | None = None  # of `decodes`; None = rebuild on next use

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._all

    def __iter__(self) -> Iterator[Request]:
        """All of them, oldest admission first."""
        return iter(self._all.values())

    @property
    def newest(self) -> Request:
        return next(reversed(self._all.values()))

    def newest_other_than(self, request: Request | None) -> Request:
        """The newest request other than `request`; `request` itself if it is the only one."""
        return next((r for r in reversed(self._all.values()) if r is not request), self.newest)

    @property
    def decode_columns(self) -> DecodeColumns:
        """The requests that decode now, in order."""
        if self._columns is None:
            self._columns = DecodeColumns(self.decodes.values())
        return self._columns

    @property
    def num_queued_tokens(self) -> int:
        """Tokens that the running requests have still to compute, as far as it is known."""
        num_prompt_tokens = sum([r.num_uncomputed_tokens for r in self.prompts.values()])
        return num_prompt_tokens + len(self.decodes)

    def get(self, key: RequestKey) -> Request | None:
        return self._all.get(key)

    def add(self, request: Request) -> None:
        """Add a request whose known tokens are to be computed in chunks."""
        self._all[request.key] = self.prompts[request.key] = request

    def begin_decode(self, request: Request) -> None:
        """Move a request to the decodes: from the next step on it computes one token a step."""
        self.prompts.pop(request.key)
        self.decodes[request.key] = request
        self._columns = None

    def pause(self, requests: Iterable[Request]) -> None:
        """Plan no more steps for these decodes: each has its last token here in flight."""
        for request in requests:
            del self.decodes[request.key]
            self._columns = None

    def hold(self, requests: Iterable[Request]) -> list[Request]:
        """Pause those that decode, with tokens in flight, until `resume`; returns them."""
        held = []
        for request in requests:
            if request.key in self.decodes:
                self.pause([request])
                held.append(request)
        return held

    def resume(self, held: Iterable[Request]) -> None:
        """Return held requests that still run to the decodes; their tokens have arrived."""
        for request in held:
            if self._all.get(request.key) is request:
                self.decodes[request.key] = request
                self._columns = None

    def count_again(self) -> None:
        """Computed tokens of some decodes have changed beside `DecodeColumns.advance`."""
        if self._columns is not None:
            self._columns.count_again()

    def remove(self, request: Request) -> None:
        del self._all[request.key]
        self.prompts.pop(request.key, None)
        if self.decodes.pop(request.key, None) is not None:
            self._columns = None

    def has_prefilling_sibling(self, request: Request, block_size: int) -> bool:
        """Whether another choice of the same request is still computing their shared prompt."""
        num_shared_blocks = (request.num_prompt_tokens - 1) // block_size
        return request.key.child > 0 and any(
            other.key.request_id == request.key.request_id
            and other.num_indexed_blocks < num_shared_blocks
            for other in self
        )


Chunk = tuple[Request, int]  # a request and how many of its known tokens the step computes


def build_plan(
    step: int,
    decodes: DecodeColumns,
    chunks: list[Chunk],
    grown: dict[int, list[int]],
    zero_block_ids: list[int],
    row_slots: RowSlots,
    planned: PlannedDrafts,
    verified: Mapping[RequestKey, list[int]],
) -> StepPlan:
    """The plan of step number `step`; takes admissions and released rows from `row_slots`.

    `decodes`: each computes its newest token and samples the next. `chunks`: computed besides; each
    samples if it reaches the end of the known tokens. `grown`: row -> new block ids. `planned`: by
    index in `decodes`. `verified`: of requests whose last step had drafts, the tokens it gave them.
    """
    num_decodes = len(decodes)
    requests = [request for request, _ in chunks]
    reaches_end = [num_new == request.num_uncomputed_tokens for request, num_new in chunks]
    rows = decodes.rows + [request.row for request in requests if request.row is not None]
    num_rows = num_decodes + len(requests)
    assert len(rows) == num_rows, f"step {step}: a request of {num_rows} has no row"
    no_blocks: list[int] = []
    verified_tokens = [
        (row_of(request), verified[request.key])
        for request in (decodes.requests if verified else ())
        if request.key in verified
    ]
    accepted_tokens, awaited_rows = _newest_of_constrained(decodes, row_slots, verified)
    admissions, released_rows = row_slots.take_changes()
    num_samples = [1] * num_decodes
    for index, its_drafts in planned.drafts.items():
        num_samples[index] += len(its_drafts)
    return StepPlan(
        step=step,
        zero_block_ids=zero_block_ids,
        admissions=admissions,
        released_rows=released_rows,
        rows=rows,
        num_new_tokens=num_samples + [num_new for _, num_new in chunks],
        num_computed_tokens=(
            decodes.num_computed_tokens + [request.num_computed_tokens for request in requests]
        ),
        num_samples=num_samples + list(map(int, reaches_end)),
        new_block_ids=(
            list(map(grown.get, rows, repeat(no_blocks))) if grown else [no_blocks] * num_rows
        ),
        accepted_tokens=accepted_tokens,
        awaited_rows=awaited_rows,
        drafts=planned.in_plan(),
        ahead=list(planned.nums_in_flight),
        verified_tokens=verified_tokens,
        texts=[(row_of(decodes.requests[i]), start, ids) for i, start, ids in planned.texts],
    )


def _newest_of_constrained(
    decodes: DecodeColumns, row_slots: RowSlots, verified: Mapping[RequestKey, list[int]]
) -> tuple[list[tuple[int, int]], list[int]]:
    """`accepted_tokens` and `awaited_rows` of a plan, before its admissions are taken."""
    accepted_tokens: list[tuple[int, int]] = []
    awaited_rows: list[int] = []
    for request in decodes.constrained:
        if row_slots.is_entering(request) or request.key in verified:
            continue
        if request.num_computed_tokens == request.num_known_tokens:
            awaited_rows.append(row_of(request))
        else:
            accepted_tokens.append((row_of(request), request.tokens[-1]))
    return accepted_tokens, awaited_rows
