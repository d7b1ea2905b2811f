"""Where a device's time goes: a profiler's trace, its kernels in groups, overlaps counted once.

    python -m load_tests.lab.kernel_profile --trace decode=trace.json --html page.html --csv all.csv

At each instant the kernel that started earliest of those running owns the time, and no kernel
running is idle time, so that the groups of a trace add up to its wall time exactly. Nothing runs
here. A trace is what torch.profiler exports (`bench_engine --profile` records some), or what Nsight
Systems saw of any engine's processes, as CSV:

    nsys profile -t cuda --cuda-graph-trace=node -o seen COMMAND
    nsys stats -r cuda_gpu_trace --format csv -o seen seen.nsys-rep    # seen_cuda_gpu_trace.csv

A kernel's name says its group. `--rules rules.json` brings other rules, of which the first whose
pattern (a regular expression, in either case) is found decides: `{"flash|fmha": "attention", ...}`.
"""

import argparse
import csv
import importlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from load_tests.lab.profile_page import KernelLine, write_csv, write_page
from load_tests.tables import render_rows

OTHER = "other"
IDLE = "idle"
# The first pattern found in a kernel's name decides; cuBLAS and flash attention both are built
# from CUTLASS, and a fused kernel belongs where its name begins.
Rules = tuple[tuple[str, str], ...]  # (group, pattern)
RULES: Rules = (
    # with the wait for other ranks
    ("sums", r"nccl|_packets_kernel|_(one|two)_shot_kernel|_stream_kernel"),
    ("experts", r"(?<![a-z])moe|topkgating|expert"),
    (
        "rope+kv",
        r"rotat|rotary|(?<![a-z])rope|kv_append|append_kv|append_?paged|reshape_and_cache|store_kv",
    ),
    (
        "attention",
        r"flash(?!infer)|fmha|attn|attention|_decode_kernel|_prefill_kernel|_combine|_merge|merge_?state"
        r"|_plan_kernel|expand_blocks|prefill_?with|decode_?with",
    ),
    (
        "sampling",
        r"sampl|gumbel|argmax|arg_max|logprob|penalt|logit|top_?[kp]|sort|multinomial|_greedy_kernel"
        r"|_best_chunk_kernel|_score_kernel|_limit_kernel|_maxima_kernel|_keep_kernel",
    ),
    ("norm", r"rms_?norm|layer_?norm|head_norm|qk_norm|coded_norm"),
    (
        "linear",
        r"gemm|gemv|nvjet|cutlass|cublas|xmma|split_?k|linear|matmul|_fp8_few_kernel|_joined_kernel"
        r"|_one_token_kernel|_fp8_blocks_kernel|_token_groups_kernel",
    ),
)
# Columns of Nsight Systems' report cuda_gpu_trace.
_START, _DURATION, _STREAM, _NAME = "Start (ns)", "Duration (ns)", "Strm", "Name"
_DEVICE_CATEGORIES = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))


class KernelRun(NamedTuple):
    """One kernel (or copy) on the device, [start_us, end_us)."""

    name: str
    start_us: float
    end_us: float
    stream: int


def groups_of(rules: Rules) -> tuple[str, ...]:
    """The rules' groups by name, then OTHER and IDLE."""
    return *sorted({group for group, _ in rules} - {OTHER}), OTHER, IDLE


GROUPS = groups_of(RULES)


@cache
def group_of(name: str, rules: Rules = RULES) -> str:
    """The group that a kernel belongs to, by its name; OTHER if no rule knows it."""
    return next(
        (group for group, pattern in rules if re.search(pattern, name, re.IGNORECASE)), OTHER
    )


def read_rules(path: Path) -> Rules:
    """Rules from a JSON file: pattern -> group. Raises ValueError with what is wrong in it."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not all(isinstance(group, str) for group in found.values()):
        raise ValueError(f"{path}: expected an object of patterns, each with the name of a group")
    if IDLE in found.values():
        raise ValueError(f"{path}: {IDLE!r} is the time without kernels; name the group otherwise")
    for pattern in found:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{path}: the pattern {pattern!r} is none: {error}") from error
    return tuple((group, pattern) for pattern, group in found.items())


def owned_us(runs: Iterable[KernelRun]) -> list[tuple[KernelRun, float]]:
    """Each run with the time it owns: when it runs and nothing that started before it does."""
    owned = []
    settled_us = float("-inf")  # everything before belongs to an earlier run, or to none
    for run in sorted(runs, key=lambda run: run.start_us):
        owned.append((run, max(0.0, run.end_us - max(run.start_us, settled_us))))
        settled_us = max(settled_us, run.end_us)
    return owned


def group_times_us(runs: Sequence[KernelRun], rules: Rules = RULES) -> dict[str, float]:
    """Group -> microseconds; they add up to the time from the first start to the last end.

    Raises ValueError without runs.
    """
    if not runs:
        raise ValueError("no kernels ran on the device")
    times_us = dict.fromkeys(groups_of(rules), 0.0)
    for run, share_us in owned_us(runs):
        times_us[group_of(run.name, rules)] += share_us
    wall_us = max(run.end_us for run in runs) - min(run.start_us for run in runs)
    times_us[IDLE] = max(0.0, wall_us - sum(times_us.values()))  # rounding
    return times_us


def longest_kernels(
    runs: Sequence[KernelRun], num_names: int | None = None
) -> list[tuple[str, int, float]]:
    """(name, runs, owned microseconds) of the names that own most, the largest first.

    num_names: None = all of them.
    """
    counts: dict[str, int] = {}
    times_us: dict[str, float] = {}
    for run, share_us in owned_us(runs):
        counts[run.name] = counts.get(run.name, 0) + 1
        times_us[run.name] = times_us.get(run.name, 0.0) + share_us
    names = sorted(times_us, key=lambda name: -times_us[name])[:num_names]
    return [(name, counts[name], times_us[name]) for name in names]


def read_trace(path: Path) -> list[KernelRun]:
    """Everything that ran on the device. Raises ValueError for a file that is not a trace."""
    if path.suffix == ".csv":
        return _read_nsys(path)
    trace = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(trace, dict) or "traceEvents" not in trace:
        raise ValueError(f"{path}: not a trace of torch.profiler: traceEvents is missing")
    return [
        KernelRun(
            event["name"], event["ts"], event["ts"] + event["dur"], event["args"].get("stream", 0)
        )
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in _DEVICE_CATEGORIES
    ]


def _read_nsys(path: Path) -> list[KernelRun]:
    with path.open(encoding="utf-8", newline="") as file:
        lines = csv.DictReader(file)
        missing = {_START, _DURATION, _STREAM, _NAME} - set(lines.fieldnames or ())
        if missing:
            raise ValueError(
                f"{path}: not Nsight Systems' report cuda_gpu_trace: no column {min(missing)!r}"
            )
        return [
            KernelRun(
                line[_NAME],
                float(line[_START]) / 1e3,
                (float(line[_START]) + float(line[_DURATION])) / 1e3,
                int(line[_STREAM] or 0),
            )
            for line in lines
        ]


def render_profile(profiles: Mapping[str, Mapping[str, float]]) -> str:
    """A table in Markdown: milliseconds and share of every group, a line a work."""
    rows = [["work", "wall ms", *next(iter(profiles.values()))]]
    for work, times_us in profiles.items():
        wall_us = sum(times_us.values())
        cells = [f"{us / 1e3:.3f} ({us / wall_us:.1%})" for us in times_us.values()]
        rows.append([work, f"{wall_us / 1e3:.3f}", *cells])
    return render_rows(rows)


def render_kernels(kernels: Sequence[tuple[str, int, float]], rules: Rules = RULES) -> str:
    """A table in Markdown of what `longest_kernels` returns."""
    rows = [["kernel", "group", "runs", "ms"]]
    for name, num_runs, time_us in kernels:
        rows.append(
            [
                name[:80].replace("|", "/"),
                group_of(name, rules),
                str(num_runs),
                f"{time_us / 1e3:.3f}",
            ]
        )
    return render_rows(rows)


def draw_profile(profiles: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """One stacked bar a work, of shares. Raises ModuleNotFoundError that says what to install."""
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("--png needs matplotlib: pip install matplotlib") from error
    figure = figures.Figure(figsize=(10, 1.2 + 0.5 * len(profiles)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(profiles)
    groups = list(next(iter(profiles.values())))
    for group in groups:
        shares = [100 * times[group] / sum(times.values()) for times in profiles.values()]
        axes.barh(list(profiles), shares, left=left, label=group)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of wall time")
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=len(groups), frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--trace", action="append", required=True, metavar="WORK=FILE", help="may be repeated"
    )
    parser.add_argument("--png", type=Path, help="also draw the shares; needs matplotlib")
    parser.add_argument("--kernels", type=int, default=0, help="also list the N longest kernels")
    parser.add_argument("--rules", type=Path, help="JSON file of patterns and groups of kernels")
    parser.add_argument("--html", type=Path, help="also write a page with the groups as bars")
    parser.add_argument("--csv", type=Path, help="also write every kernel with its group")
    args = parser.parse_args()

    rules = RULES if args.rules is None else read_rules(args.rules)
    runs = {}
    for named in args.trace:
        work, _, file = named.rpartition("=")
        runs[work or Path(file).stem] = read_trace(Path(file))
    profiles = {work: group_times_us(kernels, rules) for work, kernels in runs.items()}
    print(render_profile(profiles))
    for work, kernels in runs.items() if args.kernels else ():
        print(
            "", f"{work}:", render_kernels(longest_kernels(kernels, args.kernels), rules), sep="\n"
        )
    if args.png is not None:
        draw_profile(profiles, args.png)
    lines = [
        KernelLine(work, group_of(name, rules), name, num_runs, time_us)
        for work, kernels in runs.items()
        for name, num_runs, time_us in longest_kernels(kernels)
    ]
    if args.csv is not None:
        write_csv(lines, args.csv)
    if args.html is not None:
        write_page(profiles, lines, args.html)


if __name__ == "__main__":
    main()
