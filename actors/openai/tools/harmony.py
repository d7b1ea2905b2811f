"""Answers in OpenAI's harmony format, as gpt-oss writes them: messages, each with a header.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

What is in `analysis` is reasoning, what is in `final` or in `commentary` is content, and a message
to an offered function is a call. A message to anybody else (a function that was not offered, the
built-in `browser` and `python`), or of another role than the assistant, is reasoning: it is not
for the user, and nothing here executes it. Messages of a kind are set apart by an empty line.

The format's tokens come as marks, characters that no text can hold, so that an answer that spells
`<|end|>` in letters ends nothing.

OpenAI's own reader of the format, the package openai-harmony, is not used: it downloads its
vocabulary where it is first loaded, accepts only that one (by its hash) instead of the tokenizer of
the model's folder, and ends with an error at the first token that is out of order, where a client
should get the rest. Source of the format: docs/format.md of github.com/openai/harmony. Beyond it,
`<|start|>` or `<|channel|>` inside a message begin the next, an answer without any header is
content, and what a header lacks is missing.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from actors.openai.tools.call_reader import CallReader, Progress
from actors.openai.tools.events import Content, Event, EventSink, Reasoning
from engine.text.tokenizing import Tokenizing

# Lone surrogates: UTF-8 has none, so that no other token's text can be one of them.
START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL = map(chr, range(0xD800, 0xD807))
MARKS: Mapping[str, str] = {
    "<|start|>": START,
    "<|end|>": END,
    "<|message|>": MESSAGE,
    "<|channel|>": CHANNEL,
    "<|constrain|>": CONSTRAIN,
    "<|return|>": RETURN,
    "<|call|>": CALL,
}
FUNCTIONS = "functions."  # what a recipient that is a function begins with

_MARK = re.compile(f"([{START}-{CALL}])")
_ENDS = (END, RETURN, CALL)
_ASSISTANT = "assistant"
_TO = "to="
_MAX_HEADER_CHARS = 256  # a longer one is text whose header is missing
_GAP = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyTokens:
    """The format's tokens in a model's vocabulary."""

    marks: Mapping[int, str]  # id -> mark
    start_id: int  # of <|start|>
    stop_ids: tuple[int, ...]  # of <|return|> and <|call|>, which end an answer

    def message_so_far(self, prompt_ids: Sequence[int], tokenizing: Tokenizing) -> str:
        """The prompt from its last <|start|> on, with marks: the answer goes on in there."""
        position = len(prompt_ids) - 1
        while position >= 0 and prompt_ids[position] != self.start_id:
            position -= 1
        if position < 0:
            return ""
        detokenizer = tokenizing.detokenizer()
        texts = []
        for token_id in prompt_ids[position:]:
            mark = self.marks.get(token_id)
            texts.append(detokenizer.push(token_id) if mark is None else mark)
        return "".join(texts)


def find_tokens(tokenizing: Tokenizing) -> HarmonyTokens | list[str]:
    """The format's tokens, or the names of those that are no special tokens of the vocabulary."""
    ids = {tokenizing.piece(i).decode(): i for i in tokenizing.token_bytes.special_ids}
    lacking = [name for name in MARKS if name not in ids]
    if lacking:
        return lacking
    return HarmonyTokens(
        marks={ids[name]: mark for name, mark in MARKS.items()},
        start_id=ids["<|start|>"],
        stop_ids=(ids["<|return|>"], ids["<|call|>"]),
    )


def begins_answer(message_so_far: str) -> bool:
    """Whether a prompt ends where the header of the answer's first message begins."""
    return message_so_far.rstrip() == START + _ASSISTANT


class _Kind(Enum):
    """What the message that is being read is."""

    HEADER = auto()  # not known yet
    THOUGHT = auto()
    ANSWER = auto()
    CALL = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    role: str
    channel: str
    recipient: str
    rest: str  # words that are none of these


class HarmonyParser:
    """Reads one choice: text with marks in, reasoning, content and calls out."""

    def __init__(self, names: Collection[str], message_so_far: str = "") -> None:
        """names: of the functions that are offered.

        message_so_far: what the prompt says of the message that the answer goes on in.
        """
        self._names = names
        self._kind = _Kind.HEADER
        self._header = ""  # with marks
        self._is_first = True  # no header has come before this one
        self._calls = EventSink()
        self._reader: CallReader | None = None  # of the call that is being read
        self._is_empty = True  # the call has no arguments so far
        self._events: list[Event] = []
        self._has_text = False  # the message that is being read
        self._skips_spaces = False  # as layout behind a call's arguments
        self._spoken: set[_Kind] = set()  # kinds of which there has been text
        self.push(message_so_far)
        self._events.clear()
        self._spoken.clear()
        self._has_text = True  # what the prompt began is gone on with
        self._is_first = True
        if self._header.strip() == _ASSISTANT:
            self._header = ""

    def push(self, text: str) -> list[Event]:
        for piece in _MARK.split(text):
            if _MARK.fullmatch(piece):
                self._take_mark(piece)
            elif piece:
                self._take_text(piece)
        return self._take()

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """Ends the answer. `is_cut`: by its length; then half a header is dropped."""
        self._end_message(is_cut=is_cut)
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # ---- messages -------------------------------------------------------------------------------

    def _take_mark(self, mark: str) -> None:
        if mark == START or mark in _ENDS:
            self._end_message(is_cut=False)
        elif mark == CHANNEL and (self._kind is not _Kind.HEADER or CHANNEL in self._header):
            self._end_message(is_cut=False)
            self._header = mark
        elif self._kind is _Kind.HEADER:
            if mark == MESSAGE:
                self._begin_message(_read_header(self._header))
            else:
                self._header += mark

    def _take_text(self, text: str) -> None:
        match self._kind:
            case _Kind.HEADER:
                room = max(0, _MAX_HEADER_CHARS - len(self._header))
                self._header += text[:room]
                if text[room:]:
                    self._begin_without_end()
                    self._take_text(text[room:])
            case _Kind.CALL:
                self._take_arguments(text)
            case kind:
                self._say(kind, text)

    def _begin_message(self, header: _Header) -> None:
        self._header = ""
        self._has_text = self._skips_spaces = False
        self._kind = self._kind_of(header)
        if self._kind is _Kind.CALL:
            name = header.recipient.removeprefix(FUNCTIONS)
            self._reader = CallReader(self._calls, self._names, "", name=name)
            self._is_empty = True

    def _kind_of(self, header: _Header) -> _Kind:
        if header.role not in ("", _ASSISTANT):
            return _Kind.THOUGHT
        if header.recipient not in ("", "user", _ASSISTANT):
            is_offered = header.recipient.removeprefix(FUNCTIONS) in self._names
            return _Kind.CALL if is_offered else _Kind.THOUGHT
        return _Kind.THOUGHT if header.channel == "analysis" else _Kind.ANSWER

    def _begin_without_end(self) -> None:
        """Takes a header that has no end for a message of its channel."""
        marked = CHANNEL in self._header
        header = _read_header(self._header)
        text = header.rest if marked else _MARK.sub("", self._header)
        self._begin_message(_Header(role="", channel=header.channel, recipient="", rest=""))
        if text.strip():
            self._say(self._kind, text)

    def _end_message(self, *, is_cut: bool) -> None:
        if self._kind is _Kind.HEADER:
            is_text = self._header.strip() not in ("", _ASSISTANT)
            if is_text and not (is_cut and self._may_be_header()):
                self._begin_without_end()
        elif self._kind is _Kind.CALL:
            self._end_call(is_cut=is_cut)
        self._kind = _Kind.HEADER
        self._header = ""
        self._is_first = False

    def _may_be_header(self) -> bool:
        """Whether what has come is, or may become, more than text of the answer's beginning."""
        begun = self._header.lstrip()
        is_begun = CHANNEL in begun or begun.startswith(_TO) or _TO.startswith(begun)
        return is_begun or not self._is_first

    def _say(self, kind: _Kind, text: str) -> None:
        if self._skips_spaces:
            text = text.lstrip()
        if not text:
            return
        self._skips_spaces = False
        if not self._has_text:
            text = _GAP + text if kind in self._spoken else text
            self._has_text = True
        self._spoken.add(kind)
        self._events.append(Reasoning(text) if kind is _Kind.THOUGHT else Content(text))

    # ---- calls ----------------------------------------------------------------------------------

    def _take_arguments(self, text: str) -> None:
        reader = self._reader
        assert reader is not None, "no call has begun"
        self._is_empty = self._is_empty and not text.strip()
        num_read = reader.read(text)
        self._pass_on()
        if reader.progress is not Progress.READING:
            # What stands behind the arguments, or makes them none, is for nobody to call with.
            self._reader, self._kind = None, _Kind.THOUGHT
            self._skips_spaces = True
            self._say(_Kind.THOUGHT, text[num_read:])

    def _end_call(self, *, is_cut: bool) -> None:
        assert self._reader is not None, "no call has begun"
        if self._is_empty and not is_cut:
            self._reader.read("{}")
        else:
            self._reader.finish(is_cut=is_cut)
        self._reader = None
        self._pass_on()

    def _pass_on(self) -> None:
        """Passes on what the reader found; what it calls content is no call, and for nobody."""
        for event in self._calls.finish():
            if isinstance(event, Content):
                self._say(_Kind.THOUGHT, event.text)
            else:
                self._events.append(event)


def _read_header(header: str) -> _Header:
    """Role and recipient may stand before the channel, the recipient and a format behind it."""
    before, _, after = header.partition(CHANNEL)
    channel = re.match(rf"[^\s{START}-{CALL}]*", after)
    assert channel is not None, "the pattern matches nothing, too"
    before, rest = (text.partition(CONSTRAIN)[0] for text in (before, after[channel.end() :]))
    roles = [word for word in before.split() if not word.startswith(_TO)]
    words = [*before.split(), *rest.split()]
    named = [word for word in words if word.startswith((_TO, FUNCTIONS))]
    return _Header(
        role=roles[0] if roles else "",
        channel=channel[0],
        recipient=named[0].removeprefix(_TO) if named else "",
        rest=rest.strip(),
    )
