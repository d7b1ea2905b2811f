"""Device rows: which are free, and what the executor has not been told about them yet.

Knows no blocks, no order of requests and no tensors.
"""

from engine.request import Request
from engine.scheduling.plan import RowAdmission


class RowSlots:
    """Rows [0, max_rows), each free or given to one request."""

    def __init__(self, max_rows: int) -> None:
        self._free = list(reversed(range(max_rows)))  # taken from the end
        self._entered: list[Request] = []  # given a row since the last plan, in that order
        self._released: list[int] = []  # given up since then by requests of earlier plans

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
            self._entered.remove(request)  # the executor has not heard of it
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
