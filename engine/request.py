"""Defines a request: its key, its sampling parameters and its progress arithmetic.

One progress number: *computed* tokens (KV present) catch up with *known* tokens (prompt and
sampled). Prefill, a chunk, a prefix hit, decode and recomputation after preemption differ only in
how far apart the two are. While steps are in flight, the computed count includes tokens that were
sampled on the device and whose ids are not known here yet. Knows no tensors and no Ray.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec


class RequestKey(
    msgspec.Struct, frozen=True, array_like=True, order=True, cache_hash=True, gc=False
):
    """Identifies one attempt at one choice of one client request, everywhere in the system.

    A late message about attempt 1 can never affect attempt 2, because the keys differ.
    """

    request_id: str  # 32 hex digits, made by the ingress
    child: int = 0  # index among the n choices
    attempt: int = 0  # 0, then +1 for each retry or migration


class ConstraintKind(Enum):
    """The language in which a constraint is written."""

    JSON_SCHEMA = "json_schema"  # within the subset of engine/constraints/json_schema.py
    REGEX = "regex"  # as engine/constraints/pattern.py reads it; the whole output
    GRAMMAR = "grammar"  # GBNF (the rule `root`) or Lark (`start`); the whole output
    STRUCTURAL_TAG = "structural_tag"  # as engine/constraints/tag_layout.py defines it


class Constraint(msgspec.Struct, frozen=True, array_like=True, cache_hash=True, weakref=True):
    """The language that the whole output text must match; equal constraints are equal records."""

    kind: ConstraintKind
    text: str


class Thinking(msgspec.Struct, frozen=True, array_like=True):
    """The two tokens that delimit the model's thinking before its answer."""

    open_id: int
    close_id: int
    is_open: bool = False  # the prompt ends with `open_id`


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen; every value was validated at the edge.

    Processing order: logit_bias, penalties, min_tokens ban, constraint with allowed ids and banned
    sequences, temperature, top_k, top_p, min_p, then argmax of (log-probability + Gumbel noise).
    `temperature == 0` means argmax without noise.
    """

    max_tokens: int  # 0 = nothing is generated: the request ends with its prompt
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0 = all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0  # 64-bit; the ingress draws one when the client gave none
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()  # the client's, besides the model's own eos ids
    logprobs: int | None = None  # None = off, k = the chosen token and the k best
    logprob_token_ids: tuple[int, ...] = ()  # these in place of the k best; () = the best
    constraint: Constraint | None = None  # every token must match it, and only eos can end it
    thinking: Thinking | None = None  # constraint applies after it; None = from the first token
    allowed_token_ids: tuple[int, ...] = ()  # no others may be sampled, eos neither; () = all may
    banned_sequences: tuple[tuple[int, ...], ...] = ()  # may not appear in the output
    # None = off, k = each prompt token but the first, and the k best tokens at its position
    prompt_logprobs: int | None = None
    label_token_ids: tuple[int, ...] = ()  # max_tokens 0: log-probability of each after the prompt
    wants_embedding: bool = False  # max_tokens 0: of the prompt, from a model that makes them

    @property
    def is_prompt_only(self) -> bool:
        """Whether nothing is generated: the request ends when its prompt is computed."""
        return self.max_tokens == 0

    @property
    def is_constrained(self) -> bool:
        """Whether the tokens that may come next are known only once all earlier ones are."""
        return (
            self.constraint is not None
            or bool(self.allowed_token_ids)
            or bool(self.banned_sequences)
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether the choice depends on the tokens already present (penalties)."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


MAX_DRAFTS = 16  # that anybody may ask for
MAX_TOKENS = 2**62  # above any number


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client asked for besides its prompt; sent in full with every message about a request.

    Times are seconds from the request's arrival at the ingress. Clocks differ between hosts, so a
    message carries beside the spec how long ago that arrival was (`age_s`).
    """

    params: SamplingParams
    priority: int = 0  # smaller runs earlier
    salt: str = ""  # part of every block hash: equal prompts with unequal salts share nothing
    deadline_s: float | None = None  # after it the request ends with an error
    ttft_deadline_s: float | None = None  # target for the first token; None = its class default
    # Guessed tokens of a step, at most and at any temperature; 0 = none, None = as the worker says.
    max_drafts: int | None = None


def find_id_beyond(vocab_size: int, token_ids: Sequence[int], params: SamplingParams) -> int | None:
    """One of the request's ids that lies outside a vocabulary of `vocab_size`; None = none does.

    Stop ids are not checked: one that is never sampled stops nothing.
    """
    sequences = params.banned_sequences
    allowed = params.allowed_token_ids
    named = (*params.label_token_ids, *params.logprob_token_ids)
    for ids in (token_ids, params.logit_bias, named, allowed, *sequences):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            return next(i for i in ids if not 0 <= i < vocab_size)
    return None


class FinishReason(Enum):
    """Why a request's tokens ended; `value` is what OpenAI calls it."""

    STOP = "stop"  # eos or a stop id, decided by the worker; stop strings by the ingress
    LENGTH = "length"  # max_tokens or the context limit is reached


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of prompt tokens [first, first + N), each given all tokens before it.

    Under the model's own distribution. The k best are taken from the whole vocabulary.
    """

    first: int
    chosen: list[float]  # [N] of the prompt's token
    ranks: list[int]  # [N] of the prompt's token; 1 = none is more likely
    top_ids: list[list[int]]  # [N][k] best first
    top_logprobs: list[list[float]]  # [N][k]


class PromptScores(msgspec.Struct, frozen=True, array_like=True):
    """What a request asked to know about its prompt, besides its output tokens."""

    labels: list[float]  # log-probabilities of its `label_token_ids` as the next token
    pieces: list[PromptLogprobs]  # ascending, without gaps
    embedding: bytes = b""  # float32 in the host's byte order, if it `wants_embedding`


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A request inside one worker.

    tokens:  [0 ........ num_prompt) prompt   [num_prompt ........ len(tokens)) output
    KV:      [0 ........ num_computed) present or being written by the steps in flight
    blocks:  block_ids[i] holds tokens [i * block_size, (i + 1) * block_size)
    hashes:  block_hashes[i] names the content of the i-th *full* block of known tokens; where it
             covers the next token, too, it is missing until that one is known
    """

    key: RequestKey
    ingress_id: str
    spec: RequestSpec
    tokens: list[int]
    num_prompt_tokens: int
    arrival_s: float  # at this worker, on its clock
    age_s: float = 0.0  # at that time, since its arrival at the ingress
    # Output tokens made before this worker saw the request (a migration); they are in `tokens`
    # and count for penalties, the sampling index and max_tokens, but are never emitted again.
    num_emitted_tokens: int = 0
    decode_worker: str | None = None  # receives its KV; None = the request stays here

    num_computed_tokens: int = 0
    # Prompt tokens found in the prefix index on first admission. None before that, and for a
    # request that joined with its KV.
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    num_known_at_preemption: int = 0  # known tokens at the last preemption
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)  # computed, not sent yet
    started_s: float | None = None  # when its prompt's first step was planned here
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    # Leading tokens in whose blocks a draft model's K and V are, too: computed here for a decode
    # worker, or come from a prefill worker. 0 = of none, or nobody knows.
    num_drafter_tokens: int = 0
    # At most so many of them may be told a decode worker, which may have got blocks of an earlier
    # attempt that had no more.
    max_drafter_tokens: int = MAX_TOKENS
    num_indexed_blocks: int = 0  # leading blocks already offered to the prefix index
    row: int | None = None  # slot in the executor's tables while running

    # From the spec, on this worker's clock; None as there.
    params: SamplingParams = field(init=False)
    deadline_s: float | None = field(init=False)
    first_token_due_s: float | None = field(init=False)
    # When it ends: by its parameters, and by the rules of the scheduler that runs it.
    max_known_tokens: int = field(init=False)  # ends at this length, whatever its tokens are
    stop_ids: frozenset[int] = field(init=False)  # ends with any of these
    # Whether a choice depends on earlier tokens, or on their number beyond the index of its noise.
    depends_on_tokens: bool = field(init=False)

    def __post_init__(self) -> None:
        assert 0 < self.num_prompt_tokens <= len(self.tokens), (
            f"{self.key}: {self.num_prompt_tokens} prompt of {len(self.tokens)} known tokens"
        )
        assert len(self.tokens) - self.num_prompt_tokens == self.num_emitted_tokens, (
            f"{self.key}: {len(self.tokens)} known tokens, {self.num_prompt_tokens} of the prompt,"
            f" {self.num_emitted_tokens} said to be emitted"
        )
        self.params = self.spec.params
        asked_s = self.arrival_s - self.age_s
        deadline_s, ttft_s = self.spec.deadline_s, self.spec.ttft_deadline_s
        self.deadline_s = None if deadline_s is None else asked_s + deadline_s
        self.first_token_due_s = None if ttft_s is None else asked_s + ttft_s
        self.max_known_tokens = self.num_prompt_tokens + self.params.max_tokens
        self.stop_ids = frozenset(self.params.stop_token_ids)
        params = self.params
        self.depends_on_tokens = bool(
            params.needs_history or params.is_constrained or params.min_tokens
        )

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose ids are known on the host."""
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every prompt position must be computed for this request, ignoring the cache."""
        return self.params.prompt_logprobs is not None and self.num_output_tokens == 0

    def start_over(self) -> None:
        """Reset the progress after a preemption: no known token is computed any more."""
        if self.num_drafter_tokens < self.num_computed_tokens:
            self.max_drafter_tokens = min(self.max_drafter_tokens, self.num_drafter_tokens)
        self.num_computed_tokens = 0
        self.num_drafter_tokens = 0
        self.num_preemptions += 1
        self.num_known_at_preemption = self.num_known_tokens
        if self.needs_whole_prompt:
            self.block_hashes.clear()  # a prefix hit would skip their computation

    def keep_prompt_logprobs(self, piece: PromptLogprobs) -> None:
        """Add the next piece; after a preemption, pieces restart and replace the old ones."""
        self.prompt_logprobs = [p for p in self.prompt_logprobs if p.first < piece.first]
        self.prompt_logprobs.append(piece)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens without KV: known ones, or else the single token that is in flight.

        Every step that computes the newest token samples the next one, so one is always left.
        """
        num_known = len(self.tokens) - self.num_computed_tokens
        return num_known if num_known > 1 else 1
