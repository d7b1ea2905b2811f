"""A worker that only holds the devices Ray counts for it, for tests of its place on Ray."""

import os

import ray

from actors.lifecycle.liveness import Lifeline


class Worker:
    """Computes nothing."""

    def devices(self) -> list[int]:
        return [int(i) for i in ray.get_gpu_ids()]

    def pid(self) -> int:
        return os.getpid()

    def crash(self) -> None:
        os._exit(3)

    def fall_silent(self) -> None:
        """As when no supervisor is left."""
        self._lifeline = Lifeline(1e-6).start()
