"""The harmony format, read: well-formed answers, torn ones, any way of cutting them."""

import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.openai.tools.events import (
    CallArguments,
    CallEnded,
    CallStarted,
    Content,
    Event,
    Reasoning,
)
from actors.openai.tools.harmony import MARKS, HarmonyParser

NAMES = frozenset({"add", "get_weather"})
ARGUMENTS = '{"city": "Zwölf } `<|end|>", "days": [1, {"x": null}]}'
PROMPT = "<|start|>assistant"
CALL = f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Four.<|return|>"


@dataclass
class Read:
    """What a client would put together from events."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, bool | None]] = field(default_factory=list)


def read(events: Sequence[Event]) -> Read:
    found = Read()
    for event in events:
        match event:
            case Content(text):
                assert text, "an empty event says nothing"
                found.content += text
            case Reasoning(text):
                assert text, "an empty event says nothing"
                found.reasoning += text
            case CallStarted(name):
                found.calls.append((name, "", None))
            case CallArguments(text):
                name, arguments, _ = found.calls[-1]
                found.calls[-1] = (name, arguments + text, None)
            case CallEnded(is_complete):
                name, arguments, _ = found.calls[-1]
                found.calls[-1] = (name, arguments, is_complete)
    return found


def marked(text: str) -> str:
    """The text with marks for tokens; behind a backtick they are only spelled."""
    names = "|".join(map(re.escape, MARKS))
    return re.sub(rf"(?<!`)({names})", lambda match: MARKS[match[1]], text)


def parse(text: str, *, prompt: str = PROMPT, is_cut: bool = False) -> Read:
    """Reads the text whole, then character by character and in random pieces: all say the same."""
    whole, rng = marked(text), random.Random(text)
    places = sorted(rng.choices(range(len(whole) + 1), k=9))
    pieces = [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]
    found = []
    for ways in ([whole], list(whole), pieces):
        parser = HarmonyParser(NAMES, marked(prompt))
        events = [event for piece in ways for event in parser.push(piece)]
        found.append(read(events + parser.finish(is_cut=is_cut)))
    assert found[0] == found[1] == found[2]
    return found[0]


ROWS: list[tuple[str, Read]] = [
    ("<|channel|>final<|message|>Four.<|return|>", Read("Four.")),
    ("<|channel|>final<|message|> Fo\nur. ", Read(" Fo\nur. ")),
    (f"<|channel|>analysis<|message|>2+2<|end|>{FINAL}", Read("Four.", "2+2")),
    (CALL, Read("", "", [("add", ARGUMENTS, True)])),
    (
        f"<|channel|>analysis<|message|>I call.<|end|><|start|>assistant{CALL}",
        Read("", "I call.", [("add", ARGUMENTS, True)]),
    ),
    # The recipient before the channel, as the chat template writes it.
    (
        " to=functions.get_weather<|channel|>commentary json<|message|>{}<|call|>",
        Read("", "", [("get_weather", "{}", True)]),
    ),
    (
        '<|channel|>analysis to=functions.add code<|message|>{"a": 1}<|call|>',
        Read("", "", [("add", '{"a": 1}', True)]),
    ),
    (
        "<|channel|>commentary to=functions.add<|constrain|>json<|message|> {}\n<|call|>",
        Read("", "", [("add", "{}", True)]),
    ),
    # A preamble is for the user.
    (
        f"<|channel|>commentary<|message|>My plan<|end|><|start|>assistant{CALL}",
        Read("My plan", "", [("add", ARGUMENTS, True)]),
    ),
    (
        f"<|channel|>commentary<|message|>One<|end|>{FINAL}",
        Read("One\n\nFour."),
    ),
    (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"
        f"<|end|>{FINAL}",
        Read("Four.", "a\n\nb"),
    ),
    # What is spelled in letters is text.
    ("<|channel|>final<|message|>say `<|end|>` now<|return|>", Read("say `<|end|>` now")),
    # Nobody here executes built-in tools, or functions that were not offered.
    (
        f"<|channel|>analysis to=python code<|message|>print(1)<|call|>{FINAL}",
        Read("Four.", "print(1)"),
    ),
    ("<|channel|>commentary to=functions.rm json<|message|>{}<|call|>", Read("", "{}")),
    (
        f"<|end|><|start|>functions.add to=assistant<|message|>made up<|end|>{FINAL}",
        Read("Four.", "made up"),
    ),
    # A function without arguments.
    (
        "<|channel|>commentary to=functions.add<|message|><|call|>",
        Read("", "", [("add", "{}", True)]),
    ),
    # Torn.
    ("", Read()),
    ("Just text.", Read("Just text.")),
    ("<|return|>", Read()),
    ("Four<|return|>", Read("Four")),
    ("<|channel|>final", Read()),
    ("<|channel|>final Four.<|return|>", Read("Four.")),
    ("<|channel|>analysis<|message|>hm<|channel|>final<|message|>Four.", Read("Four.", "hm")),
    (f"<|channel|>analysis<|message|>hm{FINAL}", Read("Four.", "hm")),
    ("<|message|>Four.", Read("Four.")),
    ("<|channel|>final<|message|>Fo<|message|>ur<|constrain|>.", Read("Four.")),
    ("word " * 100 + "<|end|>", Read("word " * 100)),
    (
        '<|channel|>commentary to=functions.add<|message|>{"a": 1<|call|>',
        Read("", "", [("add", '{"a": 1', False)]),
    ),
    (
        '<|channel|>commentary to=functions.add<|message|>{"a": nul}<|call|>',
        Read("", "}", [("add", '{"a": nul', False)]),
    ),
    ("<|channel|>commentary to=functions.add<|message|>a = 1<|call|>", Read("", "a = 1")),
    (
        "<|channel|>commentary to=functions.add<|message|>{} and so<|call|>",
        Read("", "and so", [("add", "{}", True)]),
    ),
]


@pytest.mark.parametrize(("text", "expected"), ROWS)
def test_reasoning_content_and_calls_are_told_apart(text: str, expected: Read) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize("text", [text for text, _ in ROWS if "<|channel|>" in text])
def test_an_answer_that_is_cut_anywhere_shows_a_part_of_the_whole_one(text: str) -> None:
    whole, characters = parse(text), marked(text)
    for length in range(len(characters) + 1):
        parser = HarmonyParser(NAMES, marked(PROMPT))
        found = read([*parser.push(characters[:length]), *parser.finish(is_cut=True)])
        assert whole.content.startswith(found.content.rstrip())
        assert whole.reasoning.startswith(found.reasoning.rstrip()) or not whole.reasoning
        for (name, arguments, is_complete), expected in zip(found.calls, whole.calls, strict=False):
            assert (name, expected[1].startswith(arguments)) == (expected[0], True)
            assert not is_complete or arguments == expected[1]


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("<|start|>assistant<|channel|>final<|message|>Fo", "ur.<|return|>", Read("ur.")),
        (
            "<|start|>assistant<|channel|>analysis<|message|>2",
            f"+2<|end|>{FINAL}",
            Read("Four.", "+2"),
        ),
        ("<|start|>user<|message|>x<|end|>", FINAL, Read("Four.")),
        ("<|start|>assistant<|channel|>final<|message|>x<|return|>", FINAL, Read("Four.")),
        ("", "<|channel|>final<|message|>Four.", Read("Four.")),
    ],
)
def test_an_answer_goes_on_where_its_prompt_ends(prompt: str, text: str, expected: Read) -> None:
    assert parse(text, prompt=prompt) == expected


FRAGMENTS = [*MARKS, "assistant", "analysis", "final", "commentary", " to=functions.add", " json"]
FRAGMENTS += ["{", "}", '{"a": 1}', "text", " ", "\n", "user", " to=python", "x" * 300]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=16), st.booleans())
def test_no_order_of_tokens_fails_or_lets_a_mark_out(fragments: list[str], is_cut: bool) -> None:
    found = parse("".join(fragments), is_cut=is_cut)
    said = found.content + found.reasoning + "".join(call[1] for call in found.calls)
    said.encode()  # a mark is no UTF-8
    assert all(is_complete is not None for _, _, is_complete in found.calls)


# ---- OpenAI's own reader ------------------------------------------------------------------------


def well_formed(rng: random.Random) -> str:
    """An answer of one to four messages in any of the forms that the format's page shows."""
    texts = ["", "So: 2 < 3.", "Zwölf Boxkämpfer\n\njagen 鬱", " spaces "]
    messages = []
    for _ in range(rng.randint(1, 4)):
        form = rng.choice(["", "<|constrain|>json", " <|constrain|>json", " json"])
        functions = rng.choice(["add", "get_weather", "rm"])
        call = rng.choice([
            f" to=functions.{functions}<|channel|>commentary{form}",
            f"<|channel|>commentary to=functions.{functions}{form}",
            f"<|channel|>analysis to=python{rng.choice(['', ' code'])}",
        ])  # fmt: skip
        plain = f"<|channel|>{rng.choice(['analysis', 'commentary', 'final'])}"
        header, body = rng.choice([(call, '{"a": [1, "鬱"]}'), (plain, rng.choice(texts))])
        messages.append(f"{header}<|message|>{body}")
    end = rng.choice(["<|return|>", "<|call|>", "<|end|>"])
    return "<|end|><|start|>assistant".join(messages) + end


@pytest.mark.skipif(
    "TIKTOKEN_ENCODINGS_BASE" not in os.environ,
    reason="the package openai-harmony needs a folder with o200k_base.tiktoken to load offline",
)
def test_openais_own_reader_reads_the_same() -> None:
    harmony = pytest.importorskip("openai_harmony")
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    rng = random.Random(7)
    for _ in range(500):
        text = well_formed(rng)
        ids = encoding.encode(text, allowed_special="all")
        expected = Read()
        for message in encoding.parse_messages_from_completion_tokens(
            ids, harmony.Role.ASSISTANT, strict=True
        ):
            said = message.content[0].text
            name = (message.recipient or "").removeprefix("functions.")
            if name in NAMES:
                expected.calls.append((name, said, True))
            elif message.recipient or message.channel == "analysis":
                expected.reasoning += "\n\n" * bool(expected.reasoning and said) + said
            else:
                expected.content += "\n\n" * bool(expected.content and said) + said
        assert parse(text) == expected, text
