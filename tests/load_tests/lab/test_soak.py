"""Soaks of the whole application, at night, by the script that anybody would run.

What happens to requests in them is in tests/actors/test_histories_virtual.py; here memory, files
and processes are watched besides.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MARGIN_S = 600  # for the oracle, two deployments and the rest afterwards, on a slow machine

pytestmark = [pytest.mark.ray, pytest.mark.nightly]


def _soak(folder: Path, *arguments: str) -> None:
    seen = folder / "soak.json"
    command = [sys.executable, "-m", "load_tests.lab.soak", "--json", str(seen), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(seen.read_text())
    assert report["outcomes"]["num_right"] > report["options"]["num_cases"], done.stdout


@pytest.mark.timeout(60 + MARGIN_S)
def test_a_minute_of_clients_that_leave_and_workers_that_die_costs_no_token(tmp_path: Path) -> None:
    _soak(tmp_path, "--seconds", "60", "--clients", "4", "--kill-every", "15")


@pytest.mark.timeout(600 + MARGIN_S)
def test_ten_minutes_of_it_leave_memory_files_tasks_and_blocks_as_they_were(tmp_path: Path) -> None:
    _soak(tmp_path, "--seconds", "600")
