"""Which sizes of quantised weights the kernels of a GPU read; numbers alone, no torch.

4-bit numbers lie in runs of 2 * half, which fill columns and groups (int4.py).
"""

MAX_HALF = 64
MIN_HALF = 16  # a product of a GPU's matrix units has at least so many columns
SIZE_MULTIPLE = 16


def choose_half(num_columns: int, group: int) -> int:
    """The largest power of two, at most `MAX_HALF`, for runs that fill columns and groups."""
    half = MAX_HALF
    while num_columns % (2 * half) or (group != half and group % (2 * half)):
        half //= 2
    return half


def reads_sizes(num_rows: int, num_columns: int, group: int, *, is_fp8: bool) -> bool:
    """Whether a GPU's kernels read a weight [num_rows, num_columns] with scales of `group` columns.

    is_fp8: else numbers have 4 bits.
    """
    if num_rows % SIZE_MULTIPLE or num_columns % SIZE_MULTIPLE:
        return False
    if is_fp8:
        return group >= num_columns or group % SIZE_MULTIPLE == 0
    return choose_half(num_columns, group) >= MIN_HALF
