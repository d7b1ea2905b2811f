"""Processes that a bench starts end with it, however it ends.

    python -m load_tests.lab.child_processes PARENT SIGNAL PROGRAM ...     (of `bound_to_parent`)

A bench that is told to end (a time limit sends SIGTERM) ends as by an exception: what it started is
ended and its temporary folders are removed. One that is killed can do nothing: the kernel tells its
children.
"""

import argparse
import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def add_limit_option(parser: argparse.ArgumentParser) -> None:
    """For `end_after`."""
    parser.add_argument("--limit-s", type=float, default=600.0, help="of the whole run")


def end_after(limit_s: float) -> None:
    """This process ends then wherever it stands, with the stacks of its threads.

    A rank whose peer is gone waits for its GPU for ever, and takes no signal meanwhile.
    """
    faulthandler.dump_traceback_later(limit_s, exit=True)


def exit_on_sigterm() -> None:
    """From now on the first SIGTERM raises SystemExit in the main thread; others are ignored."""
    signal.signal(signal.SIGTERM, _exit)


def bound_to_parent(words: Sequence[str], number: signal.Signals) -> list[str]:
    """The command `words`, to be run by this process, as one that gets a signal at its end.

    More exactly: when the thread that starts it ends. The working directory has to be the
    project's.
    """
    told = [str(os.getpid()), str(int(number))]
    return [sys.executable, "-m", "load_tests.lab.child_processes", *told, *words]


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends, whatever it does then.

    Raises OSError.
    """
    _signal_at_parents_end(signal.SIGKILL)


def _exit(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one would cut the cleaning up short
    sys.exit(128 + number)


def _signal_at_parents_end(number: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _run(parent: int, number: int, words: list[str]) -> None:
    """Becomes `words`."""
    _signal_at_parents_end(number)
    if os.getppid() != parent:
        sys.exit("whoever started this has ended already")
    os.execvp(words[0], words)


if __name__ == "__main__":
    _run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
