"""Lanes as CUDA streams: what is sent, and what runs in the second stream, has one of its own.

    compute   op  begin  op of the other flow ...  wait(done)  op
    send          wait(begin)  sum  done

Two flows compute in one stream, one after the other, and share the others too. So a tensor made in
a side stream may be freed as soon as the compute stream has waited for it: the next operation of
the side stream waits for what the compute stream was given before. A tensor of the compute stream
that a side stream reads is held until the compute stream has waited: freed before, it would be
given to the other flow, which would write to it meanwhile.

Knows no layers. `engine.layers.schedules` decides what is issued when.
"""

from dataclasses import dataclass
from typing import Any

import torch

from engine.layers.operations import Flow, Lane, Op


@dataclass(slots=True)
class _Events:
    begin: Any  # torch.cuda.Event
    done: Any
    held: tuple[object, ...] = ()


class StreamLanes:
    """Runs the lanes in `streams` there, and the others in the current stream."""

    def __init__(self, device: torch.device, lanes: tuple[Lane, ...] = (Lane.SEND,)) -> None:
        self._device = device
        self._cuda: Any = torch.cuda  # its stubs lack types
        self._streams: dict[Lane, Any] = {lane: self._cuda.Stream(device) for lane in lanes}
        self._events: dict[tuple[int, Lane], _Events] = {}

    def issue(self, op: Op, flow: Flow) -> None:
        compute = torch.cuda.current_stream(self._device)
        for lane in op.waits:
            if lane in self._streams:
                ended = self._of(flow, lane)
                compute.wait_event(ended.done)
                ended.held = ()
        stream = self._streams.get(op.lane)
        if stream is None:
            op.run(flow)
            return
        events = self._of(flow, op.lane)
        events.begin.record(compute)
        events.held += flow.tensors()
        stream.wait_event(events.begin)
        with torch.cuda.stream(stream):
            op.run(flow)
        events.done.record(stream)

    def _of(self, flow: Flow, lane: Lane) -> _Events:
        """The events of a flow's lane; used again by its next operation there."""
        key = flow.ctx.lane, lane
        if key not in self._events:
            self._events[key] = _Events(self._cuda.Event(), self._cuda.Event())
        return self._events[key]
