"""A printed sweep becomes points and a picture."""

from pathlib import Path

import pytest

from load_tests.lab.plot_accepted import lowest, read_sweep, write_plot

PRINTED = [
    "{'device': 'NVIDIA H200'}",
    "64\t128\tnone\t\t5.048\t1.00\t4.989\t1.00\t\t\t\t",
    "64\t128\tcontroller, p 0\t\t4.984\t1.01\t4.959\t1.01\t\t\t\t",
    "64\t128\tcontroller, device, p 0.5\t2.10\t4.1\t1.23\t4.1\t1.22\t60.1\t8.1\t3.1\t3.1",
    "1\t128\tcontroller, device, p 0.5\t2.10\t4.4\t0.97\t4.1\t1.22\t60.1\t8.1\t3.1\t3.1",
    "| 64   | 128  | controller, p 0   |",
]


def test_every_line_of_the_sweep_is_a_point(tmp_path: Path) -> None:
    points = read_sweep(PRINTED)
    assert points == {"64 x 128": [(0.0, 1.01), (0.5, 1.23)], "1 x 128": [(0.5, 0.97)]}
    assert lowest(points) == (0.97, "1 x 128", 0.5)
    pytest.importorskip("matplotlib")
    write_plot(points, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 1000


def test_no_sweep_is_refused() -> None:
    with pytest.raises(ValueError, match="no line of a sweep"):
        read_sweep(PRINTED[:2])
