"""Questions before a load: is the server ready, has it the model, does it take our prompts

Each answer that is no ends the run before it began, with what to do about it.
"""

from contextlib import closing
from dataclasses import dataclass, replace

import msgspec

from load_tests.http_load.client import (
    AskOptions,
    BrokenStreamError,
    LoadError,
    RefusedError,
    Server,
    UnreachableError,
    ask,
    get,
)
from load_tests.http_load.dialogue import Prompt, PromptStyle
from load_tests.http_load.schedule import Session

UNAVAILABLE = 503
PROBE_TIMEOUT_S = 60.0
PROBE_TOKENS = 2


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None  # tokens; not every server tells


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The model that answers."""

    model: str
    max_tokens: int | None  # of prompt and answer together; None = not told


def find_model(server: Server, wanted: str | None) -> Served:
    """The model of that name, or the first one. Raises LoadError when none can answer."""
    try:
        get(server, "/ready")
    except RefusedError as refusal:
        if refusal.status == UNAVAILABLE:  # any other answer: this server has no such path
            raise UnreachableError(
                f"{server.url} is not ready: {refusal}. Wait until /ready answers 200"
            ) from refusal
    models = _models(server)
    for model in models:
        if wanted in (None, model.id):
            return Served(model=model.id, max_tokens=model.max_model_len)
    known = ", ".join(model.id for model in models) or "nothing"
    raise UnreachableError(f"{server.url} serves {known}, but not {wanted!r}: see --model")


def _models(server: Server) -> list[_Model]:
    try:
        models = msgspec.json.decode(get(server, "/v1/models"), type=_Models).data
    except RefusedError as refusal:
        raise UnreachableError(f"{server.url}/v1/models: {refusal}") from refusal
    except msgspec.DecodeError as error:
        raise UnreachableError(f"{server.url}/v1/models is no list of models: {error}") from error
    return models


def probe(server: Server, options: AskOptions) -> None:
    """One tiny request of the kind the load is made of. Raises LoadError with what to change."""
    prompts: dict[PromptStyle, Prompt] = {
        PromptStyle.IDS: [11, 12, 13],
        PromptStyle.TEXT: "time and tide",
        PromptStyle.CHAT: [{"role": "user", "content": "time and tide"}],
    }
    try:
        prompt = prompts[options.style]
        with closing(ask(server, options, prompt, PROBE_TOKENS, PROBE_TIMEOUT_S)) as answer:
            num_tokens = sum(chunk.num_tokens for chunk in answer.chunks())
    except RefusedError as refusal:
        raise RefusedError(refusal.status, f"{refusal.message}. {_hint(options)}") from refusal
    if not num_tokens:
        raise BrokenStreamError(f"{server.url}: an answer without a token to {prompt!r}")


def _hint(options: AskOptions) -> str:
    hints = []
    if options.style is PromptStyle.IDS:
        hints.append("--prompts text, if it does not take token ids")
    if options.takes_extensions:
        hints.append("--openai-only, if it does not know ignore_eos and return_token_ids")
    return "Try " + " or ".join(hints) if hints else "The server does not take such requests"


def check_lengths(sessions: list[Session], served: Served) -> None:
    """Raises LoadError if a request would not fit the model."""
    if served.max_tokens is None:
        return
    too_long = [s.max_tokens for s in sessions if s.max_tokens > served.max_tokens]
    if too_long:
        shrink = -(-max(too_long) // (served.max_tokens - 1))
        raise LoadError(
            f"{len(too_long)} of {len(sessions)} requests or conversations need more than the"
            f" {served.max_tokens} tokens of {served.model} (up to {max(too_long)});"
            f" --shrink {shrink} divides all lengths, or take another scenario"
        )


def prepare(server: Server, model: str | None, options: AskOptions) -> tuple[AskOptions, Served]:
    """The options with the model's name. Raises LoadError."""
    served = find_model(server, model)
    options = replace(options, model=served.model)
    probe(server, options)
    return options, served
