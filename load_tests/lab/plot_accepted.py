"""The sweep that `bench_accepted --sweep` printed as a picture: speed-up against acceptance.

    python -m load_tests.lab.bench_accepted --sweep 0 0.5 1 --ngrams device | tee sweep.txt
    python -m load_tests.lab.plot_accepted sweep.txt --png sweep.png

A line for each number of rows and of their keys, and one at 0.98, below which no point may be;
prints the lowest. Needs matplotlib.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROWS, KEYS, DRAFTS, SPEED_UP = 0, 1, 2, 5  # columns of what the bench prints
LEAST = 0.98

Points = dict[str, list[tuple[float, float]]]  # rows x keys -> (acceptance, speed-up)


def read_sweep(lines: Iterable[str]) -> Points:
    """The points of a sweep, by work. Raises ValueError if there is none."""
    points: Points = defaultdict(list)
    for line in lines:
        columns = line.rstrip("\n").split("\t")
        if len(columns) > SPEED_UP and columns[DRAFTS].startswith("controller"):
            acceptance = float(columns[DRAFTS].rpartition("p ")[2])
            name = f"{columns[ROWS]} x {columns[KEYS]}"
            points[name].append((acceptance, float(columns[SPEED_UP])))
    if not points:
        raise ValueError("no line of a sweep: give what `bench_accepted --sweep` printed")
    return dict(points)


def lowest(points: Points) -> tuple[float, str, float]:
    """Speed-up, rows x keys and acceptance of the lowest point."""
    return min((y, name, x) for name, line in points.items() for x, y in line)


def write_plot(points: Points, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    panel = figure.subplots()
    for name, line in points.items():
        panel.plot(*zip(*sorted(line), strict=True), marker="o", label=name)
    panel.axhline(LEAST, color="#c22f3d", linewidth=0.8, label=f"{LEAST}")
    panel.set(xlabel="acceptance of a draft", ylabel="speed-up over plain steps")
    panel.legend(title="rows x keys")
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("sweep", type=Path, help="what the bench printed")
    parser.add_argument("--png", type=Path, required=True)
    args = parser.parse_args()
    points = read_sweep(args.sweep.read_text().splitlines())
    speed_up, name, acceptance = lowest(points)
    print(f"lowest: {speed_up:.2f} at {name} and acceptance {acceptance:g}")
    write_plot(points, args.png)


if __name__ == "__main__":
    main()
