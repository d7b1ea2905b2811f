"""What workers say for stages and totals: when a prompt started, that its KV arrived, counters."""

import asyncio
import random

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from actors.ingress.mailbox import Mailbox
from actors.observability.merged_metrics import prometheus_text
from actors.observability.metrics import IngressMetrics
from actors.observability.recent_ttft import RecentTtft
from actors.routing.worker_links import WorkerLink
from actors.worker.token_streams import TOTALS_EVERY_S, TokenStreams
from configs.schema import LifetimesConfig
from engine.clock import ManualClock
from engine.messages import (
    DiskTierLoad,
    ExpertTotals,
    HandoffTotals,
    HostTierLoad,
    StepMessage,
    TokenRecord,
    decode,
)
from engine.request import RequestKey
from tests.actors.ingress.edge_app import IDLE, edge_app
from tests.engine.scheduling.replica import Replica, prompt_of

KEY = RequestKey("a")


def test_the_first_token_says_how_long_its_prompt_waited() -> None:
    replica = Replica(max_rows=1)
    first = replica.add("a", prompt_of(5))
    waited_s = random.uniform(0.1, 9.0)
    replica.clock.advance(waited_s)
    replica.step()
    second = replica.add("b", prompt_of(7))
    replica.clock.advance(0.25)
    replica.run()
    records = replica.records[first.key]
    assert records[0].waited_s == pytest.approx(waited_s + 0.001)
    assert {record.waited_s for record in records[1:]} == {None}
    assert (replica.records[second.key][0].waited_s or 0.0) >= 0.25


def streams(clock: ManualClock) -> TokenStreams:
    return TokenStreams(
        worker="w",
        incarnation="i",
        config=LifetimesConfig(load_report_every_s=1e6),
        clock=clock,
        load=lambda: IDLE,
        on_silent=lambda _: None,
        on_overflow=lambda _, __: None,
    )


def test_an_ingress_hears_that_a_request_joined_before_its_next_token() -> None:
    async def main() -> None:
        made = streams(ManualClock())
        reader = made.read("x")
        await anext(reader)
        made.announce_joined("x", KEY)
        made.announce_joined("other", RequestKey("b"))
        message = decode(await anext(reader), StepMessage)
        assert (message.joined, message.tokens) == ([KEY], [])
        made.publish([("x", TokenRecord(key=KEY, index=1, token_id=3))], [])
        message = decode(await anext(reader), StepMessage)
        assert (message.joined, len(message.tokens)) == ([], 1)

    asyncio.run(main())


def test_totals_are_told_once_a_second_to_every_client() -> None:
    async def main() -> None:
        clock = ManualClock(50.0)
        made = streams(clock)
        totals = HandoffTotals(
            num_done=1, num_bytes=random.randrange(10**12), num_found_blocks=5, num_failures=0
        )
        made.report_handoffs(lambda: totals)
        readers = [made.read(name) for name in ("x", "y")]
        for reader in readers:
            assert decode(await anext(reader), StepMessage).handoffs == totals
        seen = []
        for _ in range(6):
            made.announce_joined("x", KEY)
            seen.append(decode(await anext(readers[0]), StepMessage).handoffs)
            clock.advance(TOTALS_EVERY_S / 2)
        assert seen == [None, None, totals, None, totals, None]

    asyncio.run(main())


def test_a_mailbox_passes_on_that_its_request_joined() -> None:
    async def main() -> None:
        joined: list[bool] = []
        mailbox = Mailbox(
            prefill_worker="p",
            decode_worker="d",
            next_index=0,
            on_joined=lambda: joined.append(True),
        )
        mailbox.joined()
        assert joined == [True]

    asyncio.run(main())


def test_the_times_of_an_answer_have_a_handoff_when_its_kv_moved() -> None:
    app = edge_app()
    app.workers.joins_before = 1
    answer = app.post({"max_tokens": 3}, x_laps_timings="1").json()
    assert answer["timings"]["handoff_ms"] is not None
    families = list(
        text_string_to_metric_families(prometheus_text(app.edge.metrics.families()).decode())
    )
    (count,) = [
        s.value for f in families for s in f.samples if s.name == "laps_handoff_seconds_count"
    ]
    assert count == 1


def test_totals_of_workers_are_exported_as_they_are() -> None:
    metrics = IngressMetrics("m", RecentTtft(ManualClock()))
    load = msgspec.structs.replace(IDLE, num_preemptions=7)
    totals = HandoffTotals(num_done=3, num_bytes=4096, num_found_blocks=6, num_failures=2)
    links = [
        WorkerLink(name="p", role="prefill", load=load, handoffs=totals),
        WorkerLink(name="d", role="decode", load=IDLE),
    ]
    metrics.refresh(links, 0, 0, None)
    lines = prometheus_text(metrics.families()).decode().splitlines()
    labels = 'model_name="m",role="prefill",worker="p"'
    assert f"vllm:num_preemptions_total{{{labels}}} 7.0" in lines
    assert f"laps_handoffs_total{{{labels}}} 3.0" in lines
    assert f"laps_handoff_bytes_total{{{labels}}} 4096.0" in lines
    assert f"laps_handoff_found_blocks_total{{{labels}}} 6.0" in lines
    assert f"laps_handoff_failures_total{{{labels}}} 2.0" in lines
    assert sum(line.startswith("laps_handoff_bytes_total") for line in lines) == 1


def test_tokens_of_experts_are_exported_by_layer_where_a_worker_counts_them() -> None:
    metrics = IngressMetrics("m", RecentTtft(ManualClock()))
    totals = ExpertTotals(
        layers=(1, 3),
        counts=((4, 0), (2, 2)),
        expert_imbalance=(2.0, 1.0),
        rank_imbalance=(1.5, 1.0),
    )
    links = [
        WorkerLink(name="u", role="unified", load=IDLE, experts=totals),
        WorkerLink(name="d", role="decode", load=IDLE),
    ]
    for _ in range(2):  # a scrape replaces the one before
        metrics.refresh(links, 0, 0, None)
    lines = prometheus_text(metrics.families()).decode().splitlines()
    found = {line for line in lines if line.startswith("laps_expert_")}
    start = 'model_name="m",role="unified",worker="u"'
    expected = {
        f'laps_expert_tokens_total{{expert="{expert}",layer="{layer}",{start}}} {count:.1f}'
        for layer, counts in zip(totals.layers, totals.counts, strict=True)
        for expert, count in enumerate(counts)
    }
    for name, numbers in (
        ("laps_expert_imbalance", totals.expert_imbalance),
        ("laps_expert_rank_imbalance", totals.rank_imbalance),
    ):
        for layer, number in zip(totals.layers, numbers, strict=True):
            expected.add(f'{name}{{layer="{layer}",{start}}} {number}')
    assert found == expected


def test_what_a_host_tier_did_is_exported_by_worker() -> None:
    metrics = IngressMetrics("m", RecentTtft(ManualClock()))
    counts: dict[str, object] = {
        name: i for i, name in enumerate(HostTierLoad.__struct_fields__, start=1)
    }
    disk = {name: i for i, name in enumerate(DiskTierLoad.__struct_fields__, start=1)}
    counts |= {"block_bytes": 1000, "num_blocks": 64, "num_ready": 16, "disk": disk}
    tier = msgspec.convert(counts, HostTierLoad)
    load = msgspec.structs.replace(IDLE, host_tier=tier)
    links = [
        WorkerLink(name="u", role="unified", load=load),
        WorkerLink(name="d", role="decode", load=IDLE),
    ]
    metrics.refresh(links, 0, 0, None)
    lines = prometheus_text(metrics.families()).decode().splitlines()
    labels = 'model_name="m",role="unified",worker="u"'
    assert f"laps_host_tier_usage{{{labels}}} 0.25" in lines
    assert f"laps_host_tier_loaded_bytes_total{{{labels}}} {1000.0 * tier.num_loaded}" in lines
    for event in ("asked", "hit", "written", "loaded"):
        assert f"laps_disk_tier_{event}_blocks_total{{{labels}}} {disk[f'num_{event}']}.0" in lines
    written_bytes = 1000.0 * disk["num_written"]
    assert f"laps_disk_tier_written_bytes_total{{{labels}}} {written_bytes}" in lines
    assert f"laps_disk_tier_read_seconds_total{{{labels}}} {disk['read_s']}.0" in lines
    events = ("asked", "hit", "loaded", "wasted", "corrupt", "gone", "stored", "known", "dropped")
    for event in events:
        value = getattr(tier, f"num_{event}")
        assert f"laps_host_tier_{event}_blocks_total{{{labels}}} {value:.1f}" in lines
    assert f"laps_host_tier_given_up_total{{{labels}}} {tier.num_given_up:.1f}" in lines
    assert not any('worker="d"' in line for line in lines if "host_tier" in line)
