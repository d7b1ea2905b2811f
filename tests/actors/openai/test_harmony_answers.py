"""A model that speaks harmony behind every route, read by the `openai` and `anthropic` clients."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
import tokenizers

from actors.openai.chat_dialect import build_dialect
from actors.openai.protocol import ParsedRequest, parse_chat
from actors.openai.served_model import ServedModel
from actors.openai.tools.harmony import MARKS
from configs.schema import ApiConfig, EdgeConfig
from engine.constraints.compiling import compile_constraint
from engine.constraints.vocabulary import Vocabulary, load_vocabulary
from engine.errors import ConfigError
from engine.text.tokenizing import Tokenizing, load_tokenizer
from tests.actors.ingress.edge_app import EdgeApp, edge_app
from tests.harness.tokenizer_folders import CHATML, byte_level_folder

# As much of the published template as matters: its roles, its fields and what it fails at.
TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{%- if messages[0].role == 'system' %}{% set said = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set said = '' %}{% set rest = messages %}{% endif %}"
    "{%- if said or tools %}<|start|>developer<|message|>{{ said }}"
    "{% for tool in tools or [] %}// {{ '' + tool.function.description }}\n"
    "type {{ tool.function.name }};{% endfor %}<|end|>{% endif %}"
    "{%- set last = namespace(name='') %}{% for m in rest %}{% if m.role == 'assistant' %}"
    "{%- if 'content' in m and '<|end|>' in m.content %}{{ raise_exception('tags') }}{% endif %}"
    "{%- if 'tool_calls' in m %}"
    "{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{%- endif %}{% set last.name = m.tool_calls[0].function.name %}"
    "<|start|>assistant to=functions.{{ last.name }}<|channel|>commentary json<|message|>"
    "{{- m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{%- elif m.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant"
    "<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{%- elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
ADD = {"type": "function", "function": {"name": "add", "parameters": POINT}}
NOW = {"type": "function", "function": {"name": "now", "description": "the time"}}
STRICT = {"type": "function", "function": {"name": "add", "parameters": POINT, "strict": True}}
THOUGHT = "<|channel|>analysis<|message|>Häuser: 鬱.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Four, or `<|end|>`.<|return|>"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"x": 4}<|call|>'
USER: Any = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = byte_level_folder(tmp_path_factory.mktemp("model"), chat_template=TEMPLATE)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tokenizing(folder: Path) -> Tokenizing:
    return load_tokenizer(folder)


def ids_of(tokenizing: Tokenizing, text: str) -> list[int]:
    """Marks by id, but behind a backtick in letters, as no tokenizer but a model writes them."""
    ids: list[int] = []
    for index, piece in enumerate(text.split("`")):
        letters = ["`", piece[:1], piece[1:]] if index else [piece]
        for encoded in tokenizing.encode_batch(letters, add_special_tokens=False):
            assert isinstance(encoded, list)
            ids += encoded
    return ids


def saying(folder: Path, tokenizing: Tokenizing, text: str, **overrides: Any) -> EdgeApp:
    app = edge_app(overrides, model_folder=folder)
    app.workers.token_ids = ids_of(tokenizing, text)
    app.workers.stops = True
    return app


def client_of(app: EdgeApp) -> openai.AsyncOpenAI:
    transport = httpx2.ASGITransport(app=app.app, raise_app_exceptions=False)
    return openai.AsyncOpenAI(
        api_key="none",
        base_url="http://127.0.0.1:8000/v1",
        http_client=httpx2.AsyncClient(transport=transport),
        max_retries=0,
    )


def chat(app: EdgeApp, *, stream: bool = False, **fields: Any) -> Any:
    """The client's completion, of a stream too."""
    client = client_of(app)
    asked: Any = {"model": "tiny", "messages": [USER]} | fields

    async def main(_: httpx.AsyncClient) -> object:
        if not stream:
            return await client.chat.completions.create(**asked)
        async with client.chat.completions.stream(**asked) as events:
            async for _event in events:
                pass
            return await events.get_final_completion()

    return app.ask(main)


def essence(completion: Any) -> tuple[Any, ...]:
    (choice,) = completion.choices
    calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
    reasoning = (choice.message.model_extra or {}).get("reasoning_content")
    return choice.message.content or "", reasoning, calls, choice.finish_reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        (THOUGHT + FINAL, {}, ("Four, or `<|end|>`.", "Häuser: 鬱.", [], "stop")),
        (THOUGHT + FINAL, {"skip_special_tokens": False, "include_reasoning": False},
         ("Four, or `<|end|>`.", None, [], "stop")),
        (THOUGHT + CALL, {"tools": [ADD, NOW]},
         ("", "Häuser: 鬱.", [("add", '{"x": 4}')], "tool_calls")),
        (THOUGHT + CALL, {"tools": [NOW]}, ("", 'Häuser: 鬱.\n\n{"x": 4}', [], "stop")),
        (FINAL, {"stop": ["or"]}, ("Four, ", None, [], "stop")),
        (FINAL, {"include_stop_str_in_output": True}, ("Four, or `<|end|>`.", None, [], "stop")),
    ],
)  # fmt: skip
def test_a_chat_has_reasoning_content_and_calls_apart(
    folder: Path, tokenizing: Tokenizing, text: str, fields: Any, expected: Any, stream: bool
) -> None:
    own = {name: fields.pop(name) for name in list(fields) if name not in ("tools", "stop")}
    fields |= {"extra_body": own}
    try:
        completion = chat(saying(folder, tokenizing, text), stream=stream, **fields)
    finally:
        fields |= fields.pop("extra_body")
    assert essence(completion) == expected
    assert completion.choices[0].model_extra.get("stop_reason") in (None, "or")


def test_a_chat_cut_by_its_length_shows_no_half_of_a_header(
    folder: Path, tokenizing: Tokenizing
) -> None:
    for num_tokens in range(1, len(ids_of(tokenizing, THOUGHT + FINAL)), 3):
        app = saying(folder, tokenizing, THOUGHT + FINAL)
        app.workers.stops = False
        content, reasoning, calls, finish = essence(chat(app, max_tokens=num_tokens))
        assert "Four, or `<|end|>`.".startswith(content)
        assert "Häuser: 鬱.".startswith((reasoning or "").rstrip("\ufffd"))
        assert (calls, finish) == ([], "length")


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_items_of_each_kind_and_goes_on_with_its_thoughts(
    folder: Path, tokenizing: Tokenizing, stream: bool
) -> None:
    app = saying(folder, tokenizing, THOUGHT + CALL)
    client = client_of(app)
    tool: Any = {"type": "function", "name": "add", "parameters": POINT}
    asked: Any = {"model": "tiny", "input": "hi", "tools": [tool], "reasoning": {"effort": "low"}}

    async def main(_: httpx.AsyncClient) -> None:
        if stream:
            events = [event async for event in await client.responses.create(**asked, stream=True)]
            response = events[-1].response
        else:
            response = await client.responses.create(**asked)
        reasoning, call = response.output
        assert reasoning.content[0].text == "Häuser: 鬱."
        assert (call.name, call.arguments, call.status) == ("add", '{"x": 4}', "completed")
        app.workers.token_ids = ids_of(tokenizing, FINAL)
        answer: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
        again = await client.responses.create(
            **asked | {"input": [answer]},
            previous_response_id=response.id,
            extra_body={"enable_response_messages": True},
        )
        assert again.output_text == "Four, or `<|end|>`."
        (read,) = again.model_extra["input_messages"]
        assert read["message"] == (
            "<|start|>system<|message|>Reasoning: low<|end|>"
            "<|start|>developer<|message|>// \ntype add;<|end|><|start|>user<|message|>hi<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>Häuser: 鬱.<|end|>"
            "<|start|>assistant to=functions.add<|channel|>commentary json<|message|>"
            '{"x": 4}<|call|>'
            '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"5"<|end|>'
            "<|start|>assistant"
        )

    app.ask(main)


def test_a_message_of_anthropics_has_blocks_of_each_kind(
    folder: Path, tokenizing: Tokenizing
) -> None:
    app = saying(folder, tokenizing, THOUGHT + CALL)
    transport = httpx2.ASGITransport(app=app.app, raise_app_exceptions=False)
    client = anthropic.AsyncAnthropic(
        api_key="none",
        base_url="http://127.0.0.1:8000",
        http_client=httpx2.AsyncClient(transport=transport),
        max_retries=0,
    )
    tool: Any = {"name": "add", "input_schema": POINT}
    asked: Any = {"model": "tiny", "messages": [USER], "max_tokens": 99, "tools": [tool]}

    async def main(_: httpx.AsyncClient) -> None:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as events:
            seen = await events.get_final_message()
        for message in (whole, seen):
            thought, call = message.content
            assert thought.type == "thinking"
            assert thought.thinking == "Häuser: 鬱."
            assert call.type == "tool_use"
            assert (call.name, call.input, message.stop_reason) == ("add", {"x": 4}, "tool_use")

    app.ask(main)


def test_a_begun_message_of_anthropics_that_must_have_a_form_is_refused_in_its_words(
    folder: Path, tokenizing: Tokenizing
) -> None:
    asked = {
        "model": "tiny",
        "max_tokens": 9,
        "messages": [USER, {"role": "assistant", "content": "{"}],
        "output_config": {"format": {"type": "json_schema", "schema": POINT}},
    }
    app = saying(folder, tokenizing, FINAL)
    answer = app.ask(lambda client: client.post("/v1/messages", json=asked))
    assert answer.status_code == 400
    assert (
        "end 'messages' with one that is not the assistant's" in answer.json()["error"]["message"]
    )


# ---- prompts ------------------------------------------------------------------------------------


def prompt_of(folder: Path, tokenizing: Tokenizing, **fields: Any) -> str:
    completion = chat(
        saying(folder, tokenizing, FINAL), extra_body={"return_token_ids": True}, **fields
    )
    return tokenizing.decode(completion.model_extra["prompt_token_ids"], skip_special_tokens=False)


def called(*ids: str, **fields: Any) -> dict[str, Any]:
    calls = [
        {"id": i, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for i, name in zip(ids, ("add", "now"), strict=False)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls} | fields


def answered(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def test_every_message_reaches_the_model(folder: Path, tokenizing: Tokenizing) -> None:
    messages = [
        {"role": "system", "content": "A"},
        {"role": "developer", "content": "B"},
        USER,
        called("c", "d", content="Look:", reasoning_content="hm"),
        answered("d", "2"),
        answered("c", "1"),
        {"role": "assistant", "content": "so", "reasoning_content": "old"},
        USER,
    ]
    assert prompt_of(folder, tokenizing, messages=messages, reasoning_effort="high") == (
        "<|start|>system<|message|>Reasoning: high<|end|><|start|>developer<|message|>A\n\nB<|end|>"
        "<|start|>user<|message|>hi<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>hm\n\nLook:<|end|>"
        "<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"1"<|end|>'
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.now to=assistant<|channel|>commentary<|message|>"2"<|end|>'
        "<|start|>assistant<|channel|>final<|message|>so<|end|><|start|>user<|message|>hi<|end|>"
        "<|start|>assistant"
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "none"}, "reasoning_effort"),
        ({"messages": [USER, {"role": "system", "content": "x"}]}, "messages[1].role"),
        ({"messages": [USER, called("c"), USER, answered("c", "1")]}, "messages"),
        (
            {"messages": [USER, called("c"), answered("c", "1"), called("d"), answered("c", "1")]},
            "messages",
        ),
        ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, "structured_outputs"),
        (
            {
                "messages": [USER, {"role": "assistant", "content": "x"}],
                "extra_body": {"continue_final_message": True},
                "response_format": {"type": "json_object"},
            },
            None,
        ),
        (
            {
                "extra_body": {"add_generation_prompt": False},
                "tools": [ADD],
                "tool_choice": "required",
            },
            None,
        ),
    ],
)
def test_what_the_format_has_no_place_for_is_refused_by_name(
    folder: Path, tokenizing: Tokenizing, fields: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(saying(folder, tokenizing, FINAL), **fields)
    assert caught.value.param == param


def test_an_answer_that_must_have_a_form_is_asked_for_as_any_other(
    folder: Path, tokenizing: Tokenizing
) -> None:
    text = '<|channel|>final<|message|>{"x": 3}<|return|>'
    completion = chat(saying(folder, tokenizing, text), response_format=FORM)
    assert essence(completion) == ('{"x": 3}', None, [], "stop")


def test_an_answer_goes_on_in_a_message_that_is_begun(folder: Path, tokenizing: Tokenizing) -> None:
    app = saying(folder, tokenizing, "ur.<|return|>")
    begun = {"role": "assistant", "content": "Fo"}
    completion = chat(app, messages=[USER, begun], extra_body={"continue_final_message": True})
    assert essence(completion) == ("ur.", None, [], "stop")


# ---- outputs that are held ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def vocabulary(folder: Path, tokenizing: Tokenizing) -> Vocabulary:
    ends = tuple(i for i, mark in enumerate_marks(tokenizing) if mark in ("<|return|>", "<|call|>"))
    return load_vocabulary(folder, vocab_size=tokenizing.vocab_size, eos_token_ids=ends)


def enumerate_marks(tokenizing: Tokenizing) -> Sequence[tuple[int, str]]:
    return [(i, tokenizing.piece(i).decode()) for i in tokenizing.token_bytes.special_ids]


def parse(tokenizing: Tokenizing, **fields: Any) -> ParsedRequest:
    dialect = build_dialect(TEMPLATE, ApiConfig(), tokenizing)
    model = ServedModel(
        name="tiny", max_model_len=500, vocab_size=tokenizing.vocab_size, dialect=dialect
    )
    body = {"messages": [USER]} | fields
    return parse_chat(json.dumps(body).encode(), EdgeConfig(), model, lambda: 1)


FORM = {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}}
ANSWER = '<|channel|>final<|message|>{"x": 3}'
HELD_CALL = CALL.removesuffix("<|call|>")


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": FORM}, [ANSWER], [HELD_CALL, FINAL, '{"x": 3}', THOUGHT]),
        (
            {"response_format": FORM, "tools": [ADD]},
            [ANSWER, HELD_CALL],
            ["<|channel|>final<|message|>x", HELD_CALL.replace("add", "now")],
        ),
        (
            {"tools": [ADD, NOW], "tool_choice": "required"},
            [HELD_CALL],
            [ANSWER, HELD_CALL.replace('"x"', '"y"'), HELD_CALL + "<|end|>"],
        ),
        (
            {"tools": [ADD, NOW], "tool_choice": {"type": "function", "function": {"name": "now"}}},
            ["<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"],
            [HELD_CALL],
        ),
        (
            {"tools": [STRICT, NOW]},
            [
                HELD_CALL,
                "<|channel|>final<|message|>any\n`<|text|>`",
                "<|channel|>final<|message|>",
            ],
            [HELD_CALL.replace("4", '"4"')],
        ),
    ],
)
def test_a_form_is_for_the_last_message_behind_any_thought(
    tokenizing: Tokenizing,
    vocabulary: Vocabulary,
    fields: dict[str, Any],
    good: list[str],
    bad: list[str],
) -> None:
    constraint = parse(tokenizing, **fields).sampling.constraint
    assert constraint is not None
    grammar = compile_constraint(vocabulary, constraint)

    def allows(text: str) -> bool:
        matcher = grammar.matcher()
        ids = ids_of(tokenizing, text)
        return all(matcher.accept_token(i) for i in ids) and matcher.is_complete

    for text in good:
        assert allows(text), text
        assert allows(THOUGHT + text), text
        assert not allows(THOUGHT + THOUGHT + text), text
    for text in bad:
        assert not allows(text), text


# ---- which models -------------------------------------------------------------------------------


def test_a_model_speaks_it_by_its_template_or_by_name(folder: Path, tokenizing: Tokenizing) -> None:
    def dialect(template: str, tokens: Tokenizing = tokenizing, **api: Any) -> Any:
        return build_dialect(template, ApiConfig(**api), tokens)

    plain = load_tokenizer(Path("demo_model/laps-demo"))
    by_template = dialect(TEMPLATE)
    assert by_template.harmony is not None
    assert (by_template.can_call, by_template.knows_reasoning_effort) == (True, True)
    assert dialect(TEMPLATE, plain).harmony is None
    assert dialect(CHATML).harmony is None
    assert dialect(TEMPLATE, reasoning_parser="none").harmony is None
    assert dialect(TEMPLATE, tool_parser="hermes").harmony is None
    assert not dialect(TEMPLATE, tool_parser="none").can_call
    for named in ({"tool_parser": "harmony"}, {"reasoning_parser": "harmony"}):
        assert dialect(CHATML, **named).harmony == by_template.harmony
        with pytest.raises(ConfigError, match="has no special token"):
            dialect(TEMPLATE, plain, **named)
    with pytest.raises(ConfigError, match="'think'"):
        dialect(TEMPLATE, tool_parser="harmony", reasoning_parser="think")


def test_a_call_ends_an_answer_whatever_the_folder_says(tokenizing: Tokenizing) -> None:
    names = dict(enumerate_marks(tokenizing))
    for ignore_eos, expected in ((False, {"<|return|>", "<|call|>"}), (True, set())):
        parsed = parse(tokenizing, ignore_eos=ignore_eos)
        assert {names[i] for i in parsed.sampling.stop_token_ids} == expected
