"""Renders chat messages to prompt text with the model's own template, in transformers' sandbox.

Knows nothing of tokens. Templates come from the model folder only, never from a client.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from engine.errors import ConfigError, RequestError
from engine.file_checks import check_file
from engine.messages import TokenizeRequest

if TYPE_CHECKING:
    import jinja2.nodes
    import jinja2.parser

TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"  # a folder
CONFIG_FILE = "tokenizer_config.json"
TOOLS = "tools"  # the one reserved variable that the edge itself may set

# Names that a client's chat_template_kwargs may not set: arguments of the renderer, variables that
# it passes to the template, and options that have their own request field.
RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        TOOLS,
        "truncation",
    }
)
_MAX_MESSAGE_CHARS = 300  # of a template's own error text


def is_reserved_kwarg(name: str) -> bool:
    """True for reserved names and every special token's variable (`bos_token`, ...)."""
    return name in RESERVED_KWARGS or name.endswith(("_token", "_tokens"))


class TemplateTokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    chat_template: object

    def apply_chat_template(
        self, conversation: list[dict[str, object]], **kwargs: object
    ) -> object: ...


class ChatTemplate:
    """Renders conversations for one model; without a template every conversation is refused."""

    def __init__(self, tokenizer: TemplateTokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def is_present(self) -> bool:
        return self._tokenizer.chat_template is not None

    def render(self, request: TokenizeRequest) -> str:
        """The prompt text; RequestError if there is no template or it refuses the messages."""
        assert request.messages is not None, "no messages to render"
        names = set(request.chat_template_kwargs) - {TOOLS}
        reserved = sorted(name for name in names if is_reserved_kwarg(name))
        assert not reserved, f"reserved template variables passed the edge: {reserved}"
        if not self.is_present:
            raise RequestError(
                "This model has no chat template; use /v1/completions instead.", param="messages"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                request.messages,
                tokenize=False,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                **request.chat_template_kwargs,
            )
        except Exception as error:  # a template is the model's code and may raise anything
            raise RequestError(_explain(error), param="messages") from error
        assert isinstance(text, str), f"the renderer returned {type(text).__name__}"
        return text


class _NamedTemplate(msgspec.Struct):
    template: str


class _TokenizerConfig(msgspec.Struct):
    """The part of tokenizer_config.json that is read here."""

    chat_template: str | list[_NamedTemplate] | None = None


def read_template_text(folder: Path) -> str | None:
    """All chat templates of a model folder as one text; None when it has none.

    For inspecting templates without loading transformers. The files are those that transformers
    prefers, in its order. Raises ConfigError.
    """
    texts = [text for _, text in _read_templates(folder)]
    return "\n".join(texts) if texts else None


def describe_tokenizer(folder: Path) -> dict[str, object]:
    """The folder's tokenizer_config.json as clients read it: special tokens and template as texts.

    Folders may have the template in a file of its own, and tokens as objects. Raises ConfigError.
    """
    path = folder / CONFIG_FILE
    try:
        config = msgspec.json.decode(_read(path), type=dict[str, object]) if path.exists() else {}
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    for name, token in config.items():
        if name.endswith("_token") and isinstance(token, dict):
            config[name] = token.get("content")
    if (folder / TEMPLATE_FILE).exists():
        config["chat_template"] = _read(folder / TEMPLATE_FILE)
    return config


def check_templates(folder: Path) -> None:
    """Raises ConfigError, naming file and line, for a chat template that jinja cannot parse.

    Without this check, every conversation would raise the error.
    """
    import jinja2  # imported here, because only renderers need jinja
    from jinja2.ext import Extension

    class Generation(Extension):
        """Transformers' block around assistant text; here it only has to be parsed."""

        tags = {"generation"}  # noqa: RUF012 - jinja's own form

        def parse(self, parser: "jinja2.parser.Parser") -> list["jinja2.nodes.Node"]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    syntax = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", Generation])
    for path, text in _read_templates(folder):
        try:
            syntax.parse(text)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{path}: the chat template is not valid in its line {error.lineno}:"
                f" {error.message}; correct it or download the file again"
            ) from error


def _read_templates(folder: Path) -> list[tuple[Path, str]]:
    """Each template with its file. Raises ConfigError."""
    files = [folder / TEMPLATE_FILE, *sorted((folder / MORE_TEMPLATES).glob("*.jinja"))]
    templates = [(path, _read(path)) for path in files if path.exists()]
    path = folder / CONFIG_FILE
    if not path.exists():
        return templates
    try:
        found = msgspec.json.decode(_read(path), type=_TokenizerConfig).chat_template
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    inside = [found] if isinstance(found, str) else [one.template for one in found or ()]
    return templates or [(path, text) for text in inside]


def _read(path: Path) -> str:
    check_file(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def load_chat_template(folder: Path) -> ChatTemplate:
    """The template of a model folder; raises ConfigError when transformers cannot load it."""
    # Imported here because it takes a second, and only what renders needs it. AutoTokenizer would
    # bring torch, for seconds more; the classes that it chooses from render alike.
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder}: transformers cannot load the tokenizer: {error}") from error
    return ChatTemplate(cast("TemplateTokenizer", tokenizer))


def _explain(error: Exception) -> str:
    """A template's own error (`raise_exception`) for the client; for others only the type."""
    from jinja2 import TemplateError

    own_text = isinstance(error, TemplateError) or type(error) is ValueError
    detail = str(error)[:_MAX_MESSAGE_CHARS] if own_text else type(error).__name__
    return f"The chat template cannot render these messages: {detail}"
