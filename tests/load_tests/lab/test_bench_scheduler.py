"""The scheduling figures are of full decode batches, one duration for every part of every step."""

import pytest

from load_tests.lab.bench_scheduler import Batch, Bench, main


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_every_part_of_every_step_is_timed(enable_prefix_caching: bool) -> None:
    batch = Batch(
        num_rows=5,
        num_prompt_tokens=7,
        num_steps=11,
        block_size=4,
        enable_prefix_caching=enable_prefix_caching,
    )
    durations = Bench(batch).run()
    assert [len(part_us) for part_us in durations.of_step] == [11] * 5
    assert len(durations.add_us) == 5
    assert all(us > 0 for part_us in durations.of_step for us in part_us)
    plan, commit, report, encode, settle, total, _ = durations.figures()
    assert total.value >= max(part.value for part in (plan, commit, report, encode, settle))


def test_a_batch_that_does_not_decode_whole_has_no_figure() -> None:
    bench = Bench(Batch(num_rows=3, num_prompt_tokens=7, num_steps=2, block_size=4))
    bench.run()
    with pytest.raises(AssertionError, match="runs already"):  # its rows decode still
        bench.run()


def test_one_table_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_scheduler", "--rows", "2", "--steps", "3"])
    main()
    printed = capsys.readouterr().out
    names = [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("| ")]
    assert names == [
        "figure",
        "plan",
        "commit",
        "report",
        "encode",
        "settle",
        "sum of these",
        "add",
    ]
