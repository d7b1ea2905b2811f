"""What a safetensors file says it holds, read from its first bytes and checked against its size.

[0, 8)          length of the header, little endian
[8, 8 + length) JSON: name -> dtype, shape, [begin, end) in the data
[8 + length, )  data: every byte belongs to one tensor
"""

import math
import struct
from pathlib import Path

import msgspec

from engine.errors import ConfigError
from engine.file_checks import check_file

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_LENGTH = struct.Struct("<Q")
DTYPE_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # those that can be loaded
_METADATA = "__metadata__"


class StoredTensor(msgspec.Struct, frozen=True):
    """Where and what a tensor is."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors by name, in the order of their data. Reads the header and nothing behind it.

    Raises ConfigError: no file, not a safetensors file, or shorter or longer than it says.
    """
    check_file(path)
    try:
        with path.open("rb") as file:
            num_file_bytes = path.stat().st_size
            length = _read_length(path, file.read(_LENGTH.size), num_file_bytes)
            encoded = file.read(length)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        raw = msgspec.json.decode(encoded, type=dict[str, msgspec.Raw])
        raw.pop(_METADATA, None)
        tensors = {name: msgspec.json.decode(t, type=StoredTensor) for name, t in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unreadable(path, f"its header is damaged ({error})") from error
    ordered = dict(sorted(tensors.items(), key=lambda item: item[1].data_offsets))
    _check_extent(path, ordered, num_file_bytes - _LENGTH.size - length)
    return ordered


def _read_length(path: Path, encoded: bytes, num_file_bytes: int) -> int:
    if len(encoded) < _LENGTH.size:
        raise _unreadable(path, f"it has {num_file_bytes} bytes")
    (length,) = _LENGTH.unpack(encoded)
    assert isinstance(length, int)
    if length > MAX_HEADER_BYTES:
        raise _unreadable(path, "it does not begin with a header")
    if length > num_file_bytes - _LENGTH.size:
        raise _truncated(path, f"its header alone is longer than its {num_file_bytes} bytes")
    return length


def _check_extent(path: Path, tensors: dict[str, StoredTensor], num_data_bytes: int) -> None:
    """The tensors fill the data without gap or overlap, each with as many bytes as its shape."""
    position = 0
    for name, tensor in tensors.items():
        begin, end = tensor.data_offsets
        size = DTYPE_BYTES.get(tensor.dtype)
        has_size = size is None or end - begin == math.prod(tensor.shape) * size
        if begin != position or end < begin or not has_size or min(tensor.shape, default=0) < 0:
            raise _unreadable(path, f"its header places tensor {name!r} wrongly")
        position = end
    if num_data_bytes < position:
        raise _truncated(
            path, f"its header speaks of {position} bytes of tensors, it has {num_data_bytes}"
        )
    if num_data_bytes > position:
        raise _unreadable(path, f"{num_data_bytes - position} bytes follow its last tensor")


def _truncated(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path}: not a readable safetensors file, it is cut short: {why}; download it again"
    )


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path}: not a readable safetensors file: {why}; download it again")
