"""NCCL's own deadline, which no group of this project has: all deadlines are the callers'.

The watchdog of torch's groups (2.11 to 2.13) reads from a clock how long ago an operation was
queued, and asks only then whether it has ended. So once a process was stopped and goes on, it takes
operations that have ended for ones that hang. It then ends the process, or, where that is
forbidden, sleeps for a minute with a lock that the next operation needs and the group's end waits
for. It does not see replays of graphs either.
"""

from datetime import timedelta

NO_WATCHDOG = timedelta(days=365)  # the timeout of a group's options
