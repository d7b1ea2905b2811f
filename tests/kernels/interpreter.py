"""Runs a module-level function with Triton's interpreter in place of its compiler.

The interpreter is chosen when `triton` is imported, so each call starts one fresh process: put all
cases of a module in one function. In it: fp32 and fp16 only (the interpreter's bf16 is wrong).
"""

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def run_interpreted(function: str, *arguments: str, timeout_s: float = 240.0) -> str:
    """Call `module:function` with `arguments` under TRITON_INTERPRET=1; returns what it printed.

    Raises AssertionError with the process's output when the function raises.
    """
    module, name = function.split(":")
    code = f"import sys, {module}\n{module}.{name}(*sys.argv[1:])"
    environment = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert ended.returncode == 0, f"{function} failed\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout
