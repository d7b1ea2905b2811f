"""What is told of loads that a bench has traced."""

from load_tests.lab.trace_loads import Piece, TracedLoad, summary


def _load(*pieces: tuple[float, float, float], given_up_s: float | None = None) -> TracedLoad:
    """pieces: of 4 blocks each; when each began, had copied, and ended, in s."""
    traced = [
        Piece(num_blocks=4, began_s=began_s, copied_s=copied_s, ended_s=ended_s)
        for began_s, copied_s, ended_s in pieces
    ]
    return TracedLoad(num_blocks=9, began_s=1.0, pieces=traced, given_up_s=given_up_s)


def test_a_load_is_told_piece_by_piece() -> None:
    load = _load((1.002, 1.003, 1.0035), (1.005, 1.006, 1.006), given_up_s=1.01)
    told = "9 blocks; at 2.0: 4 in 1.0 + 0.5; at 5.0: 4 in 1.0 + 0.0; given up at 10.0"
    assert load.describe() == told


def test_quantiles_tell_where_time_went() -> None:
    loads = [_load((1.002, 1.004, 1.005), (1.008, 1.010, 1.011)) for _ in range(3)]
    loads.append(_load(given_up_s=1.5))
    lines = summary(loads, [0.001, 0.002])
    assert lines[0] == "4 loads; 1 given up, of them 1 before their first piece"
    assert lines[1] == "until the first piece, ms: median 2.00, p90 2.00, largest 2.00"
    assert lines[2] == "between two pieces, ms: median 3.00, p90 3.00, largest 3.00"
    assert lines[3] == "a block's copy, ms: median 0.50, p90 0.50, largest 0.50"
    assert lines[4] == "a piece's digest, ms: median 1.00, p90 1.00, largest 1.00"
