"""The peer's bench as far as it goes without the peer: switches, names, and a clear refusal."""

from pathlib import Path

import pytest

from load_tests.lab.bench_mixed_vllm import build_parser, label, run


def test_settings_are_in_the_label() -> None:
    plain = build_parser().parse_args([])
    assert label(plain) == "vLLM, 8192 batched tokens"
    switches = "--batched-tokens 2048 --long-threshold 1024 --short-first"
    tuned = build_parser().parse_args(switches.split())
    assert label(tuned) == "vLLM, 2048 batched tokens, long threshold 1024, short first"
    eight = build_parser().parse_args("--quantization fp8 --kv-dtype fp8".split())
    assert label(eight) == "vLLM, 8192 batched tokens, fp8 weights, fp8 KV"


def test_a_search_needs_limits(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--limits"):
        run(build_parser().parse_args(["--search"]), tmp_path)


@pytest.mark.parametrize("limits", ["100", "1,2", "1,2,3,4", "a,b,c"])
def test_limits_are_three_numbers(limits: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--limits", limits])
    assert "--limits" in capsys.readouterr().err
