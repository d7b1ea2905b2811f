"""How the threads of one process share its interpreter."""

import sys

# A worker's event loop and its engine's thread wake each other several times a step, and each is
# soon done; a rank beside the first launches steps beside threads that move blocks. With Python's
# 5 ms, one that wants to go on waits until the other happens to give the interpreter away; with
# this, it takes it.
SWITCH_S = 1e-4


def share_interpreter() -> None:
    """Lets a thread keep the interpreter for no longer than SWITCH_S while another one waits."""
    sys.setswitchinterval(SWITCH_S)
