"""The notation of the model's tool calls and reasoning, from its chat template or configuration.

Chosen once, when an ingress starts. Knows the parsers by name only.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from actors.openai import reasoning
from actors.openai.tools import harmony, hermes, llama3_json, mistral
from actors.openai.tools.events import ToolParser
from actors.openai.tools.harmony import HarmonyTokens
from configs.schema import ApiConfig
from engine.errors import ConfigError
from engine.request import Thinking
from engine.text.tokenizing import Tokenizing


class ToolFormat(Enum):
    """The format of tool calls in plain text; `value` is its name in the configuration."""

    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDialect:
    """What a model's chats may contain besides text: tool calls, reasoning."""

    knows_tools: bool = False  # the template has a place for tools
    knows_reasoning_effort: bool = False  # likewise
    knows_enable_thinking: bool = False  # likewise
    tool_format: ToolFormat | None = None  # None = no parser for this model's calls
    splits_reasoning: bool = False
    thinking: Thinking | None = None  # None = it has no marker, or markers of several tokens
    # Special tokens that are markers, so that their text has to be seen: id -> text.
    tool_markers: Mapping[int, str] = field(default_factory=dict)
    reasoning_markers: Mapping[int, str] = field(default_factory=dict)
    # The whole answer is in this format, calls and reasoning too; None = it is not.
    harmony: HarmonyTokens | None = None
    reads_calls: bool = True  # False: the configuration says that tools are refused

    @property
    def can_call(self) -> bool:
        """Whether the calls that the model writes are read."""
        return self.tool_format is not None or (self.harmony is not None and self.reads_calls)


def build_dialect(template: str | None, api: ApiConfig, tokenizing: Tokenizing) -> ChatDialect:
    """Builds the dialect from the text of the model's chat templates and the configuration.

    template: all of them as one text; None = the model has none. Raises ConfigError for a format
    that the model's tokenizer cannot write.
    """
    text = _without_comments(template or "")
    knows_tools = _names(text, "tools")
    if (tokens := _harmony(text, api, tokenizing)) is not None:
        return ChatDialect(
            knows_tools=knows_tools,
            knows_reasoning_effort=_names(text, "reasoning_effort"),
            harmony=tokens,
            reads_calls=api.tool_parser != "none",
        )
    tool_format = _tool_format(text, api) if knows_tools else None
    splits = api.reasoning_parser == "think" or (
        api.reasoning_parser == "auto" and any(marker in text for marker in reasoning.MARKERS)
    )
    return ChatDialect(
        knows_tools=knows_tools,
        knows_reasoning_effort=_names(text, "reasoning_effort"),
        knows_enable_thinking=_names(text, "enable_thinking"),
        tool_format=tool_format,
        splits_reasoning=splits,
        thinking=_read_thinking(tokenizing) if splits else None,
        tool_markers=_special_ids(_markers_of(tool_format), tokenizing),
        reasoning_markers=_special_ids(reasoning.MARKERS if splits else (), tokenizing),
    )


def build_tool_parser(tool_format: ToolFormat, names: frozenset[str]) -> ToolParser:
    """Builds a parser for one choice, which finds calls of the functions `names`."""
    match tool_format:
        case ToolFormat.HERMES:
            return hermes.HermesParser(names)
        case ToolFormat.LLAMA3_JSON:
            return llama3_json.Llama3JsonParser(names)
    return mistral.MistralParser(names)


def _harmony(template: str, api: ApiConfig, tokenizing: Tokenizing) -> HarmonyTokens | None:
    """The tokens of the harmony format if answers are in it, by the template or the config."""
    named = {api.tool_parser, api.reasoning_parser} - {"auto", "none"}
    if not named and api.reasoning_parser == "auto":
        tokens = harmony.find_tokens(tokenizing)
        is_known = all(marker in template for marker in ("<|start|>", "<|channel|>", "<|message|>"))
        return tokens if is_known and isinstance(tokens, HarmonyTokens) else None
    if "harmony" not in named:
        return None
    if others := sorted(named - {"harmony"}):
        raise ConfigError(
            "api.tool_parser and api.reasoning_parser: 'harmony' is the format of whole answers and"
            f" cannot be combined with {others[0]!r}; set both to 'harmony' or leave one 'auto'"
        )
    tokens = harmony.find_tokens(tokenizing)
    if isinstance(tokens, list):
        raise ConfigError(
            "api.tool_parser or api.reasoning_parser is 'harmony', but the model's tokenizer has"
            f" no special token {', '.join(tokens)}; leave them 'auto' for this model"
        )
    return tokens


def _tool_format(template: str, api: ApiConfig) -> ToolFormat | None:
    if api.tool_parser == "none":
        return None
    if api.tool_parser != "auto":
        return ToolFormat(api.tool_parser)
    if mistral.TOOL_CALLS in template or "[AVAILABLE_TOOLS]" in template:
        return ToolFormat.MISTRAL
    # Some models put another notation than JSON between the same markers.
    if hermes.OPEN in template and "<function=" not in template and "<arg_key>" not in template:
        return ToolFormat.HERMES
    if llama3_json.TAG in template or ("<|eot_id|>" in template and '"parameters"' in template):
        return ToolFormat.LLAMA3_JSON
    return None


def _markers_of(tool_format: ToolFormat | None) -> Sequence[str]:
    match tool_format:
        case ToolFormat.HERMES:
            return hermes.MARKERS
        case ToolFormat.LLAMA3_JSON:
            return llama3_json.MARKERS
        case ToolFormat.MISTRAL:
            return mistral.MARKERS
    return ()


def _read_thinking(tokenizing: Tokenizing) -> Thinking | None:
    pieces = list(tokenizing.token_bytes.pieces)
    markers = [marker.encode() for marker in reasoning.MARKERS]
    if not all(marker in pieces for marker in markers):
        return None
    open_id, close_id = map(pieces.index, markers)
    return Thinking(open_id, close_id)


def _special_ids(markers: Sequence[str], tokenizing: Tokenizing) -> dict[int, str]:
    names = {marker.encode(): marker for marker in markers}
    pieces = {i: tokenizing.piece(i) for i in sorted(tokenizing.token_bytes.special_ids)}
    return {token_id: names[piece] for token_id, piece in pieces.items() if piece in names}


def _without_comments(template: str) -> str:
    return re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)


def _names(template: str, variable: str) -> bool:
    """Whether a template's statements, not only its text, use a variable."""
    statements = re.findall(r"\{[%{].*?[%}]\}", template, flags=re.DOTALL)
    return any(re.search(rf"\b{variable}\b", statement) for statement in statements)
