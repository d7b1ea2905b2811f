"""What is queued in which stream, and how long the memory that another stream reads is kept."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch

from engine.layers.operations import Flow, Lane, Op
from engine.layers.stream_lanes import StreamLanes


class _Device:
    """Stands in for `torch.cuda`: writes down what streams are given."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.current = self.Stream("compute")
        self.num_events = 0

    def Stream(self, name: object) -> "_Stream":
        return _Stream(self, name if isinstance(name, str) else "side")

    def Event(self) -> "_Event":
        self.num_events += 1
        return _Event(self)

    def current_stream(self, device: object) -> "_Stream":
        return self.current

    @contextmanager
    def stream(self, stream: "_Stream") -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class _Stream:
    def __init__(self, device: _Device, name: str) -> None:
        self.device, self.name = device, name

    def wait_event(self, event: "_Event") -> None:
        self.device.said.append(f"{self.name} waits for {event.of}")


class _Event:
    of = "nothing"

    def __init__(self, device: _Device) -> None:
        self.device = device

    def record(self, stream: _Stream) -> None:
        self.of = stream.name


class _Context:
    def __init__(self, lane: int) -> None:
        self.lane = lane


def _op(device: _Device, name: str, lane: Lane = Lane.COMPUTE, **named: Any) -> Op:
    def run(flow: Flow) -> None:
        device.said.append(f"{device.current.name}: {name}")
        flow.x = torch.zeros(1)

    return Op(name, run, lane=lane, **named)


def test_what_a_side_stream_reads_is_kept_until_the_compute_stream_has_waited() -> None:
    device = _Device()
    with patch("engine.layers.stream_lanes.torch.cuda", cast("Any", device)):
        lanes = StreamLanes(torch.device("cpu"), (Lane.SEND,))
        flow = Flow(ctx=cast("Any", _Context(0)), x=torch.ones(3))
        read = weakref.ref(flow.x)
        lanes.issue(_op(device, "send", Lane.SEND), flow)
        # The second one has no stream here.
        lanes.issue(_op(device, "second", Lane.SECOND_STREAM), flow)
        assert read() is not None, "the other flow would get its memory and write to it"
        lanes.issue(_op(device, "use", waits=(Lane.SEND, Lane.SECOND_STREAM)), flow)
        assert read() is None
    assert device.said == [
        "side waits for compute",
        "side: send",
        "compute: second",
        "compute waits for side",
        "compute: use",
    ]


def test_flows_have_events_of_their_own_which_are_used_again() -> None:
    device = _Device()
    with patch("engine.layers.stream_lanes.torch.cuda", cast("Any", device)):
        lanes = StreamLanes(torch.device("cpu"))
        flows = [Flow(ctx=cast("Any", _Context(lane)), x=torch.ones(3)) for lane in (0, 1)]
        for _ in range(3):
            for flow in flows:
                lanes.issue(_op(device, "send", Lane.SEND), flow)
                lanes.issue(_op(device, "use", waits=(Lane.SEND,)), flow)
    assert device.num_events == 4
