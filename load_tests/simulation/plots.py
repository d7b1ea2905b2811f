"""Pictures of a sweep as PNG files; matplotlib comes with the package's extra `load`.

ttft_CLASS.png   p50, p90 and p99 of the first token against the rate, a line for each policy
goodput.png      the highest sustained rate of each policy
pools.png        workers in the short pool over time, at each rate, where a policy has pools
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from load_tests.simulation.metrics import CLASS_NAMES, Limits
from load_tests.simulation.sweep import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUANTILES = ("p50", "p90", "p99")


def has_plotting() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def write_plots(curves: Sequence[Curve], limits: Limits, folder: Path) -> list[Path]:
    """Returns the files that were written. Raises ImportError without matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [_plot_ttft(curves, name, limits, folder) for name in CLASS_NAMES]
    paths.append(_plot_goodput(curves, folder))
    if any(point.pool_sizes[0].num_short for curve in curves for point in curve.points):
        paths.append(_plot_pools(curves, folder))
    return paths


def _plot_ttft(curves: Sequence[Curve], name: str, limits: Limits, folder: Path) -> Path:
    figure, all_axes = _subplots(len(QUANTILES))
    for axes, quantile in zip(all_axes, QUANTILES, strict=True):
        for curve in curves:
            rates = [point.rate for point in curve.points]
            values_s = [
                getattr(point.by_class[name], f"ttft_{quantile}_s") for point in curve.points
            ]
            axes.plot(rates, [1e3 * s for s in values_s], marker="o", label=curve.name)
        axes.axhline(1e3 * limits.ttft_s, color="grey", linestyle=":")
        axes.set(title=f"{name}, {quantile}", xlabel="requests/s", ylabel="TTFT [ms]")
        axes.set_yscale("log")
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(curves))
    return _save(figure, folder / f"ttft_{name}.png")


def _plot_goodput(curves: Sequence[Curve], folder: Path) -> Path:
    figure, (axes,) = _subplots(1)
    axes.barh([curve.name for curve in curves], [curve.goodput for curve in curves])
    axes.invert_yaxis()
    axes.set(title="highest sustained rate", xlabel="requests/s")
    return _save(figure, folder / "goodput.png")


def _plot_pools(curves: Sequence[Curve], folder: Path) -> Path:
    figure, (axes,) = _subplots(1)
    for curve in curves:
        for point in curve.points:
            sizes = point.pool_sizes
            if sizes[0].num_short + sizes[0].num_long == 0:
                continue
            at_s = [size.at_s for size in sizes]
            label = f"{curve.name}, {point.rate:.4g}/s"
            axes.step(at_s, [size.num_short for size in sizes], where="post", label=label)
    axes.set(title="workers in the short pool", xlabel="s", ylabel="workers")
    figure.legend(loc="outside right upper")
    return _save(figure, folder / "pools.png")


def _subplots(num: int) -> "tuple[Figure, list[Axes]]":
    """A figure and its axes, without a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * num + 1, 4), layout="constrained")
    return figure, list(figure.subplots(1, num, squeeze=False)[0])


def _save(figure: "Figure", path: Path) -> Path:
    figure.savefig(path, dpi=120)
    return path
