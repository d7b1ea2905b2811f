"""Which parsers a model gets, by its chat template and the config; and which names it has."""

from pathlib import Path

import pytest

from actors.openai.chat_dialect import ToolFormat, build_dialect
from actors.openai.served_model import ServedModel, check_model, served_names
from configs.errors import ConfigFileError
from configs.load import load_config
from configs.schema import ApiConfig
from engine.errors import ConfigError, RequestError
from engine.text.tokenizing import Tokenizing, load_tokenizer
from tests.harness.tokenizer_folders import CHATML, byte_level_folder

QWEN = (
    '{%- if tools %}{{- "<tools>" }}{%- for tool in tools %}{{ tool | tojson }}{% endfor %}'
    '{{- "<tool_call>\\n{\\"name\\": <function-name>}\\n</tool_call>" }}{% endif %}'
)
LLAMA = (
    '{%- if tools is not none %}{{- \'Respond in the format {"name": function name,'
    ' "parameters": dictionary of argument name and its value}.\' }}{% endif %}<|eot_id|>'
)
MISTRAL = "{%- if tools is defined %}{{ '[AVAILABLE_TOOLS]' }}{{ tools }}{% endif %}[TOOL_CALLS]"
CODER = "{%- if tools %}<tool_call>\n<function=example>\n</tool_call>{% endif %}"


@pytest.fixture(scope="module")
def tokenizing(tmp_path_factory: pytest.TempPathFactory) -> Tokenizing:
    return load_tokenizer(byte_level_folder(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    ("template", "knows_tools", "tool_format"),
    [
        (QWEN, True, ToolFormat.HERMES),
        (LLAMA, True, ToolFormat.LLAMA3_JSON),
        (MISTRAL, True, ToolFormat.MISTRAL),
        (CODER, True, None),
        (CHATML, False, None),
        ("{# tools #}" + CHATML, False, None),
        ("You have tools. " + CHATML, False, None),
        ("{{ builtin_tools }}", False, None),
        (None, False, None),
    ],
)
def test_a_template_tells_how_calls_are_written(
    tokenizing: Tokenizing, template: str | None, knows_tools: bool, tool_format: ToolFormat | None
) -> None:
    dialect = build_dialect(template, ApiConfig(), tokenizing)
    assert (dialect.knows_tools, dialect.tool_format) == (knows_tools, tool_format)


def test_a_template_tells_how_thinking_is_asked_for(tokenizing: Tokenizing) -> None:
    switch = "{%- if enable_thinking is defined and enable_thinking is false %}x{% endif %}"
    dialect = build_dialect(CHATML + switch, ApiConfig(), tokenizing)
    assert (dialect.knows_enable_thinking, dialect.knows_reasoning_effort) == (True, False)
    dialect = build_dialect(CHATML + "{{ reasoning_effort }}", ApiConfig(), tokenizing)
    assert (dialect.knows_enable_thinking, dialect.knows_reasoning_effort) == (False, True)


def test_the_config_has_the_last_word_on_parsers(tokenizing: Tokenizing) -> None:
    for kind in ToolFormat:
        api = ApiConfig(tool_parser=kind.value)
        assert build_dialect(CODER, api, tokenizing).tool_format is kind
        assert build_dialect(CHATML, api, tokenizing).tool_format is None
    assert build_dialect(QWEN, ApiConfig(tool_parser="none"), tokenizing).tool_format is None
    thinking = CHATML + "<think>"
    for parser, template, splits in (
        ("auto", thinking, True),
        ("auto", CHATML, False),
        ("think", CHATML, True),
        ("none", thinking, False),
    ):
        api = ApiConfig(reasoning_parser=parser)  # type: ignore[arg-type]
        assert build_dialect(template, api, tokenizing).splits_reasoning is splits


def test_an_unknown_parser_ends_the_start() -> None:
    with pytest.raises(ConfigFileError, match=r"api\.tool_parser"):
        load_config(None, {"api.tool_parser": "guess"})


def test_a_model_may_have_several_names() -> None:
    config = load_config(None, {"api.served_model_names": ["big", "small", "big"]})
    assert served_names(config) == ("big", "small")
    model = ServedModel(name="big", aliases=("small",), max_model_len=9, vocab_size=9)
    check_model("big", model)
    check_model("small", model)
    with pytest.raises(RequestError) as refused:
        check_model("other", model)
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")


def test_one_name_is_the_folders_or_the_configs() -> None:
    config = load_config(None, {"model.path": "/models/Tiny-1B"})
    assert served_names(config) == ("Tiny-1B",)
    assert served_names(load_config(None, {"model.served_name": "mine"})) == ("mine",)
    both = {"model.served_name": "mine", "api.served_model_names": ["mine", "yours"]}
    assert served_names(load_config(None, both)) == ("mine", "yours")
    with pytest.raises(ConfigError, match=r"model\.served_name"):
        served_names(load_config(None, both | {"model.served_name": "other"}))


def test_names_are_not_empty() -> None:
    with pytest.raises(ConfigFileError, match="served_model_names"):
        load_config(Path("configs/dev_cpu.yaml"), {"api.served_model_names": [""]})
