"""Chat templates with tools, and what is known of a template without loading transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.errors import ConfigError
from engine.messages import TokenizeRequest
from engine.text.chat_template import (
    describe_tokenizer,
    load_chat_template,
    read_template_text,
)
from tests.harness.tokenizer_folders import CHATML, byte_level_folder

WITH_TOOLS = (
    "{% if tools %}TOOLS{% for tool in tools %} {{ tool | tojson }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ m.tool_call_id or '' }};{% endfor %}{{ effort | default('') }}"
)
TOOL: dict[str, object] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "<b>häuser</b>",
        "parameters": {"type": "object", "properties": {"b": {}, "a": {}}},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"b": 1, "a": 2}}}
MESSAGES: list[dict[str, object]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
]


@pytest.mark.parametrize("tools", [[TOOL], [TOOL, TOOL], None])
def test_tools_calls_and_their_answers_are_rendered_as_transformers_does(
    tmp_path: Path, tools: list[dict[str, object]] | None
) -> None:
    folder = byte_level_folder(tmp_path, chat_template=WITH_TOOLS)
    variables: dict[str, object] = {"effort": "low"} | ({} if tools is None else {"tools": tools})
    text = load_chat_template(folder).render(
        TokenizeRequest(messages=MESSAGES, chat_template_kwargs=variables)
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    theirs = tokenizer.apply_chat_template(
        MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True, effort="low"
    )
    assert text == theirs
    assert text.count("TOOLS") == (0 if tools is None else 1)
    assert '{"b": 1, "a": 2}' in text


def test_variables_of_the_renderer_cannot_be_set() -> None:
    template = load_chat_template(Path("demo_model/laps-demo"))
    with pytest.raises(AssertionError, match="messages"):
        template.render(
            TokenizeRequest(messages=MESSAGES, chat_template_kwargs={"messages": [], "tools": []})
        )


def test_a_template_is_read_from_wherever_transformers_would_read_it(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    assert read_template_text(folder) == CHATML
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two tools"}]
    config["chat_template"] = named
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_template_text(folder) == "one\ntwo tools"
    (folder / "chat_template.jinja").write_text("three")
    assert read_template_text(folder) == "three"
    assert AutoTokenizer.from_pretrained(str(folder)).chat_template == "three"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("four")
    assert read_template_text(folder) == "three\nfour"
    both = {"default": "three", "tool_use": "four"}
    assert AutoTokenizer.from_pretrained(str(folder)).chat_template == both


def test_a_folder_without_a_template_has_none_and_a_broken_one_is_named(tmp_path: Path) -> None:
    assert read_template_text(byte_level_folder(tmp_path, chat_template=None)) is None
    assert read_template_text(tmp_path / "nothing") is None
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer_config"):
        read_template_text(tmp_path)


def test_clients_read_special_tokens_and_the_template_as_texts(tmp_path: Path) -> None:
    """What transformers writes now: a token as an object, the template in a file of its own."""
    token = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}
    config = {"eos_token": token, "bos_token": None, "model_max_length": 8}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    told = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    assert describe_tokenizer(tmp_path) == config | told
    assert describe_tokenizer(tmp_path / "none") == {}
