"""The JSON behind the page, the times kept for it, and metrics per class and pool."""

import json
import math
import random
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from actors.ingress.pages import PAGE_HEADERS, build_laps_view, laps_json, laps_page
from actors.observability.merged_metrics import prometheus_text
from actors.observability.metrics import IngressMetrics, num_new_moves
from actors.observability.recent_ttft import BIN_RATIO, NUM_PIECES, PIECE_S, RecentTtft
from actors.routing.worker_links import WorkerLink
from configs.schema import LapsConfig
from engine.clock import ManualClock
from engine.length_class import LengthClass
from engine.messages import (
    Assign,
    ExpertTotals,
    LapsStatus,
    LoadReport,
    OverlapLoad,
    PoolMove,
    SpeculationLoad,
    WorkerLoad,
)

LOAD = LoadReport(queued_tokens=7, num_waiting=2, num_running=5, num_free_blocks=60, num_blocks=64)
WITHIN = math.sqrt(BIN_RATIO) * 1.0001


def _worker(name: str, pool: LengthClass | None, queued_s: float, alive: bool = True) -> WorkerLoad:
    return WorkerLoad(
        worker=name,
        pool=pool,
        is_alive=alive,
        num_waiting=1,
        queued_tokens=30,
        queued_s=queued_s,
        num_cached_blocks=0,
    )


def _status(
    workers: list[WorkerLoad],
    moves: list[PoolMove] | None = None,
    pending: tuple[int, int] = (0, 0),
) -> LapsStatus:
    return LapsStatus(
        enabled=True,
        threshold=256,
        policy="ratio",
        pools={
            "short": [w.worker for w in workers if w.pool == "short"],
            "long": [w.worker for w in workers if w.pool == "long"],
        },
        pending={"short": pending[0], "long": pending[1]},
        workers=workers,
        moves=moves or [],
        step_costs=None,
    )


def _move(number: int, ago_s: float = 1.0) -> PoolMove:
    return PoolMove(worker="w", pool="short", ago_s=ago_s, reason=f"load {number}")


# ---- times to the first token -------------------------------------------------------------------


@given(times_s=st.lists(st.floats(0.001, 500.0), min_size=1, max_size=200))
def test_a_quantile_is_the_one_of_all_times_within_the_width_of_a_bin(times_s: list[float]) -> None:
    recent = RecentTtft(ManualClock(1000.0))
    for seconds in times_s:
        recent.add("short", seconds)
    found, ordered = recent.summary()["short"], sorted(times_s)
    for share, quantile_s in ((0.5, found.p50_s), (0.9, found.p90_s)):
        exact_s = ordered[math.ceil(share * len(ordered)) - 1]
        assert quantile_s is not None
        assert exact_s / WITHIN <= quantile_s <= exact_s * WITHIN
    assert found.num == len(times_s) == found.pieces[0].num


def test_pieces_have_their_age_and_the_old_ones_fall_out() -> None:
    clock = ManualClock(20 * PIECE_S)
    recent = RecentTtft(clock)
    recent.add("long", 1.0)
    clock.advance(3 * PIECE_S)
    recent.add("long", 4.0)
    recent.add("long", 4.0)
    clock.advance(1.0)
    found = recent.summary()["long"]
    assert [(piece.num, piece.ago_s) for piece in found.pieces] == [
        (1, 1.0 + 2.5 * PIECE_S),
        (2, 1.0 - 0.5 * PIECE_S),
    ]
    assert recent.summary()["short"].pieces == []
    clock.advance((NUM_PIECES - 3) * PIECE_S - 1.0)
    assert recent.summary()["long"].num == 2
    clock.advance(3 * PIECE_S)
    empty = recent.summary()["long"]
    assert (empty.num, empty.p50_s, empty.p90_s, empty.pieces) == (0, None, None, [])


def test_memory_does_not_grow_with_time_nor_with_the_rate() -> None:
    clock, rng = ManualClock(), random.Random(1)
    recent = RecentTtft(clock)
    for _ in range(3 * NUM_PIECES):
        for _ in range(200):
            recent.add("short", rng.uniform(0.01, 10.0))
        clock.advance(PIECE_S)
    pieces = recent.summary()["short"].pieces
    assert len(pieces) == NUM_PIECES - 1  # the one under way is empty
    assert len(json.dumps(str(pieces))) < 10_000


# ---- the JSON and the page ----------------------------------------------------------------------


def test_the_json_has_what_the_allocator_says_and_what_this_ingress_knows() -> None:
    clock = ManualClock(50.0)
    recent = RecentTtft(clock)
    recent.add("short", 0.02)
    up = WorkerLink(name="prefill-0", role="prefill", load=LOAD)
    up.handle = object()  # type: ignore[assignment] # connected
    away = WorkerLink(name="decode-0", role="decode")
    view = build_laps_view(
        model="m",
        ingress="i",
        laps=LapsConfig(),
        ttft=recent.summary(),
        links=[up, away],
    )
    status = _status([_worker("prefill-0", None, 0.5)], pending=(3, 4))
    said = json.loads(laps_json(status, view))
    assert (said["threshold"], said["pending"], said["policy"]) == (
        256,
        {"short": 3, "long": 4},
        "ratio",
    )
    assert said["workers"][0]["queued_s"] == 0.5
    assert said["queue"] == LapsConfig().queue
    assert said["ttft"]["short"]["num"] == 1
    assert said["ttft"]["long"] == {"num": 0, "p50_s": None, "p90_s": None, "pieces": []}
    decode, prefill = said["reports"]
    assert (prefill["num_running"], prefill["num_free_blocks"], prefill["is_up"]) == (5, 60, True)
    assert (decode["role"], decode["is_up"], decode["num_blocks"]) == ("decode", False, 0)


DRAFTS = SpeculationLoad(
    num_drafts=40, num_accepted=25, num_rows=10, drafts_at=(10, 30), accepted_at=(9, 16)
)


def _link(drafts: SpeculationLoad | None) -> WorkerLink:
    load = msgspec.structs.replace(LOAD, speculation=drafts)
    link = WorkerLink(name="unified-0", role="unified", load=load)
    link.handle = object()  # type: ignore[assignment] # connected
    return link


def test_the_json_has_what_became_of_drafts() -> None:
    recent = RecentTtft(ManualClock(50.0))
    for drafts in (DRAFTS, None):
        view = build_laps_view(
            model="m", ingress="i", laps=LapsConfig(), ttft=recent.summary(), links=[_link(drafts)]
        )
        (report,) = json.loads(laps_json(_status([]), view))["reports"]
        if drafts is None:
            assert report["speculation"] is None
        else:
            assert report["speculation"]["accepted_at"] == [9, 16]
            assert report["speculation"]["measured_gain"] is None


def test_drafts_are_counted_by_worker_and_by_position() -> None:
    metrics = IngressMetrics("m", RecentTtft(ManualClock(9.0)))

    def scrape(drafts: SpeculationLoad | None) -> dict[tuple[str, str], float]:
        metrics.refresh([_link(drafts)], 0, 0, None)
        text = prometheus_text(metrics.families()).decode()
        return {
            (s.name, s.labels.get("position") or s.labels.get("kind", "")): s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
            if "spec" in s.name and not s.name.endswith("_info")
        }

    found = scrape(msgspec.structs.replace(DRAFTS, measured_gain=1.5, is_on=False))
    assert found["vllm:spec_decode_num_drafts_total", ""] == 10
    assert found["vllm:spec_decode_num_draft_tokens_total", ""] == 40
    assert found["vllm:spec_decode_num_accepted_tokens_total", ""] == 25
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"] == 9
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"] == 16
    assert found["laps_speculation_gain", "measured"] == 1.5
    assert ("laps_speculation_gain", "predicted") not in found
    assert found["laps_speculation_on", ""] == 0
    assert not any(value for value in scrape(None).values())


def test_steps_of_two_batches_are_counted_by_worker() -> None:
    overlap = OverlapLoad(
        num_steps=9, num_split_prompts=4, num_split_decodes=3, num_two_chunk=2, num_replayed=1
    )
    link = _link(None)
    link.load = msgspec.structs.replace(LOAD, two_batches=overlap)
    metrics = IngressMetrics("m", RecentTtft(ManualClock(9.0)))
    metrics.refresh([link], 0, 0, None)
    text = prometheus_text(metrics.families()).decode()
    found = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert [
        found[f"laps_{name}_total"]
        for name in (
            *("uncaptured_steps", "split_prompt_steps", "split_decode_steps"),
            *("cut_prompt_steps", "split_graph_steps"),
        )
    ] == [9, 4, 3, 2, 1]
    view = build_laps_view(
        model="m",
        ingress="i",
        laps=LapsConfig(),
        ttft=RecentTtft(ManualClock(9.0)).summary(),
        links=[link],
    )
    (report,) = json.loads(laps_json(_status([]), view))["reports"]
    assert report["two_batches"]["num_split_prompts"] == 4


def test_the_json_has_how_evenly_experts_are_used_without_each_of_them() -> None:
    link = _link(None)
    link.experts = ExpertTotals(
        layers=(1, 4),
        counts=((7, 0, 0, 5), (3, 3, 3, 3)),
        expert_imbalance=(7 / 3, 1.0),
        rank_imbalance=(7 / 6, 1.0),
    )
    view = build_laps_view(model="m", ingress="i", laps=LapsConfig(), ttft={}, links=[link])
    (report,) = json.loads(laps_json(_status([]), view))["reports"]
    assert report["experts"] == {
        "layers": [1, 4],
        "experts": [7 / 3, 1.0],
        "ranks": [7 / 6, 1.0],
        "num_idle": [2, 0],
    }


def test_the_page_needs_nothing_but_itself() -> None:
    text = laps_page().decode()
    assert text.startswith("<!doctype html>")
    assert re.findall(r"\w+://[^\s\"']+", text) == ["http://www.w3.org/2000/svg"]  # only a name
    for word in (" src=", "@import", "innerHTML", "insertAdjacentHTML", "document.write"):
        assert word not in text
    assert "default-src 'none'" in PAGE_HEADERS["Content-Security-Policy"]


# ---- metrics ------------------------------------------------------------------------------------


class _Scraped:
    """The metrics of one ingress, and their samples."""

    def __init__(self) -> None:
        self.recent = RecentTtft(ManualClock(9.0))
        self.metrics = IngressMetrics("m", self.recent)

    def scrape(self, status: LapsStatus | None) -> dict[tuple[str, str], float]:
        """(name, class or pool) -> value."""
        self.metrics.refresh([], 0, 0, status)
        text = prometheus_text(self.metrics.families()).decode()
        return {
            (s.name, s.labels.get("length_class") or s.labels.get("pool", "")): s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
            if s.labels.get("le", "0.02") == "0.02"
        }


def test_requests_are_counted_by_class() -> None:
    ingress = _Scraped()
    assert ingress.scrape(None)["laps_requests_total", "long"] == 0, "there before the first one"
    assign = Assign(
        prefill_worker="p", decode_worker=None, length_class="long", work_s=0.2, ttft_s=0.5
    )
    ingress.metrics.classes.count_placed(assign)
    ingress.metrics.classes.observe_ttft("long", 0.6)
    ingress.metrics.classes.observe_ttft("short", 0.015)
    found = ingress.scrape(None)
    assert found["laps_requests_total", "long"] == 1
    assert found["laps_requests_total", "short"] == 0
    assert found["laps_predicted_queue_seconds_sum", "long"] == pytest.approx(0.3)
    assert found["laps_time_to_first_token_seconds_count", "long"] == 1
    assert found["laps_time_to_first_token_seconds_sum", "long"] == pytest.approx(0.6)
    assert found["laps_time_to_first_token_seconds_bucket", "short"] == 1
    assert found["laps_time_to_first_token_seconds_bucket", "long"] == 0
    assert ingress.recent.summary()["long"].num == 1


def test_pools_are_shown_as_the_allocator_sees_them() -> None:
    ingress = _Scraped()
    workers = [
        _worker("a", "short", 0.25),
        _worker("b", "long", 2.0),
        _worker("c", "long", 0.5),
        _worker("d", "long", 0.0, alive=False),
    ]
    found = ingress.scrape(_status(workers, pending=(6, 1)))
    assert {pool: found["laps_pool_workers", pool] for pool in ("short", "long")} == {
        "short": 1,
        "long": 2,
    }
    assert found["laps_pool_pending_seconds", "short"] == 0.25
    assert found["laps_pool_pending_seconds", "long"] == 2.5
    assert found["laps_waiting_requests", "short"] == 6
    assert ("laps_pool_workers", "any") not in found
    unsplit = ingress.scrape(_status([_worker("a", None, 0.75)]))
    assert unsplit["laps_pool_pending_seconds", "any"] == 0.75
    assert ("laps_pool_workers", "short") not in unsplit


def test_without_an_allocator_there_are_no_stale_pools() -> None:
    ingress = _Scraped()
    ingress.scrape(_status([_worker("a", "short", 0.25), _worker("b", "long", 2.0)], [_move(1)]))
    found = ingress.scrape(None)
    assert not [name for name, _ in found if name in ("laps_pool_workers", "laps_waiting_requests")]
    assert found["laps_pool_moves_total", "short"] == 1, "a counter does not go back"


def test_each_move_is_counted_once_also_over_a_restart_of_the_allocator() -> None:
    ingress = _Scraped()
    seen = [
        ingress.scrape(_status([], moves))["laps_pool_moves_total", "short"]
        for moves in (
            [],
            [_move(1)],
            [_move(1, ago_s=7.0)],
            [_move(3), _move(2), _move(1)],
            [],
            [_move(4)],
        )
    ]
    assert seen == [0, 1, 1, 3, 3, 4]


@given(num_before=st.integers(0, 90), num_new=st.integers(0, 31), remembered=st.integers(32, 40))
def test_new_moves_are_told_from_those_known(
    num_before: int, num_new: int, remembered: int
) -> None:
    moves = [_move(number) for number in range(num_before + num_new)]
    before = moves[:num_before][-remembered:][::-1]
    now = moves[-remembered:][::-1]
    assert num_new_moves(before, now) == num_new
