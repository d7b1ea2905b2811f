"""Runs a module-level function with Triton's interpreter in place of its compiler.

The interpreter is chosen when `triton` is imported, so that a process of its own runs them: one,
for all of a test process, because its imports take longer than most cases. In it: fp32 and fp16
only (the interpreter's bf16 is wrong), and products that do not depend on a line's place.
"""

import atexit
import contextlib
import importlib
import io
import json
import os
import random
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tests.harness.seeds import fresh_seed, seed_libraries
from tests.kernels.spared_work import spare_work

T = TypeVar("T")

_ROOT = Path(__file__).resolve().parents[2]


def drawn(cases: Sequence[T], number: int) -> list[T]:
    """Some of the cases, others in every run; prints which, for whoever reads of a failure."""
    places = sorted(random.sample(range(len(cases)), number))
    print(f"cases {places}")
    return [cases[place] for place in places]


class _Interpreter:
    """The process; it ends when its standard input is closed."""

    def __init__(self) -> None:
        environment = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.interpreter"],
            cwd=_ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.close)

    def run(self, function: str, arguments: tuple[str, ...]) -> tuple[bool, str]:
        """Whether it returned, and what it printed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([fresh_seed(), function, *arguments]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            return False, f"the process ended with {self.process.wait()}"
        is_good, printed = json.loads(answer)
        return is_good, printed

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


_started: list[_Interpreter] = []


def run_interpreted(function: str, *arguments: str) -> str:
    """Call `module:function` with `arguments` under TRITON_INTERPRET=1; returns what it printed.

    Raises AssertionError with what it printed when the function raises.
    """
    interpreter = _started.pop() if _started else _Interpreter()
    try:
        is_good, printed = interpreter.run(function, arguments)
    except BaseException:  # a test that ran out of time reads no answer, nor shall the next one
        interpreter.close()
        raise
    if interpreter.process.poll() is None:
        _started.append(interpreter)
    assert is_good, f"{function} failed\n{printed}"
    return printed


def _run(seed: int, function: str, *arguments: str) -> tuple[bool, str]:
    seed_libraries(seed)
    module, name = function.split(":")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            getattr(importlib.import_module(module), name)(*arguments)
        except BaseException:  # noqa: BLE001 - the test raises it
            return False, printed.getvalue() + traceback.format_exc()
    return True, printed.getvalue()


def _use_even_products() -> None:
    """Make the interpreter's `tl.dot` sum alike for every line of a tile, as a GPU does.

    NumPy's matmul calls a BLAS, in which the order of a sum may depend on the line's place. Where
    TRITON_INTERPRET=1 is set by hand, and not by `run_interpreted`, checks of equal bits fail.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(
        self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
    ) -> Any:
        del self, input_precision, max_num_imprecise_acc
        assert a.dtype.primitive_bitwidth >= 16, "bytes stand for FP8, which NumPy does not know"
        product = np.einsum("...ik,...kj->...ij", a.data, b.data, dtype=d.data.dtype)
        return TensorHandle(product + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


if __name__ == "__main__":
    _use_even_products()
    spare_work()
    for line in sys.stdin:
        print(json.dumps(_run(*json.loads(line))), flush=True)
