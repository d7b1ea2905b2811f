"""Recorded traffic as workloads: files that a user has, in the formats of their publishers.

    azure      CSV  TIMESTAMP,ContextTokens,GeneratedTokens           Azure LLM inference traces
    mooncake   JSON lines of timestamp [ms], input_length, output_length and hash_ids, which name
               blocks of 512 tokens and give prefix hits              Mooncake traces
    lengths    CSV with num_prefill_tokens,num_decode_tokens          no times: drawn ones

Timestamps that sit on a coarse grid are spread over it, or each point would be a burst.
"""

import csv
import json
from datetime import datetime
from pathlib import Path

import numpy as np

from load_tests.simulation.workload import Chain, Counts, Floats, Workload

MOONCAKE_BLOCK_TOKENS = 512
COARSE_GRID_S = 1.0  # times of recorded requests this far apart, or more, are a grid


def read_azure(path: Path) -> Workload:
    """Raises ValueError for a file of another kind, OSError if it cannot be read."""
    rows = _rows(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: times[i])
    return Workload(
        name=path.stem,
        arrival_s=np.array([(times[i] - times[order[0]]).total_seconds() for i in order]),
        prompt_tokens=_counts([rows[i]["ContextTokens"] for i in order]),
        output_tokens=_counts([rows[i]["GeneratedTokens"] for i in order]),
    )


def read_mooncake(path: Path, *, seed: int = 0) -> Workload:
    """`seed` spreads times over their grid. Raises ValueError for a file of another kind."""
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    missing = {"timestamp", "input_length", "output_length", "hash_ids"} - set(rows[0])
    if missing:
        raise ValueError(f"{path}: no {sorted(missing)} in its first line")
    times_s = _spread(np.array([row["timestamp"] / 1e3 for row in rows]), seed)
    order = np.argsort(times_s, kind="stable")
    return Workload(
        name=path.stem,
        arrival_s=times_s[order] - times_s[order[0]],
        prompt_tokens=_counts([rows[i]["input_length"] for i in order]),
        output_tokens=_counts([rows[i]["output_length"] for i in order]),
        chains=[_chain(rows[i]["hash_ids"], rows[i]["input_length"]) for i in order],
        block_tokens=MOONCAKE_BLOCK_TOKENS,
    )


def read_lengths(path: Path) -> tuple[Counts, Counts]:
    """Prompt and output tokens [rows]. Raises ValueError for a file of another kind."""
    rows = _rows(path, ("num_prefill_tokens", "num_decode_tokens"))
    return (
        _counts([row["num_prefill_tokens"] for row in rows]),
        _counts([row["num_decode_tokens"] for row in rows]),
    )


def _rows(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    if not rows or not set(columns) <= set(rows[0]):
        raise ValueError(f"{path}: no rows with the columns {', '.join(columns)}")
    return rows


def _counts(values: list[str] | list[int]) -> Counts:
    """A recorded 0 stands for a request that failed; it is served as one token."""
    return np.maximum(1, np.array([int(value) for value in values], dtype=np.int64))


def _chain(hash_ids: list[int], num_tokens: int) -> Chain:
    """Full blocks only: a partial one is not found again."""
    return tuple(hash_ids[: num_tokens // MOONCAKE_BLOCK_TOKENS])


def _spread(times_s: Floats, seed: int) -> Floats:
    """Times as they are, or each moved within its step of a coarse grid."""
    gaps_s = np.diff(np.unique(times_s))
    if len(gaps_s) == 0 or gaps_s.min() < COARSE_GRID_S:
        return times_s
    return times_s + np.random.default_rng(seed).uniform(0.0, gaps_s.min(), len(times_s))
