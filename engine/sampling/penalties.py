"""Applies penalties to tokens already present: repetition, frequency and presence.

Only rows with a penalty get a row of counts. The tables grow when such a request arrives and are
reused, so a server without such requests allocates none. Knows nothing of later processing.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.request import SamplingParams
from engine.sampling.feature import Ahead, at, positions_of, put, take
from engine.sampling.staging import Staging


class TokenCounts:
    """How often each token occurred, for rows with a penalty: fp32 [slots, vocab] on the device.

    fp32 because it is combined with logits; exact up to 2**24 occurrences. Grows by doubling to at
    most `max_rows` slots; a removed row's slot is reused.
    """

    def __init__(self, vocab_size: int, max_rows: int, staging: Staging) -> None:
        self._max_rows = max_rows
        self._staging = staging
        self._counts = torch.zeros((0, vocab_size), dtype=torch.float32, device=staging.device)
        self._slots: dict[int, int] = {}  # row -> slot
        self._free_slots: list[int] = []

    def __contains__(self, row: object) -> bool:
        return row in self._slots

    @property
    def num_slots(self) -> int:
        return self._counts.shape[0]

    def add(self, row: int, token_ids: list[int]) -> None:
        assert row not in self._slots, f"row {row} already has counts"
        self._check_ids(row, token_ids)
        if not self._free_slots:
            self._grow()
        slot = self._free_slots.pop()
        self._slots[row] = slot
        ids = self._staging.indices(token_ids)
        ones = self._counts.new_ones(len(token_ids))
        # Sums of ones are exact in any order.
        self._counts[slot].zero_().index_add_(0, ids, ones)

    def remove(self, row: int) -> None:
        slot = self._slots.pop(row, None)
        if slot is not None:
            self._free_slots.append(slot)

    def slots_of(self, rows: list[int]) -> NDArray[np.int64]:
        """Slots of the rows, [len(rows)]."""
        return np.array([self._slots[row] for row in rows], dtype=np.int64)

    def gather(self, slots: Tensor, ahead: Ahead | None = None) -> Tensor:
        """Counts at int64 [P] slots, with those of `ahead`, as a copy, fp32 [P, vocab]."""
        counts = self._counts.index_select(0, slots)
        if ahead is not None and any(ahead):
            lines = np.repeat(np.arange(len(ahead)), [len(drafts) for drafts in ahead])
            token_ids = np.array([i for drafts in ahead for i in drafts], dtype=np.int64)
            index = self._staging.send(lines.astype(np.int64), token_ids)
            counts.index_put_(index, counts.new_ones(len(lines)), accumulate=True)
        return counts

    def observe(self, rows: list[int], token_ids: Tensor) -> None:
        positions = positions_of(rows, self._slots)
        if not positions:
            return
        members = [rows[position] for position in positions]
        index, slots = self._staging.send(
            np.array(positions, dtype=np.int64), self.slots_of(members)
        )
        # Rows are distinct, so slots are too: no element is written twice.
        self._counts[slots, token_ids.index_select(0, index)] += 1

    def _check_ids(self, row: int, token_ids: list[int]) -> None:
        vocab_size = self._counts.shape[1]
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            assert 0 <= token_id < vocab_size, f"row {row}: token id {token_id}"

    def _grow(self) -> None:
        old = self.num_slots
        new = min(max(1, 2 * old), self._max_rows)
        assert new > old, f"more than {self._max_rows} rows"
        extra = self._counts.new_zeros((new - old, self._counts.shape[1]))
        self._counts = torch.cat([self._counts, extra])
        self._free_slots.extend(reversed(range(old, new)))


class RepetitionPenalty:
    """Divides positive logits and multiplies negative ones, for tokens of prompt and output."""

    def __init__(self, vocab_size: int, max_rows: int, staging: Staging) -> None:
        self._counts = TokenCounts(vocab_size, max_rows, staging)
        self._staging = staging
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

    def apply(self, logits: Tensor, rows: list[int], ahead: Ahead | None = None) -> None:
        positions = positions_of(rows, self._penalties)
        if not positions:
            return
        members = [rows[position] for position in positions]
        index, slots, penalty = self._staging.send(
            np.array(positions, dtype=np.int64),
            self._counts.slots_of(members),
            np.array([[self._penalties[row]] for row in members], dtype=np.float32),
        )
        part = take(logits, index)
        # Handling positive and negative parts apart is several times faster than a select.
        penalised = part.clamp(min=0).div_(penalty).add_(part.clamp(max=0).mul_(penalty))
        is_present = self._counts.gather(slots, at(ahead, positions)) > 0
        put(logits, index, part.copy_(penalised.where(is_present, part)))

    def observe(self, rows: list[int], token_ids: Tensor) -> None:
        self._counts.observe(rows, token_ids)


class OccurrencePenalty:
    """Subtracts frequency_penalty per occurrence and presence_penalty once; output tokens only."""

    def __init__(self, vocab_size: int, max_rows: int, staging: Staging) -> None:
        self._counts = TokenCounts(vocab_size, max_rows, staging)
        self._staging = staging
        self._penalties: dict[int, tuple[float, float]] = {}  # row -> frequency, presence

    def add(
        self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]
    ) -> bool:
        if params.frequency_penalty == 0.0 and params.presence_penalty == 0.0:
            return False
        self._counts.add(row, output_ids)
        self._penalties[row] = (params.frequency_penalty, params.presence_penalty)
        return True

    def remove(self, row: int) -> None:
        self._penalties.pop(row, None)
        self._counts.remove(row)

    def apply(self, logits: Tensor, rows: list[int], ahead: Ahead | None = None) -> None:
        positions = positions_of(rows, self._penalties)
        if not positions:
            return
        members = [rows[position] for position in positions]
        index, slots, penalties = self._staging.send(
            np.array(positions, dtype=np.int64),
            self._counts.slots_of(members),
            np.array([self._penalties[row] for row in members], dtype=np.float32),  # [P, 2]
        )
        part = take(logits, index)
        counts = self._counts.gather(slots, at(ahead, positions))
        part -= penalties[:, :1] * counts
        part -= penalties[:, 1:] * counts.clamp_(max=1)
        put(logits, index, part)

    def observe(self, rows: list[int], token_ids: Tensor) -> None:
        self._counts.observe(rows, token_ids)
