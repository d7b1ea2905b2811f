"""Records that cross a process boundary: small, typed, each with one purpose.

Encoded with msgpack by `encode` / `decode`. Messages carry durations, never timestamps, because
clocks differ between hosts. Every message about a request carries its full `RequestKey`.
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
    """Decode the allocator's answer, one of the `Placement` types, by its tag."""
    answer: Placement = msgspec.msgpack.decode(data, type=Placement)
    return answer


def decode_reserve_reply(data: bytes) -> "ReserveReply":
    """Decode a decode worker's answer to a ReserveRequest, by its tag."""
    answer: ReserveReply = msgspec.msgpack.decode(data, type=ReserveReply)
    return answer


# ---- ingress -> tokenizer batcher ---------------------------------------------------------------


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to turn into ids: exactly one of `text`, `messages`, `token_ids` is set."""

    text: str | None = None
    messages: list[dict[str, object]] | None = None  # OpenAI chat messages, validated
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] = {}
    token_ids: list[int] | None = None  # already encoded: only its blocks are hashed
    # A longer prompt is cut to so many, special tokens of a text among them; None = never.
    max_tokens: int | None = None
    cuts_end: bool = False  # it is cut at its end, else at its beginning
    hash_params: BlockHashParams | None = None  # None = no block hashes are needed
    salt: str = ""  # part of the block hashes


class TokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """The ids, or `error`, a message for the client (a template or encoding problem).

    `token_ids` is empty for a prompt that was sent as ids, since the caller has them.
    """

    token_ids: list[int] = []
    block_hashes: list[bytes] = []  # hash chain of the prompt's full blocks; empty = not asked for
    error: str | None = None


class ConstraintVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a constraint can be enforced on outputs; `error` is a message for the client."""

    error: str | None = None


# ---- ingress -> allocator -----------------------------------------------------------------------


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True):
    num_prompt_tokens: int
    # Reject if more tokens are queued. None for a retry: an admitted request is not rejected later.
    max_queued_tokens: int | None = None
    avoid: list[str] = []  # workers on which this request has just failed
    # Hash chain of the prompt's full blocks (engine/kv/hashes.py); empty = prefix hits are unknown.
    block_hashes: list[bytes] = []
    # Seconds until its first token is due; None = the class default of the config, if there is one.
    ttft_deadline_s: float | None = None


class Assign(msgspec.Struct, frozen=True, kw_only=True, tag="assign"):
    """The workers for a prompt, and predictions for it on the prefill worker."""

    prefill_worker: str
    decode_worker: str | None  # None = the prefill worker is unified and keeps the request
    length_class: LengthClass = "short"
    num_new_tokens: int = 0  # to be computed there; the rest is in its prefix cache
    work_s: float = 0.0  # time to compute them alone in a step
    shared_s: float = 0.0  # the part of it that a step costs regardless of its prompts
    ttft_s: float = 0.0  # time to the first token, including the queue before it
    reason: str = ""


class Hold(msgspec.Struct, frozen=True, kw_only=True, tag="hold"):
    reason: str
    retry_after_s: float


class Reject(msgspec.Struct, frozen=True, kw_only=True, tag="reject"):
    reason: str
    retry_after_s: float


Placement = Assign | Hold | Reject


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one worker that prefills, as placement knows it."""

    worker: str
    pool: LengthClass | None  # None = it takes prompts of both classes
    is_alive: bool
    num_waiting: int
    queued_tokens: int
    queued_s: float  # predicted seconds for these tokens
    num_cached_blocks: int  # known to placement
    num_stored_blocks: int = 0  # likewise, in the tiers that it shares
    host_tier: "HostTierLoad | None" = None  # as of its last report; None = it has none


class PoolMove(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    pool: LengthClass  # the pool that it moved to
    ago_s: float
    reason: str


class LapsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `GET /laps_status`."""

    enabled: bool
    threshold: int  # tokens
    policy: str
    pools: dict[LengthClass, list[str]]  # empty lists = the workers are not split
    pending: dict[LengthClass, int]  # waiting prompts, by class where workers report classes
    workers: list[WorkerLoad]
    moves: list[PoolMove]  # the last ones, newest first
    # As a worker that prefills fitted them; placement predicts with them. None = none fitted yet.
    step_costs: StepCosts | None


# ---- ingress replicas -> allocator, for each other ----------------------------------------------

LimitKind = Literal["requests", "tokens"]  # what a key may use so many of a minute


class KeyUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one key has used of one limit at a replica."""

    key: str
    kind: LimitKind
    used: int  # since the replica began
    level: float  # what is left of the minute, as the replica knows it; below 0 = owed


class KeyLevel(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of one limit of a key over all replicas; below 0 = owed."""

    key: str
    kind: LimitKind
    level: float


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica of the ingress tells the others."""

    ingress_id: str
    is_complete: bool  # `uses` has everything since the replica began; else what is new
    uses: list[KeyUse]
    num_waiting_tokens: int  # of prompts between arrival and first token
    address: bytes  # at which it answers the others' calls; see actors/rpc/server.py


class ReplicaNews(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica of the ingress learns of the others."""

    is_known: bool  # else nothing of the report was taken over: a complete one is asked for
    num_replicas: int  # that report now, the one that asks among them
    num_waiting_tokens: int  # at the others
    addresses: list[bytes]  # of the others, and of those that may live though they are silent
    has_all_addresses: bool  # else the allocator began just now: some may not have reported yet
    levels: list[KeyLevel]  # of all limits that are not full


class MetricSample(msgspec.Struct, frozen=True, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class MetricFamily(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of a replica, as Prometheus knows it."""

    name: str
    type: str
    text: str
    samples: list[MetricSample]


class ReplicaMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics that one replica counts by itself."""

    ingress_id: str
    families: list[MetricFamily]
    is_live: bool = True  # else it is gone: what it counted still counts, what it held does not


# ---- allocator -> worker ------------------------------------------------------------------------


class BlockChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that a worker's prefix cache gained and lost since its last report of this kind.

    `sequence` counts the reports of one incarnation. With `is_resync`, `added` is the full content.
    """

    incarnation: str
    sequence: int
    is_resync: bool
    added: list[bytes]
    removed: list[bytes]


class TierReport(msgspec.Struct, frozen=True, kw_only=True):
    """A store of blocks below a worker's device, which other workers may share."""

    place: str  # equal for all who share it
    block_s: float  # predicted time to load a block
    floor_s: float  # and of any load, beside that
    blocks: BlockChanges | None = None  # None = no change, or not asked


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """Data for placement besides the load; requested from time to time."""

    costs: StepCosts | None = None  # None = the cost model is not fitted yet
    blocks: BlockChanges | None = None  # None = no change
    tiers: list[TierReport] = []  # the fastest first


# Tier -> the last of its reports that is known, None = tell everything. What another worker tells
# of, or is not known yet, is left out.
TiersAfter = dict[str, int | None]


# ---- ingress -> worker --------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a worker that prefills."""

    key: RequestKey
    ingress_id: str
    token_ids: list[int]  # prompt, then output tokens emitted by earlier attempts
    num_prompt_tokens: int
    spec: RequestSpec
    age_s: float = 0.0  # since the request's arrival at the ingress
    decode_worker: str | None = None


# ---- worker -> ingress --------------------------------------------------------------------------


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One token of one request. `index` counts output tokens from 0 across all attempts.

    A prompt-only request also gets one record, with index 0, `is_output` False, and the prompt's
    last token as `token_id`.
    """

    key: RequestKey
    index: int
    token_id: int
    is_output: bool = True
    logprobs: TokenLogprobs | None = None
    prompt: PromptScores | None = None  # with the first token of a request that asked
    num_cached_tokens: int | None = None  # with the first token of an attempt
    waited_s: float | None = None  # with the same token: from arrival here to the first step
    finish: Literal["stop", "length"] | None = None
    stop_token_id: int | None = None  # the id that ended it, when finish is "stop"


class FailureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt failed; `retryable` = another worker may succeed."""

    key: RequestKey
    reason: str
    retryable: bool
    code: str = "worker_error"


class ShortLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The waiting short prompts of a worker that runs short prompts first."""

    num_waiting: int
    queued_tokens: int
    queued_s: float | None = None  # as LoadReport.queued_s


STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class DiskTierLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's disk tier has done since the worker started, in blocks."""

    num_asked: int  # of prompts, neither on the device nor in the host tier
    num_hit: int  # of these, found in files
    num_written: int
    num_dropped: int  # came faster than they were written
    num_loaded: int
    read_s: float  # of all reads together
    num_evicted: int
    num_void_files: int  # torn or of another form; removed
    num_blocks: int  # in the folder, as far as this worker knows


class HostTierLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's host tier has done since the worker started, in blocks, and its size."""

    block_bytes: int
    num_asked: int  # of prompts, not on the device
    num_hit: int  # of these, found in the tier or below it
    num_unworthy: int  # found, and sooner computed than loaded; at every look
    num_loaded: int
    num_wasted: int  # of these, after nobody waited for them any more
    num_corrupt: int  # found not to be what was stored
    num_gone: int  # evicted from the tier while they were loaded
    num_stored: int
    num_known: int  # left the device, and in the tier already
    num_dropped: int  # left the device, and not stored for want of a free block
    num_skipped: int  # left the device, and not stored, because nothing stored is found
    num_waits: int  # requests that waited for a load
    num_given_up: int  # of these, those that computed the rest
    wait_s: float  # of all of them together
    num_blocks: int  # of the machine
    num_ready: int  # of these, stored by any of its workers
    disk: DiskTierLoad | None = None


class SpeculationLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a worker's drafts since the worker started, and whether they pay."""

    num_drafts: int  # guessed tokens that steps verified
    num_accepted: int
    num_rows: int  # rows with drafts, once for each step
    # [position in a row's drafts]
    drafts_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    # Tokens per second over those of plain steps, in the last steps with drafts; None = unknown.
    predicted_gain: float | None = None
    measured_gain: float | None = None
    is_on: bool = True  # False = stopped for a while, because drafts lost time
    num_stops: int = 0


class OverlapLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Which of a worker's steps were computed as two batches, since the worker started."""

    num_steps: int  # that replayed no graph, whole or split
    num_split_prompts: int  # of these, with prompts and split
    num_split_decodes: int  # of these, without prompts and split
    num_two_chunk: int  # of the split ones: a prompt was cut
    num_replayed: int  # steps beside these, which replayed a graph of two batches


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a worker is; sent with every step message and at least every 100 ms."""

    queued_tokens: int  # uncomputed tokens of waiting and running requests
    num_waiting: int
    num_running: int
    num_free_blocks: int  # free or evictable
    num_blocks: int
    queued_s: float | None = None  # predicted seconds of queued_tokens; None = no prediction
    short: ShortLoad | None = None  # None = one queue: a short prompt waits for all before it
    room_s: float = 0.0  # predicted seconds until one more long request has a row and KV blocks
    # Since the worker started: steps by their tokens, [i] with at most STEP_TOKEN_BUCKETS[i] and
    # the last with more; their tokens together.
    step_counts: tuple[int, ...] = ()
    num_step_tokens: int = 0
    num_preemptions: int = 0  # likewise
    num_preemptions_for_others: int = 0  # of these: for a request that waited for a row or blocks
    speculation: SpeculationLoad | None = None  # None = it has no drafter
    host_tier: HostTierLoad | None = None  # None = it has none
    two_batches: OverlapLoad | None = None  # None = it splits no step
    is_draining: bool = False  # it refuses what another worker can take


class HandoffTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of a worker that sends KV, since it started."""

    num_done: int  # prompts that decode workers have taken over
    num_bytes: int
    num_found_blocks: int  # of these prompts, that decode workers had cached: not sent
    num_failures: int  # handoffs that were retried or given up


class ExpertTotals(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens each expert of a worker's model got; an entry for each layer with experts."""

    layers: tuple[int, ...]  # indices among all layers
    counts: tuple[tuple[int, ...], ...]  # tokens of each expert, since the worker started
    # Of late: the fullest expert's over the mean; of the ranks likewise where each has whole ones.
    expert_imbalance: tuple[float, ...]
    rank_imbalance: tuple[float, ...] = ()


class StepMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one step produced for one ingress."""

    worker: str
    incarnation: str
    step_seq: int  # counts messages of this stream from 0; acknowledged by the ingress
    load: LoadReport
    tokens: list[TokenRecord] = []
    failures: list[FailureRecord] = []
    joined: list[RequestKey] = []  # requests whose KV has arrived here; sent before their tokens
    handoffs: HandoffTotals | None = None  # from time to time, from a worker that sends KV
    experts: ExpertTotals | None = None  # likewise, from one that counts them


# ---- supervisor <-> everybody -------------------------------------------------------------------


class WorkerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a worker that others go by: the configuration's, or chosen for `auto`."""

    max_step_ms: float  # a short prompt waits so long for a long one's chunk, at most
    max_queued_tokens: int  # prompt tokens beyond which requests are refused, if it were alone


class WorkerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a worker; peers refuse each other unless `model` and `layout` are equal."""

    name: str
    incarnation: str  # new with every process start
    role: Role
    model: str  # fingerprint of model, weights and app version
    layout: KvLayout
    max_model_len: int
    pid: int
    host: str = ""  # the machine that it runs on, by `host_id`; "" = not known
    limits: WorkerLimits | None = None  # None = as the configuration says
    # Key of its block hashes, for lookups in its prefix cache; never leaves the application.
    block_key: bytes = b""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a heartbeat. `identity` is None while the model is still loading."""

    identity: WorkerIdentity | None
    state: Literal["starting", "ready", "draining", "failed"]
    detail: str = ""  # the cause of a failure


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """The actors that make up the system now, for ingresses and the allocator."""

    workers: dict[str, WorkerStatus]  # name -> last known status; expected workers only
    roles: dict[str, Role]  # name -> role, of the same workers
    batchers: list[str]  # tokenizer batchers that answer
    allocator: str


# ---- prefill worker -> decode worker (handoff; see engine/kv/transfer) ---------------------------


class ReserveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask the decode worker for blocks for a prompt whose first chunk is starting."""

    key: RequestKey
    sender: WorkerIdentity
    ingress_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    spec: RequestSpec
    age_s: float = 0.0  # as in Submit
    wait_s: float = 1.0  # how long the decode worker may delay its answer while it is full


class Reservation(msgspec.Struct, frozen=True, kw_only=True, tag="reservation"):
    """Granted: blocks for all known tokens; the first `num_hit_blocks` need no transfer."""

    transfer_id: str
    num_blocks: int
    num_hit_blocks: int
    lease_s: float


class NotNow(msgspec.Struct, frozen=True, kw_only=True, tag="not_now"):
    """The decode worker is full; ask again."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Refused for good: mismatch, unknown, aborted or shutting down."""

    reason: str


ReserveReply = Reservation | NotNow | Refused

ChannelKind = Literal["cuda_ipc", "nccl_pair", "gloo_pair", "object_store"]


class PairRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Open a channel between two workers; an older epoch of the same sender is closed first."""

    sender: WorkerIdentity
    channel: ChannelKind
    epoch: int  # of this (sender, receiver); incremented for every channel opened
    rendezvous_key: str  # prefix of the channel's keys in the rendezvous
    offer: bytes = b""  # data the receiver needs for this kind; cuda_ipc: the KV store's handle


class PairReply(msgspec.Struct, frozen=True, kw_only=True):
    """`receiver` is None if the channel did not open; `reason` then says why."""

    receiver: WorkerIdentity | None = None
    reason: str = ""
    is_unfit: bool = False  # this kind cannot work between these workers; do not ask again


class PieceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks [first_block, first_block + num_blocks) of a transfer, sent as one message."""

    transfer_id: str
    key: RequestKey
    sender: str
    sender_incarnation: str
    epoch: int
    seq: int  # counts the pieces of this epoch's channel from 0
    first_block: int
    num_blocks: int  # 0 only if no block is missing and the piece just commits
    digests: list[int]  # one per block
    first_token_id: int | None = None  # set on the last piece: sampled by the sender
    # Set on the last piece: leading tokens with whose KV in the sender's blocks a draft model's is.
    num_drafter_tokens: int = 0


class PieceReply(msgspec.Struct, frozen=True, kw_only=True):
    """The acknowledgement. "committed" = the request runs at the receiver; no more is expected."""

    outcome: Literal["accepted", "committed", "failed"]
    reason: str = ""
    is_retryable: bool = False  # the reservation is still valid: the transfer may start over


class CancelTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """The sender gives up a request: cancels its reservation, or the wait for one."""

    key: RequestKey
    reason: str = ""


class CancelReply(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome "committed" = too late: the request runs at the receiver; its answer was lost."""

    outcome: Literal["cancelled", "committed"]


class RenewLease(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt still computes; answered with HandoffError if the reservation is gone."""

    transfer_id: str
    key: RequestKey
