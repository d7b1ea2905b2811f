"""What the death of a rank costs: workers of two ranks under load, each killed and each stopped

    RAY_AUTH_MODE=disabled OMP_NUM_THREADS=1 \\
        python -m load_tests.lab.gang_deaths --out gang_deaths.md
    python -m load_tests.lab.gang_deaths --device cuda    # a unified worker on two GPUs
    python -m load_tests.lab.gang_deaths --sizes 1 2      # one rank prefills, two decode

Once a unified worker, once a prefill and a decode worker (on GPUs that takes four). Each cell is a
handful of streamed requests to the real application, one signal to one rank, and a look at what
came of it: answers that were whole, wrong or lost; seconds until the gang was whole again; what was
left of the old one. Answers are compared token for token with those of an engine of
one rank on the CPU, in this process. Exits with 1 if one was wrong or lost, or anything was left.
"""

import argparse
import itertools
import random
import shlex
import signal
import sys
import time
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from actors.lifecycle.deployment import rank_name
from actors.lifecycle.placement_groups import worker_groups
from load_tests.lab.failure_stage import Ask
from load_tests.lab.soak_cases import Case, answer_cases
from load_tests.tables import describe_machine, render_rows
from load_tests.testbed.deployed import MODEL, Cluster, wait_until
from load_tests.testbed.system import System, signal_process
from load_tests.testbed.traces import is_gone, left_of, rings_of

NUM_RANKS = 2
NUM_STREAMS = 4
BLOCK_SIZE = 16
STREAM_TOKENS = 300
PROMPT_TOKENS, PROMPT_NEW = 1900, 20
VOCABULARY = (10, 3000)  # ids of prompts
PATIENCE_S = 120.0
LOOK_EVERY_S = 0.02
STALL_S = 5.0
DEPLOYMENT: dict[str, object] = {
    "workers.tensor_parallel_size": NUM_RANKS,
    "workers.num_cpus": 0.1,  # so that it has a placement group
    "workers.stall_s": STALL_S,
    "cache.block_size": BLOCK_SIZE,
    "scheduler.max_num_seqs": 16,
    "scheduler.max_num_batched_tokens": 32,  # a prompt takes many steps
    "lifetimes.supervisor_silence_s": 8.0,
    "lifetimes.supervisor_heartbeat_s": 0.5,
    "lifetimes.ingress_silence_s": 5.0,
}
UNIFIED: dict[str, object] = {"workers.unified": 1}
APART: dict[str, object] = {
    "workers.unified": 0,
    "workers.prefill": 1,
    "workers.decode": 1,
    "handoff.piece_bytes": 1,  # a block a piece: a transfer takes as long as its prompt
}
# In fp32, so that only sums in another order stand between a GPU's tokens and a CPU's.
ON_GPUS: dict[str, object] = {
    "model.device": "cuda",
    "model.dtype": "float32",
    "model.attention.prefill": "reference",  # the one that computes in fp32
    "model.attention.decode": "reference",
    "execution.cuda_graphs": False,
    "workers.num_gpus": 1,
    "cache.num_blocks": 2048,
}
# Where prefill and decode are apart, a prompt's KV moves as it computes.
PHASES = ("before a prompt", "mid prompt", "mid stream")
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
HEADER = (
    "worker",
    "rank",
    "signal",
    "phase",
    "whole",
    "wrong",
    "lost",
    "whole again, s",
    "left over",
)
COMMAND = "RAY_AUTH_MODE=disabled OMP_NUM_THREADS=1 python -m load_tests.lab.gang_deaths"


Sizes = dict[str, int]  # role -> ranks of its worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One signal to one rank."""

    role: str  # of its worker
    rank: int
    signal: str
    phase: str
    num_asks: int
    num_wrong: int
    num_lost: int
    restored_s: float
    left: str  # in words; "" = nothing

    @property
    def is_violation(self) -> bool:
        return bool(self.num_wrong or self.num_lost or self.left)

    def cells(self) -> tuple[str, ...]:
        num_whole = self.num_asks - self.num_wrong - self.num_lost
        return (
            self.role,
            str(self.rank),
            self.signal,
            self.phase,
            f"{num_whole} of {self.num_asks}",
            str(self.num_wrong),
            str(self.num_lost),
            f"{self.restored_s:.1f}",
            self.left or "nothing",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GangCases:
    """What is asked."""

    streams: list[Case]
    prompt: Case


def draw_cases(rng: random.Random) -> GangCases:
    """With their right answers; seeded samples, so that a shifted draw would be seen."""

    def case(num_prompt_tokens: int, num_tokens: int) -> Case:
        ids = [rng.randrange(*VOCABULARY) for _ in range(num_prompt_tokens)]
        sampling = {"temperature": 1.0, "seed": rng.randrange(2**31)}
        return Case(prompt_ids=ids, text=None, sampling=sampling, num_tokens=num_tokens)

    asked = [case(9, STREAM_TOKENS) for _ in range(NUM_STREAMS)]
    asked.append(case(PROMPT_TOKENS, PROMPT_NEW))
    answered = answer_cases(MODEL, asked)
    if len(answered) != len(asked):
        return draw_cases(rng)  # one hangs on how a sum was rounded
    *streams, prompt = answered
    return GangCases(streams=streams, prompt=prompt)


class GangStage:
    """Workers of several ranks, and who is who in the one that is to fail."""

    def __init__(self, system: System, cases: GangCases, role: str, sizes: Sizes) -> None:
        """role: of the worker that is to fail."""
        self.system = system
        self._num_ranks = sizes[role]
        self._cases = cases
        self._salts = (f"{role} salt {number}" for number in itertools.count())
        self._role = role
        self._worker = f"{role}-0.{system.application.hash}"

    def names(self) -> list[str]:
        """Of the ranks' actors, in their order."""
        return [
            self._worker,
            *(rank_name(self._worker, rank) for rank in range(1, self._num_ranks)),
        ]

    def pids(self) -> list[int]:
        """Raises AssertionError while a rank does not answer."""
        pids = [self.system.pid(name) for name in self.names()]
        assert None not in pids, f"{self.names()}: {pids}"
        return [pid for pid in pids if pid is not None]

    def ask(self, case: Case) -> Ask:
        return Ask(self.system, case, next(self._salts))

    def run(self, rank: int, name: str, phase: str) -> Outcome:
        """One cell. Raises AssertionError if the gang does not become whole again."""
        before = self.pids()
        rings = rings_of(before)
        asks = self._bring_to(phase)
        began_s = time.monotonic()
        signal_process(before[rank], SIGNALS[name])
        if phase == "before a prompt":
            asks += [self.ask(case) for case in (*self._cases.streams, self._cases.prompt)]
        wait_until(lambda: self._is_whole_again(before), "the gang is whole again", PATIENCE_S)
        restored_s = time.monotonic() - began_s
        for ask in asks:
            ask.wait()
        return Outcome(
            role=self._role,
            rank=rank,
            signal=name,
            phase=phase,
            num_asks=len(asks),
            num_wrong=sum(not ask.is_right for ask in asks),
            num_lost=sum(ask.is_right and not ask.is_whole for ask in asks),
            restored_s=restored_s,
            left=self._left(before, rings),
        )

    def _bring_to(self, phase: str) -> list[Ask]:
        """Requests in that phase: all of them stream, and one has a part of its prompt computed."""
        if phase == "before a prompt":
            return []
        asks = [self.ask(case) for case in self._cases.streams]
        wait_until(lambda: all(len(ask.tokens) > 5 for ask in asks), "all stream", PATIENCE_S)
        if phase == "mid prompt":
            before = self._num_done()
            asks.append(self.ask(self._cases.prompt))
            wait_until(
                lambda: self._num_done() > before + PROMPT_TOKENS // 8,
                "a part of the prompt is computed, and has moved",
                PATIENCE_S,
            )
        return asks

    def _num_done(self) -> int:
        """Prompt tokens whose KV is where it will be decoded; no partial blocks."""
        for seen in self.system.statistics().values():
            if "receiver" in seen:
                return BLOCK_SIZE * int(seen["receiver"]["num_pieces"])
        return int(seen["scheduler"]["num_prompt_tokens_computed"])

    def _is_whole_again(self, before: Sequence[int]) -> bool:
        now = [self.system.pid(name) for name in self.names()]
        return None not in now and set(now).isdisjoint(before) and self.system.is_ready()

    def _left(self, before: Sequence[int], rings: Set[str]) -> str:
        """What is left of the old gang, or held for requests, when all should be quiet."""
        until_s = time.monotonic() + PATIENCE_S / 4
        while (left := self._look(before, rings)) and time.monotonic() < until_s:
            time.sleep(LOOK_EVERY_S)
        return "; ".join(left)

    def _look(self, before: Sequence[int], rings: Set[str]) -> list[str]:
        left = [f"process {pid}" for pid in before if not is_gone(pid)]
        left += [f"{what}: {num}" for what, num in self.system.held().items()]
        groups = sorted(worker_groups(self.system.name))
        workers = sorted(self.system.application.workers())
        left += [f"groups of {groups}"] if groups != workers else []
        return left + sorted(left_of(rings))


def render(outcomes: Sequence[Outcome], options: str, device: str) -> str:
    """The record, in markdown."""
    machine = ", ".join(f"{what}: {value}" for what, value in describe_machine().items())
    return "\n".join(
        [
            "# What the death of a rank costs",
            "",
            f"    {COMMAND} {options}",
            "",
            f"Workers of {NUM_RANKS} ranks, if no sizes are named, the shipped model; on {device},",
            f"workers.stall_s {STALL_S:g}, supervisor_silence_s 8; {machine}.",
            f"{NUM_STREAMS} streams of {STREAM_TOKENS} tokens, and a prompt of {PROMPT_TOKENS}",
            "tokens but for `mid stream`.",
            "Once a unified worker, once a prefill and a decode worker, of which one is hit; there",
            "`mid prompt` is mid transfer as well: a prompt's blocks move as it computes.",
            "Every answer is compared token for token with an engine of one rank. Whole again:",
            "from the signal until every rank is another process and `/ready` says so. Left over:",
            "old processes, blocks, rows, leases, rings, placement groups. A rank that is stopped",
            "is noticed by the other one's heartbeat, within workers.stall_s.",
            "",
            render_rows([HEADER, *(outcome.cells() for outcome in outcomes)]),
            "",
        ]
    )


def deployments(
    device: str, sizes: tuple[int, int] | None
) -> list[tuple[dict[str, object], Sizes]]:
    """Settings of each application, and the sizes of its workers."""
    unified, apart = {"unified": NUM_RANKS}, {"prefill": NUM_RANKS, "decode": NUM_RANKS}
    chosen = [(UNIFIED, unified), (APART, apart)]
    if sizes is not None:
        apart = dict(zip(apart, sizes, strict=True))
        asked = {f"workers.{role}_tensor_parallel_size": size for role, size in apart.items()}
        chosen = [(APART | asked, apart)]
    if device == "cpu":
        return [(DEPLOYMENT | workers, found) for workers, found in chosen]
    num_gpus = torch.cuda.device_count()
    return [
        (DEPLOYMENT | ON_GPUS | workers, found)
        for workers, found in chosen
        if sum(found.values()) <= num_gpus
    ]


def cells_of(sizes: Sizes, only: Sequence[str]) -> list[tuple[str, int, str, str]]:
    """Role, rank, signal and phase of each cell whose words hold all of `only`."""
    ranks = [(role, rank) for role, size in sizes.items() for rank in range(size)]
    cells = [(*rank, name, phase) for rank in ranks for name in SIGNALS for phase in PHASES]
    return [cell for cell in cells if all(text in " ".join(map(str, cell)) for text in only)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write the record there, in markdown")
    parser.add_argument(
        "--only", nargs="*", default=[], help="cells whose role, rank, signal and phase hold all"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--sizes", type=int, nargs=2, metavar=("PREFILL", "DECODE"), help="no unified worker"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    args = parser.parse_args()
    planned = [
        (deployment, sizes, cells)
        for deployment, sizes in deployments(args.device, args.sizes)
        if (cells := cells_of(sizes, args.only))
    ]
    if not planned:
        parser.error("no cell is left: name other --sizes or --only, or take more GPUs")
    cluster = Cluster.start()
    outcomes = []
    drawing = ThreadPoolExecutor(1)  # while the first application starts
    drawn = drawing.submit(draw_cases, random.Random(args.seed))
    try:
        for number, (deployment, sizes, cells) in enumerate(planned):
            began_s = time.monotonic()
            system = System(cluster, f"gang-deaths-{number}", deployment)
            print(
                f"{' and '.join(sizes)}: ready {time.monotonic() - began_s:.0f} s after the start",
                flush=True,
            )
            cases = drawn.result()
            stages = {role: GangStage(system, cases, role, sizes) for role in sizes}
            for role, rank, name, phase in cells:
                outcomes.append(stages[role].run(rank, name, phase))
                print(*outcomes[-1].cells(), sep=" | ", flush=True)
            system.stop()
    finally:
        drawing.shutdown()
        cluster.stop()
    options = f"--device {args.device} --seed {args.seed}"
    if args.sizes:
        options += " --sizes " + " ".join(map(str, args.sizes))
    if args.only:
        options += " --only " + shlex.join(args.only)
    text = render(outcomes, options, args.device)
    if args.out:
        args.out.write_text(text)
    print(text)
    sys.exit(any(outcome.is_violation for outcome in outcomes))


if __name__ == "__main__":
    main()
