"""Workloads: the stated distributions, the formats of recorded ones, and what they refuse."""

import json
from pathlib import Path

import numpy as np
import pytest

from load_tests.simulation.traces import read_azure, read_lengths, read_mooncake
from load_tests.simulation.workload import Lengths, Mix, Workload, drawn, lmsys, recorded, sharegpt


def draw(lengths: Lengths, cv: float = 1.0, seed: int = 0) -> Workload:
    return drawn("w", lengths, rate=20.0, num_requests=40_000, seed=seed, cv=cv)


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_variation_that_were_asked_for(cv: float) -> None:
    gaps = np.diff(draw(lmsys, cv).arrival_s)
    assert np.mean(gaps) == pytest.approx(1 / 20, rel=0.06)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(cv, rel=0.06)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75, 0.95])
def test_a_mix_has_its_share_of_short_prompts(share: float) -> None:
    tokens = draw(Mix(share)).prompt_tokens
    assert np.mean(tokens <= 256) == pytest.approx(share, abs=0.01)
    assert tokens.min() >= 8
    assert not np.any((tokens > 256) & (tokens < 2048))
    assert tokens.max() < 8192


def test_published_quantiles_come_out() -> None:
    share = draw(sharegpt).prompt_tokens
    assert np.mean(share <= 256) == pytest.approx(0.171, abs=0.01)
    assert np.percentile(share, [50, 90, 99]) == pytest.approx([1730, 5696, 7434], rel=0.03)
    messages = draw(lmsys)
    quantiles = np.percentile(messages.prompt_tokens, [25, 50, 75, 90, 99])
    assert quantiles == pytest.approx([9, 17, 47, 128, 881], rel=0.1)
    assert np.mean(messages.output_tokens) == pytest.approx(214, rel=0.03)


def test_a_seed_names_a_workload_and_rates_share_its_requests() -> None:
    one, again, other = draw(sharegpt), draw(sharegpt), draw(sharegpt, seed=1)
    assert np.array_equal(one.arrival_s, again.arrival_s)
    assert np.array_equal(one.prompt_tokens, again.prompt_tokens)
    assert not np.array_equal(one.prompt_tokens, other.prompt_tokens)
    faster = one.at_rate(40.0)
    assert faster.rate == pytest.approx(40.0)
    assert np.array_equal(faster.prompt_tokens, one.prompt_tokens)
    assert len(one.first(7)) == 7


def test_azure_rows_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:04.0319600,3180,8\n"
        "2023-11-16 18:17:03.5319600,0,10\n"
    )
    workload = read_azure(path)
    assert workload.arrival_s.tolist() == pytest.approx([0.0, 0.5])
    assert workload.prompt_tokens.tolist() == [1, 3180]
    assert workload.output_tokens.tolist() == [10, 8]


def test_mooncake_times_leave_their_grid_and_chains_are_full_blocks(tmp_path: Path) -> None:
    rows = [
        {"timestamp": t, "input_length": 1100, "output_length": 5, "hash_ids": [0, 7 + i, 9]}
        for i, t in enumerate([0, 0, 0, 3000, 3000, 6000])
    ]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    workload = read_mooncake(path)
    assert workload.arrival_s[0] == 0.0
    assert len(set(workload.arrival_s.tolist())) == 6
    assert workload.duration_s < 9.0
    assert workload.chains is not None
    assert {len(chain) for chain in workload.chains} == {2}
    assert np.array_equal(workload.arrival_s, read_mooncake(path).arrival_s)


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    for read in (read_azure, read_lengths):
        with pytest.raises(ValueError, match="no rows with the columns"):
            read(path)
    path.write_text('{"timestamp": 0}\n')
    with pytest.raises(ValueError, match="input_length"):
        read_mooncake(path)


def test_a_recorded_list_is_put_in_order() -> None:
    workload = recorded("r", [(2.0, 30, 4), (0.5, 10, 3)])
    assert workload.arrival_s.tolist() == [0.5, 2.0]
    assert workload.prompt_tokens.tolist() == [10, 30]
    assert workload.chains is None
