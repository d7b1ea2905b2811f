"""How a worker process ends itself when it cannot be trusted any more: one log line, then exit.

Ray restarts the actor. No cleanup: what would clean up is what failed.
"""

import faulthandler
import logging
import os
import traceback
from typing import NoReturn

logger = logging.getLogger(__name__)

EXIT_FAILED = 70  # EX_SOFTWARE
STDERR = 2  # the file itself, whatever `sys.stderr` is by now


def exit_failed(who: str, error: BaseException) -> NoReturn:
    """The engine raised what no request is to blame for: a CUDA error, no memory, a broken rule.

    A device that failed once answers wrongly afterwards.
    """
    reason = "".join(traceback.format_exception(error))
    logger.critical("%s: the engine failed, exiting:\n%s", who, reason)
    _exit()


def exit_stalled(who: str, stall_s: float) -> NoReturn:
    """The engine hangs; every thread's stack goes to stderr."""
    logger.critical("%s: the engine made no progress for %.0f s, exiting", who, stall_s)
    faulthandler.dump_traceback(file=STDERR, all_threads=True)
    _exit()


def _exit() -> NoReturn:
    logging.shutdown()
    os._exit(EXIT_FAILED)
