"""A full KV cache in virtual time: the engine's scheduler over predicted step costs."""

from dataclasses import replace

import pytest

from load_tests.lab.full_cache import FullCacheLoad, FullCacheResult, run_virtual
from load_tests.simulation.worker import WorkerSpec

FORTY = FullCacheLoad()
BLOCKS = 2048 * 16  # tokens: 40 answers of 1500 need nearly twice as many
ALL = 10**6


def run(load: FullCacheLoad, num_tokens: int, share: float, queue: str) -> FullCacheResult:
    spec = WorkerSpec(
        keeps_decodes=True,
        max_kv_tokens=num_tokens,
        max_rows=64,
        max_num_batched_tokens=512,
        short_share=share,
    )
    return run_virtual(load, spec.with_queue(queue))


@pytest.mark.parametrize(
    ("load", "num_tokens", "queue"),
    [
        (FORTY, BLOCKS, "priority"),
        (FORTY, BLOCKS, "fcfs"),
        (FORTY, BLOCKS, "laps"),
        (replace(FORTY, num_long=10), BLOCKS // 8, "priority"),
        (replace(FORTY, num_long=64), ALL, "priority"),  # all rows are taken, few blocks
    ],
)
def test_short_prompts_do_not_wait_for_long_answers(
    load: FullCacheLoad, num_tokens: int, queue: str
) -> None:
    alone = run(replace(load, num_long=0), num_tokens, 0.05, queue)
    before = run(load, num_tokens, 0.0, queue)
    after = run(load, num_tokens, 0.05, queue)
    assert after.quantile_s(0.9) <= 3 * alone.quantile_s(0.9)
    assert max(after.long_end_s) <= 1.1 * max(before.long_end_s)
    assert sum(after.long_end_s) <= 1.1 * sum(before.long_end_s)
    assert after.num_preemptions <= before.num_preemptions + load.num_long
    if queue != "laps":  # there a prompt passes what was preempted anyway
        assert before.quantile_s(0.9) > 100 * alone.quantile_s(0.9)


def test_nobody_is_preempted_where_there_is_room() -> None:
    assert run(FORTY, ALL, 0.05, "priority").num_preemptions == 0
