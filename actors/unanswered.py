"""Which actors are there and say nothing: a stopped process, or an event loop that hangs.

Such an actor cannot end itself, and Ray takes it for alive. Time is counted in calls, not read from
a clock: a supervisor that was stopped itself and goes on must not blame the others. Knows no Ray.
"""

MAX_UNANSWERED = 4  # calls in a row


class Unanswered:
    """Calls to actors that ran out of time, by actor; each waits as long as the caller thinks fit.

    One that has never answered is not judged: it may wait for a device, or load.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def answered(self, name: str) -> None:
        """It works; from now on it is expected to."""
        self._counts[name] = 0

    def forget(self, name: str) -> None:
        """It died or starts: it is not expected to answer until it has done so again."""
        self._counts.pop(name, None)

    def timed_out(self, name: str) -> bool:
        """One more call without an answer; True, once, when there were too many."""
        if name not in self._counts:
            return False
        self._counts[name] += 1
        if self._counts[name] < MAX_UNANSWERED:
            return False
        del self._counts[name]
        return True
