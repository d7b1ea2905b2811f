"""The served model as the ingress knows it: its names, limits and notation."""

from dataclasses import dataclass, field
from pathlib import Path

from actors.openai.chat_dialect import ChatDialect
from configs.schema import AppConfig
from engine.errors import ConfigError, RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSpace:
    """The embeddings that a model makes."""

    num_dimensions: int
    is_normalised: bool
    can_shorten: bool  # to the first dimensions
    short_dimensions: tuple[int, ...] = ()  # how many may be kept; () = any number


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model under one or several names."""

    name: str  # the canonical one
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int  # ids 0 ... vocab_size - 1 may be sent
    created_s: int = 0  # Unix time
    aliases: tuple[str, ...] = ()  # further names a request may use
    dialect: ChatDialect = field(default_factory=ChatDialect)
    embeddings: EmbeddingSpace | None = None  # None = it generates

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


def served_names(config: AppConfig) -> tuple[str, ...]:
    """The canonical name and the others; raises ConfigError when two keys disagree."""
    names = tuple(dict.fromkeys(config.api.served_model_names))
    single = config.model.served_name
    if names and single is not None and single != names[0]:
        raise ConfigError(
            f"model.served_name is {single!r}, but api.served_model_names begins with"
            f" {names[0]!r}; set only one of the two keys"
        )
    return names or (single or Path(config.model.path).name,)


def check_model(name: str | None, model: ServedModel) -> str:
    """Returns the name that the answer repeats: the client's, or the canonical one for None.

    Raises RequestError (404, model_not_found) for a name that is not served.
    """
    if name is None:
        return model.name
    if name not in model.names:
        raise RequestError(
            f"The model `{name[:200]}` does not exist",
            param="model",
            code="model_not_found",
            status=404,
        )
    return name


def check_generates(name: str | None, model: ServedModel) -> str:
    """As `check_model`; raises RequestError (400) too for a model that makes embeddings."""
    name = check_model(name, model)
    if model.embeddings is not None:
        raise _unsupported_endpoint(
            f"The model `{name}` makes embeddings and generates nothing: send texts to"
            " /v1/embeddings."
        )
    return name


def check_embeds(name: str, model: ServedModel) -> EmbeddingSpace:
    """The embeddings of the model that is served as `name`; raises RequestError if it has none."""
    if model.embeddings is None:
        raise _unsupported_endpoint(
            f"The model `{name}` generates and makes no embeddings: serve an embedding model, with"
            " sentence-transformers' `modules.json` in its folder."
        )
    return model.embeddings


def _unsupported_endpoint(message: str) -> RequestError:
    return RequestError(message, param="model", code="unsupported_endpoint")
