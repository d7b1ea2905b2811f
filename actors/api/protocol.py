"""From the bytes of an OpenAI request to what the engine runs, or an error before any byte is sent.

`parse_chat` and `parse_completion` need no tokenizer; `resolve_sampling` settles what depends on
the prompt's length. Knows no HTTP and no workers.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from actors.api.openai_requests import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    StreamOptions,
    decode_body,
    unsupported,
)
from actors.api.request_rules import (
    BOUNDS,
    MAX_MESSAGES,
    MAX_SALT_CHARS,
    MAX_STOP_TOKEN_IDS,
    Bounds,
    check_chars,
    check_length,
    check_token_ids,
    count_chars,
    invalid,
    read_logit_bias,
    read_message,
    read_stops,
    read_template_kwargs,
)
from configs.schema import EdgeConfig
from engine.errors import RequestError
from engine.messages import TokenizeRequest
from engine.request import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
MAX_CHARS_PER_TOKEN = 16  # a prompt beyond it cannot fit, whatever the tokenizer makes of it
SEED_BITS = 63  # seeds stay non-negative in a signed 64-bit integer
_UINT64 = 2**64 - 1

Prompt = TokenizeRequest | list[int]


class Endpoint(Enum):
    """Which object the client speaks; `value` is the parameter its prompt is in."""

    CHAT = "messages"
    COMPLETION = "prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the edge must know of the model it serves."""

    name: str
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int  # ids 0 ... vocab_size - 1 may be sent
    created_s: int = 0  # Unix time


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A validated request. Choices are numbered prompt by prompt: n of the first, then on."""

    endpoint: Endpoint
    model: str
    prompts: list[Prompt]
    n: int
    max_tokens: int | None  # as the client said
    base_sampling: SamplingParams  # final but for max_tokens, which `resolve_sampling` sets
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    cache_salt: str = ""
    priority: int = 0
    ttft_deadline_s: float | None = None  # from arrival; from a header, not the body

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompts)


def draw_seed() -> int:
    """A random seed for a request that named none."""
    return secrets.randbits(SEED_BITS)


def child_seed(seed: int, choice_index: int) -> int:
    """Seed of one choice: the request's own for choice 0, else a SplitMix64 step away from it.

    The same for every retry, and distinct noise for each choice (Steele et al. 2014, SplitMix).
    """
    if choice_index == 0:
        return seed
    mixed = (seed + choice_index * 0x9E3779B97F4A7C15) & _UINT64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _UINT64
    return (mixed ^ (mixed >> 31)) >> (64 - SEED_BITS)


def parse_chat(
    body: bytes,
    limits: EdgeConfig,
    model: ServedModel,
    new_seed: Callable[[], int] = draw_seed,
) -> ParsedRequest:
    """A /v1/chat/completions body; raises RequestError with `param` and OpenAI's code."""
    chat = decode_body(body, ChatBody)
    _check_model(chat.model, model)
    if chat.top_logprobs is not None and not chat.logprobs:
        raise invalid("top_logprobs", "only allowed when 'logprobs' is true.")
    Bounds(0, limits.max_logprobs).check("top_logprobs", chat.top_logprobs)
    logprobs = (chat.top_logprobs or 0) if chat.logprobs else None
    return _assemble(
        chat,
        Endpoint.CHAT,
        [_read_chat_prompt(chat, model)],
        _sampling(chat, limits, model, logprobs, new_seed),
        limits,
    )


def parse_completion(
    body: bytes,
    limits: EdgeConfig,
    model: ServedModel,
    new_seed: Callable[[], int] = draw_seed,
) -> ParsedRequest:
    """A /v1/completions body; raises RequestError with `param` and OpenAI's code."""
    completion = decode_body(body, CompletionBody)
    _check_model(completion.model, model)
    if completion.echo:
        raise unsupported("echo")
    if completion.suffix is not None:
        raise unsupported("suffix")
    if completion.best_of is not None and completion.best_of != (completion.n or 1):
        raise unsupported("best_of", ", except as n")
    Bounds(0, limits.max_logprobs).check("logprobs", completion.logprobs)
    return _assemble(
        completion,
        Endpoint.COMPLETION,
        _read_completion_prompts(completion, limits, model),
        _sampling(completion, limits, model, completion.logprobs, new_seed),
        limits,
    )


def resolve_sampling(
    parsed: ParsedRequest, num_prompt_tokens: int, max_model_len: int
) -> SamplingParams:
    """Sampling of a prompt whose length is known; choice i then takes `child_seed(seed, i)`.

    Without max_tokens a chat may use the rest of the context, a completion 16 tokens. Raises
    RequestError (context_length_exceeded) when prompt and output cannot fit.
    """
    param = parsed.endpoint.value
    if num_prompt_tokens < 1:
        raise invalid(param, "the prompt holds no tokens.", "empty_prompt")
    remaining = max_model_len - num_prompt_tokens
    if remaining < 1 or (parsed.max_tokens or 1) > remaining:
        raise _too_long(param, num_prompt_tokens, parsed.max_tokens, max_model_len)
    default = remaining if parsed.endpoint is Endpoint.CHAT else DEFAULT_COMPLETION_TOKENS
    max_tokens = parsed.max_tokens or min(default, remaining)
    min_tokens = parsed.base_sampling.min_tokens
    if min_tokens > max_tokens:
        raise invalid("min_tokens", f"must not exceed max_tokens ({max_tokens}), got {min_tokens}.")
    return msgspec.structs.replace(parsed.base_sampling, max_tokens=max_tokens)


def _too_long(
    param: str, num_prompt_tokens: int, max_tokens: int | None, max_model_len: int
) -> RequestError:
    if max_tokens is None:
        used = f"your {param} resulted in {num_prompt_tokens} tokens"
        advice = f"reduce the length of the {param}"
    else:
        used = (
            f"you requested {num_prompt_tokens + max_tokens} tokens ({num_prompt_tokens} in the"
            f" {param}, {max_tokens} in the completion)"
        )
        advice = f"reduce the length of the {param} or completion"
    return _context_exceeded(param, max_model_len, used, advice)


def _context_exceeded(param: str, max_model_len: int, used: str, advice: str) -> RequestError:
    return RequestError(
        f"This model's maximum context length is {max_model_len} tokens. However, {used}. Please"
        f" {advice}.",
        param=param,
        code="context_length_exceeded",
    )


def _check_model(name: str, model: ServedModel) -> None:
    if name != model.name:
        raise RequestError(
            f"The model `{name[:200]}` does not exist",
            param="model",
            code="model_not_found",
            status=404,
        )


def _check_prompt_chars(param: str, num_chars: int, model: ServedModel) -> None:
    """Refuses before any work on the text what cannot fit."""
    if num_chars > MAX_CHARS_PER_TOKEN * model.max_model_len:
        raise _context_exceeded(
            param,
            model.max_model_len,
            f"your {param} resulted in far more ({num_chars} characters)",
            f"reduce the length of the {param}",
        )


def _read_chat_prompt(chat: ChatBody, model: ServedModel) -> TokenizeRequest:
    check_length("messages", len(chat.messages), MAX_MESSAGES)
    # First, so that no work is done on what cannot fit.
    _check_prompt_chars("messages", sum(map(count_chars, chat.messages)), model)
    messages = [
        read_message(message, f"messages[{position}]")
        for position, message in enumerate(chat.messages)
    ]
    continues = bool(chat.continue_final_message)
    adds_prompt = chat.add_generation_prompt
    if continues and adds_prompt:
        raise invalid("continue_final_message", "cannot be combined with 'add_generation_prompt'.")
    if continues and messages[-1]["role"] != "assistant":
        raise invalid("continue_final_message", "the last message must be an assistant's.")
    return TokenizeRequest(
        messages=messages,
        # Chat templates write the special tokens themselves.
        add_special_tokens=bool(chat.add_special_tokens),
        add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
        continue_final_message=continues,
        chat_template_kwargs=read_template_kwargs(chat.chat_template_kwargs),
    )


def _read_completion_prompts(
    completion: CompletionBody, limits: EdgeConfig, model: ServedModel
) -> list[Prompt]:
    prompt = completion.prompt
    if isinstance(prompt, str):
        return [_text_prompt(prompt, "prompt", completion, model)]
    if prompt and isinstance(prompt[0], int):
        return [_ids_prompt(prompt, "prompt", model)]
    check_length("prompt", len(prompt), limits.max_prompts)
    kind = type(prompt[0])
    read: list[Prompt] = []
    for position, item in enumerate(prompt):
        where = f"prompt[{position}]"
        if type(item) is not kind:
            raise _mixed_prompt(where)
        if isinstance(item, str):
            read.append(_text_prompt(item, where, completion, model))
        elif isinstance(item, list):
            read.append(_ids_prompt(item, where, model))
    return read


def _mixed_prompt(param: str) -> RequestError:
    return RequestError(
        f"Invalid type for '{param}': a prompt is a string, or an array of only strings, only token"
        " ids or only arrays of token ids.",
        param=param,
        code="invalid_type",
    )


def _text_prompt(
    text: str, param: str, completion: CompletionBody, model: ServedModel
) -> TokenizeRequest:
    if not text:
        raise invalid(param, "empty string.", "empty_string")
    _check_prompt_chars("prompt", len(text), model)
    adds = completion.add_special_tokens
    return TokenizeRequest(text=text, add_special_tokens=True if adds is None else adds)


def _ids_prompt(items: Sequence[object], param: str, model: ServedModel) -> list[int]:
    ids = [item for item in items if isinstance(item, int)]
    if len(ids) != len(items):
        raise _mixed_prompt(param)
    if len(ids) >= model.max_model_len:
        raise _too_long("prompt", len(ids), None, model.max_model_len)
    check_length(param, len(ids), model.max_model_len)
    check_token_ids(param, ids, model.vocab_size)
    return ids


def _sampling(
    body: GenerationBody,
    limits: EdgeConfig,
    model: ServedModel,
    logprobs: int | None,
    new_seed: Callable[[], int],
) -> SamplingParams:
    for name, bounds in BOUNDS.items():
        bounds.check(name, getattr(body, name, None))
    stop_ids = body.stop_token_ids or []
    if stop_ids:
        check_length("stop_token_ids", len(stop_ids), MAX_STOP_TOKEN_IDS)
        check_token_ids("stop_token_ids", stop_ids, model.vocab_size)
    return SamplingParams(
        max_tokens=1,
        min_tokens=body.min_tokens or 0,
        temperature=_or(body.temperature, 1.0),
        top_k=_read_top_k(body.top_k, model.vocab_size),
        top_p=_or(body.top_p, 1.0),
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=read_logit_bias(
            body.logit_bias, max_entries=limits.max_logit_bias, vocab_size=model.vocab_size
        ),
        seed=(new_seed() if body.seed is None else body.seed) & (2**SEED_BITS - 1),
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=tuple(dict.fromkeys(stop_ids)),
        logprobs=logprobs,
    )


def _read_top_k(top_k: int | None, vocab_size: int) -> int:
    """0 for "all tokens", however the client said it: null, 0, -1 or more than there are."""
    return 0 if top_k is None or top_k < 1 or top_k >= vocab_size else top_k


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _assemble(
    body: GenerationBody,
    endpoint: Endpoint,
    prompts: list[Prompt],
    sampling: SamplingParams,
    limits: EdgeConfig,
) -> ParsedRequest:
    Bounds(1, limits.max_n).check("n", body.n)
    if body.cache_salt is not None:
        check_chars("cache_salt", body.cache_salt, MAX_SALT_CHARS)
    options = body.stream_options or StreamOptions()
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "only allowed when 'stream' is true.")
    return ParsedRequest(
        endpoint=endpoint,
        model=body.model,
        prompts=prompts,
        n=body.n or 1,
        max_tokens=_read_max_tokens(body),
        base_sampling=sampling,
        stops=read_stops(body.stop, max_stops=limits.max_stop, max_chars=limits.max_stop_chars),
        include_stop=bool(body.include_stop_str_in_output),
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
    )


def _read_max_tokens(body: GenerationBody) -> int | None:
    newer = body.max_completion_tokens if isinstance(body, ChatBody) else None
    if newer is not None and body.max_tokens is not None and newer != body.max_tokens:
        raise invalid("max_tokens", "differs from 'max_completion_tokens'; send one of the two.")
    return body.max_tokens if newer is None else newer
