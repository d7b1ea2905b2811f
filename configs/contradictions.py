"""Settings of one `AppConfig` that are each valid and together are not.

Knows which settings go together, and what to change; not what any of them does.
"""

import msgspec

from configs.errors import ConfigFileError
from configs.faults import parse_faults
from configs.schema import AppConfig, ExecutionConfig, LapsConfig, LifetimesConfig


def find_contradiction(config: AppConfig) -> str | None:
    """Settings that are each valid and together are not: what to change, or None."""
    return (
        _fault_contradiction(config)
        or _worker_contradiction(config)
        or _model_contradiction(config)
        or _cache_contradiction(config)
        or _speculation_contradiction(config)
        or _laps_queue_contradiction(config.laps)
        or _laps_graph_contradiction(config)
        or _overlap_contradiction(config)
        or _laps_pool_contradiction(config)
        or _lifetimes_contradiction(config.lifetimes)
    )


def _lifetimes_contradiction(lifetimes: LifetimesConfig) -> str | None:
    if lifetimes.supervisor_heartbeat_s >= lifetimes.supervisor_silence_s:
        return (
            "lifetimes.supervisor_heartbeat_s: must be below supervisor_silence_s"
            f" ({lifetimes.supervisor_silence_s}), or every worker gives itself up"
        )
    if lifetimes.acknowledge_every_s >= lifetimes.ingress_silence_s:
        return (
            "lifetimes.acknowledge_every_s: must be below ingress_silence_s"
            f" ({lifetimes.ingress_silence_s}), or workers abort live requests"
        )
    return None


def _model_contradiction(config: AppConfig) -> str | None:
    model = config.model
    if model.device == "cpu" and model.deterministic:
        return "model.deterministic: needs model.device cuda; set one of the two"
    if model.deterministic and config.execution.round_expert_inputs_from is not None:
        return (
            "execution.round_expert_inputs_from: with model.deterministic no inputs are rounded;"
            " leave out one of the two"
        )
    if model.device == "cpu" and config.execution.cuda_graphs:
        return "execution.cuda_graphs: needs model.device cuda; set one of the two"
    if model.device == "cpu" and model.dtype == "float16":
        return "model.dtype: float16 needs model.device cuda; on a CPU use float32 or bfloat16"
    return None


def _cache_contradiction(config: AppConfig) -> str | None:
    asked, cache = config.model.max_model_len, config.cache
    if cache.disk_path is not None and cache.host_gib == 0:
        return f"cache.disk_path: {cache.disk_path} needs the host tier; set cache.host_gib"
    if cache.host_answers and (why := _answers_contradiction(config)) is not None:
        return f"cache.host_answers: {why}, or this to false"
    if cache.host_gib > 0 and not cache.enable_prefix_caching:
        return (
            f"cache.host_gib: {cache.host_gib:g} with enable_prefix_caching false would never be"
            " used; set it to 0, or the latter to true"
        )
    if cache.kv_scales is not None and cache.kv_dtype == "auto":
        return "cache.kv_scales: needs cache.kv_dtype fp8_e4m3; set that, or leave the scales out"
    if cache.num_blocks is None:
        return None
    capacity = cache.num_blocks * cache.block_size
    if asked is not None and asked > capacity:
        return (
            f"model.max_model_len: {asked} tokens, but cache.num_blocks x cache.block_size holds"
            f" {capacity}; lower the first or raise cache.num_blocks"
        )
    return None


def _answers_contradiction(config: AppConfig) -> str | None:
    """What to set instead."""
    if config.cache.host_gib == 0:
        return "there is no host tier; set cache.host_gib"
    if config.workers.decode == 0:
        return "there are no decode workers; set workers.decode"
    if len(sizes := set(config.workers.num_ranks.values())) > 1:
        a, b = sorted(sizes)
        return (
            f"workers of {a} and of {b} ranks have no blocks in common; set"
            " workers.*tensor_parallel_size to one number"
        )
    return None


_WITH_FOLDER = ("draft_model", "eagle3")  # of their own
_READING_STATES = ("eagle3", "mtp")  # of the model that is served


def _speculation_contradiction(config: AppConfig) -> str | None:
    asked = config.speculation
    if (asked.drafter in _WITH_FOLDER) != (asked.model_path is not None):
        return (
            f"speculation.drafter: {asked.drafter} with speculation.model_path {asked.model_path};"
            " draft_model needs the folder of the smaller model, eagle3 that of the head, and"
            " nothing else reads it"
        )
    verifies_otherwise = asked.attention_backend != "prefill" or asked.max_graph_tokens not in (
        "auto",
        0,
    )
    if asked.drafter == "none" and verifies_otherwise:
        return (
            "speculation: attention_backend and max_graph_tokens are about steps with drafts, and"
            " drafter is none; set a drafter, or leave them out"
        )
    if asked.ngrams_on_device is True and asked.drafter != "ngram":
        return (
            "speculation.ngrams_on_device: true with speculation.drafter"
            f" {asked.drafter} looks up nothing; set drafter to ngram, or leave it out"
        )
    if asked.drafter in (*_WITH_FOLDER, *_READING_STATES):
        return _drafting_model_contradiction(config)
    return None


def _drafting_model_contradiction(config: AppConfig) -> str | None:
    """Of drafters that compute."""
    asked = config.speculation
    workers, overlaps = config.workers, config.execution.enable_two_batch_overlap
    for key in ("expert_exchange_min_tokens", "sequence_parallel_min_tokens"):
        shares = isinstance(getattr(workers, key), int)
        if asked.drafter == "eagle3" and overlaps and shares:
            return (
                f"execution.enable_two_batch_overlap: with workers.{key} steps of two batches keep"
                " no states of inner layers for speculation.drafter eagle3; set it to false, leave"
                " that out, or set another drafter"
            )
    if config.model.attention.mask is not None:
        return (
            f"speculation.drafter: {asked.drafter} with model.attention.mask is not supported,"
            " because the mask is not that of what drafts; set ngram, or leave out the mask"
        )
    if config.model.device == "cuda" and config.cache.num_blocks is None:
        return (
            f"speculation.drafter: {asked.drafter} on a GPU needs cache.num_blocks, because the"
            " memory of what drafts is not measured; set it, or set ngram"
        )
    if asked.drafter in _READING_STATES and config.execution.dual_stream_token_threshold:
        return (
            "execution.dual_stream_token_threshold: steps of two streams keep no hidden states for"
            f" speculation.drafter {asked.drafter}; set it to 0, or another drafter"
        )
    if asked.drafter == "mtp" and config.model.weights == "random":
        return (
            "speculation.drafter: mtp with model.weights random, which leaves the model's folder"
            " without the layer that guesses; set safetensors, or another drafter"
        )
    return None


def _fault_contradiction(config: AppConfig) -> str | None:
    try:
        faults = parse_faults(config.faults)
    except ConfigFileError as error:
        return f"faults: {error}"
    if faults and not config.debug:
        return f"faults: {config.faults!r} needs debug true, which is for tests; set one of the two"
    return None


def _worker_contradiction(config: AppConfig) -> str | None:
    workers = config.workers
    if (workers.prefill > 0) != (workers.decode > 0):
        return (
            f"workers: prefill {workers.prefill} with decode {workers.decode} cannot serve; set"
            " both above 0, or both to 0 with unified above 0"
        )
    if workers.prefill == 0 and workers.unified == 0:
        return "workers: nothing can serve; set unified above 0, or prefill and decode above 0"
    if workers.prefill > 0 and workers.unified > 0:
        return (
            f"workers: unified {workers.unified} beside prefill {workers.prefill} and decode"
            f" {workers.decode} is not supported yet; set unified to 0, or prefill and decode to 0"
        )
    if config.model.device == "cpu" and workers.num_gpus > 0:
        return f"workers.num_gpus: {workers.num_gpus} with model.device cpu; set one of the two"
    return _rank_contradiction(config)


def _overlap_contradiction(config: AppConfig) -> str | None:
    execution = config.execution
    if not execution.enable_two_batch_overlap:
        values, defaults = map(msgspec.structs.asdict, (execution, ExecutionConfig()))
        for key in values:
            if key.startswith("tbo_") and values[key] != defaults[key]:
                return f"execution.{key}: needs enable_two_batch_overlap; set that, or leave it out"
        return None
    if max(config.workers.num_ranks.values(), default=1) == 1:
        return (
            "execution.enable_two_batch_overlap: a worker of one rank adds nothing over ranks, so"
            " nothing can be hidden; set workers.tensor_parallel_size above 1, or this to false"
        )
    if config.model.device == "cpu" and execution.tbo_min_prompt_tokens == "auto":
        return (
            "execution.tbo_min_prompt_tokens: auto knows the rates of an H200 only; on a CPU set it"
            " to a number of tokens"
        )
    return None


def _rank_contradiction(config: AppConfig) -> str | None:
    workers, size = config.workers, max(config.workers.num_ranks.values())
    if workers.prefill == 0:
        for key in ("prefill_tensor_parallel_size", "decode_tensor_parallel_size"):
            if getattr(workers, key) is not None:
                return f"workers.{key}: there are no such workers; set tensor_parallel_size"
    if (why := _expert_contradiction(config, size)) is not None:
        return why
    sizes = [workers.num_ranks.get(role, 1) for role in ("prefill", "decode")]
    if config.handoff.pull_by_ranks and max(sizes) == 1:
        return (
            "handoff.pull_by_ranks: no prefill or decode worker has several ranks; set one of"
            " workers.*tensor_parallel_size above 1, or this to false"
        )
    if size > 1 and config.model.device == "cuda" and workers.num_gpus != 1:
        return (
            f"workers.num_gpus: {workers.num_gpus:g} with workers.tensor_parallel_size {size}:"
            " every rank needs a GPU of its own; set it to 1, which is per rank"
        )
    return None


def _expert_contradiction(config: AppConfig, num_ranks: int) -> str | None:
    workers = config.workers
    if workers.expert_parallel and num_ranks == 1:
        return (
            "workers.expert_parallel: one rank holds all experts; set workers.tensor_parallel_size"
            " above 1, or this to false"
        )
    if workers.expert_exchange_min_tokens is not None and not workers.expert_parallel:
        return (
            "workers.expert_exchange_min_tokens: tokens travel to whole experts only; set"
            " workers.expert_parallel to true, or leave it out"
        )
    if workers.expert_exchange_min_tokens is not None and config.model.deterministic:
        return (
            "workers.expert_exchange_min_tokens: with model.deterministic the order of sums would"
            " depend on the number of a step's tokens; leave it out, or set deterministic to false"
        )
    if isinstance(workers.sequence_parallel_min_tokens, int) and workers.expert_parallel:
        return (
            "workers.sequence_parallel_min_tokens: it is for models without experts; with"
            " expert_parallel set expert_exchange_min_tokens"
        )
    if isinstance(workers.sequence_parallel_min_tokens, int) and num_ranks == 1:
        return (
            "workers.sequence_parallel_min_tokens: one rank has nothing to share; set"
            " workers.tensor_parallel_size above 1, or leave it out"
        )
    return _dp_attention_contradiction(config) if workers.enable_dp_attention else None


def _dp_attention_contradiction(config: AppConfig) -> str | None:
    """What ranks with requests of their own cannot do."""
    workers, laps, key = config.workers, config.laps, "workers.enable_dp_attention"
    if not workers.expert_parallel:
        return f"{key}: ranks share whole experts; set expert_parallel to true, or this to false"
    if config.handoff.pull_by_ranks:
        return (
            f"{key}: with handoff.pull_by_ranks it is not supported, because a request's KV is on"
            " one rank, not in heads of all; set one of the two to false"
        )
    if workers.expert_exchange_min_tokens is not None:
        return (
            f"{key}: tokens travel to experts in every step; leave out expert_exchange_min_tokens"
        )
    if laps.batch_prefill_form == "grid":
        return (
            f"{key}: with laps.batch_prefill_form grid it is not supported, because ranks have"
            " other grids; leave the latter out, or set this to false"
        )
    return None


def _laps_queue_contradiction(laps: LapsConfig) -> str | None:
    if laps.window != "none" and laps.queue != "laps":
        return f"laps.window: {laps.window} needs laps.queue laps; set one of the two"
    if laps.min_window_s > laps.max_window_s:
        return (
            f"laps.min_window_s: {laps.min_window_s} is above max_window_s {laps.max_window_s};"
            " lower the first or raise the second"
        )
    return None


_GRAPH_KEYS = {
    "grid": ("max_seq_len", "batch_sizes", "seq_lengths"),
    "ragged": ("max_rows",),
}


def _laps_graph_contradiction(config: AppConfig) -> str | None:
    laps = config.laps
    is_grid = laps.batch_prefill_form == "grid"
    asked = laps.enable_batch_prefill_cuda_graph
    if is_grid and asked is False:
        return (
            "laps.batch_prefill_form: grid with enable_batch_prefill_cuda_graph false captures"
            " nothing; leave one of the two out"
        )
    if asked or is_grid:
        key = "enable_batch_prefill_cuda_graph" if asked else "batch_prefill_form: grid"
        if config.model.device == "cpu":
            return f"laps.{key}: needs model.device cuda; set one of the two"
        if config.execution.cuda_graphs is False:
            return f"laps.{key}: needs execution.cuda_graphs, which is false; set one of the two"
    stray = _stray_graph_key(laps, "ragged" if is_grid else "grid")
    return stray or (_grid_contradiction(config) if is_grid else None)


def _stray_graph_key(laps: LapsConfig, other: str) -> str | None:
    """Neither form has the settings of the `other`, and would ignore them."""
    keys = [f"batch_prefill_{name}" for name in _GRAPH_KEYS[other]]
    values, defaults = msgspec.structs.asdict(laps), msgspec.structs.asdict(LapsConfig())
    key = next((key for key in keys if values[key] != defaults[key]), None)
    if key is None:
        return None
    return f"laps.{key}: belongs to batch_prefill_form {other}; set that, or leave this out"


def _grid_contradiction(config: AppConfig) -> str | None:
    laps, scheduler = config.laps, config.scheduler
    for key in ("max_num_batched_tokens", "max_num_seqs"):
        if getattr(scheduler, key) == "auto":
            return f"laps.batch_prefill_form: grid needs scheduler.{key} as a number, not auto"
    num_rows, lengths = laps.batch_prefill_batch_sizes, laps.batch_prefill_seq_lengths
    for key, sizes in (
        ("batch_prefill_batch_sizes", num_rows),
        ("batch_prefill_seq_lengths", lengths),
    ):
        if not sizes or list(sizes) != sorted(set(sizes)):
            return f"laps.{key}: {list(sizes)} must be ascending sizes, each once and at least one"
    for key, largest, limit_key, limit in (
        (
            "batch_prefill_seq_lengths",
            lengths[-1],
            "batch_prefill_max_seq_len",
            laps.batch_prefill_max_seq_len,
        ),
        (
            "batch_prefill_max_seq_len",
            laps.batch_prefill_max_seq_len,
            "scheduler.max_num_batched_tokens",
            scheduler.max_num_batched_tokens,
        ),
        (
            "batch_prefill_batch_sizes",
            num_rows[-1],
            "scheduler.max_num_seqs",
            scheduler.max_num_seqs,
        ),
    ):
        assert isinstance(limit, int), f"{limit_key} was checked above"
        if largest > limit:
            return f"laps.{key}: {largest} is above {limit_key} {limit}; lower it or raise that"
    return None


def _laps_pool_contradiction(config: AppConfig) -> str | None:
    laps = config.laps
    if not laps.enable_laps_alloc:
        return None
    num_workers = config.workers.prefill + config.workers.unified
    if num_workers < laps.min_workers_to_split:
        return (
            f"laps.enable_laps_alloc: {num_workers} workers prefill, fewer than"
            f" laps.min_workers_to_split {laps.min_workers_to_split}; add workers, lower the"
            " latter, or set enable_laps_alloc to false"
        )
    if 2 * laps.min_workers_per_pool > num_workers:
        return (
            f"laps.min_workers_per_pool: two pools of {laps.min_workers_per_pool} need more than"
            f" the {num_workers} workers that prefill; lower it or add workers"
        )
    if laps.laps_rebalance_interval_s > laps.rebalance_cool_down_s > 0:
        return (
            f"laps.rebalance_cool_down_s: {laps.rebalance_cool_down_s} is shorter than"
            f" laps_rebalance_interval_s {laps.laps_rebalance_interval_s} and would do nothing;"
            " raise it, or set it to 0"
        )
    return None
