"""How long a message takes through the ring from a leader to its ranks, copies included

    python -m load_tests.lab.bench_plan_ring [--readers 1]

One way, from before the write to after the read of the slowest reader, in processes of their own.
`soon`: the next message comes while readers look for it; `asleep`: they have gone to sleep.
"""

import argparse
import os
import struct
import subprocess
import sys
import time
import uuid

from engine.ranks.plan_ring import SPIN_S, PlanRing, PlanRingReader
from load_tests.tables import render_rows

SIZES_KB = (1, 16, 128)
PAUSES_S = {"soon": SPIN_S / 4, "asleep": 20 * SPIN_S}
WARM_ROUNDS = 50
PATIENCE_S = 30.0
HEADER = ("KB", "readers are", "p50, us", "p99, us")
_AT = struct.Struct("<d")


def read(name: str, number: int) -> None:
    """A reader: reports when it had each message."""
    ring = PlanRingReader(name, number, PATIENCE_S, PATIENCE_S)
    while ring.read():
        ring.report(_AT.pack(time.perf_counter()))


def times_us(
    ring: PlanRing, num_readers: int, num_bytes: int, pause_s: float, rounds: int
) -> tuple[str, ...]:
    """p50 and p99 of a message's way, in microseconds."""
    message, took_us = os.urandom(num_bytes), []
    for _ in range(WARM_ROUNDS + rounds):
        until_s = time.perf_counter() + pause_s
        while time.perf_counter() < until_s:
            pass
        began_s = time.perf_counter()
        ring.write(message)
        had_s: list[float] = []
        while len(had_s) < num_readers:
            told = ring.wait_reports(PATIENCE_S)
            had_s += [_AT.unpack(report)[0] for _, report in told if report]
        took_us.append(1e6 * (max(had_s) - began_s))
    took_us = sorted(took_us[WARM_ROUNDS:])
    return tuple(f"{took_us[int(share * len(took_us))]:.1f}" for share in (0.5, 0.99))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--readers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--read", nargs=2, metavar=("NAME", "NUMBER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        read(args.read[0], int(args.read[1]))
        return
    name = f"bench-{uuid.uuid4().hex}"
    rows: list[tuple[str, ...]] = [HEADER]
    with PlanRing(name, args.readers, PATIENCE_S) as ring:
        command = [sys.executable, "-m", "load_tests.lab.bench_plan_ring", "--read", name]
        readers = [subprocess.Popen([*command, str(i)]) for i in range(args.readers)]
        for _ in readers:
            ring.accept(PATIENCE_S)
        for size_kb in SIZES_KB:
            for when, pause_s in PAUSES_S.items():
                found = times_us(ring, args.readers, 1024 * size_kb, pause_s, args.rounds)
                rows.append((str(size_kb), when, *found))
        ring.write(b"")
        for reader in readers:
            reader.wait()
    print(render_rows(rows))


if __name__ == "__main__":
    main()
