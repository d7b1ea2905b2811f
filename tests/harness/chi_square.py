"""When counts of random draws are too far from what they should be."""

import math


def chi_square_limit(num_free: int) -> float:
    """The 99.9 % point (Wilson and Hilferty)."""
    spread = 2 / (9 * num_free)
    return num_free * (1 - spread + 3.0902 * math.sqrt(spread)) ** 3
