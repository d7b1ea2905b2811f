"""Finds stop strings in text that arrives in pieces. Knows characters, not tokens.

One Knuth-Morris-Pratt automaton per stop string: O(1) amortised per character for any strings. The
automata's states give the exact length of text that may still become a match.
"""

from collections.abc import Sequence


class StopStrings:
    """Passes text through until one of `stops` is complete.

    The match is the stop string that ends first; of those that end together, the longest. So the
    result does not depend on how the text was cut into pieces. With `include` the matched string
    is part of the text, otherwise the text ends before it.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), f"an empty stop string in {stops!r}"
        self._stops = list(stops)
        self._borders = [_border_lengths(stop) for stop in self._stops]
        self._matched_chars = [0] * len(self._stops)  # matched prefix length, per stop string
        self._include = include
        self._held = ""  # may still become part of a stop string

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Returns (text to emit, the completed stop string or None); text after a match is dropped.

        Without `may_stop`, a stop string that ends in this text is ordinary text; one that begins
        in it can still be completed by later text.
        """
        if not self._stops:
            return text, None
        for position, char in enumerate(text):
            matched = self._advance(char)
            if matched is not None and may_stop:
                whole = self._held + text[: position + 1]
                self._held = ""
                return (whole if self._include else whole[: -len(matched)]), matched
        whole = self._held + text
        num_held = max(self._num_held(index) for index in range(len(self._stops)))
        self._held = whole[len(whole) - num_held :]
        return whole[: len(whole) - num_held], None

    def flush(self) -> str:
        """Text held back that can no longer be part of a stop string; ends the text."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, index: int) -> int:
        """Number of held characters that may still become part of this stop string."""
        length = self._matched_chars[index]
        return self._borders[index][-1] if length == len(self._stops[index]) else length

    def _advance(self, char: str) -> str | None:
        longest: str | None = None
        for index, stop in enumerate(self._stops):
            length = self._matched_chars[index]
            if length == len(stop):  # it was complete while `may_stop` was False
                length = self._borders[index][-1]
            while length > 0 and stop[length] != char:
                length = self._borders[index][length - 1]
            if stop[length] == char:
                length += 1
            self._matched_chars[index] = length
            if length == len(stop) and (longest is None or length > len(longest)):
                longest = stop
        return longest


def _border_lengths(pattern: str) -> list[int]:
    """Per prefix, the length of its longest proper prefix that is also its suffix (KMP)."""
    lengths = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length > 0 and pattern[position] != pattern[length]:
            length = lengths[length - 1]
        if pattern[position] == pattern[length]:
            length += 1
        lengths[position] = length
    return lengths
