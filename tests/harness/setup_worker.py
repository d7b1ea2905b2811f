"""Starts a worker of Ray as Ray's script of this name does, which imports half of Ray to do so.

That took half a second of CPU time before each actor. What Ray's script does beyond setting
environment variables is left to it.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path


def main(words: list[str]) -> None:
    """Become the worker's process. words: what the raylet gives to Ray's script."""
    options = argparse.ArgumentParser(allow_abbrev=False)
    options.add_argument("--serialized-runtime-env-context", default="{}")
    options.add_argument("--language")
    asked, worker = options.parse_known_args(words)
    context = json.loads(asked.serialized_runtime_env_context)
    python = context.pop("py_executable", sys.executable)
    variables = context.pop("env_vars", {})
    if asked.language != "PYTHON" or any(context.values()):
        os.execv(sys.executable, [sys.executable, str(_ray_script()), *words])
    _set(variables)
    os.execv(python, [python, *worker])


def _set(variables: Mapping[str, str]) -> None:
    """Names of variables in values stand for what those are, or for nothing, in turn."""
    for name, value in variables.items():
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))


def _ray_script() -> Path:
    ray = find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    return Path(ray.origin).parent / "_private" / "workers" / "setup_worker.py"


if __name__ == "__main__":
    main(sys.argv[1:])
