"""The lab of two Ray nodes, as it runs without GPUs: a rate over gloo, and both kills."""

import subprocess
import sys

import pytest

from load_tests.testbed.deployed import ROOT

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
