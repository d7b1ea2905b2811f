"""The parts of a chat's output, content, reasoning and tool calls, as a stream of events.

A call is `CallStarted`, any number of `CallArguments`, then `CallEnded`; calls never interleave.
The same events make streamed and whole answers, so that the two cannot disagree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    name: str  # of a function that the request offered


@dataclass(frozen=True, slots=True)
class CallArguments:
    text: str  # the next characters of a JSON object, as the model wrote it


@dataclass(frozen=True, slots=True)
class CallEnded:
    is_complete: bool  # False: the output ended, or stopped being JSON, inside the arguments


Event = Content | Reasoning | CallStarted | CallArguments | CallEnded


class ToolParser(Protocol):
    """Finds the calls in one choice's text; the events do not depend on how it was cut."""

    def push(self, text: str) -> list[Event]:
        """Takes text; returns what is certain now: nothing while a marker is incomplete."""
        ...

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """Ends the text; returns what was held back.

        is_cut: the text ended by its length, not by the model. Then half a marker, and a call whose
        name is not known yet, are dropped: they are no content.
        """
        ...


class EventSink:
    """Gathers a parser's events: merges pieces, and drops white space that only sets calls apart.

    White space at the end of content is held back: before and after a call it is layout, anywhere
    else it is content.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._spaces = ""  # white space that waits
        self._follows_call = False

    def content(self, text: str) -> None:
        whole = self._spaces + text
        if self._follows_call:
            whole = whole.lstrip()
        body = whole.rstrip()
        self._spaces = whole[len(body) :]
        if body:
            self._follows_call = False
            self._add_text(Content(body))

    def start_call(self, name: str) -> None:
        self._spaces = ""
        self._events.append(CallStarted(name))

    def arguments(self, text: str) -> None:
        if text:
            self._add_text(CallArguments(text))

    def end_call(self, *, is_complete: bool) -> None:
        self._follows_call = is_complete
        self._events.append(CallEnded(is_complete))

    def take(self) -> list[Event]:
        """The events since the last call of this."""
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """Returns the rest; trailing white space is content unless a call came before it."""
        if self._spaces and not self._follows_call:
            self._add_text(Content(self._spaces))
        self._spaces = ""
        return self.take()

    def _add_text(self, event: Content | CallArguments) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, Content) and isinstance(event, Content):
            self._events[-1] = Content(last.text + event.text)
        elif isinstance(last, CallArguments) and isinstance(event, CallArguments):
            self._events[-1] = CallArguments(last.text + event.text)
        else:
            self._events.append(event)


def num_held_chars(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that may still become one of `markers`."""
    longest = max(map(len, markers)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0
