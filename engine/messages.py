"""Records that cross a process boundary, and nothing else: small, typed, one purpose each.

Encoded with msgpack by `encode` / `decoder`. Durations travel, never timestamps: clocks differ
between hosts. Every message about a request carries its full `RequestKey`.
"""

from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

from engine.cost_model import StepCosts
from engine.kv.hashes import BlockHashParams
from engine.kv.layout import KvLayout
from engine.length_class import LengthClass
from engine.plan import TokenLogprobs
from engine.request import PromptScores, RequestKey, RequestSpec

Role = Literal["prefill", "decode", "unified"]
T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct | Sequence[object]) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """Decode and validate; raises msgspec.ValidationError when a peer speaks another version."""
    return msgspec.msgpack.decode(data, type=kind)


def decode_placement(data: bytes) -> "Placement":
    """Decode the allocator's answer; its tag tells the kinds apart."""
    answer: Placement = msgspec.msgpack.decode(data, type=Placement)
    return answer


def decode_reserve_reply(data: bytes) -> "ReserveReply":
    """Decode a decode worker's answer to a ReserveRequest."""
    answer: ReserveReply = msgspec.msgpack.decode(data, type=ReserveReply)
    return answer


# ---- ingress -> tokenizer batcher ---------------------------------------------------------------


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to tokenise: exactly one of `text`, `messages`, `token_ids` is set."""

    text: str | None = None
    messages: list[dict[str, object]] | None = None  # OpenAI chat messages, validated
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] = {}
    token_ids: list[int] | None = None  # only the hashes of its blocks are wanted
    hash_params: BlockHashParams | None = None  # None = no hashes of blocks are wanted
    salt: str = ""  # of their names


class TokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """`error` is a message for the client (a template or encoding problem), else the ids.

    There are no ids for a prompt that came as ids.
    """

    token_ids: list[int] = []
    block_hashes: list[bytes] = []  # the chain of the prompt's full blocks; empty = not asked for
    error: str | None = None


class ConstraintVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether outputs can be held to a constraint; `error` is a message for the client."""

    error: str | None = None


# ---- ingress -> allocator -----------------------------------------------------------------------


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True):
    num_prompt_tokens: int
    # Refuse beyond so many queued tokens; None for a retry, which is never refused.
    max_queued_tokens: int | None = None
    avoid: list[str] = []  # workers that just failed this request
    # The chain of the prompt's full blocks (engine/kv/hashes.py); empty = hits are not known.
    block_hashes: list[bytes] = []
    # Until its first token is due; None = the class default of the config, if there is one.
    ttft_deadline_s: float | None = None


class Assign(msgspec.Struct, frozen=True, kw_only=True, tag="assign"):
    """The prompt's workers, and what was predicted of it on the first of them."""

    prefill_worker: str
    decode_worker: str | None  # None = the prefill worker is unified and keeps the request
    length_class: LengthClass = "short"
    num_new_tokens: int = 0  # tokens to compute there; the others are in its prefix cache
    work_s: float = 0.0  # predicted seconds to compute them in a step of their own
    shared_s: float = 0.0  # of it, a step's fixed cost
    ttft_s: float = 0.0  # predicted, with what is queued before it
    reason: str = ""


class Hold(msgspec.Struct, frozen=True, kw_only=True, tag="hold"):
    reason: str
    retry_after_s: float


class Reject(msgspec.Struct, frozen=True, kw_only=True, tag="reject"):
    reason: str
    retry_after_s: float


Placement = Assign | Hold | Reject


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill worker, as placement sees it."""

    worker: str
    pool: LengthClass | None  # None = it takes prompts of both classes
    is_alive: bool
    num_waiting: int
    queued_tokens: int
    queued_s: float  # predicted seconds of these
    num_cached_blocks: int  # in its prefix cache, as far as reported


class PoolMove(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    pool: LengthClass  # its pool since then
    ago_s: float
    reason: str


class LapsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `GET /laps_status`."""

    enabled: bool
    threshold: int  # tokens
    policy: str
    pools: dict[LengthClass, list[str]]  # empty lists = the workers are not split
    pending: dict[LengthClass, int]  # waiting prompts, by class where workers tell them apart
    workers: list[WorkerLoad]
    moves: list[PoolMove]  # the last ones, newest first


# ---- allocator -> worker ------------------------------------------------------------------------


class BlockChanges(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks that a worker's prefix cache gained and lost since its last such report.

    `sequence` counts the reports of one incarnation; with `is_resync`, `added` is all there is.
    """

    incarnation: str
    sequence: int
    is_resync: bool
    added: list[bytes]
    removed: list[bytes]


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """What placement asks a worker for besides its load, now and then."""

    costs: StepCosts | None = None  # None = nothing is fitted yet
    blocks: BlockChanges | None = None  # None = no change


# ---- ingress -> worker --------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a worker that prefills."""

    key: RequestKey
    ingress_id: str
    token_ids: list[int]  # prompt, then output already emitted by an earlier attempt
    num_prompt_tokens: int
    spec: RequestSpec
    age_s: float = 0.0  # since the request's arrival at the ingress
    decode_worker: str | None = None


# ---- worker -> ingress --------------------------------------------------------------------------


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One token of one request. `index` counts output tokens from 0 across all attempts.

    A request that asks for no token gets one record all the same, with index 0: `is_output` is
    False, and `token_id` is its prompt's last.
    """

    key: RequestKey
    index: int
    token_id: int
    is_output: bool = True
    logprobs: TokenLogprobs | None = None
    prompt: PromptScores | None = None  # with the first token of a request that asked
    num_cached_tokens: int | None = None  # with the first token of an attempt
    waited_s: float | None = None  # likewise: from its arrival at the worker to its first step
    finish: Literal["stop", "length"] | None = None
    stop_token_id: int | None = None  # which id ended it, when finish is "stop"


class FailureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt ended without a finish; `retryable`: another worker may succeed."""

    key: RequestKey
    reason: str
    retryable: bool
    code: str = "worker_error"


class ShortLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The waiting short prompts of a worker that computes them first."""

    num_waiting: int
    queued_tokens: int
    queued_s: float | None = None  # as LoadReport.queued_s


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's load; sent with every step message and at least every 100 ms."""

    queued_tokens: int  # uncomputed tokens of waiting and running requests
    num_waiting: int
    num_running: int
    num_free_blocks: int  # free or evictable
    num_blocks: int
    queued_s: float | None = None  # predicted seconds of queued_tokens; None = not predicted there
    short: ShortLoad | None = (
        None  # None = one queue, in which a short prompt waits for all before it
    )
    room_s: float = 0.0  # predicted seconds until one more long request has a row and KV blocks
    num_preemptions: int = 0  # since the worker started
    num_preemptions_for_others: int = 0  # of these, for a waiting request; the others let rows grow


class HandoffTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of a worker that sends KV, since it started."""

    num_done: int  # prompts that a decode worker has taken over
    num_bytes: int
    num_failures: int  # handoffs retried or given up


class StepMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one step produced for one ingress."""

    worker: str
    incarnation: str
    step_seq: int  # counts messages of this stream from 0; acknowledged by the ingress
    load: LoadReport
    tokens: list[TokenRecord] = []
    failures: list[FailureRecord] = []
    joined: list[RequestKey] = []  # their KV has arrived here; this comes before their tokens
    handoffs: HandoffTotals | None = None  # now and then, from a worker that sends KV


# ---- supervisor <-> everybody -------------------------------------------------------------------


class WorkerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies a worker; peers refuse each other unless `model` and `layout` are equal."""

    name: str
    incarnation: str  # new with every process start
    role: Role
    model: str  # fingerprint of model, weights and app version
    layout: KvLayout
    max_model_len: int
    pid: int
    # The key of its block hashes, for processes that compute hits; stays in the application.
    block_key: bytes = b""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a heartbeat. `identity` is None while the model is still loading."""

    identity: WorkerIdentity | None
    state: Literal["starting", "ready", "draining", "failed"]
    detail: str = ""  # why it failed


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """The actors of the deployment now, for ingresses and the allocator."""

    workers: dict[str, WorkerStatus]  # name -> last known status; expected workers only
    roles: dict[str, Role]  # name -> role, of the same workers
    batchers: list[str]  # those that answer
    allocator: str


# ---- prefill worker -> decode worker (handoff; see engine/kv/transfer) ---------------------------


class ReserveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask a decode worker to reserve blocks for a prompt whose first chunk starts."""

    key: RequestKey
    sender: WorkerIdentity
    ingress_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    spec: RequestSpec
    age_s: float = 0.0  # as in Submit
    wait_s: float = 1.0  # how long the decode worker may hold the answer while it is full


class Reservation(msgspec.Struct, frozen=True, kw_only=True, tag="reservation"):
    """Granted: blocks for all known tokens; the first `num_hit_blocks` need no transfer."""

    transfer_id: str
    num_blocks: int
    num_hit_blocks: int
    lease_s: float


class NotNow(msgspec.Struct, frozen=True, kw_only=True, tag="not_now"):
    """The decode worker is full; ask again."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Never: mismatch, unknown, aborted, shutting down."""

    reason: str


ReserveReply = Reservation | NotNow | Refused

ChannelKind = Literal["cuda_ipc", "nccl_pair", "gloo_pair", "object_store"]


class PairRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Open a channel between two workers; an older epoch of the same sender is closed first."""

    sender: WorkerIdentity
    channel: ChannelKind
    epoch: int  # of this (sender, receiver): grows by one with every channel opened
    rendezvous_key: str  # prefix of the channel's keys in the rendezvous
    offer: bytes = b""  # what the receiver needs besides to open this kind; cuda_ipc: the KV store


class PairReply(msgspec.Struct, frozen=True, kw_only=True):
    """`receiver` is None when the channel did not open; then `reason` says why."""

    receiver: WorkerIdentity | None = None
    reason: str = ""
    is_unfit: bool = False  # this kind cannot work here; do not ask again


class PieceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks [first_block, first_block + num_blocks) of a transfer, sent as one message."""

    transfer_id: str
    key: RequestKey
    sender: str
    sender_incarnation: str
    epoch: int
    seq: int  # counts the pieces of this epoch's channel from 0
    first_block: int
    num_blocks: int  # 0 only when nothing is missing and the piece just commits
    digests: list[int]  # one per block
    first_token_id: int | None = None  # set on the last piece: sampled by the sender


class PieceReply(msgspec.Struct, frozen=True, kw_only=True):
    """The acknowledgement. "committed" = the request runs at the receiver, nothing more is due."""

    outcome: Literal["accepted", "committed", "failed"]
    reason: str = ""
    is_retryable: bool = False  # the reservation lives: the transfer may start over


class CancelTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """The sender gives up a request: cancel its reservation, or its wait for one."""

    key: RequestKey
    reason: str = ""


class CancelReply(msgspec.Struct, frozen=True, kw_only=True):
    """Too late when "committed": the request runs at the receiver and its answer was lost."""

    outcome: Literal["cancelled", "committed"]


class RenewLease(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt still computes; answered with HandoffError when the reservation is gone."""

    transfer_id: str
    key: RequestKey
