"""The host tier on a virtual clock: it loads where that pays, and costs next to nothing else."""

import pytest

from load_tests.lab.bench_host_tier import build_parser
from load_tests.lab.simulate_host_tier import HEADER, Simulation, add_options

GIVEN = (
    "--scale 1 --duration-s 12 --max-model-len 4096 --max-output-tokens 8 --at-once 2 --host-gib 4"
)


def _simulate(*options: str) -> dict[str, dict[str, float]]:
    """By the run, then by the column."""
    parser = build_parser()
    add_options(parser)
    simulation = Simulation(parser.parse_args([*GIVEN.split(), *options]))
    for host_gib in (0.0, 4.0):
        simulation.run(host_gib)
    _, *rows = simulation.rows
    numbers = [[float("nan") if cell == "-" else float(cell) for cell in row[1:]] for row in rows]
    named = zip((row[0] for row in rows), numbers, strict=True)
    return {name: dict(zip(HEADER[1:], found, strict=True)) for name, found in named}


@pytest.fixture(scope="module")
def fast() -> dict[str, dict[str, float]]:
    return _simulate("--kernel-ms", "0")


def test_conversations_that_come_back_are_loaded_and_begin_sooner(
    fast: dict[str, dict[str, float]],
) -> None:
    without, with_tier = fast["conversations, 0 GiB"], fast["conversations, 4 GiB"]
    assert with_tier["loads"] > 10
    assert with_tier["given up"] < 0.2 * with_tier["loads"]
    assert with_tier["tokens computed"] < 0.6 * without["tokens computed"]
    assert with_tier["first token ms: mean"] < 0.8 * without["first token ms: mean"]


def test_where_nothing_comes_back_first_tokens_are_as_early(
    fast: dict[str, dict[str, float]],
) -> None:
    without, with_tier = fast["all different, 0 GiB"], fast["all different, 4 GiB"]
    assert with_tier["tokens computed"] == without["tokens computed"]
    ratio = with_tier["first token ms: mean"] / without["first token ms: mean"]
    assert 0.98 < ratio < 1.01


def test_a_run_is_repeated_exactly(fast: dict[str, dict[str, float]]) -> None:
    assert str(_simulate("--kernel-ms", "0")) == str(fast)


def test_loads_get_on_sooner_where_threads_switch_sooner() -> None:
    """A thread that loads wants the interpreter several times a piece."""
    late, soon = (
        _simulate("--kernel-ms", "0", "--turn-ms", "3", "--switch-ms", switch_ms)
        for switch_ms in ("5", "0.1")
    )
    name = "conversations, 4 GiB"
    assert soon[name]["found %"] > late[name]["found %"] + 5
    assert soon[name]["first token ms: mean"] < 0.95 * late[name]["first token ms: mean"]
