"""A decode worker's books in a test: real block cache and hashes, a scheduler that only records."""

from collections.abc import Sequence

from engine.clock import ManualClock
from engine.kv.cache import BlockCache, BlockTerms, check_blocks
from engine.kv.hashes import RequestHasher
from engine.kv.layout import KvLayout
from engine.kv.transfer import IncomingHandoffs, JoiningRank
from engine.messages import PieceHeader, Reservation, ReserveRequest, Role, WorkerIdentity
from engine.request import Request, RequestKey, RequestSpec, SamplingParams

BLOCK_SIZE = 3
LAYOUT = KvLayout.with_heads(
    num_layers=2, block_size=BLOCK_SIZE, num_kv_heads=2, head_dim=2, dtype="float32"
)
LEASE_S = 8.0


def identity(name: str, role: Role, incarnation: str | None = None) -> WorkerIdentity:
    return WorkerIdentity(
        name=name,
        incarnation=incarnation or f"{name}-1",
        role=role,
        model="m",
        layout=LAYOUT,
        max_model_len=100,
        pid=1,
    )


SENDER = identity("prefill-0", "prefill")
RECEIVER = identity("decode-0", "decode")


def hasher() -> RequestHasher:
    return RequestHasher(b"k" * 16, model="m", dtype="float32", block_size=BLOCK_SIZE)


class RecordingScheduler:
    """Keeps what joins it, and indexes full blocks as the real one does."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self.running: dict[RequestKey, Request] = {}
        self.num_waiting = 0

    @property
    def num_running(self) -> int:
        return len(self.running)

    def is_short(self, num_known_tokens: int) -> bool:
        return False

    def terms_of_joining(
        self, request: Request, num_promised_rows: int, *, overtakes: bool
    ) -> BlockTerms | None:
        if self.num_waiting:
            return None
        return BlockTerms(num_spare_blocks=self.num_running + num_promised_rows)

    def make_way(self, request: Request) -> None:
        """Nobody is preempted."""

    def join(self, request: Request) -> None:
        assert request.num_uncomputed_tokens == 1
        for i in range(request.num_indexed_blocks, request.num_computed_tokens // BLOCK_SIZE):
            parent = request.block_hashes[i - 1] if i else None
            self._cache.index(request.block_ids[i], request.block_hashes[i], parent)
        self.running[request.key] = request

    def abort(self, key: RequestKey) -> bool:
        if key not in self.running:
            return False
        self.finish(key)
        return True

    def finish(self, key: RequestKey) -> None:
        self._cache.release(self.running.pop(key).block_ids)


class Decode:
    """A decode worker without device or network."""

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        max_rows: int = 4,
        incoming_class: type[IncomingHandoffs] = IncomingHandoffs,
        identity: WorkerIdentity = RECEIVER,
        clock: ManualClock | None = None,
        first_block: int = 0,
    ) -> None:
        """first_block: the number of the cache's first one, of a rank with blocks of its own."""
        self._first_block = first_block
        self.clock = clock or ManualClock(100.0)
        self.cache = BlockCache(num_blocks, enable_prefix_caching=True, protected_share=0.8)
        self.scheduler = RecordingScheduler(self.cache)
        self.incoming = incoming_class(
            [JoiningRank(cache=self.cache, scheduler=self.scheduler, first_block=first_block)],
            hasher=hasher(),
            identity=identity,
            clock=self.clock,
            lease_s=LEASE_S,
            max_rows=max_rows,
        )

    def check(self) -> None:
        owners = [
            (name, [block_id - self._first_block for block_id in block_ids])
            for name, block_ids in self.incoming.owners()
        ]
        owners += [(f"row {key}", r.block_ids) for key, r in self.scheduler.running.items()]
        check_blocks(self.cache, owners)

    def granted(self, request: ReserveRequest) -> Reservation:
        answer = self.incoming.reserve(request)
        assert isinstance(answer, Reservation), answer
        return answer


def key_of(number: int) -> RequestKey:
    return RequestKey(f"{number:032x}")


def asking(
    number: int, token_ids: Sequence[int], *, num_prompt_tokens: int | None = None
) -> ReserveRequest:
    return ReserveRequest(
        spec=RequestSpec(params=SamplingParams(max_tokens=9)),
        key=key_of(number),
        sender=SENDER,
        ingress_id="ingress-0",
        token_ids=list(token_ids),
        num_prompt_tokens=num_prompt_tokens or len(token_ids),
    )


def piece(
    number: int,
    reservation: Reservation,
    first: int,
    end: int,
    *,
    epoch: int = 1,
    first_token_id: int | None = None,
) -> PieceHeader:
    return PieceHeader(
        transfer_id=reservation.transfer_id,
        key=key_of(number),
        sender=SENDER.name,
        sender_incarnation=SENDER.incarnation,
        epoch=epoch,
        seq=0,
        first_block=first,
        num_blocks=end - first,
        digests=[0] * (end - first),
        first_token_id=first_token_id,
    )
