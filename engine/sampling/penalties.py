"""Penalties on tokens already present: repetition, frequency and presence.

Only rows that ask for a penalty get a row of counts; the tables grow when such a request comes and
are reused, so a server whose clients use none holds none. Knows nothing of later processing.
"""

import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.sampling.feature import column, positions_of, put, take


class TokenCounts:
    """How often each token occurred, for the rows that care: fp32 [slots, vocab].

    fp32 because it meets logits, and exact up to 2**24 occurrences. Grows by doubling to at most
    `max_rows` slots; a removed row's slot is used again.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._counts = torch.zeros((0, vocab_size), dtype=torch.float32, device=device)
        self._slots: dict[int, int] = {}  # row -> slot
        self._free_slots: list[int] = []

    def __contains__(self, row: object) -> bool:
        return row in self._slots

    @property
    def num_slots(self) -> int:
        return self._counts.shape[0]

    def add(self, row: int, token_ids: list[int]) -> None:
        assert row not in self._slots, f"row {row} already has counts"
        _, vocab_size = self._counts.shape
        ids = torch.tensor(token_ids, dtype=torch.int64)
        counts = torch.bincount(ids, minlength=vocab_size)
        assert counts.shape[0] == vocab_size, f"row {row}: token id {counts.shape[0] - 1}"
        if not self._free_slots:
            self._grow()
        slot = self._free_slots.pop()
        self._slots[row] = slot
        self._counts[slot] = counts

    def remove(self, row: int) -> None:
        slot = self._slots.pop(row, None)
        if slot is not None:
            self._free_slots.append(slot)

    def gather(self, rows: list[int]) -> Tensor:
        """Counts of the rows, a copy, fp32 [len(rows), vocab]."""
        return self._counts.index_select(0, self._slots_of(rows))

    def observe(self, rows: list[int], token_ids: list[int]) -> None:
        positions = positions_of(rows, self._slots)
        if positions:
            slots = self._slots_of([rows[position] for position in positions])
            drawn = [token_ids[position] for position in positions]
            # Rows are distinct, hence slots too: no element is written twice.
            self._counts[slots, torch.tensor(drawn, device=slots.device)] += 1

    def _slots_of(self, rows: list[int]) -> Tensor:
        return torch.tensor([self._slots[row] for row in rows], device=self._counts.device)

    def _grow(self) -> None:
        old = self.num_slots
        new = min(max(1, 2 * old), self._max_rows)
        assert new > old, f"more than {self._max_rows} rows"
        extra = self._counts.new_zeros((new - old, self._counts.shape[1]))
        self._counts = torch.cat([self._counts, extra])
        self._free_slots.extend(reversed(range(old, new)))


class RepetitionPenalty:
    """Divides positive logits and multiplies negative ones, for tokens of prompt and output."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._counts = TokenCounts(vocab_size, max_rows, device)
        self._penalties: dict[int, float] = {}  # row -> factor

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> bool:
        if params.repetition_penalty == 1.0:
            return False
        self._counts.add(row, prompt_ids + output_ids)
        self._penalties[row] = params.repetition_penalty
        return True

    def remove(self, row: int) -> None:
        self._penalties.pop(row, None)
        self._counts.remove(row)

    def apply(self, logits: Tensor, rows: list[int]) -> None:
        positions = positions_of(rows, self._penalties)
        if not positions:
            return
        members = [rows[position] for position in positions]
        part = take(logits, positions)
        penalty = column(self._penalties, members, part)
        # Positive and negative parts apart: several times faster than a select on the sign.
        penalised = part.clamp(min=0).div_(penalty).add_(part.clamp(max=0).mul_(penalty))
        put(logits, positions, part.copy_(penalised.where(self._counts.gather(members) > 0, part)))

    def observe(self, rows: list[int], token_ids: list[int]) -> None:
        self._counts.observe(rows, token_ids)


class OccurrencePenalty:
    """Subtracts frequency_penalty per occurrence and presence_penalty once; output tokens only."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._counts = TokenCounts(vocab_size, max_rows, device)
        self._frequency: dict[int, float] = {}  # row -> penalty
        self._presence: dict[int, float] = {}  # row -> penalty

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> bool:
        if params.frequency_penalty == 0.0 and params.presence_penalty == 0.0:
            return False
        self._counts.add(row, output_ids)
        self._frequency[row] = params.frequency_penalty
        self._presence[row] = params.presence_penalty
        return True

    def remove(self, row: int) -> None:
        self._frequency.pop(row, None)
        self._presence.pop(row, None)
        self._counts.remove(row)

    def apply(self, logits: Tensor, rows: list[int]) -> None:
        positions = positions_of(rows, self._frequency)
        if not positions:
            return
        members = [rows[position] for position in positions]
        part = take(logits, positions)
        counts = self._counts.gather(members)
        part -= column(self._frequency, members, part) * counts
        part -= column(self._presence, members, part) * counts.clamp_(max=1)
        put(logits, positions, part)

    def observe(self, rows: list[int], token_ids: list[int]) -> None:
        self._counts.observe(rows, token_ids)
