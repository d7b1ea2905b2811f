"""What copies between a device and the host tier take, and what steps beside them take.

    python -m load_tests.lab.bench_tier_copies            # one GPU, 10 s
    python -m load_tests.lab.bench_tier_copies --device cpu --layers 2     # stages nothing

Blocks of an 8B model in bf16, 256 at a time, by the tier's own mover, with and without staging.
First how long a load takes while many steps are queued, the first one and the next; then that what
comes back is what was saved, though a step overwrote it at once. Then how long the stream of the
steps is held by a save, and how long the thread that steps. Then steps like decoding (a few ids up,
60 products over 3 GB of weights, a few tokens down, which the host waits for), alone and while
another thread saves or loads; and the same of steps of prompts, for whose kernels digests wait.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import torch

from actors.lifecycle.threads import share_interpreter
from engine.kv.host.movers import BlockMover, build_mover
from engine.kv.host.tier import piece_size
from engine.kv.layout import KvLayout
from engine.kv.store import KvStore
from load_tests.lab.devices import describe_device
from load_tests.tables import render_rows

NUM_BLOCKS = 256
NUM_FEW = 8  # blocks
NUM_QUEUED = 40  # steps, about 50 ms on an H200
NUM_PROMPT_TOKENS = 8192
NUM_REPEATS = 7
NUM_BESIDE = 20  # saves or loads beside which steps are timed
MAX_STEPS = 3000
IDS = list(range(NUM_BLOCKS))
HEADER = ["beside", "steps", "mean ms", "p50", "p99", "GB/s of copies"]


class Copies:
    """A store, and an arena of as many blocks; half of the store's blocks are spare."""

    def __init__(self, layout: KvLayout, device: torch.device, num_staged: int) -> None:
        self.store = KvStore(layout, num_blocks=2 * NUM_BLOCKS, device=device)
        self._arena = np.zeros((NUM_BLOCKS, layout.block_bytes), dtype=np.uint8)
        self.mover: BlockMover = build_mover(self.store, self._arena, num_staged)
        self.gigabytes = NUM_BLOCKS * layout.block_bytes / 1e9

    def check(self) -> None:
        """Saves, overwrites, loads elsewhere. Raises AssertionError if a bit is another."""
        store, spare = self.store, [NUM_BLOCKS + i for i in IDS]
        store.tensor.normal_()
        before = store.gather(IDS)
        synchronize(store.device)
        wait = self.mover.save(IDS, IDS)
        store.zero(IDS)  # as a step that was given the blocks
        digests = wait()
        assert digests == store.digest_staged(before), "other digests"
        assert self.mover.begin_load()(IDS, spare) == digests, "other bits came back"
        assert torch.equal(store.gather(spare), before), "other bits came back"

    def piece_ms(self) -> float:
        """Of a load of a few blocks."""
        began_s = time.perf_counter()
        self.mover.begin_load()(IDS[:NUM_FEW], IDS[:NUM_FEW])
        return 1e3 * (time.perf_counter() - began_s)

    def save(self) -> None:
        self.mover.save(IDS, IDS)()

    def load(self) -> None:
        """In pieces, as the tier does."""
        copy, first = self.mover.begin_load(), 0
        while first < NUM_BLOCKS:
            end = first + piece_size(first, NUM_BLOCKS, self.store.layout.block_bytes)
            copy(IDS[first:end], IDS[first:end])
            first = end

    def save_times_ms(self) -> tuple[float, float, float]:
        """Of a save: the steps' stream held (0 on a CPU), the thread that steps, all."""
        device, found = self.store.device, list[tuple[float, float, float]]()
        for _ in range(NUM_REPEATS):
            synchronize(device)
            began_s, first = time.perf_counter(), mark(device)
            wait = self.mover.save(IDS, IDS)
            second, stepping_ms = mark(device), 1e3 * (time.perf_counter() - began_s)
            wait()
            all_ms = 1e3 * (time.perf_counter() - began_s)
            synchronize(device)
            held_ms = first.elapsed_time(second) if first is not None else 0.0
            found.append((held_ms, stepping_ms, all_ms))
        held, stepping, whole = (statistics.median(times) for times in zip(*found, strict=True))
        return held, stepping, whole


def mark(device: torch.device) -> Any:  # noqa: ANN401 - torch's events have no types
    """A point in the stream of the steps, to take times between; None on a CPU."""
    if device.type != "cuda":
        return None
    event: Any = torch.cuda.Event
    point = event(enable_timing=True)
    point.record()
    return point


class Steps:
    """Like decode steps of 16 rows, or the steps of as many tokens of prompts."""

    def __init__(self, device: torch.device, num_tokens: int = 16) -> None:
        width, depth, number = (6144, 4096, 60) if device.type == "cuda" else (64, 64, 2)
        dtype, pinned = torch.bfloat16, device.type == "cuda"
        self._device = device
        self._weights = [
            torch.randn(width, depth, device=device, dtype=dtype) for _ in range(number)
        ]
        self._rows = torch.randn(num_tokens, width, device=device, dtype=dtype)
        self._up = torch.zeros(1024, dtype=torch.int64, pin_memory=pinned)
        self._down = torch.zeros(1024, dtype=torch.int64, pin_memory=pinned)
        self._ids = torch.zeros(1024, dtype=torch.int64, device=device)

    def queue(self) -> None:
        """One step, which is not waited for on a GPU."""
        self._ids.copy_(self._up, non_blocking=True)
        for weight in self._weights:
            torch.matmul(self._rows, weight)
        self._down.copy_(self._ids, non_blocking=True)

    def times_ms(self, number: int, until: Event | None = None) -> list[float]:
        """At least `number`, and on until it is set."""
        found: list[float] = []
        while len(found) < MAX_STEPS:
            if len(found) >= number and (until is None or until.is_set()):
                break
            began_s = time.perf_counter()
            self.queue()
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            found.append(1e3 * (time.perf_counter() - began_s))
        return found

    def beside(self, name: str, work: Callable[[], None], gigabytes: float) -> list[str]:
        """A row of steps while another thread does `work`, over and over."""
        is_over = Event()

        def repeat() -> float:
            began_s = time.perf_counter()
            try:
                for _ in range(NUM_BESIDE):
                    work()
            finally:
                is_over.set()
            return time.perf_counter() - began_s

        with ThreadPoolExecutor(1) as pool:
            copying = pool.submit(repeat)
            times_ms = self.times_ms(5, is_over)
            return row(name, times_ms, f"{NUM_BESIDE * gigabytes / copying.result():.1f}")


def row(name: str, times_ms: Iterable[float], rate: str) -> list[str]:
    ms = sorted(times_ms)
    figures = statistics.mean(ms), ms[len(ms) // 2], ms[int(0.99 * len(ms))]
    cells = [name, str(len(ms)), *(f"{figure:.3f}" for figure in figures), rate]
    print("  ".join(cells), flush=True)  # the rest may not come
    return cells


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=36)
    return parser


def main() -> None:
    share_interpreter()  # as in a worker
    args = build_parser().parse_args()
    device = torch.device(args.device)
    layout = KvLayout.with_heads(
        num_layers=args.layers, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16"
    )
    steps = Steps(device)
    for num_staged in (0, NUM_BLOCKS // 2, NUM_BLOCKS) if device.type == "cuda" else (0,):
        copies = Copies(layout, device, num_staged)
        for _ in range(NUM_QUEUED):
            steps.queue()
        first_ms, next_ms = copies.piece_ms(), copies.piece_ms()
        print(
            f"{NUM_FEW} blocks loaded beside steps: first {first_ms:.2f} ms, then {next_ms:.2f}",
            flush=True,
        )
        copies.check()
        held_ms, stepping_ms, all_ms = copies.save_times_ms()
        print(
            f"{num_staged} rows to stage: a save holds the steps {held_ms:.3f} ms, their thread"
            f" {stepping_ms:.3f}; all {all_ms:.2f} ({1e3 * copies.gigabytes / all_ms:.1f} GB/s)",
            flush=True,
        )
    steps.times_ms(30)
    rows = [HEADER, row("nothing", steps.times_ms(300), "")]
    rows.append(steps.beside("saves", copies.save, copies.gigabytes))
    rows.append(steps.beside("loads", copies.load, copies.gigabytes))
    rows.append(row("nothing", steps.times_ms(300), ""))
    prompts = Steps(device, NUM_PROMPT_TOKENS)
    rows.append(row("nothing: prompts", prompts.times_ms(5), ""))
    rows.append(prompts.beside("saves: prompts", copies.save, copies.gigabytes))
    rows.append(prompts.beside("loads: prompts", copies.load, copies.gigabytes))
    print(render_rows(rows))
    print("\n".join(f"{name}: {value}" for name, value in describe_device(device).items()))


if __name__ == "__main__":
    main()
