"""Short requests beside long ones that hold all blocks or all rows."""

import random
from typing import Literal

import pytest

from configs.schema import LapsConfig
from engine.kv.layout import KvLayout
from engine.kv.transfer import IncomingHandoffs, JoiningRank
from engine.messages import NotNow, Reservation, ReserveRequest, WorkerIdentity
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.scheduling.host_loads import NoHostLoads
from tests.engine.scheduling.replica import BLOCK_SIZE, Replica, params_of, prompt_of

THRESHOLD = 12
SHORT, LONG = 5, 100  # output tokens


def replica_of(
    *, num_blocks: int, max_rows: int, short_share: float = 0.2, overlap: bool = False
) -> Replica:
    return Replica(
        num_blocks=num_blocks,
        max_rows=max_rows,
        max_num_batched_tokens=32,
        max_model_len=4 * num_blocks,
        short_share=short_share,
        overlap=overlap,
        laps=LapsConfig(laps_length_threshold=THRESHOLD),
    )


def fill(replica: Replica, num_long: int, num_tokens: int = 2 * THRESHOLD) -> list[Request]:
    """Long answers, each with more than `num_tokens` known."""
    params = params_of(LONG)
    longs = [replica.add(f"long-{i}", prompt_of(4, i), params=params) for i in range(num_long)]
    while min(r.num_known_tokens for r in longs) <= num_tokens:
        replica.step()
    return longs


def steps_to_first_token(replica: Replica, request: Request) -> int:
    for num_steps in range(1, 500):
        replica.step()
        if replica.output(request):
            return num_steps
    raise AssertionError(f"{request.key} got no token")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("num_blocks", "max_rows"), [(44, 6), (200, 4)])  # no blocks; no rows
def test_a_short_prompt_does_not_wait_for_a_long_answer(
    num_blocks: int, max_rows: int, overlap: bool
) -> None:
    replica = replica_of(num_blocks=num_blocks, max_rows=max_rows, overlap=overlap)
    longs = fill(replica, 4, num_tokens=40)
    short = replica.add("short", prompt_of(5, 9), params=params_of(SHORT))
    assert steps_to_first_token(replica, short) <= 4
    replica.run(1000)
    for request in [*longs, short]:
        assert replica.output(request) == replica.expected(request)
    assert longs[0].num_preemptions == 0  # the first in order gives way to nobody


def test_without_a_reserve_it_waits() -> None:
    replica = replica_of(num_blocks=44, max_rows=6, short_share=0.0)
    fill(replica, 4, num_tokens=40)
    short = replica.add("short", prompt_of(5, 9), params=params_of(SHORT))
    assert steps_to_first_token(replica, short) > 30


def test_a_stream_of_short_prompts_starves_no_long_answer() -> None:
    replica = replica_of(num_blocks=44, max_rows=4)
    longs = fill(replica, 4)
    for number in range(600):
        if not {r.key for r in longs} - set(replica.left):
            break
        if replica.scheduler.statistics().num_waiting < 8:
            replica.add(f"short-{number}", prompt_of(5, 10 + number), params=params_of(SHORT))
        replica.step()
    assert {r.key for r in longs} <= set(replica.left)
    num_for_others = replica.scheduler.statistics().num_preemptions_for_others
    assert 0 < num_for_others <= len(longs) * (LONG // THRESHOLD + 1)


def test_a_more_important_long_prompt_takes_the_place_of_a_less_important_one() -> None:
    replica = replica_of(num_blocks=60, max_rows=2)
    longs = fill(replica, 2)
    urgent = replica.add("urgent", prompt_of(20, 9), params=params_of(SHORT), priority=-1)
    assert steps_to_first_token(replica, urgent) <= 4
    assert [r.num_preemptions for r in longs] == [0, 1]


# ---- long prompts that the queue offers first, because a cache has most of them ------------------


def replica_with(
    document: list[int],
    *,
    num_blocks: int,
    max_long_wait_s: float = 9.0,
    short_share: float = 0.3,
    mix: Literal["exclusive", "fill"] = "exclusive",
) -> Replica:
    """Its cache has `document`, so prompts that begin with it are short in its queue."""
    replica = Replica(
        num_blocks=num_blocks,
        max_rows=8,
        max_num_batched_tokens=64,
        max_model_len=4 * num_blocks,
        short_share=short_share,
        laps=LapsConfig(
            queue="laps",
            mix=mix,
            laps_length_threshold=THRESHOLD,
            max_long_wait_s=max_long_wait_s,
        ),
    )
    replica.add("document", document, params=params_of(1))
    replica.run()
    return replica


@pytest.mark.parametrize("mix", ["exclusive", "fill"])
@pytest.mark.parametrize("short_share", [0.0, 0.3])
@pytest.mark.parametrize("document_tokens", [0, 40])  # others are short; or long, but cached
def test_who_goes_first_does_not_take_the_blocks_of_one_that_has_aged(
    document_tokens: int, short_share: float, mix: Literal["exclusive", "fill"]
) -> None:
    document, draw = prompt_of(document_tokens or 1, 99), random.Random(5)
    replica = replica_with(
        document, num_blocks=48, max_long_wait_s=0.05, short_share=short_share, mix=mix
    )
    long: Request | None = None
    for number in range(100):
        if replica.scheduler.statistics().num_waiting < 6:
            turn = document * (document_tokens > 0) + prompt_of(draw.randint(1, 9), number)
            replica.add(f"turn-{number}", turn, params=params_of(draw.choice((5, 12, 25))))
        replica.step()
        replica.clock.advance(0.01)
        if number == 30:
            long = replica.add("long", prompt_of(120, 7), params=params_of(SHORT))
    assert long is not None
    assert long.key in replica.left  # it needs 30 of the 48 blocks, which the others kept taking


@pytest.mark.parametrize("mix", ["exclusive", "fill"])
@pytest.mark.parametrize("short_share", [0.0, 0.3])
def test_one_that_waits_for_another_choice_of_its_prompt_keeps_nobody_from_entering(
    short_share: float, mix: Literal["exclusive", "fill"]
) -> None:
    replica = replica_with(
        [1], num_blocks=48, max_long_wait_s=0.0, short_share=short_share, mix=mix
    )
    prompt = prompt_of(120, 7)  # the blocks that are left would not do for two such prompts
    for child in (0, 1):
        replica.add("long", prompt, child=child, params=params_of(1))
    replica.step()  # the first of several chunks
    short = replica.add("short", prompt_of(5, 1), params=params_of(1))
    assert steps_to_first_token(replica, short) == 1


def test_one_that_waits_for_blocks_from_the_host_tier_keeps_nobody_from_entering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = replica_with([1], num_blocks=48, max_long_wait_s=0.0, short_share=0.0)
    replica.lent = replica.cache.allocate(20) or []
    long = replica.add("long", prompt_of(190), params=params_of(1))  # it needs all blocks
    replica.step()
    replica.cache.release(replica.lent)
    replica.lent = []
    monkeypatch.setattr(NoHostLoads, "is_awaited", lambda _, key, now_s: key == long.key)
    short = replica.add("short", prompt_of(5, 1), params=params_of(1))
    assert steps_to_first_token(replica, short) == 1


def test_who_is_refused_for_one_that_it_overtook_does_not_shut_that_one_out() -> None:
    document = prompt_of(88, 99)
    replica = replica_with(document, num_blocks=32)
    now_s = replica.clock.now_s()
    given = params_of(SHORT)
    early = replica.add("early", [*document, 1, 2], params=given, ttft_deadline_s=now_s + 9)
    urgent = replica.add("urgent", prompt_of(5, 5), params=given, ttft_deadline_s=now_s + 1)
    replica.run()  # all blocks are free, and not enough for both with the reserve
    assert {early.key, urgent.key} <= set(replica.left)


# ---- a decode worker makes room ------------------------------------------------------------------


def incoming_of(replica: Replica, max_rows: int) -> IncomingHandoffs:
    return IncomingHandoffs(
        [JoiningRank(cache=replica.cache, scheduler=replica.scheduler)],
        hasher=replica.scheduler._blocks._hasher,
        identity=identity_of("decode-0"),
        clock=replica.clock,
        lease_s=8.0,
        max_rows=max_rows,
    )


def identity_of(name: str) -> WorkerIdentity:
    return WorkerIdentity(
        name=name,
        incarnation=f"{name}-1",
        role="decode",
        model="m",
        layout=KvLayout.with_heads(
            num_layers=1, block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=4, dtype="float32"
        ),
        max_model_len=150,
        pid=1,
    )


def asking(name: str, num_tokens: int) -> ReserveRequest:
    return ReserveRequest(
        spec=RequestSpec(params=SamplingParams(max_tokens=SHORT)),
        key=RequestKey(name),
        sender=identity_of("prefill-0"),
        ingress_id="ingress-a",
        token_ids=prompt_of(num_tokens, 77),
        num_prompt_tokens=num_tokens,
    )


@pytest.mark.parametrize(("num_blocks", "max_rows"), [(44, 6), (200, 4)])
def test_a_reservation_of_a_short_request_makes_a_long_answer_give_way(
    num_blocks: int, max_rows: int
) -> None:
    replica = replica_of(num_blocks=num_blocks, max_rows=max_rows)
    fill(replica, 4, num_tokens=40)
    incoming = incoming_of(replica, max_rows)
    long, short = asking("a", 90), asking("b", 5)
    assert isinstance(incoming.reserve(long), NotNow)
    assert not incoming.may_overtake(long)
    assert incoming.may_overtake(short)
    for _ in range(4):
        answer = incoming.reserve(short, overtakes=True)
        if isinstance(answer, Reservation):
            break
        replica.core.step()
    assert isinstance(answer, Reservation)
    assert isinstance(incoming.reserve(long), NotNow)  # who was preempted here goes first
