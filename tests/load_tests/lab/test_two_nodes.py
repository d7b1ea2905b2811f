"""The lab of two Ray nodes, as it runs without GPUs: a rate over gloo, and both kills."""

import subprocess
import sys
from pathlib import Path

import pytest
from ray._private.utils import read_ray_address, write_ray_address

from load_tests.testbed.deployed import ROOT
from load_tests.testbed.ray_nodes import Node, RayNodes, forget_address

SMALL = "--tokens 64 --prompt-tokens 800 --stream-tokens 300"


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_workers_of_two_nodes_are_killed_and_no_token_is_wrong() -> None:
    command = [sys.executable, "-m", "load_tests.lab.two_nodes", "--device", "cpu"]
    command += ["--kinds", "addresses", *SMALL.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| gloo_pair |" in done.stdout
    assert "channels of another kind than gloo_pair: 0" in done.stdout


def test_no_address_of_a_killed_head_is_left_and_another_s_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    cluster = RayNodes([Node("127.0.0.2", None, {})], tmp_path, 4321)
    for address in (cluster.gcs_address, "127.0.0.9:4321"):
        write_ray_address(address)
        forget_address(cluster)
        assert read_ray_address() == (None if address == cluster.gcs_address else address)
