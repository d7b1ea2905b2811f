"""Benches that start side by side on the same GPUs and measure in turn.

Each says that it is ready and waits, idle and with every thread of it running, until a file exists:
whoever starts them makes the file when nobody else measures. A bench that is stopped with SIGSTOP
instead may die when it goes on: the deadlines of other engines, NCCL's watchdog among them, count
the time of the stop.
"""

import argparse
import time
from pathlib import Path

LOOK_S = 0.02


def add_turn_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--turn", type=Path, metavar="FILE", help="measure once it exists; default: at once"
    )


def wait_turn(file: Path | None) -> bool:
    """Returns once `file` exists; at once where there is none to wait for.

    Whether there was one: the GPU was idle then, and has to be warmed up again.
    """
    while file is not None and not file.exists():
        time.sleep(LOOK_S)
    return file is not None
