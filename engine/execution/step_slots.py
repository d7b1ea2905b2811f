"""What the host keeps of a launched step until it was waited for: made once, used in turn.

    take()  launch ... wait  give_back()         a slot belongs to one step at a time

Making page-locked memory or an event for every step would cost the host more than launching it.
Knows no plan and no model.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.step_timer import StepTimer


class StepSlot:
    """One step's timer, and the memory its tokens come back to."""

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
    """As many slots as there ever were steps in flight."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._device = device
        self._free: list[StepSlot] = []

    def take(self) -> StepSlot:
        """A slot that no step uses."""
        return self._free.pop() if self._free else StepSlot(self._max_rows, self._device)

    def give_back(self, slot: StepSlot) -> None:
        """Its step has been waited for, and what was copied was read."""
        assert slot not in self._free, "a step was waited for twice"
        self._free.append(slot)
