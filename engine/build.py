"""Builds one worker's engine from a config and a model folder: a core ready to step.

Several ranks may share the model. Each builds an engine by the same configuration, in the same
order, and where one measures something all go by the same result. Then rank 0 steps its core; the
others launch rank 0's plans, in its order, on their executors and use nothing else.
"""

import logging
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from configs.schema import AppConfig
from engine.build_drafting import RankDrafting, build_drafting, build_head
from engine.build_host_tier import OwnTier, build_below_device, staged_blocks
from engine.clock import Clock
from engine.constraints.grammars import Grammars
from engine.constraints.vocabulary import load_vocabulary
from engine.core import EngineCore, StepScheduler
from engine.engine import Engine
from engine.errors import ConfigError
from engine.kv.cache import BlockCache
from engine.kv.hashes import RequestHasher
from engine.kv.layout import DTYPE_BYTES
from engine.kv.rank_caches import RankCaches
from engine.kv.store import KvStore
from engine.kv.transfer import OutgoingEvent, OutgoingHandoffs, OutgoingOfRanks
from engine.layers.context import SINGLE_RANK, Comm
from engine.messages import Role
from engine.model_folder import ModelFolder, compute_dtype, read_folder
from engine.models.llama import CausalLM
from engine.models.quantization.published_tensors import weight_bytes
from engine.models.spec import ModelSpec
from engine.ranks.agreement import hanging_up_on_error, value_of_first
from engine.ranks.rank import SIZE_KEY
from engine.ranks.shared_stores import RankStore, share_stores
from engine.runner.auto import (
    Footprint,
    StepSizes,
    choose_limits,
    choose_sizes,
    describe,
    needs_calibration,
)
from engine.runner.calibration import calibrate
from engine.runner.executor import Executor
from engine.runner.executor_builder import ExecutorBuilder
from engine.runner.measured_executor import MeasuredExecutor
from engine.scheduling.dp_scheduler import DpScheduler
from engine.scheduling.drafting import Drafting
from engine.scheduling.finish import FinishRules
from engine.scheduling.scheduler import Scheduler
from kernels.compilation import CompilationCounter
from kernels.device import DeviceProperties, device_properties

logger = logging.getLogger(__name__)
BLOCK_KEY_BYTES = 32


def build_engine(
    config: AppConfig,
    model_fingerprint: str,
    clock: Clock,
    notify: Callable[[OutgoingEvent], None],
    block_key: bytes | None = None,
    model: CausalLM | None = None,
    *,
    role: Role = "unified",
    comm: Comm = SINGLE_RANK,
) -> Engine:
    """Load this rank's part of the model and build the engine.

    `notify` is called on the engine thread with events about prompts whose KV is to move.
    `block_key`: key of the block hashes; None = drawn here. With `cache.host_gib`, engines with the
    same key share an arena on each machine, and whoever builds one closes it. `model`: of an engine
    that is gone and had an equal model section; None = load it. `role`: whether and where to KV
    moves. `comm`: to the other ranks, which build at the same time; hung up if this raises. Raises
    ConfigError for a folder or a config that cannot be served, WorkerError if another rank could
    not build.
    """
    _check_size(config, comm)
    torch.set_num_threads(config.workers.torch_threads)
    folder = read_folder(config, comm.rank)
    spec = folder.spec
    compilations, grammars = _count_compilations(config), _build_grammars(config, spec)
    with hanging_up_on_error(comm):
        measured = _build_measured_executor(config, folder, clock, comm, model, grammars, role=role)
        executor, store = measured.executor, measured.executor.kv_store
        max_model_len = context_length(config, spec, store.num_blocks)
        stores = _share_stores(comm, role, folder, store)  # first: drafters look into the memory
        given = config, spec, measured, grammars, clock, comm
        drafting = build_drafting(*given, role=role, holds=_overlaps(config))
        key = secrets.token_bytes(BLOCK_KEY_BYTES) if block_key is None else block_key
        below = build_below_device(config, role, key, folder, store, comm, measured.num_staged)
    _forget_counts(executor, compilations)
    tiers = below.of_ranks(comm.rank.size if spec.has_dp_attention else 1, store.num_blocks)
    cache = _build_caches(config, store.num_blocks, tiers, drafting)
    hasher = RequestHasher.of_blocks(key, model_fingerprint, folder.layout)
    outgoing = _build_outgoing(cache, notify)
    finish_rules = FinishRules(spec.eos_token_ids, max_model_len)
    scheduler = _build_scheduler(measured, finish_rules, cache, hasher, outgoing, tiers, drafting)
    return Engine(
        spec=spec,
        layout=folder.layout,
        whole_layout=folder.whole_layout,
        rank_stores=stores,
        max_model_len=max_model_len,
        limits=measured.limits,
        cache=cache,
        hasher=hasher,
        executor=executor,
        grammars=grammars,
        outgoing=outgoing,
        below_device=below,
        core=_build_core(config, scheduler, measured, clock),
        draft_passes=drafting.passes,
        compilations=compilations,
        calibration=measured.calibration,
    )


def _share_stores(
    comm: Comm, role: Role, folder: ModelFolder, store: KvStore
) -> tuple[RankStore, ...]:
    """Those of all ranks, on rank 0 of several that move blocks."""
    if comm.rank.size == 1 or role == "unified":
        return ()
    has_own_blocks = folder.spec.has_dp_attention
    return share_stores(comm, store, folder.whole_layout, has_own_blocks=has_own_blocks)


def _count_compilations(config: AppConfig) -> CompilationCounter:
    """Counts from now on. On a CPU nothing compiles, and importing Triton would take 0.5 s."""
    counter = CompilationCounter()
    if config.model.device == "cuda":
        counter.install()
    return counter


def _check_size(config: AppConfig, comm: Comm) -> None:
    asked, found = sorted(set(config.workers.num_ranks.values())), comm.rank.size
    if found not in asked:
        raise ConfigError(
            f"{SIZE_KEY}: {' or '.join(map(str, asked))}, but {found}"
            f" process{'es' * (found > 1)} would share the model; set it to {found}"
        )


def _build_measured_executor(
    config: AppConfig,
    folder: ModelFolder,
    clock: Clock,
    comm: Comm,
    model: CausalLM | None,
    grammars: Grammars,
    *,
    role: Role,
) -> MeasuredExecutor:
    """Build for the sizes chosen for the device; measure steps if the configuration needs it."""
    is_built = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    if config.model.device == "cuda" and not is_built:
        raise ConfigError(
            f"model.device: cuda, but torch {torch.__version__} is built without CUDA; install one"
            " that is built with it, or set cpu"
        )
    device = device_properties(torch.device(config.model.device))
    sizes = _choose_sizes(config, folder, device, comm, role)
    gpu_bytes = device.memory_bytes if device.is_gpu else 0
    num_staged = staged_blocks(config, role, folder.layout, gpu_bytes)
    builder = ExecutorBuilder(
        config,
        spec=folder.spec.of_rank(comm.rank),
        layout=folder.layout,
        sizes=sizes,
        model=model,
        matchers=grammars,
        sends_blocks=role == "prefill",
        num_staged=num_staged,
        comm=comm,
        kv_scales=folder.kv_scales,
    )
    if not builder.verify_token_sizes:
        sizes = sizes.without_verification()
    head = build_head(config, folder.spec, builder, comm)
    executor = builder.build_executor()
    calibration = None
    if needs_calibration(config):
        calibration = calibrate(
            executor,
            sizes,
            num_blocks=executor.kv_store.num_blocks,
            max_row_tokens=builder.max_row_tokens,
            clock=clock,
            comm=comm,
        )
    limits = choose_limits(config, sizes, calibration)
    if limits.choices:
        logger.info("%s", describe(device, limits, calibration))
    return MeasuredExecutor(
        executor=executor,
        limits=limits,
        calibration=calibration,
        graph_token_sizes=builder.graph_token_sizes,
        verify_token_sizes=builder.verify_token_sizes,
        sizes=sizes,
        num_staged=num_staged,
        head=head,
    )


def _choose_sizes(
    config: AppConfig, folder: ModelFolder, device: DeviceProperties, comm: Comm, role: Role
) -> StepSizes:
    """The sizes of the largest steps, equal on all ranks."""
    spec, rank = folder.spec, comm.rank
    element_bytes = DTYPE_BYTES[compute_dtype(config.model, spec)]
    held_bytes = weight_bytes(
        spec, element_bytes=element_bytes, keeps_quantised=device.is_gpu, rank=rank
    )
    footprint = Footprint.of(spec.of_rank(rank), folder.layout, held_bytes, element_bytes)
    found = choose_sizes(config, device, footprint, decodes=role != "prefill")
    return value_of_first(comm, found)


def _forget_counts(executor: Executor, compilations: CompilationCounter) -> None:
    """Count steps and compilations from here on: those so far no request asked for."""
    compilations.reset()
    if executor.expert_loads is not None:
        executor.expert_loads.reset()
    if executor.may_split:
        executor.two_batches.reset()


def _build_caches(
    config: AppConfig, num_blocks: int, tiers: Sequence[OwnTier], drafting: RankDrafting
) -> BlockCache | RankCaches:
    """tiers: of each rank with blocks of its own, each `num_blocks`."""
    pairs = zip(tiers, drafting.of_rank, strict=True)
    caches = [_build_cache(config, num_blocks, tier, own) for tier, own in pairs]
    return caches[0] if len(caches) == 1 else RankCaches(caches)


def _build_cache(
    config: AppConfig, num_blocks: int, host_tier: OwnTier, drafting: Drafting
) -> BlockCache:
    return BlockCache(
        num_blocks,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        protected_share=config.cache.protected_share,
        on_evict=host_tier.save if host_tier and host_tier.stores == "evicted" else None,
        on_allocate=drafting.forget_blocks,
    )


def _build_outgoing(
    cache: BlockCache | RankCaches, notify: Callable[[OutgoingEvent], None]
) -> OutgoingHandoffs | OutgoingOfRanks:
    if isinstance(cache, BlockCache):
        return OutgoingHandoffs(cache, notify)
    of_rank = [
        OutgoingHandoffs(own, notify, first_block=cache.first_block(rank))
        for rank, own in enumerate(cache.of_rank)
    ]
    return OutgoingOfRanks(of_rank)


def _build_grammars(config: AppConfig, spec: ModelSpec) -> Grammars:
    return Grammars(
        lambda: load_vocabulary(
            Path(config.model.path), vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids
        )
    )


def _build_scheduler(
    measured: MeasuredExecutor,
    finish_rules: FinishRules,
    cache: BlockCache | RankCaches,
    hasher: RequestHasher,
    outgoing: OutgoingHandoffs | OutgoingOfRanks,
    tiers: Sequence[OwnTier],
    drafting: RankDrafting,
) -> StepScheduler:
    block_size = measured.executor.layout.block_size

    def over(
        own: BlockCache, outgoing: OutgoingHandoffs, drafting: Drafting, tier: OwnTier
    ) -> Scheduler:
        return Scheduler(
            measured.limits.scheduler,
            cache=own,
            hasher=hasher,
            handoff_queue=outgoing,
            block_size=block_size,
            finish_rules=finish_rules,
            laps=measured.limits.laps,
            graph_token_sizes=measured.graph_token_sizes,
            drafting=drafting,
            host_tier=tier,
        )

    if isinstance(outgoing, OutgoingHandoffs):
        assert isinstance(cache, BlockCache), "both are of one rank"
        return over(cache, outgoing, drafting.of_rank[0], tiers[0])
    assert isinstance(cache, RankCaches), "both are of several"
    schedulers = list(map(over, cache.of_rank, outgoing.of_rank, drafting.of_rank, tiers))
    return DpScheduler(schedulers, cache, hasher, block_size, drafting.launch_queued)


def _build_core(
    config: AppConfig, scheduler: StepScheduler, measured: MeasuredExecutor, clock: Clock
) -> EngineCore:
    if measured.calibration is not None:
        scheduler.learn(measured.calibration.samples)
    return EngineCore(
        scheduler,
        measured.executor,
        clock,
        overlap=_overlaps(config),
        defers_planning=config.laps.queue == "laps",
    )


def _overlaps(config: AppConfig) -> bool:
    asked = config.scheduler.overlap
    return config.model.device == "cuda" if asked is None else asked


def context_length(config: AppConfig, spec: ModelSpec, num_blocks: int) -> int:
    """The longest context in tokens: the minimum of model, config and cache capacity.

    Raises ConfigError when the config asks for more than the model or the cache can give.
    """
    capacity = num_blocks * config.cache.block_size
    asked = config.model.max_model_len
    if asked is None:
        return min(spec.max_model_len, capacity)
    if asked > min(spec.max_model_len, capacity):
        raise ConfigError(
            f"model.max_model_len is {asked}, but {config.model.path} allows {spec.max_model_len}"
            f" tokens and {num_blocks} blocks of cache.block_size hold {capacity}; lower the first"
            " or give the cache more room"
        )
    return asked
