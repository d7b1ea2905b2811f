"""Scenario files: those that come with the project, what is refused, and what a command changes."""

import random
from pathlib import Path

import pytest

from load_tests.http_load.scenario import (
    FOLDER,
    Changes,
    ScenarioError,
    Trace,
    change,
    read_scenario,
)

NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
MINIMAL = """
name: tiny
about: One length.
rate: 3
slo: {short: {ttft_ms: 100}, long: {ttft_ms: 1000}}
load:
  kind: drawn
  prompts: [{share: 1, prompt_tokens: {kind: fixed, tokens: 5}, output_tokens: {kind: fixed, tokens: 2}}]
"""  # noqa: E501


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_of_the_project_is_read_by_its_name(name: str) -> None:
    scenario = read_scenario(name)
    assert scenario.name == name
    assert scenario.about.endswith(".")
    assert (scenario.rate is None) == isinstance(scenario.load, Trace)


def test_all_named_scenarios_are_there() -> None:
    assert NAMES == ["agents", "azure_trace", "chat", "documents", "mixed", "mooncake_trace"]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("rate: 3", "rate: 3\nrates: 4", "rates"),
        ("ttft_ms: 100}", "ttf_ms: 100}", "ttf_ms"),
        ("rate: 3", "rate: -3", "rate"),
        ("rate: 3", "", "rate"),
        ("rate: 3", "rate: .inf", "rate"),
        ("kind: drawn", "kind: drwan", "drwan"),
        ("tokens: 5", "tokens: 0", "prompt_tokens"),
        ("kind: fixed, tokens: 5", "kind: uniform, min: 9, max: 8", "min 9"),
        ("kind: fixed, tokens: 5", "kind: quantiles, points: [[0, 9], [0.5, 8], [1, 10]]", "rise"),
        ("{share: 1,", "{share: 1, num_documents: 3,", "document_tokens"),
        ("rate: 3", "rate: [", "tiny.yaml"),
    ],
)
def test_what_is_wrong_in_a_file_is_told(tmp_path: Path, old: str, new: str, told: str) -> None:
    read_scenario(write(tmp_path, MINIMAL))
    assert old in MINIMAL
    with pytest.raises(ScenarioError, match=told):
        read_scenario(write(tmp_path, MINIMAL.replace(old, new)))


def test_a_name_that_is_not_there_comes_back_with_those_that_are() -> None:
    with pytest.raises(ScenarioError, match="mooncake_trace"):
        read_scenario("nothing")


def test_a_command_line_changes_what_it_names_and_nothing_else() -> None:
    scenario = read_scenario("mixed")
    rate, seed = random.uniform(1, 9), random.randrange(99)
    changed = change(scenario, Changes(rate=rate, seed=seed, shrink=8, share_cancelled=0.25))
    assert (changed.rate, changed.seed, changed.share_cancelled) == (rate, seed, 0.25)
    assert (changed.duration_s, changed.load, changed.slo) == (
        scenario.duration_s,
        scenario.load,
        scenario.slo,
    )
    assert changed.class_of(256 // 8) == "short"
    assert changed.class_of(256 // 8 + 1) == "long"


@pytest.mark.parametrize(
    "changes",
    [Changes(rate=0.0), Changes(shrink=0), Changes(share_cancelled=1.5), Changes(seed=-1)],
)
def test_a_bad_change_is_refused(changes: Changes) -> None:
    with pytest.raises(ScenarioError, match="mixed"):
        change(read_scenario("mixed"), changes)


def test_only_a_trace_scenario_takes_a_trace() -> None:
    with pytest.raises(ScenarioError, match="replays no trace"):
        change(read_scenario("mixed"), Changes(trace="somewhere.csv"))
    load = change(read_scenario("azure_trace"), Changes(trace="somewhere.csv")).load
    assert isinstance(load, Trace)
    assert load.path == "somewhere.csv"
