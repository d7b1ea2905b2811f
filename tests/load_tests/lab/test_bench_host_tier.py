"""The bench of the host tier as far as it needs no model."""

import sys

import pytest

from actors.lifecycle.threads import SWITCH_S
from load_tests.lab.bench_host_tier import Runner, build_parser


def test_threads_share_the_interpreter_as_in_a_worker() -> None:
    """With Python's 5 ms a load waits for a whole turn of the thread that steps."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(5e-3)
    try:
        Runner(build_parser().parse_args([]), None, [], 1)
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    finally:
        sys.setswitchinterval(before_s)
