"""The simulator held against a measured engine: the same arrivals, with the costs that it fitted.

    python -m load_tests.lab.bench_mixed --rates 16 24 --queue fcfs laps --json mixed.json  (a GPU)
    python -m load_tests.lab.validate_simulation mixed.json --fit-rate 16 --markdown

Step costs are those of `--fit-rate` (default: the first rate that was measured) of each variant, or
of `--fit-variant` for all. Points that had run by then are marked `fitted`, all others `held out`.
Errors are relative to the measured value; within 10 % is met.

The device's time comes from the costs; when a step is planned, and what gathers until then, from
the engine's own rules. What the host adds is stated, not fitted: `--host-ms` from a plan to its
step's start on an idle device, `--gap-ms` between steps, `--read-ms` from the end of a step to its
tokens being read.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from load_tests.simulation.measured import (
    ASSUMED_KV_TOKENS,
    Comparison,
    Fit,
    HostTimes,
    MeasuredRun,
    choose_fit,
    compare,
    num_met,
    read_measured,
)
from load_tests.tables import render_rows


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="what bench_mixed --json has written")
    parser.add_argument("--fit-rate", type=float, help="requests/s; default: measured first")
    parser.add_argument("--fit-variant", help="whose costs all variants get; default: their own")
    parser.add_argument("--host-ms", type=float, default=1.0)
    parser.add_argument("--gap-ms", type=float, default=0.0)
    parser.add_argument("--read-ms", type=float, default=0.3)
    parser.add_argument("--markdown", action="store_true", help="with the command, for a record")
    return parser


def validate(run: MeasuredRun, args: argparse.Namespace) -> tuple[list[Fit], list[Comparison]]:
    """Simulate every point. Raises ValueError for a variant or a rate that was not measured."""
    host = HostTimes(start_s=args.host_ms / 1e3, gap_s=args.gap_ms / 1e3, read_s=args.read_ms / 1e3)
    fits, comparisons = [], []
    for variant in run.variants:
        fit = choose_fit(run, args.fit_variant or variant, args.fit_rate)
        fits.append(fit)
        for point in run.points_of(variant):
            comparisons += compare(run, point, fit, host)
    return list(dict.fromkeys(fits)), comparisons


def render(run: MeasuredRun, fits: Sequence[Fit], comparisons: Sequence[Comparison]) -> str:
    """The table, then what a reader must know of it."""
    rows = [
        ("requests/s", "variant", "seeds", "costs", "figure", "measured ms", "simulated ms",
         "error", "within 10 %"),
        *map(_cells, comparisons),
    ]  # fmt: skip
    notes = [*map(_describe_fit, fits)]
    if "num_kv_tokens" not in run.about:
        notes.append(f"Room for KV is not in the file: {ASSUMED_KV_TOKENS:,} tokens are assumed.")
    for name in ("held out", "fitted"):
        some = [c for c in comparisons if _role(c) == name]
        if some:
            notes.append(f"{name}: {num_met(some)} of {len(some)} figures within 10 %.")
    return render_rows(rows) + "\n\n" + "\n".join(f"- {note}" for note in notes)


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        run = read_measured(args.file)
        fits, comparisons = validate(run, args)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if args.markdown:
        words = sys.argv[1:] if argv is None else argv
        print(f"    python -m load_tests.lab.validate_simulation {shlex.join(words)}\n")
        print(
            f"The host adds {args.host_ms:g} ms before a step on an idle device, {args.gap_ms:g} ms"
            f" between steps, {args.read_ms:g} ms until tokens are read.\n"
        )
    print(render(run, fits, comparisons))


def _cells(comparison: Comparison) -> tuple[str, ...]:
    point = comparison.point
    return (
        f"{point.rate:g}",
        point.variant,
        " ".join(map(str, point.by_seed)),
        _role(comparison),
        comparison.name.replace("_", " "),
        f"{comparison.measured_ms:.1f}",
        f"{comparison.simulated_ms:.1f}",
        f"{comparison.error:+.1%}",
        "yes" if comparison.is_met else "NO",
    )


def _role(comparison: Comparison) -> str:
    return "held out" if comparison.is_held_out else "fitted"


def _describe_fit(fit: Fit) -> str:
    if fit.rate is None:
        return (
            f"{fit.variant}: the costs are those of the end of its measurement; the file has none"
            " by point, so none of its own points is held out."
        )
    return (
        f"{fit.variant}: the costs are as they were after {fit.rate:g}/s, fitted to the last"
        f" steps of each kind of {fit.costs.num_samples:,}."
    )


if __name__ == "__main__":
    main()
