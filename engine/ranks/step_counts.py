"""How far rank 0 is with its steps, for those who wait for the ends of steps on other threads."""


class StepCounts:
    """How many steps of rank 0 were launched and have ended; others read it from any thread.

    Passes of a model that drafts are steps, too. They all end in the order of their launches, so
    one that was waited for has ended all before it.
    """

    def __init__(self) -> None:
        self.num_launched = 0
        self.num_ended = 0
