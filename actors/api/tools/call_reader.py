"""Reads one tool call that is a JSON object, passing its arguments on while they are written.

What is certain to be no call goes back to the text it came from. Knows no markers: each format
reads those itself.
"""

from collections.abc import Collection
from enum import Enum, auto

import msgspec

from actors.api.tools.events import EventSink
from actors.api.tools.json_scanner import JsonScanner

ARGUMENT_KEYS = ("arguments", "parameters")


class Progress(Enum):
    READING = auto()
    COMPLETE = auto()
    REFUSED = auto()  # no call of an offered function, or broken JSON


class CallReader:
    """`{"name": ..., "arguments": {...}}`, keys in any order, or the arguments alone.

    A call starts once its name is known to be offered and its arguments have begun as an object;
    refused before that, `opening` and all that was read become content. Refused later, the call
    ends incomplete. The refused character itself is never consumed.
    """

    def __init__(
        self, sink: EventSink, names: Collection[str], opening: str, *, name: str | None = None
    ) -> None:
        """`opening`: what led here, for the way back. With `name`, only the arguments follow."""
        self._sink = sink
        self._names = names
        self._scanner = JsonScanner()
        self._is_bare = name is not None
        self._name = name
        self._is_started = False
        self._raw = [opening]  # all that was read, until the call starts
        # Characters that are not passed on yet; None = no arguments have come.
        self._arguments: list[str] | None = None
        self._key: str | None = None  # of the member that is being read
        self._key_chars: list[str] = []
        self._name_chars: list[str] = []
        self.progress = Progress.READING

    def read(self, text: str) -> int:
        """How many characters were consumed; all of them unless `progress` says otherwise."""
        for position, char in enumerate(text):
            if not self._push(char):
                self._refuse()
                return position
            if self.progress is Progress.COMPLETE:
                return position + 1
        self._pass_on()
        return len(text)

    def finish(self, *, is_cut: bool) -> None:
        """The text ended inside the call; `is_cut`: if it has not started, it is dropped."""
        if is_cut:
            self._raw.clear()
        self._refuse()

    # ---- one character ----------------------------------------------------------------------

    def _push(self, char: str) -> bool:
        """False: this character cannot belong to a call."""
        scanner = self._scanner
        was_in_string, old_depth, had_key = scanner.in_string, scanner.depth, scanner.expects_colon
        if old_depth == 0 and not char.isspace() and char != "{":
            return False
        if not scanner.push(char):
            return False
        between_members = old_depth == 1 and not was_in_string and not self._is_bare
        if between_members and char in ",}":
            is_call = self._end_member()
        elif between_members and had_key and char == ":":
            is_call = self._begin_member()
        else:
            is_call = self._add(char, old_depth)
        is_call = is_call and self._advance()
        if is_call and not self._is_started:
            self._raw.append(char)
        return is_call

    def _begin_member(self) -> bool:
        key = _decode_text("".join(self._key_chars))
        self._key = key
        self._key_chars.clear()
        is_repeated = (key == "name" and self._name is not None) or (
            key in ARGUMENT_KEYS and self._arguments is not None
        )
        return key is not None and not is_repeated

    def _add(self, char: str, depth: int) -> bool:
        if self._is_bare or self._key in ARGUMENT_KEYS:
            return self._add_to_arguments(char)
        if self._key == "name":
            self._name_chars.append(char)
        elif self._key is None and depth == 1:
            self._key_chars.append(char)
        return True

    def _add_to_arguments(self, char: str) -> bool:
        if self._arguments is None:
            if char.isspace():
                return True
            self._arguments = []
            if char not in '{"':  # a string may hold the object, as OpenAI's own format does
                return False
        elif char.isspace() and self._is_after_arguments():
            return True
        self._arguments.append(char)
        return True

    def _is_after_arguments(self) -> bool:
        return not self._is_bare and self._scanner.depth == 1 and not self._scanner.in_string

    def _end_member(self) -> bool:
        if self._key == "name":
            self._name = _decode_text("".join(self._name_chars))
            if self._name not in self._names:
                return False
        self._key = None
        return True

    # ---- the call ---------------------------------------------------------------------------

    def _advance(self) -> bool:
        """Starts and ends the call when it is time; False: it turned out to be none."""
        if not self._is_started and self._name is not None and self._has_object():
            self._start(self._name)
        if not self._scanner.is_done:
            return True
        if not self._is_started:
            arguments = "{}" if self._arguments is None else _object_in(self._arguments)
            if self._name is None or arguments is None:
                return False
            self._arguments = [arguments]
            self._start(self._name)
        self._pass_on()
        self._sink.end_call(is_complete=True)
        self.progress = Progress.COMPLETE
        return True

    def _has_object(self) -> bool:
        """The arguments' bracket and one character more: what is no JSON mostly shows there."""
        if self._arguments is None or self._arguments[0] != "{":
            return False
        return len(self._arguments) > 1 and not self._arguments[-1].isspace()

    def _start(self, name: str) -> None:
        self._is_started = True
        self._raw.clear()
        self._sink.start_call(name)

    def _pass_on(self) -> None:
        if self._is_started and self._arguments:
            self._sink.arguments("".join(self._arguments))
            self._arguments.clear()

    def _refuse(self) -> None:
        if self._is_started:
            self._pass_on()
            self._sink.end_call(is_complete=False)
        else:
            self._sink.content("".join(self._raw))
        self.progress = Progress.REFUSED


def _decode_text(raw: str) -> str | None:
    """The string that a JSON text holds; None when it holds something else."""
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeError):
        return None


def _object_in(chars: list[str]) -> str | None:
    """The text of a JSON object that is written as a JSON string; None when it is not one."""
    text = _decode_text("".join(chars))
    if text is None:
        return None
    scanner = JsonScanner()
    is_object = text.lstrip().startswith("{") and all(map(scanner.push, text))
    return text if is_object and scanner.is_done else None
