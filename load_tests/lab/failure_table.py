"""What each failure costs: every row of the matrix that a CPU can show, in every phase it has

    RAY_AUTH_MODE=disabled OMP_NUM_THREADS=1 \\
        python -m load_tests.lab.failure_table --out failures.md

Each cell is one streamed request to the real application, brought into its phase (seen in what the
workers hold), one deed, and a look at what came of it: what the client saw, token for token; how
long it waited for its next token and the system for all of its parts; what is still held when all
is quiet. Exits with 1 if a client saw what it must not see, or something leaked.
"""

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from load_tests.lab.failure_rows import FROM_OUTSIDE, NOT_RUN, ON_DEMAND, Row, Sees, nothing
from load_tests.lab.failure_stage import Ask, Cases, Phase, PhaseMissedError, Stage
from load_tests.lab.soak_cases import Case, answer_cases
from load_tests.tables import describe_machine
from load_tests.testbed.deployed import MODEL, Cluster
from load_tests.testbed.system import System

SUBJECT_TOKENS, SUBJECT_NEW = 800, 60
TALKER_NEW, OCCUPANT_NEW = 1000, 400
NUM_OCCUPANTS = 4
SHORT_TOKENS = 9
VOCABULARY = (10, 3000)  # ids of prompts
TRIES = 3  # to bring a request into its phase
REST_S = 90.0
LOOK_EVERY_S = 0.1
COMMAND = "RAY_AUTH_MODE=disabled OMP_NUM_THREADS=1 python -m load_tests.lab.failure_table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One row of the matrix in one phase."""

    row: Row
    phase: Phase
    view: str
    silence_s: float | None
    ready_s: float | None  # None = not all parts were there in time
    held: dict[str, int]  # when quiet, by `worker: owner`
    is_seen_rightly: bool

    @property
    def is_violation(self) -> bool:
        return not self.is_seen_rightly or self.ready_s is None or bool(self.held)

    def line(self) -> str:
        """Of a markdown table."""
        silence = "-" if self.silence_s is None else f"{self.silence_s:.1f}"
        ready = "never" if self.ready_s is None else f"{self.ready_s:.1f}"
        held = "; ".join(f"{who} {num}" for who, num in self.held.items()) or "0"
        wrong = " **VIOLATION**" if self.is_violation else ""
        row = self.row
        return (
            f"| {row.number} | {row.fault} | {self.phase.value} | {row.how} | {self.view}{wrong}"
            f" | {silence} | {ready} | {held} |"
        )


def draw_cases(rng: random.Random) -> Cases:
    """With their right answers, from an engine in this process."""

    def case(num_prompt_tokens: int, num_tokens: int) -> Case:
        ids = [rng.randrange(*VOCABULARY) for _ in range(num_prompt_tokens)]
        sampling = {"temperature": 1.0, "seed": rng.randrange(2**31)}
        return Case(prompt_ids=ids, text=None, sampling=sampling, num_tokens=num_tokens)

    # Long answers of samples at random come near a tie now and then: some more are drawn.
    long = [case(SHORT_TOKENS, TALKER_NEW)] + [
        case(SHORT_TOKENS, OCCUPANT_NEW) for _ in range(NUM_OCCUPANTS)
    ]
    asked = [case(SUBJECT_TOKENS, SUBJECT_NEW), *long]
    answered = answer_cases(MODEL, asked)
    if len(answered) != len(asked):
        return draw_cases(rng)
    subject, talker, *occupants = answered
    return Cases(subject=subject, talker=talker, occupants=occupants)


class Table:
    """Fills cells, one after the other, on one Ray cluster."""

    def __init__(self, cluster: Cluster, cases: Cases) -> None:
        self._cluster = cluster
        self._cases = cases
        self._numbers = itertools.count()
        self.cells: list[Cell] = []

    def run(self, rows: Sequence[Row]) -> None:
        """Rows of one deployment after another; a deployment lives as long as it is the same."""
        for _, group in itertools.groupby(rows, key=lambda row: row.deployment):
            same = list(group)
            system = System(self._cluster, f"failures-{next(self._numbers)}", same[0].deployment)
            try:
                stage = Stage(system=system, cases=self._cases, salts=self._salts())
                for row in same:
                    for phase in row.phases:
                        self._keep(fill(stage, row, phase))
            finally:
                system.stop()

    def _salts(self) -> Iterator[str]:
        return (f"salt {next(self._numbers)}" for _ in itertools.count())

    def _keep(self, cell: Cell) -> None:
        self.cells.append(cell)
        print(cell.line(), flush=True)


def fill(stage: Stage, row: Row, phase: Phase) -> Cell:
    """One cell; a violation too if no request could be brought into the phase, or one hangs."""
    try:
        return _fill(stage, row, phase)
    except PhaseMissedError as error:
        return Cell(
            row=row,
            phase=phase,
            view=f"no result: {error}",
            silence_s=None,
            ready_s=None,
            held=_wait_quiet(stage.system),
            is_seen_rightly=False,
        )


def _fill(stage: Stage, row: Row, phase: Phase) -> Cell:
    """Raises PhaseMissedError."""
    signs = stage.signs()
    asks = _begin(stage, row, phase)
    fault_s = time.perf_counter()
    if row.deed is nothing:  # the fault comes some time in the answer
        _wait_all(asks)
    else:
        row.deed(stage, asks[0])
    ready_s = _wait_ready(stage, fault_s)
    _wait_all(asks)
    held = _wait_quiet(stage.system)
    is_due = "faults" in row.deployment or row.sees is Sees.ERROR
    if is_due and all(ask.is_whole for ask in asks) and stage.signs() == signs:
        raise PhaseMissedError("the fault never came")
    return Cell(
        row=row,
        phase=phase,
        view="; ".join(_views(asks, row)),
        silence_s=asks[0].silence_s(fault_s),
        ready_s=ready_s,
        held=held,
        is_seen_rightly=all(_is_allowed(ask, row) for ask in asks),
    )


def _begin(stage: Stage, row: Row, phase: Phase) -> list[Ask]:
    """The request in its phase, then all others that are under way."""
    if row.deed is nothing:  # the deployment itself does something in that phase
        cases = stage.cases
        if row.num_asks > 1 and phase is Phase.STREAM:
            return [stage.ask(case) for case in cases.occupants[: row.num_asks]]
        case = cases.talker if phase is Phase.STREAM else cases.subject
        return [stage.ask(case) for _ in range(row.num_asks)]
    for _ in range(TRIES - 1):
        try:
            return [stage.reach(phase), *stage.occupants]
        except PhaseMissedError as error:
            print(f"again: {error}", flush=True)
            for ask in stage.occupants:
                ask.wait()
    return [stage.reach(phase), *stage.occupants]


def _views(asks: Sequence[Ask], row: Row) -> list[str]:
    """What its client saw, and what others saw that they must not, or that were asked for it."""
    others = [ask for ask in asks[1:] if row.num_asks > 1 or not _is_allowed(ask, row)]
    return list(dict.fromkeys(ask.view() for ask in (asks[0], *others)))


def _is_allowed(ask: Ask, row: Row) -> bool:
    match row.sees:
        case Sees.WHOLE:
            return ask.is_whole or (ask.has_left and ask.is_right)
        case Sees.ERROR:
            return ask.is_right and (ask.is_whole or ask.has_clear_error)
        case Sees.CUT:
            return ask.is_right


def _wait_all(asks: Sequence[Ask]) -> None:
    for ask in asks:
        ask.wait()


def _wait_ready(stage: Stage, fault_s: float) -> float | None:
    """Seconds from the fault until every part of the system answers; None if that never came."""
    while not stage.is_restored():
        if time.perf_counter() - fault_s > REST_S:
            return None
        time.sleep(LOOK_EVERY_S)
    return time.perf_counter() - fault_s


def _wait_quiet(system: System) -> dict[str, int]:
    """What is held when it should be quiet."""
    until_s = time.monotonic() + REST_S
    while (held := system.held()) and time.monotonic() < until_s:
        time.sleep(LOOK_EVERY_S)
    return held


def render(cells: Sequence[Cell], seed: int) -> str:
    """The whole record, in markdown."""
    machine = ", ".join(f"{what}: {value}" for what, value in describe_machine().items())
    return "\n".join(
        [
            "# What each failure costs",
            "",
            f"    {COMMAND} --seed {seed} --out load_tests/results/failures.md",
            "",
            "The whole application on a CPU with the shipped model, 2 prefill workers and 1 decode",
            f"worker unless the row says otherwise; {machine}. Every answer is compared token for",
            "token with what an engine in one process brought. Next token: the longest wait for a",
            "token after the fault. All ready: from the fault until every part of the system",
            "answers. Faults on demand come some time in the answer, so both count from its start.",
            "Leaked: held = leases = reservations, by owner, when all was quiet. A wait before the",
            "transfer is for a row of the decode worker, too: two other streams hold both.",
            "",
            "| # | fault | phase | injected how | client sees | next token, s | all ready, s"
            " | leaked |",
            "|---|---|---|---|---|---|---|---|",
            *(cell.line() for cell in cells),
            "",
            "Not run:",
            "",
            *(f"- {row}: {why}." for row, why in NOT_RUN.items()),
            "",
        ]
    )


def _has_one_of(row: Row, words: Sequence[str]) -> bool:
    return any(word in f"{row.fault} {row.how}" for word in words)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write the record there, in markdown")
    parser.add_argument("--only", nargs="*", default=[""], help="rows with one of these words")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    args = parser.parse_args()
    rows = [row for row in (*FROM_OUTSIDE, *ON_DEMAND) if _has_one_of(row, args.only)]
    cases = draw_cases(random.Random(args.seed))
    cluster = Cluster.start()
    try:
        table = Table(cluster, cases)
        table.run(rows)
    finally:
        cluster.stop()
    text = render(table.cells, args.seed)
    if args.out:
        args.out.write_text(text)
    print(text)
    sys.exit(any(cell.is_violation for cell in table.cells))


if __name__ == "__main__":
    main()
