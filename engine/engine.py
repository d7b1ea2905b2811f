"""One worker's engine: its parts, and what they report together. Built by build.py."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from engine.build_host_tier import BelowDevice
from engine.constraints.grammars import Grammars
from engine.core import DraftingExecutor, EngineCore
from engine.errors import RequestError
from engine.kv.cache import BlockCache
from engine.kv.hashes import RequestHasher
from engine.kv.host.disk_tier import DiskStatistics
from engine.kv.host.tier import HostTier
from engine.kv.layout import KvLayout
from engine.kv.rank_caches import RankCaches
from engine.kv.store import KvStore
from engine.kv.transfer import JoiningRank, OutgoingHandoffs, OutgoingOfRanks
from engine.messages import DiskTierLoad, ExpertTotals, HostTierLoad, LoadReport, OverlapLoad
from engine.models.spec import ModelSpec
from engine.ranks.shared_stores import RankStore
from engine.request import SamplingParams, find_id_beyond
from engine.runner.auto import Calibration, Limits
from engine.runner.executor import Executor
from engine.scheduling.dp_scheduler import DpScheduler
from engine.scheduling.host_loads import HostLoadStatistics
from engine.scheduling.scheduler import Scheduler
from engine.speculation.draft_model import DraftModel
from engine.speculation.rank_passes import JoinedPasses
from kernels.compilation import CompilationCounter


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What one worker computes with.

    The thread that steps `core` owns all fields but `kv_store` and `grammars`.
    """

    spec: ModelSpec  # of the whole model
    layout: KvLayout  # of this rank's blocks: they hold its KV heads
    whole_layout: KvLayout  # of blocks with the heads of all ranks: so they move to other workers
    rank_stores: tuple[RankStore, ...]  # on rank 0 of several that move blocks; else ()
    max_model_len: int
    limits: Limits  # by which the scheduler was built, and what was chosen for `auto`
    cache: BlockCache | RankCaches  # of the ranks' own blocks, with DP attention
    hasher: RequestHasher
    executor: Executor
    grammars: Grammars  # compiled constraints; safe to call from any thread
    outgoing: OutgoingHandoffs | OutgoingOfRanks  # as `cache`
    below_device: BelowDevice  # the host tier, or this rank's part of it
    core: EngineCore
    draft_passes: DraftModel | JoinedPasses | None  # of the model or head that drafts, if one does
    compilations: CompilationCounter  # kernels compiled since the engine was ready
    calibration: Calibration | None = None  # None = the configuration says all in numbers

    @property
    def kv_store(self) -> KvStore:
        """This rank's K and V."""
        return self.executor.kv_store

    @property
    def host_tier(self) -> HostTier | None:
        """None = what the cache evicts is lost, or rank 0 has it."""
        return self.below_device.tier

    @property
    def shared_cache(self) -> BlockCache:
        """The blocks of a worker whose ranks have the same requests: not with DP attention."""
        assert isinstance(self.cache, BlockCache), "each rank has blocks of its own"
        return self.cache

    @property
    def shared_scheduler(self) -> Scheduler:
        """As of `shared_cache`."""
        assert isinstance(self.core.scheduler, Scheduler), "each rank has a scheduler of its own"
        return self.core.scheduler

    @property
    def joining_ranks(self) -> list[JoiningRank]:
        """Where requests may join whose KV comes: with DP attention one for each rank."""
        scheduler, cache = self.core.scheduler, self.cache
        if isinstance(scheduler, DpScheduler) and isinstance(cache, RankCaches):
            pairs = zip(cache.of_rank, scheduler.of_rank, strict=True)
            return [
                JoiningRank(cache=own, scheduler=of_rank, first_block=cache.first_block(rank))
                for rank, (own, of_rank) in enumerate(pairs)
            ]
        return [JoiningRank(cache=self.shared_cache, scheduler=self.shared_scheduler)]

    @property
    def has_own_blocks(self) -> bool:
        """Whether each of several ranks has blocks of its own."""
        return isinstance(self.cache, RankCaches)

    @property
    def drafting_executor(self) -> DraftingExecutor | None:
        """Of `draft_passes`."""
        return None if self.draft_passes is None else self.draft_passes.executor

    def load(self) -> LoadReport:
        """The current load."""
        counts = self.core.scheduler.statistics()
        queued = self.core.queued_work()
        return LoadReport(
            queued_tokens=counts.num_queued_tokens,
            num_waiting=counts.num_waiting,
            num_running=counts.num_running,
            num_free_blocks=self.cache.num_available,
            num_blocks=self.cache.num_blocks,
            queued_s=queued.queued_s,
            short=queued.short,
            room_s=queued.room_s,
            step_counts=counts.step_counts,
            num_step_tokens=counts.num_step_tokens,
            num_preemptions=counts.num_preemptions,
            num_preemptions_for_others=counts.num_preemptions_for_others,
            speculation=self.core.scheduler.drafting.load(),
            host_tier=self._host_tier_load(),
            two_batches=self._overlap_load(),
        )

    def expert_totals(self) -> ExpertTotals | None:
        """How many tokens each expert got; None = not counted, or not yet. Any thread may ask."""
        loads = self.executor.expert_loads
        if loads is None or loads.newest is None:
            return None
        return ExpertTotals(**asdict(loads.newest))

    def _overlap_load(self) -> OverlapLoad | None:
        if not self.executor.may_split:
            return None
        return OverlapLoad(**asdict(self.executor.two_batches.statistics()))

    def _host_tier_load(self) -> HostTierLoad | None:
        loads = self.core.scheduler.host_statistics()
        if self.host_tier is None or loads is None:
            return None
        blocks = self.host_tier.statistics()
        return HostTierLoad(
            block_bytes=blocks.block_bytes,
            num_asked=loads.num_asked_blocks,
            num_hit=loads.num_hit_blocks,
            num_unworthy=loads.num_unworthy_blocks,
            num_loaded=blocks.num_loaded,
            num_wasted=loads.num_wasted_blocks,
            num_corrupt=blocks.num_corrupt,
            num_gone=blocks.num_gone,
            num_stored=blocks.num_stored,
            num_known=blocks.num_known,
            num_dropped=blocks.num_dropped,
            num_skipped=blocks.num_skipped,
            num_waits=loads.num_waits,
            num_given_up=loads.num_given_up,
            wait_s=loads.wait_s,
            num_blocks=blocks.num_blocks,
            num_ready=blocks.num_ready,
            disk=_disk_tier_load(loads, blocks.disk),
        )

    def close(self) -> None:
        """Give back what outlives the process; nothing may be called afterwards. Idempotent."""
        if self.host_tier is not None:
            self.host_tier.close()

    def check_ids(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises RequestError for an id outside the vocabulary, which would fail the whole step."""
        found = find_id_beyond(self.spec.vocab_size, token_ids, params)
        if found is not None:
            raise RequestError(
                f"{found} is not a token id. Expected a value from 0 to {self.spec.vocab_size - 1}."
            )

    def check_kind(self, params: SamplingParams) -> None:
        """Raises RequestError for an output from a model without a head, and the reverse."""
        if params.wants_embedding != (self.spec.pooling is not None):
            does = "generates" if params.wants_embedding else "makes embeddings"
            raise RequestError(f"This model {does}.", code="unsupported_endpoint")

    def describe(self) -> str:
        """One line for the log: the model, the KV blocks and the longest context."""
        kv_mib = self.layout.block_bytes * self.cache.num_blocks / 2**20
        return (
            f"{self.spec.architecture}, {self.spec.num_layers} layers, {self.layout.dtype};"
            f" {self.cache.num_blocks} KV blocks of {self.layout.block_size} tokens"
            f" ({kv_mib:.0f} MiB), longest context {self.max_model_len} tokens"
        )


def _disk_tier_load(loads: HostLoadStatistics, disk: DiskStatistics | None) -> DiskTierLoad | None:
    if disk is None:
        return None
    num_in_memory = loads.num_hit_blocks - loads.num_disk_hit_blocks
    return DiskTierLoad(
        num_asked=loads.num_asked_blocks - num_in_memory,
        num_hit=loads.num_disk_hit_blocks,
        **asdict(disk),
    )
