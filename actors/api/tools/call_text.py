"""An answer's text while a parser reads it: what is not understood yet, and the call being read.

What every format does alike; markers, and what follows what, are each format's own.
"""

from collections.abc import Callable, Collection

from actors.api.tools.call_reader import CallReader, Progress
from actors.api.tools.events import Event, EventSink, num_held_chars


class CallText:
    """Text in, events out, as one parser decides in between."""

    def __init__(self, names: Collection[str]) -> None:
        """names: of the functions that are offered."""
        self.names = names
        self.rest = ""  # not yet understood
        self._sink = EventSink()
        self._call: CallReader | None = None

    def push(self, text: str, advance: Callable[[], bool]) -> list[Event]:
        """More text; `advance` reads a stretch of `rest`, False when it has to see more first."""
        self.rest += text
        while advance():
            pass
        return self._sink.take()

    def finish(
        self, *, unread: str = "", is_cut: bool = False, drops_rest: bool = False
    ) -> list[Event]:
        """The text is over; `unread` was taken from it and led to nothing.

        is_cut: a call that has not started is dropped. drops_rest: what is not understood is, too.
        """
        if self._call is not None:
            self._call.finish(is_cut=is_cut)
        if not drops_rest:
            self._sink.content(unread + self.rest)
        self.rest = ""
        return self._sink.finish()

    def content(self, text: str) -> None:
        """`text`, taken from `rest` before, is what it looks like."""
        self._sink.content(text)

    def skip_to(self, marker: str) -> bool:
        """Pass on what comes before `marker`, and take it; False = it has not come, whole."""
        before, found, after = self.rest.partition(marker)
        num_sent = len(before) - (0 if found else num_held_chars(before, (marker,)))
        self._sink.content(before[:num_sent])
        self.rest = after if found else before[num_sent:]
        return bool(found)

    def begin_call(self, opening: str, rest: str, *, name: str | None = None) -> None:
        """`rest` begins a call; `opening` led to it. With `name`, only the arguments follow."""
        self.rest = rest
        self._call = CallReader(self._sink, self.names, opening, name=name)

    def read_call(self) -> Progress:
        """As far as the text goes."""
        assert self._call is not None, "no call has begun"
        self.rest = self.rest[self._call.read(self.rest) :]
        progress = self._call.progress
        if progress is not Progress.READING:
            self._call = None
        return progress
