"""The tests' way to start a worker of Ray is Ray's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import setup_worker

# A worker that says how it was started.
WORKER = "import json, os, sys; print(json.dumps([sys.executable, sys.argv, dict(os.environ)]))"
ENVIRONMENT = dict(os.environ, FIRST="1")


def started_by(script: Path, *words: str) -> tuple[str, list[str], dict[str, str]]:
    command = [sys.executable, str(script), *words]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    python, arguments, environment = json.loads(done.stdout)
    # Set by bash, and by every import of Ray.
    for name in ("_", "SHLVL", "PWD", "OLDPWD", "RAY_CLIENT_MODE"):
        environment.pop(name, None)
    return python, arguments, environment


@pytest.mark.parametrize(
    "context",
    [
        {},
        {"env_vars": {"SECOND": "${FIRST} ${NOWHERE}$FIRST", "FIRST": "a  b", "THIRD": "$FIRST"}},
        {"command_prefix": ["PREFIXED=1"]},
    ],
    ids=["bare", "variables", "a prefix"],
)
def test_a_worker_is_started_as_by_ray(context: dict[str, object], tmp_path: Path) -> None:
    worker = tmp_path / "the worker.py"
    worker.write_text(WORKER)
    full = {"command_prefix": [], "env_vars": {}, "py_executable": sys.executable}
    full |= {"override_worker_entrypoint": None, "java_jars": []} | context
    words = [
        *("-s", str(worker), "--node-ip-address=10.0.0.1", "--temp-dir=/a  b", "--empty="),
        *(f"--serialized-runtime-env-context={json.dumps(full)}", "--language=PYTHON", "--last=$X"),
    ]
    ours = started_by(Path(setup_worker.__file__), *words)
    assert ours == started_by(setup_worker._ray_script(), *words)
    assert ours[1][-1] == "--last=$X"
