"""What `/laps_status` may say, made of the records that the server encodes."""

import math
from collections.abc import Mapping, Sequence

from actors.ingress.pages import ExpertBalance, LapsView, WorkerReport, laps_json
from actors.observability.recent_ttft import NUM_PIECES, PIECE_S, ClassTtft, TtftPiece
from engine.length_class import LengthClass
from engine.messages import LapsStatus, OverlapLoad, PoolMove, SpeculationLoad, WorkerLoad
from engine.routing.pools import CLASSES

NO_TTFT = ClassTtft(num=0, p50_s=None, p90_s=None, pieces=[])
SUFFIX = ".22997e1f"


def _load(
    name: str,
    pool: LengthClass | None,
    queued_s: float,
    num_waiting: int,
    *,
    is_alive: bool = True,
) -> WorkerLoad:
    return WorkerLoad(
        worker=name + SUFFIX,
        pool=pool,
        is_alive=is_alive,
        num_waiting=num_waiting,
        queued_tokens=int(queued_s * 30_000),
        queued_s=queued_s,
        num_cached_blocks=1180,
    )


def _ttft(middle_s: float, swing: float, gap: range = range(0)) -> ClassTtft:
    """A curve with a hill, and nothing in the pieces of `gap`."""
    pieces = []
    for index in range(NUM_PIECES):
        if index in gap:
            continue
        hill = math.exp(-(((index - 38) / 9) ** 2))
        p50_s = middle_s * (1 + swing * hill + 0.08 * math.sin(index * 1.7))
        p90_s = p50_s * (1.9 + 0.2 * math.sin(index * 2.3))
        ago_s = (NUM_PIECES - 1 - index) * PIECE_S
        pieces.append(TtftPiece(ago_s=ago_s, num=20 + index % 7, p50_s=p50_s, p90_s=p90_s))
    num = sum(piece.num for piece in pieces)
    return ClassTtft(num=num, p50_s=middle_s * 1.1, p90_s=middle_s * 2.4, pieces=pieces)


def state(
    loads: Sequence[WorkerLoad],
    *,
    enabled: bool = True,
    queue: str = "laps",
    pending: tuple[int, int] = (0, 0),
    moves: Sequence[PoolMove] = (),
    ttft: Mapping[LengthClass, ClassTtft] | None = None,
    drafts: SpeculationLoad | None = None,
    overlap: OverlapLoad | None = None,
    experts: ExpertBalance | None = None,
) -> bytes:
    """The JSON for these workers that prefill and, if there is one, a decode worker."""
    pools: dict[LengthClass, list[str]] = {
        pool: [load.worker for load in loads if load.pool == pool] for pool in CLASSES
    }
    away = [load.worker for load in loads if not load.is_alive]
    names = [load.worker for load in loads] + (["decode-0" + SUFFIX] if loads else [])
    reports = [
        WorkerReport(
            worker=name,
            role="decode" if name.startswith("decode") else "prefill",
            is_up=name not in away,
            num_running=143 if name.startswith("decode") else 2,
            num_waiting=1,
            num_free_blocks=812,
            num_blocks=2048,
            speculation=drafts,
            two_batches=overlap,
            experts=experts,
        )
        for name in names
    ]
    status = LapsStatus(
        enabled=enabled,
        threshold=256,
        policy="pressure",
        pools=pools,
        pending={"short": pending[0], "long": pending[1]},
        workers=list(loads),
        moves=list(moves),
        step_costs=None,
    )
    view = LapsView(
        model="laps-demo",
        ingress="ingress-0123456789abcdef",
        queue=queue,
        length_threshold=256,
        rebalance_interval_s=5.0,
        ttft=dict(ttft or dict.fromkeys(CLASSES, NO_TTFT)),
        reports=reports,
    )
    return laps_json(status, view)


def busy(num_short_waiting: int = 17) -> bytes:
    """Four workers in two pools, one of them away, after three moves."""
    loads = [
        _load("prefill-0", "short", 0.0412, num_short_waiting),
        _load("prefill-1", "short", 0.021, 3),
        _load("prefill-2", "long", 1.73, 9),
        _load("prefill-3", "long", 0.0, 0, is_alive=False),
    ]
    reason = "seconds of queued work: {} 0.913, {} 0.021, ratio 2.0"
    moves = [
        PoolMove(
            worker="prefill-1" + SUFFIX,
            pool="short",
            ago_s=12.4,
            reason=reason.format("short", "long"),
        ),
        PoolMove(
            worker="prefill-3" + SUFFIX,
            pool="long",
            ago_s=131.0,
            reason=reason.format("long", "short"),
        ),
        PoolMove(worker="prefill-2" + SUFFIX, pool="long", ago_s=7300.0, reason="<b>bold</b>"),
    ]
    return state(
        loads,
        pending=(num_short_waiting + 3, 9),
        moves=moves,
        ttft={"short": _ttft(0.021, 1.5), "long": _ttft(0.62, 3.0, gap=range(12, 16))},
    )


def off() -> bytes:
    """Two workers, pools and the short-first queue off, some first tokens."""
    loads = [_load("prefill-0", None, 0.12, 2), _load("prefill-1", None, 0.0, 0)]
    ttft: dict[LengthClass, ClassTtft] = {"short": _ttft(0.05, 0.5, gap=range(50)), "long": NO_TTFT}
    return state(loads, enabled=False, queue="fcfs", ttft=ttft)


def guessing(*, is_on: bool = True) -> bytes:
    """One worker that guesses tokens."""
    drafts = SpeculationLoad(
        num_drafts=4000,
        num_accepted=2500,
        num_rows=1000,
        drafts_at=(1000, 1000, 1000, 1000),
        accepted_at=(910, 700, 500, 390),
        predicted_gain=1.62,
        measured_gain=1.5,
        is_on=is_on,
        num_stops=int(not is_on),
    )
    return state([_load("unified-0", None, 0.0, 0)], drafts=drafts)


def splitting() -> bytes:
    """One worker of several ranks that computes steps as two batches and counts its experts."""
    experts = ExpertBalance(
        layers=(1, 2, 4), experts=(1.5, 3.25, 2.0), ranks=(1.25, 1.0, 1.125), num_idle=(0, 1200, 4)
    )
    overlap = OverlapLoad(
        num_steps=5000,
        num_split_prompts=1200,
        num_split_decodes=30,
        num_two_chunk=7,
        num_replayed=0,
    )
    return state([_load("unified-0", None, 0.0, 0)], overlap=overlap, experts=experts)


def one_worker() -> bytes:
    return state([_load("unified-0", None, 0.0, 0)])


def too_few() -> bytes:
    return state([_load("prefill-0", None, 0.0, 0), _load("prefill-1", None, 0.0, 0)])


def quiet() -> bytes:
    """Pools, and nothing has happened."""
    pools: tuple[LengthClass, ...] = ("short", "long", "long")
    return state([_load(f"prefill-{i}", pool, 0.0, 0) for i, pool in enumerate(pools)])


def nobody() -> bytes:
    """The allocator has just started."""
    return state([])


def crowd() -> bytes:
    """More workers than the page has rows for."""
    return state([_load(f"prefill-{i}", CLASSES[i % 2], i / 100, i) for i in range(130)])
