"""A worker that only holds the devices Ray counts for it, for tests of its place on Ray."""

import os
from typing import Any

import ray

from actors.lifecycle.liveness import Lifeline
from actors.lifecycle.placement_groups import in_own_bundle


class Worker:
    """Computes nothing."""

    def devices(self) -> list[int]:
        return [int(i) for i in ray.get_gpu_ids()]

    def pid(self) -> int:
        return os.getpid()

    def start_rank(self, rank: int, options: dict[str, Any]) -> Any:
        """A further rank of this worker, which it owns."""
        self._rank = ray.remote(Worker).options(**options, **in_own_bundle(rank)).remote()
        return self._rank

    def crash(self) -> None:
        os._exit(3)

    def fall_silent(self) -> None:
        """As when no supervisor is left."""
        self._lifeline = Lifeline(1e-6).start()
