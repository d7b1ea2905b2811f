"""Faults on demand: what goes wrong, where and when, read from one string.

    decode:step=10:die; prefill:piece=3:corrupt; prefill-0:piece=5:delay=0.5
    unified-0.rank-1:step=7:raise

Steps and pieces count from 1 in every worker of that role, or in the one of that number alone,
anew with every process. A rank is one of a worker's further ranks; without it, rank 0. A step may
`die` (the process is killed), `raise`, `hang` or turn to `nan`; a piece of KV may be dropped
(`drop`), arrive as other bytes (`corrupt`) or late (`delay=SECONDS`).
"""

import re
from dataclasses import dataclass
from enum import Enum

from configs.errors import ConfigFileError


class FaultKind(Enum):
    DIE = "die"
    RAISE = "raise"
    HANG = "hang"
    NAN = "nan"
    DROP = "drop"
    CORRUPT = "corrupt"
    DELAY = "delay"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    role: str
    place: str  # "step" or "piece"
    number: int  # from 1
    kind: FaultKind
    worker: int | None = None  # which of that role, from 0; None = every one
    rank: int = 0  # of that worker
    delay_s: float = 0.0

    def befalls(self, role: str, name: str, rank: int = 0) -> bool:
        """Whether a rank of a worker is meant; `name` is the worker's, `ROLE-NUMBER.HASH`."""
        is_meant = self.worker is None or name.partition(".")[0] == f"{role}-{self.worker}"
        return self.role == role and is_meant and self.rank == rank


_FAULT = re.compile(
    r"(?P<role>prefill|decode|unified)(-(?P<worker>\d+)(\.rank-(?P<rank>\d+))?)?:"
    r"(step=(?P<step>[1-9]\d*):(?P<of_step>die|raise|hang|nan)"
    r"|piece=(?P<piece>[1-9]\d*):(?P<of_piece>drop|corrupt|delay=(?P<delay_s>\d+(\.\d+)?)))"
)


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Raises ConfigFileError that names the part it cannot read."""
    parts = [part.strip() for part in text.split(";")]
    return tuple(_parse(part) for part in parts if part)


def _parse(part: str) -> Fault:
    match = _FAULT.fullmatch(part)
    if match is None or (match["piece"] and match["role"] != "prefill"):
        raise ConfigFileError(
            f"{part!r} is no fault; write ROLE:step=N:die, raise, hang or nan, or"
            " prefill:piece=N:drop, corrupt or delay=SECONDS, separated by semicolons;"
            " ROLE-NUMBER means one worker of that role, ROLE-NUMBER.rank-R one rank of it"
        )
    kind = match["of_step"] or match["of_piece"].partition("=")[0]
    return Fault(
        role=match["role"],
        place="step" if match["step"] else "piece",
        number=int(match["step"] or match["piece"]),
        kind=FaultKind(kind),
        worker=None if match["worker"] is None else int(match["worker"]),
        rank=int(match["rank"] or 0),
        delay_s=float(match["delay_s"] or 0.0),
    )
