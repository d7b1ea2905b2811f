"""From the bytes of an OpenAI request to what the engine runs, or an error before any byte is sent.

`parse_chat` and `parse_completion` need no tokenizer; `resolve_sampling` settles what depends on
the prompt's length. Knows no HTTP and no workers.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import msgspec

from actors.openai.answer_shapes import AnswerShape
from actors.openai.chat_dialect import ToolFormat
from actors.openai.output_rules import check_can_end, read_constraint
from actors.openai.prompt_only import PromptOnly
from actors.openai.prompts import (
    Prompt,
    PromptReader,
    prompt_too_long,
    read_chat_prompt,
    read_truncation,
)
from actors.openai.request_bodies import (
    ChatBatchBody,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Speculation,
    StreamOptions,
    decode_body,
    unsupported,
)
from actors.openai.request_rules import (
    BOUNDS,
    INT64_MAX,
    MAX_STOP_TOKEN_IDS,
    Bounds,
    check_chars,
    check_length,
    check_metadata,
    check_token_ids,
    invalid,
    read_cache_identity,
    read_logit_bias,
    read_stops,
)
from actors.openai.served_model import ServedModel, check_generates
from actors.openai.tool_rules import ToolUse, hold_harmony, read_tool_use
from actors.openai.tools.harmony import HarmonyTokens
from configs.schema import EdgeConfig
from engine.errors import RequestError
from engine.messages import TokenizeRequest
from engine.request import MAX_DRAFTS, Constraint, RequestSpec, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
SEED_BITS = 63  # seeds stay non-negative in a signed 64-bit integer
MAX_SCORED_TOKENS = 2**17  # of all prompts of one request that asks for scores or embeddings
MAX_PROMPT_LOGPROBS = 2**17  # values of one answer: each prompt token's own, and the best
MAX_BAD_WORDS = 256
MAX_LOGPROB_IDS = 128  # vLLM's limit
MAX_BAD_WORD_CHARS = 256
MAX_REQUEST_ID_CHARS = 256
_UINT64 = 2**64 - 1


class Endpoint(Enum):
    """The endpoint; `value` is the parameter that holds the prompt."""

    CHAT = "messages"
    COMPLETION = "prompt"
    SCORE = "items"
    RERANK = "documents"
    EMBEDDING = "input"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A validated request. Choices are numbered prompt by prompt: n of the first, then on."""

    endpoint: Endpoint
    model: str
    prompts: Sequence[Prompt]
    n: int
    max_tokens: int | None  # as the client said
    spec: RequestSpec  # final but for params.max_tokens, which `resolve_sampling` sets
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    # A completion's text begins with its prompt's, a chat's with that of a message it continues.
    echo: bool = False
    request_id: str | None = None  # the client's, which the answer's id repeats
    bad_words: tuple[str, ...] = ()  # texts whose tokens may not appear in the output
    skips_special_tokens: bool = True  # False: the text of special tokens is shown
    names_tokens_by_id: bool = False  # log-probabilities call a token `token_id:7`
    prompt_logprobs: int | None = None  # as the client said; a completion's echo may want some too
    # What is asked of the prompts where nothing is generated; None = outputs are.
    prompt_only: PromptOnly | None = None
    shape: AnswerShape | None = None  # of another protocol's answer; None = the endpoint's own
    # What else than text the answer may hold.
    tool_format: ToolFormat | None = None  # None = no calls
    tool_names: frozenset[str] = frozenset()
    holds_calls: bool = False  # the output is calls and nothing else
    parallel_tool_calls: bool = True  # False: an answer shows its first call only
    splits_reasoning: bool = False
    include_reasoning: bool = True
    harmony: HarmonyTokens | None = None  # the answer is in this format; its marks are `markers`
    markers: Mapping[int, str] = field(default_factory=dict)  # special tokens whose text is read

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters of every choice, but for its max_tokens and its own seed."""
        return self.spec.params

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompts)

    @property
    def num_asked_tokens(self) -> int:
        """The output tokens that the client asked for, of all choices; 0 if it did not say."""
        return (self.max_tokens or 0) * self.num_choices


def replace_params(spec: RequestSpec, params: SamplingParams) -> RequestSpec:
    """The same request, sampled by `params`."""
    return msgspec.structs.replace(spec, params=params)


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
    return read_chat(decode_body(body, ChatBody), limits, model, new_seed)


def read_chat(
    chat: ChatBody,
    limits: EdgeConfig,
    model: ServedModel,
    new_seed: Callable[[], int] = draw_seed,
) -> ParsedRequest:
    """A decoded body; other protocols are read as such a one, too. Raises as `parse_chat`."""
    name = check_generates(chat.model, model)
    if chat.top_logprobs and not chat.logprobs:
        raise invalid("top_logprobs", "only allowed when 'logprobs' is true.")
    num_best = _read_num_best("top_logprobs", chat.top_logprobs, limits, model)
    check_metadata(chat.metadata)
    logprobs = (num_best or 0) if chat.logprobs else None
    constraint = read_constraint(chat)
    tools = read_tool_use(chat, model, constraint)
    if tools is not None:
        constraint = tools.constraint
    elif constraint is not None and model.dialect.harmony is not None:
        constraint = hold_harmony(constraint)
    parsed = _assemble(
        chat,
        Endpoint.CHAT,
        name,
        [_read_prompt(chat, model, tools)],
        _sampling(chat, limits, model, logprobs, new_seed, constraint),
        limits,
    )
    dialect = model.dialect
    parsed = replace(
        parsed,
        spec=replace_params(parsed.spec, _thinking_first(parsed.sampling, model)),
        splits_reasoning=dialect.splits_reasoning,
        include_reasoning=chat.include_reasoning is not False,
        markers=dialect.reasoning_markers,
        echo=bool(chat.echo),
    )
    if tools is not None:
        parsed = replace(
            parsed,
            tool_format=dialect.tool_format,
            tool_names=tools.names,
            holds_calls=tools.must_call,
            parallel_tool_calls=chat.parallel_tool_calls is not False,
            markers={**dialect.reasoning_markers, **dialect.tool_markers},
        )
    return parsed if dialect.harmony is None else _in_harmony(parsed, dialect.harmony)


def _in_harmony(parsed: ParsedRequest, tokens: HarmonyTokens) -> ParsedRequest:
    """A chat whose answer is in the harmony format."""
    sampling = parsed.sampling
    if not sampling.ignore_eos:  # a folder may name one of the two as eos only
        stop_ids = tuple(dict.fromkeys((*sampling.stop_token_ids, *tokens.stop_ids)))
        sampling = msgspec.structs.replace(sampling, stop_token_ids=stop_ids)
    spec = replace_params(parsed.spec, sampling)
    return replace(parsed, spec=spec, harmony=tokens, markers=tokens.marks)


def parse_chat_batch(
    body: bytes,
    limits: EdgeConfig,
    model: ServedModel,
    new_seed: Callable[[], int] = draw_seed,
) -> ParsedRequest:
    """A /v1/chat/completions/batch body: one choice for each conversation. Raises as `parse_chat`.

    As in vLLM they have no tools, are not streamed, and n is 1.
    """
    batch = decode_body(body, ChatBatchBody)
    for param in ("stream", "tools", "echo", "prompt_logprobs"):
        if getattr(batch, param):
            raise unsupported(param, " for batches of conversations")
    Bounds(1, 1).check("n", batch.n)
    check_length("messages", len(batch.messages), limits.max_prompts)
    check_generates(batch.model, model)
    prompts = [
        _read_conversation(batch.chat(position), f"messages[{position}]", model)
        for position in range(len(batch.messages))
    ]
    return replace(read_chat(batch.chat(0), limits, model, new_seed), prompts=prompts)


def parse_completion(
    body: bytes,
    limits: EdgeConfig,
    model: ServedModel,
    new_seed: Callable[[], int] = draw_seed,
) -> ParsedRequest:
    """A /v1/completions body; raises RequestError with `param` and OpenAI's code."""
    completion = decode_body(body, CompletionBody)
    name = check_generates(completion.model, model)
    if completion.suffix:
        raise unsupported("suffix")
    _check_best_of(completion)
    constraint = read_constraint(completion)
    logprobs = _read_num_best("logprobs", completion.logprobs, limits, model)
    reader = PromptReader(
        param=Endpoint.COMPLETION.value,
        model=model,
        max_prompts=limits.max_prompts,
        add_special_tokens=completion.add_special_tokens,
        truncation=read_truncation(completion, completion.max_tokens, model),
    )
    parsed = _assemble(
        completion,
        Endpoint.COMPLETION,
        name,
        reader.read(completion.prompt),
        _sampling(completion, limits, model, logprobs, new_seed, constraint),
        limits,
    )
    if not completion.echo or logprobs is None:
        return replace(parsed, echo=bool(completion.echo))
    num_best = max(logprobs, parsed.prompt_logprobs or 0)
    sampling = msgspec.structs.replace(parsed.sampling, prompt_logprobs=num_best)
    return replace(parsed, echo=True, spec=replace_params(parsed.spec, sampling))


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
        raise prompt_too_long(param, num_prompt_tokens, parsed.max_tokens or None, max_model_len)
    default = remaining if parsed.endpoint is Endpoint.CHAT else DEFAULT_COMPLETION_TOKENS
    max_tokens = min(default, remaining) if parsed.max_tokens is None else parsed.max_tokens
    min_tokens = parsed.sampling.min_tokens
    if min_tokens > max_tokens:
        raise invalid("min_tokens", f"must not exceed max_tokens ({max_tokens}), got {min_tokens}.")
    return msgspec.structs.replace(parsed.sampling, max_tokens=max_tokens)


def check_totals(parsed: ParsedRequest, prompt_lengths: Sequence[int]) -> None:
    """Bounds what a request asks of all its prompts together; lengths in tokens.

    Raises RequestError.
    """
    total = sum(prompt_lengths)
    if parsed.prompt_only is not None and total > MAX_SCORED_TOKENS:
        raise invalid(
            parsed.endpoint.value,
            f"the prompts have {total} tokens together. Expected at most {MAX_SCORED_TOKENS}; send"
            " fewer of them in one request.",
        )
    num_best = parsed.sampling.prompt_logprobs
    if num_best is None:
        return
    num_logprobs = total * parsed.n * (1 + num_best)
    if num_logprobs > MAX_PROMPT_LOGPROBS:
        raise invalid(
            "logprobs" if parsed.prompt_logprobs is None else "prompt_logprobs",
            f"{total} prompt tokens have {num_logprobs} log-probabilities to return. Expected at"
            f" most {MAX_PROMPT_LOGPROBS}; ask for fewer, or about shorter prompts.",
        )


def _sampling(
    body: GenerationBody,
    limits: EdgeConfig,
    model: ServedModel,
    logprobs: int | None,
    new_seed: Callable[[], int],
    constraint: Constraint | None,
) -> SamplingParams:
    check_can_end(body, constraint)
    for name, bounds in BOUNDS.items():
        bounds.check(name, getattr(body, name, None))
    if not _asks_of_prompt(body):
        Bounds(1, INT64_MAX).check("max_tokens", body.max_tokens)
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
        constraint=constraint,
        prompt_logprobs=_read_num_best("prompt_logprobs", body.prompt_logprobs, limits, model),
        allowed_token_ids=_read_allowed_ids(body.allowed_token_ids, model),
        logprob_token_ids=_read_logprob_ids(body, logprobs, model),
    )


def _read_prompt(chat: ChatBody, model: ServedModel, tools: ToolUse | None) -> TokenizeRequest:
    truncation = read_truncation(chat, _read_max_tokens(chat), model)
    return read_chat_prompt(chat, model, None if tools is None else tools.definitions, truncation)


def _read_conversation(chat: ChatBody, where: str, model: ServedModel) -> TokenizeRequest:
    """Reads one of several conversations; errors name its place among them."""
    try:
        return _read_prompt(chat, model, None)
    except RequestError as error:
        message = error.message.replace("messages", where, 1)
        param = None if error.param is None else error.param.replace("messages", where, 1)
        raise RequestError(message, param=param, code=error.code, status=error.status) from error


def _read_num_best(
    param: str, num_best: int | None, limits: EdgeConfig, model: ServedModel
) -> int | None:
    """How many of the best tokens are wanted at each position; -1 becomes all of them."""
    if limits.max_logprobs == -1 or limits.max_logprobs >= model.vocab_size:
        Bounds(-1, model.vocab_size).check(param, num_best)
    else:
        Bounds(0, limits.max_logprobs).check(param, num_best)
    return model.vocab_size if num_best == -1 else num_best


def _read_allowed_ids(token_ids: list[int] | None, model: ServedModel) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    check_length("allowed_token_ids", len(token_ids), model.vocab_size)
    check_token_ids("allowed_token_ids", token_ids, model.vocab_size)
    return tuple(dict.fromkeys(token_ids))


def _read_logprob_ids(
    body: GenerationBody, logprobs: int | None, model: ServedModel
) -> tuple[int, ...]:
    """The tokens whose log-probabilities stand in place of those of the best."""
    param, token_ids = "logprob_token_ids", body.logprob_token_ids
    if not token_ids:
        return ()
    if logprobs is None:
        raise invalid(param, "only allowed when 'logprobs' are asked for.")
    if body.max_tokens == 0:
        raise invalid(param, "no output is asked for, so there is nothing to list them beside.")
    check_length(param, len(token_ids), MAX_LOGPROB_IDS)
    check_token_ids(param, token_ids, model.vocab_size)
    return tuple(dict.fromkeys(token_ids))


def _read_bad_words(words: list[str] | None) -> tuple[str, ...]:
    if not words:
        return ()
    check_length("bad_words", len(words), MAX_BAD_WORDS)
    for position, word in enumerate(words):
        check_chars(f"bad_words[{position}]", word, MAX_BAD_WORD_CHARS)
    return tuple(dict.fromkeys(words))


def _asks_of_prompt(body: GenerationBody) -> bool:
    """Whether an answer without output would still have content."""
    echoes = isinstance(body, CompletionBody) and bool(body.echo)
    return echoes or body.prompt_logprobs is not None


def _thinking_first(sampling: SamplingParams, model: ServedModel) -> SamplingParams:
    """Makes a constraint start after the model's thinking."""
    if sampling.constraint is None or model.dialect.thinking is None:
        return sampling
    return msgspec.structs.replace(sampling, thinking=model.dialect.thinking)


def _read_top_k(top_k: int | None, vocab_size: int) -> int:
    """Returns 0 for "all tokens", which clients write as null, 0, -1 or a too large number."""
    return 0 if top_k is None or top_k < 1 or top_k >= vocab_size else top_k


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _assemble(
    body: GenerationBody,
    endpoint: Endpoint,
    name: str,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    limits: EdgeConfig,
) -> ParsedRequest:
    Bounds(1, limits.max_n).check("n", body.n)
    options = body.stream_options or StreamOptions()
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "only allowed when 'stream' is true.")
    if body.prompt_logprobs and body.stream:
        raise invalid("prompt_logprobs", "only allowed when 'stream' is false.")
    return ParsedRequest(
        endpoint=endpoint,
        model=name,
        prompts=prompts,
        n=body.n or 1,
        max_tokens=_read_max_tokens(body),
        spec=RequestSpec(
            params=sampling,
            priority=body.priority or 0,
            salt=read_cache_identity(body.cache_salt, body.extra_key),
            max_drafts=_read_max_drafts(body.speculation),
        ),
        stops=read_stops(body.stop, max_stops=limits.max_stop, max_chars=limits.max_stop_chars),
        include_stop=bool(body.include_stop_str_in_output),
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        prompt_logprobs=sampling.prompt_logprobs,
        request_id=_read_request_id(body.request_id),
        bad_words=_read_bad_words(body.bad_words),
        skips_special_tokens=body.skip_special_tokens is not False,
        names_tokens_by_id=bool(body.return_tokens_as_token_ids),
    )


def _read_max_drafts(asked: Speculation | None) -> int | None:
    if asked is None:
        return None
    Bounds(0, MAX_DRAFTS).check("speculation.max_drafts", asked.max_drafts)
    return asked.max_drafts


def _read_request_id(request_id: str | None) -> str | None:
    if request_id is not None:
        check_chars("request_id", request_id, MAX_REQUEST_ID_CHARS)
    return request_id


def _read_max_tokens(body: GenerationBody) -> int | None:
    newer = body.max_completion_tokens if isinstance(body, ChatBody) else None
    if newer is not None and body.max_tokens is not None and newer != body.max_tokens:
        raise invalid("max_tokens", "differs from 'max_completion_tokens'; send one of the two.")
    return body.max_tokens if newer is None else newer


def _check_best_of(completion: CompletionBody) -> None:
    """Refuses a `best_of` above `n`: no choices are generated only to be dropped."""
    best_of, n = completion.best_of, completion.n or 1
    if best_of is None or best_of == n:
        return
    if best_of < n:
        raise invalid("best_of", f"must not be less than n ({n}), got {best_of}.")
    raise unsupported("best_of", ", except as n")
