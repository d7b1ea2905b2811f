"""Server-sent events out of bytes that are cut anywhere: the data of each complete event."""


class EventParser:
    """Keeps what has no end yet. Event names, ids and comments are of no matter here."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, data: bytes) -> list[str]:
        """The data of the events that ended in `data`, in order."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                value = line.removeprefix(b"data:").removeprefix(b" ")
                self._data.append(value.decode("utf-8", errors="replace"))
            elif not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events
