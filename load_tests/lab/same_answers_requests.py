"""The fixed requests of same_answers.py: what every endpoint offers, and what it refuses.

Greedy or seeded, small, and each of a prompt of its own where a cached prefix would show.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

Json = dict[str, Any]

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SCORE, RERANK, TOKENIZE, DETOKENIZE = "/v1/score", "/v1/rerank", "/tokenize", "/detokenize"
PROMPT = "import os\nimport "
USER = [{"role": "user", "content": "def main():"}]
TALK = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "def add(a, b):"},
    {"role": "assistant", "content": "return a + b"},
    {"role": "user", "content": "def sub(a, b):"},
]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "tag": {"enum": ["a", "b"]}},
    "required": ["x", "tag"],
}
MOVE = {"type": "function", "function": {"name": "move", "parameters": POINT}}
WAIT = {"type": "function", "function": {"name": "wait", "description": "do nothing"}}
STRICT = {"type": "function", "function": {"name": "go", "parameters": POINT, "strict": True}}
MOVE_CHOICE = {"type": "function", "function": {"name": "move"}}
LIST_GRAMMAR = 'root ::= "[" item ("," item)* "]"\nitem ::= [0-9] [0-9]?'
LONG_WORDS = "word " * 5000
# A model whose template knows no tools refuses these, and that is an answer too.
BY_GET = (
    ("chat_page", "/"),
    ("models", "/v1/models"),
    ("unknown_model_card", "/v1/models/nobody"),
    ("openapi", "/openapi.json"),
    ("health", "/health"),
    ("ready", "/ready"),
    ("version", "/version"),
    ("laps_page", "/laps"),
    ("laps_status", "/laps_status"),
    ("metrics", "/metrics"),
    ("unknown_path", "/v1/embeddings"),
    ("wrong_method", CHAT),
)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it goes out."""

    name: str
    path: str
    method: str = "GET"
    body: bytes | None = None
    headers: Mapping[str, str] = {}


def calls(model: str) -> Iterator[Call]:
    """All of them, in the order in which they are sent."""
    for name, path in BY_GET[:2]:
        yield Call(name=name, path=path)
    yield Call(name="model_card", path=f"/v1/models/{model}")
    groups = (
        ("completion", COMPLETION, _completions()),
        ("chat", CHAT, _chats()),
        ("held", CHAT, _held_chats()),
        ("held_completion", COMPLETION, _held_completions()),
        ("tools", CHAT, _tools()),
        ("score", SCORE, _scores()),
        ("rerank", RERANK, _reranks()),
        ("tokenize", TOKENIZE, _tokenize()),
        ("detokenize", DETOKENIZE, _detokenize()),
        ("bad_completion", COMPLETION, _bad_completions()),
        ("bad_chat", CHAT, _bad_chats()),
        ("bad_held", CHAT, _bad_held()),
        ("bad_score", SCORE, _bad_scores()),
        ("bad_rerank", RERANK, _bad_reranks()),
    )
    for group, path, bodies in groups:
        for name, fields in bodies.items():
            yield _post(f"{group}.{name}", path, {"model": model} | fields)
    yield from _raw(model)
    for name, path in BY_GET[2:]:
        yield Call(name=name, path=path)


def _post(name: str, path: str, fields: Json) -> Call:
    return Call(name=name, path=path, method="POST", body=json.dumps(fields).encode())


def _streamed(bodies: Mapping[str, Json], *names: str) -> dict[str, Json]:
    """With each of the named once more, as a stream that ends with its usage."""
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return dict(bodies) | {f"{name}_streamed": bodies[name] | usage for name in names}


# ---- text ----------------------------------------------------------------------------------------


def _completions() -> dict[str, Json]:
    greedy: Json = {"prompt": PROMPT, "temperature": 0.0, "max_tokens": 16}
    drawn: Json = {"prompt": PROMPT, "max_tokens": 12, "seed": 7}
    ids = [5, 17, 240, 99, 1023]
    bodies: dict[str, Json] = {
        "text": greedy,
        "default_length": {"prompt": "x = 1\n", "temperature": 0.0},
        "texts": greedy | {"prompt": ["def f(", "class A:", "for i in "]},
        "ids": greedy | {"prompt": ids},
        "ids_lists": greedy | {"prompt": [ids, [9, 8, 7]]},
        "token_ids": greedy | {"return_token_ids": True},
        "echo": greedy | {"echo": True},
        "echo_only": greedy | {"echo": True, "max_tokens": 0},
        "echo_logprobs": greedy | {"echo": True, "logprobs": 2, "max_tokens": 4},
        "echo_only_logprobs": greedy | {"echo": True, "logprobs": 1, "max_tokens": 0},
        "prompt_logprobs": greedy | {"prompt_logprobs": 2, "max_tokens": 3},
        "prompt_logprobs_only": greedy | {"prompt_logprobs": 0, "max_tokens": 0},
        "logprobs": greedy | {"logprobs": 3},
        "logprobs_zero": greedy | {"logprobs": 0},
        "stop": greedy | {"stop": "\n", "max_tokens": 48},
        "stops": greedy | {"stop": ["zzz", "im"], "max_tokens": 48},
        "stop_kept": greedy | {"stop": "\n", "include_stop_str_in_output": True, "max_tokens": 48},
        "stop_ids": greedy | {"stop_token_ids": list(range(180, 300)), "max_tokens": 48},
        "ignore_eos": greedy | {"ignore_eos": True, "max_tokens": 40},
        "min_tokens": greedy | {"min_tokens": 12},
        "one_token": greedy | {"max_tokens": 1},
        "no_special_tokens": greedy | {"add_special_tokens": False},
        "seed": drawn,
        "seed_big": drawn | {"seed": 2**63 - 1},
        "seed_negative": drawn | {"seed": -1},
        "top_k": drawn | {"top_k": 3},
        "top_p": drawn | {"top_p": 0.5},
        "min_p": drawn | {"min_p": 0.2},
        "hot": drawn | {"temperature": 2.0},
        "cold": drawn | {"temperature": 0.01},
        "n": drawn | {"n": 3},
        "best_of": drawn | {"n": 2, "best_of": 2},
        "presence": greedy | {"presence_penalty": 1.5},
        "frequency": greedy | {"frequency_penalty": -1.5},
        "repetition": greedy | {"repetition_penalty": 1.4},
        "bias": greedy | {"logit_bias": {"100": 5, "200": -100}},
        "priority": greedy | {"priority": -3},
        "cache_salt": greedy | {"cache_salt": "mine"},
        "extra_key": greedy | {"extra_key": "yours"},
        "harmless": greedy | {"user": "me"},
        "texts_n": drawn | {"prompt": ["a = ", "b = "], "n": 2},
    }
    streamed = "text echo echo_logprobs logprobs token_ids stop stops n texts seed ignore_eos"
    return _streamed(bodies, *streamed.split(), "prompt_logprobs") | {
        "streamed_without_usage": greedy | {"stream": True},
        "streamed_with_usage_all_along": greedy
        | {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    }


def _chats() -> dict[str, Json]:
    greedy: Json = {"messages": USER, "temperature": 0.0, "max_tokens": 16}
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    bodies: dict[str, Json] = {
        "user": greedy,
        "talk": greedy | {"messages": TALK},
        "parts": greedy | {"messages": parts},
        "both_lengths": greedy | {"max_completion_tokens": 4},
        "max_completion_tokens": {"messages": USER, "temperature": 0, "max_completion_tokens": 5},
        "logprobs": greedy | {"logprobs": True, "top_logprobs": 2},
        "logprobs_alone": greedy | {"logprobs": True},
        "token_ids": greedy | {"return_token_ids": True},
        "prompt_logprobs": greedy | {"prompt_logprobs": 1, "max_tokens": 2},
        "n": {"messages": USER, "max_tokens": 8, "n": 2, "seed": 3},
        "stop": greedy | {"stop": ["\n"], "max_tokens": 40},
        "bias": greedy | {"logit_bias": {"77": 3.5}},
        "continued": greedy
        | {
            "messages": [*USER, {"role": "assistant", "content": "return "}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        "harmless": greedy
        | {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        "prediction": greedy | {"prediction": {"type": "content", "content": "pass"}},
        "template_kwargs": greedy | {"chat_template_kwargs": {"enable_thinking": False}},
        "include_reasoning": greedy | {"include_reasoning": False},
    }
    return _streamed(bodies, "user", "logprobs", "n", "stop", "token_ids", "continued")


# ---- outputs that have a form --------------------------------------------------------------------


def _schema_format(schema: object, **fields: object) -> Json:
    described = {"name": "answer", "schema": schema} | fields
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def _outputs() -> dict[str, Json]:
    return {
        "json": {"structured_outputs": {"json": POINT}},
        "json_text": {"structured_outputs": {"json": json.dumps(POINT)}},
        "regex": {"structured_outputs": {"regex": "[a-f]{3,6}[0-9]"}},
        "choice": {"structured_outputs": {"choice": ["red", "green", "blue"]}},
        "grammar": {"structured_outputs": {"grammar": LIST_GRAMMAR}},
        "date": {"structured_outputs": {"json": {"type": "string", "format": "date"}}},
    }


def _held_chats() -> dict[str, Json]:
    greedy: Json = {"messages": USER, "temperature": 0.0, "max_tokens": 64}
    forms = _outputs() | {
        "text": {"response_format": {"type": "text"}},
        "object": {"response_format": {"type": "json_object"}},
        "schema": _schema_format(POINT),
        "schema_strict": _schema_format(POINT, strict=True),
        "array": _schema_format({"type": "array", "items": {"type": "boolean"}, "maxItems": 3}),
        "drawn": _schema_format(POINT) | {"temperature": 1.0, "seed": 11},
    }
    bodies = {name: greedy | form for name, form in forms.items()}
    return _streamed(bodies, "schema", "regex", "choice")


def _held_completions() -> dict[str, Json]:
    greedy: Json = {"prompt": "answer = ", "temperature": 0.0, "max_tokens": 64}
    return {name: greedy | form for name, form in _outputs().items()}


def _tools() -> dict[str, Json]:
    asked: Json = {"messages": USER, "temperature": 0.0, "max_tokens": 64, "tools": [MOVE, WAIT]}
    result = [
        *USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "move", "arguments": '{"x": 1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "moved"},
    ]
    bodies = {
        "auto": asked | {"tool_choice": "auto"},
        "unset": asked,
        "none": asked | {"tool_choice": "none"},
        "required": asked | {"tool_choice": "required"},
        "named": asked | {"tool_choice": MOVE_CHOICE},
        "one_at_a_time": asked | {"tool_choice": "required", "parallel_tool_calls": False},
        "strict": asked | {"tools": [STRICT], "tool_choice": "auto"},
        "results": asked | {"messages": result},
    }
    return _streamed(bodies, "auto", "required", "named")


# ---- prompts alone -------------------------------------------------------------------------------


def _scores() -> dict[str, Json]:
    asked: Json = {"query": "import ", "items": ["os", "sys"], "label_token_ids": [10, 20, 30]}
    return {
        "texts": asked,
        "softmax": asked | {"apply_softmax": True},
        "item_first": asked | {"item_first": True},
        "ids": asked | {"query": [5, 6], "items": [[7], [8, 9]]},
        "one": asked | {"items": "os"},
    }


def _reranks() -> dict[str, Json]:
    asked: Json = {
        "query": "sorting",
        "documents": ["def sort(x):", {"text": "import os"}, "class A:"],
        "label_token_ids": [10, 20],
    }
    return {
        "three": asked,
        "top": asked | {"top_n": 1},
        "with_documents": asked | {"return_documents": True},
        "template": asked | {"template": "Q: {query}\nD: {document}\nA:"},
        "instruction": asked | {"instruction": "Say which is better."},
    }


def _tokenize() -> dict[str, Json]:
    return {
        "text": {"prompt": PROMPT},
        "strings": {"prompt": "größer than 日本\n", "return_token_strs": True},
        "no_special_tokens": {"prompt": PROMPT, "add_special_tokens": False},
        "messages": {"messages": TALK},
        "no_generation_prompt": {"messages": TALK, "add_generation_prompt": False},
        "empty": {"prompt": ""},
        "both": {"prompt": "a", "messages": USER},
        "neither": {},
    }


def _detokenize() -> dict[str, Json]:
    return {
        "some": {"tokens": [5, 17, 240]},
        "none": {"tokens": []},
        "outside": {"tokens": [99999]},
        "negative": {"tokens": [-1]},
        "texts": {"tokens": ["a"]},
    }


# ---- refusals ------------------------------------------------------------------------------------


def _bad_completions() -> dict[str, Json]:
    fine: Json = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0.0}
    return {
        "unknown_field": fine | {"nonsense": 1},
        "unknown_model": fine | {"model": "nobody"},
        "no_prompt": {"max_tokens": 4},
        "prompt_type": fine | {"prompt": 5},
        "prompt_empty": fine | {"prompt": ""},
        "prompts_empty": fine | {"prompt": []},
        "prompt_mixed": fine | {"prompt": ["a", 5]},
        "id_outside": fine | {"prompt": [5, 3072]},
        "temperature_type": fine | {"temperature": "hot"},
        "temperature_high": fine | {"temperature": 2.5},
        "top_p_zero": fine | {"top_p": 0},
        "min_p_high": fine | {"min_p": 1.5},
        "top_k_low": fine | {"top_k": -2},
        "penalty_high": fine | {"presence_penalty": 3},
        "repetition_zero": fine | {"repetition_penalty": 0},
        "max_tokens_negative": fine | {"max_tokens": -1},
        "max_tokens_zero": fine | {"max_tokens": 0},
        "n_zero": fine | {"n": 0},
        "n_high": fine | {"n": 1000},
        "best_of_more": fine | {"n": 1, "best_of": 3},
        "suffix": fine | {"suffix": "end"},
        "logprobs_high": fine | {"logprobs": 1000},
        "prompt_logprobs_low": fine | {"prompt_logprobs": -2},
        "seed_big": fine | {"seed": 2**63},
        "stops_many": fine | {"stop": ["a"] * 100},
        "stop_empty": fine | {"stop": ""},
        "bias_high": fine | {"logit_bias": {"5": 200}},
        "bias_key": fine | {"logit_bias": {"x": 1}},
        "bias_outside": fine | {"logit_bias": {"3072": 1}},
        "min_above_max": fine | {"min_tokens": 9},
        "too_long": fine | {"prompt": LONG_WORDS},
        "too_long_with_output": fine | {"prompt": [7] * 2000, "max_tokens": 100},
        "priority_big": fine | {"priority": 2**40},
        "beam_search": fine | {"use_beam_search": True},
        "options_without_stream": fine | {"stream_options": {"include_usage": True}},
        "streamed_unknown_field": fine | {"stream": True, "nonsense": 1},
        "salt_empty": fine | {"cache_salt": ""},
    }


def _bad_chats() -> dict[str, Json]:
    fine: Json = {"messages": USER, "max_tokens": 4, "temperature": 0.0}
    image = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
    unknown_call = {"type": "function", "function": {"name": "fly"}}
    return {
        "no_messages": {"max_tokens": 4},
        "messages_empty": fine | {"messages": []},
        "role_unknown": fine | {"messages": [{"role": "king", "content": "x"}]},
        "content_type": fine | {"messages": [{"role": "user", "content": 5}]},
        "content_image": fine | {"messages": [{"role": "user", "content": image}]},
        "message_field": fine | {"messages": [{"role": "user", "content": "x", "mood": "good"}]},
        "functions": fine | {"functions": []},
        "top_without_logprobs": fine | {"top_logprobs": 2},
        "top_high": fine | {"logprobs": True, "top_logprobs": 100},
        "service_tier": fine | {"service_tier": "gold"},
        "effort": fine | {"reasoning_effort": "low"},
        "metadata_type": fine | {"metadata": {"a": 1}},
        "choice_without_tools": fine | {"tool_choice": "required"},
        "choice_unknown_tool": fine | {"tools": [MOVE], "tool_choice": unknown_call},
        "tool_type": fine | {"tools": [{"type": "browser"}]},
        "too_long": fine | {"messages": [{"role": "user", "content": LONG_WORDS}]},
    }


def _bad_held() -> dict[str, Json]:
    fine: Json = {"messages": USER, "max_tokens": 4}
    impossible = {"type": "integer", "minimum": 5, "maximum": 3}
    return {
        "format_type": fine | {"response_format": {"type": "yaml"}},
        "format_without_schema": fine | {"response_format": {"type": "json_schema"}},
        "schema_impossible": fine | _schema_format(impossible),
        "schema_keyword": fine | _schema_format({"type": "object", "minProperties": 3}),
        "schema_type": fine | _schema_format({"type": "thing"}),
        "regex_broken": fine | {"structured_outputs": {"regex": "(["}},
        "regex_lookahead": fine | {"structured_outputs": {"regex": "(?=a)b"}},
        "grammar_broken": fine | {"structured_outputs": {"grammar": "root ::= ("}},
        "choice_empty": fine | {"structured_outputs": {"choice": []}},
        "two_outputs": fine | {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "both_ways": fine | _schema_format(POINT) | {"structured_outputs": {"regex": "a"}},
        "endless": fine | _schema_format(POINT) | {"ignore_eos": True},
    }


def _bad_scores() -> dict[str, Json]:
    fine: Json = {"query": "a", "items": ["b"], "label_token_ids": [1]}
    return {
        "no_labels": {"query": "a", "items": ["b"]},
        "label_outside": fine | {"label_token_ids": [9999]},
        "mixed": fine | {"query": [1], "items": ["b"]},
        "no_items": fine | {"items": []},
        "unknown_field": fine | {"temperature": 1},
    }


def _bad_reranks() -> dict[str, Json]:
    fine: Json = {"query": "a", "documents": ["b"], "label_token_ids": [1, 2]}
    return {
        "no_place": fine | {"template": "{query}"},
        "top_zero": fine | {"top_n": 0},
        "no_documents": fine | {"documents": []},
        "without_labels": {"query": "a", "documents": ["b"]},
    }


def _raw(model: str) -> Iterator[Call]:
    """Bodies that are no JSON of ours, and headers."""
    good = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": 2, "temperature": 0})
    bodies = {
        "broken": b'{"model": ',
        "array": b"[]",
        "empty": b"",
        "not_utf8": b'{"model": "\xff"}',
        "deep": b"[" * 2000 + b"]" * 2000,
        "twice": good.replace("{", '{"max_tokens": 1, ', 1).encode(),
    }
    for name, body in bodies.items():
        yield Call(name=f"raw.{name}", path=COMPLETION, method="POST", body=body)
    headers = {
        "too_large": {"Content-Length": str(2**30)},
        "text_type": {"Content-Type": "text/plain"},
        "compressed": {"Content-Encoding": "gzip"},
        "timings": {"x-laps-timings": "1"},
        "due": {"x-ttft-deadline-ms": "5000"},
        "due_wrong": {"x-ttft-deadline-ms": "soon"},
    }
    for name, given in headers.items():
        body = good.encode()
        yield Call(name=f"raw.{name}", path=COMPLETION, method="POST", body=body, headers=given)
    yield Call(name="raw.deleted", path="/v1/models", method="DELETE")
