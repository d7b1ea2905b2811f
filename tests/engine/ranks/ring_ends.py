"""One end of a ring as a process of its own: `python -m tests.engine.ranks.ring_ends ROLE ...`

reader NAME NUMBER PAUSE    prints `ready`; after an empty message a running digest for each before
                            it; waits up to PAUSE seconds, at random, before each
writer NAME SIZE            prints `ready`, then writes one message of so many bytes, and waits
"""

import hashlib
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from engine.ranks.plan_ring import PlanRing, PlanRingReader

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 60.0  # of what is not meant to fail, on a busy machine
STUCK_S = 0.5


class RingProcess:
    """A process, and the lines that it prints."""

    def __init__(self, *args: object) -> None:
        command = [sys.executable, "-m", "tests.engine.ranks.ring_ends", *map(str, args)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def rest(self) -> list[str]:
        """All that it still prints until it ends."""
        text, _ = self.process.communicate(timeout=PATIENCE_S)
        return text.split()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        stdout: IO[str] | None = self.process.stdout
        assert stdout is not None
        stdout.close()


def read(name: str, number: int, pause_s: float) -> None:
    ring = PlanRingReader(name, number, PATIENCE_S, PATIENCE_S)
    print("ready", flush=True)
    digest, messages = hashlib.blake2b(digest_size=8), []
    while message := ring.read():
        messages.append(message)  # digested later: a reader that works does not look at the ring
        if pause_s:
            time.sleep(random.uniform(0.0, pause_s))
    for message in messages:
        digest.update(message)
        print(digest.hexdigest())


def write(name: str, size: int) -> None:
    ring = PlanRing(name, 1, PATIENCE_S)
    print("ready", flush=True)
    ring.accept(PATIENCE_S)
    ring.write(bytes(size))
    threading.Event().wait()


if __name__ == "__main__":
    role, name, *rest = sys.argv[1:]
    if role == "reader":
        read(name, int(rest[0]), float(rest[1]))
    else:
        write(name, int(rest[0]))
