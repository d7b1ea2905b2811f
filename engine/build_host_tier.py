"""Builds what a worker has below its device cache: the host tier, and the disk tier below that.

Of several ranks the first has it. The others store and load their parts of its blocks
(engine/ranks/block_parts.py), or blocks of their own (engine/ranks/own_moves.py).
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.schema import AppConfig
from engine.kv.host.arena import HostArena
from engine.kv.host.disk import DiskFiles
from engine.kv.host.disk_tier import DiskTier
from engine.kv.host.rank_tier import RankTier
from engine.kv.host.shared_file import name_for
from engine.kv.host.staging import num_staged_blocks
from engine.kv.host.tier import HostTier
from engine.kv.layout import KvLayout
from engine.kv.store import KvStore
from engine.layers.context import Comm
from engine.messages import Role
from engine.model_folder import ModelFolder
from engine.ranks.block_parts import BlockParts, RankPart, share_arena
from engine.ranks.own_moves import OwnBlocks, OwnMoves

logger = logging.getLogger(__name__)


# Where one cache's blocks go; None = they are lost.
OwnTier = HostTier | RankTier | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BelowDevice:
    """What takes the blocks that leave the device's cache."""

    tier: HostTier | None = None  # None = they are lost, or rank 0 has it
    parts: BlockParts | OwnBlocks | None = None  # of its blocks
    part: RankPart | OwnMoves | None = None  # of another rank than the first

    def of_ranks(self, num_ranks: int, num_blocks: int) -> Sequence[OwnTier]:
        """What each rank's cache evicts to; num_ranks: that have blocks of their own, so many."""
        tier = self.tier
        if tier is None or num_ranks == 1:
            return [tier] * num_ranks
        return [RankTier(tier, rank * num_blocks) for rank in range(num_ranks)]


def staged_blocks(config: AppConfig, role: Role, layout: KvLayout, gpu_bytes: int) -> int:
    """Blocks of a GPU's memory that a host tier takes beside the store.

    gpu_bytes: all memory of the GPU; 0 = there is none.
    """
    return num_staged_blocks(layout.block_bytes, gpu_bytes) if _has_tier(config, role) else 0


def _has_tier(config: AppConfig, role: Role) -> bool:
    return config.cache.host_gib > 0 and (role != "decode" or config.cache.host_answers)


def build_below_device(
    config: AppConfig,
    role: Role,
    block_key: bytes,
    folder: ModelFolder,
    store: KvStore,
    comm: Comm,
    num_staged: int,
) -> BelowDevice:
    """Every rank calls it at the same point; num_staged: from `staged_blocks`. Raises ConfigError
    if there is no room for the arena, or on the GPU, or the arena is another model's, and
    WorkerError if another rank could not take part.

    With `cache.host_answers` a decode worker has one, too, for the blocks of its answers: the rest
    came from a worker that stores it. They stay held until they are copied. What is evicted there
    is not stored: what arrives is written to these blocks by streams and processes that wait for
    steps, but not for copies to the arena.
    """
    if not _has_tier(config, role):
        return BelowDevice()
    size, whole = comm.rank.size, folder.whole_layout
    parts: BlockParts | OwnBlocks = BlockParts(whole, size)
    if folder.spec.has_dp_attention:
        parts = OwnBlocks(store.num_blocks, size)
    if comm.rank.index > 0:
        mover = share_arena(comm, None, store, parts, num_staged)
        return BelowDevice(parts=parts, part=parts.follow(comm.rank.index, mover))
    num_parts = parts.num_parts
    described = whole if num_parts == 1 else (whole, num_parts)
    fingerprint = hashlib.blake2b(repr(described).encode(), digest_size=16).digest()
    arena = HostArena(
        name_for(block_key),
        num_bytes=int(config.cache.host_gib * 2**30),
        block_bytes=num_parts * store.layout.block_bytes,
        fingerprint=fingerprint,
    )
    try:
        mover = share_arena(comm, arena, store, parts, num_staged)
        disk = _build_disk_tier(config, block_key + fingerprint, arena)
    except BaseException:
        arena.close()  # else the file stays as long as this process, which lives on to say why
        raise
    logger.info("%s holds %d KV blocks for all workers here", arena.name, arena.num_blocks)
    is_staged = store.device.type == "cuda"
    tier = HostTier(
        arena,
        mover,
        disk,
        num_staged=num_staged if is_staged else None,
        stores="answers" if role == "decode" else "evicted",
    )
    return BelowDevice(tier=tier, parts=parts)


def _build_disk_tier(config: AppConfig, owner: bytes, arena: HostArena) -> DiskTier | None:
    """owner: of the blocks; others' are not found. Raises ConfigError."""
    if config.cache.disk_path is None:
        return None
    files = DiskFiles(
        Path(config.cache.disk_path),
        num_bytes=int(config.cache.disk_gib * 2**30),
        block_bytes=arena.block_bytes,
        namespace=hashlib.blake2b(owner, digest_size=16, person=b"disk tier").digest(),
    )
    logger.info("%s holds %d KV blocks from earlier", files.folder, files.num_blocks)
    return DiskTier(files, arena)
