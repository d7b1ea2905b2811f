"""A cable that delays and loses frames: two virtual network cards, and a process between them.

    python -m load_tests.testbed.weak_cable CARD OTHER_CARD

Makes both cards, prints "ready", and passes every frame that leaves one of them to the other, until
it is ended. Each line that it reads sets what happens to frames from then on: milliseconds of delay
each way, and the share of frames that are lost. For kernels without netem, which does the same.
"""

import fcntl
import os
import random
import selectors
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000  # whole Ethernet frames, and nothing before them
_MAX_FRAME_BYTES = 65536
# As in a switch: a sender that is too fast for the delay loses frames too.
_MAX_WAITING = 20_000


@dataclass(slots=True)
class Weather:
    """What happens to a frame."""

    delay_s: float = 0.0  # each way
    loss: float = 0.0  # share of frames

    @staticmethod
    def parse(line: str) -> "Weather":
        """Reads milliseconds and a share. Raises ValueError for anything else."""
        delay_ms, loss = map(float, line.split())
        return Weather(delay_s=delay_ms / 1e3, loss=loss)


@dataclass(slots=True)
class Direction:
    """Frames on their way from one card to the other, in their order."""

    source: int  # file of the card
    target: int
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)  # due at, frame

    def read(self, weather: Weather, rng: random.Random) -> None:
        """Takes one frame, and loses it or lets it wait for its delay."""
        frame = os.read(self.source, _MAX_FRAME_BYTES)
        if rng.random() >= weather.loss and len(self.waiting) < _MAX_WAITING:
            self.waiting.append((time.monotonic() + weather.delay_s, frame))

    def write_due(self) -> float | None:
        """Passes on what has waited long enough; returns seconds until the next is due."""
        while self.waiting:
            left_s = self.waiting[0][0] - time.monotonic()
            if left_s > 0:
                return left_s
            _, frame = self.waiting.popleft()
            with suppress(OSError):  # the card is down or gone: the frame is lost, as on any cable
                os.write(self.target, frame)
        return None


def relay(card: int, other: int, rng: random.Random) -> None:
    """Passes frames on until the standard input ends."""
    weather = Weather()
    directions = [Direction(card, other), Direction(other, card)]
    with selectors.DefaultSelector() as selector:
        for direction in directions:
            selector.register(direction.source, selectors.EVENT_READ, direction)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            waits = [left_s for one in directions if (left_s := one.write_due()) is not None]
            for key, _ in selector.select(min(waits, default=None)):
                if isinstance(key.data, Direction):
                    key.data.read(weather, rng)
                elif line := sys.stdin.readline():
                    weather = Weather.parse(line)
                else:
                    return


def make_card(name: str) -> int:
    """Makes a virtual network card, which is gone when its file is closed."""
    file = os.open("/dev/net/tun", os.O_RDWR)
    wanted = struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI)
    fcntl.ioctl(file, _TUNSETIFF, wanted)
    return file


def main() -> None:
    card, other = (make_card(name) for name in sys.argv[1:])
    print("ready", flush=True)
    relay(card, other, random.Random(7))


if __name__ == "__main__":
    main()
