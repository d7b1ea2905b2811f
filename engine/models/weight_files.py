"""Finds the safetensors files of a model folder and checks that they hold the model.

Reads headers only, so a folder of any size takes milliseconds. A file is:

    [0, 8)          length of the header, little endian
    [8, 8 + length) JSON: name -> dtype, shape, [begin, end) in the data
    [8 + length, )  data: every byte belongs to one tensor
"""

import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from engine.errors import ConfigError
from engine.file_checks import check_file
from engine.models.config_file import ConfigFile
from engine.models.fused_experts import find_fused
from engine.models.llama_weights import BODY, HEAD
from engine.models.quantization.published_tensors import NeededTensor, is_unused, needed_tensors
from engine.models.quantization.scheme import Packing
from engine.models.sources import Source
from engine.models.spec import ModelSpec

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_LENGTH = struct.Struct("<Q")
DTYPE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}
DTYPE_BYTES |= {"F8_E8M0": 1, "U8": 1, "I8": 1}
_METADATA = "__metadata__"


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor's dtype, shape and byte range in the data."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors by name, in the order of their data. Reads only the header.

    Raises ConfigError if there is no file, or it is not a safetensors file, or its length differs
    from what its header says.
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
    """Check that the tensors fill the data without gap or overlap, and fit their shapes."""
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


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Tensors that some exporters leave in the files and that carry no information.
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_VISION = ("vision_tower.", "multi_modal_projector.")  # beside a text model with a prefix
_MISMATCH = "the weights and config.json describe different models"


GGUF = "GGUF is not read; use the safetensors of the model that it was made from"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def check_format(where: str, names: Iterable[str]) -> None:
    """Raises ConfigError if a model's files, by their names, have its weights in another format."""
    suffixes = {Path(name).suffix.lower() for name in names}
    if ".safetensors" in suffixes:
        return
    if ".gguf" in suffixes:
        raise ConfigError(f"{where}: has weights as GGUF only; {GGUF}")
    if suffixes & set(_PICKLED):
        raise ConfigError(
            f"{where}: has pickled weights only (*.bin, *.pt), which are not read because they can"
            " run code; use a revision with safetensors, or convert them"
        )


def check_weights(folder: Path, spec: ModelSpec) -> dict[Path, dict[str, Source]]:
    """Each weights file with those of the model's tensors that it holds, in order of their data.

    Of each file: a tensor's name in `needed_tensors` -> where the file has it. Raises ConfigError
    naming file, tensor, expected and found shape. An unknown tensor is refused unless it is known
    to carry no information: a bias or a layer, for example, would change the output.
    """
    missing = needed_tensors(spec)
    found: dict[Path, dict[str, Source]] = {}
    for path, indexed in weight_files(folder):
        header = read_header(path)
        absent = sorted(
            name
            for name in (indexed or frozenset()) - header.keys()
            if _sources(name, spec).keys() & missing.keys()
        )
        if absent:
            raise ConfigError(f"{path}: tensor {absent[0]!r} is in {INDEX_FILE} but not here")
        found[path] = {}
        for name, tensor in header.items():
            sources = _sources(name, spec)
            if sources.keys() <= missing.keys():
                _check_tensor(path, name, tensor, _take(sources, missing, name, spec))
                found[path] |= sources
            elif any(sources.keys() & names.keys() for names in found.values()):
                raise ConfigError(f"{path}: tensor {name!r} stands in another file as well")
            elif not _is_harmless(name, spec) and not _is_zero_bias(path, name, tensor, spec):
                raise ConfigError(
                    f"{path}: unexpected tensor {name!r} for {spec.architecture}; {_MISMATCH}"
                )
    _refuse_missing(folder, missing)
    return found


def find_tensors(
    folder: Path, spec: ModelSpec, needed: Mapping[str, NeededTensor]
) -> dict[Path, dict[str, Source]]:
    """The same of some tensors, whatever else is in the files: by file, in order of their data.

    spec: of a model with these tensors. Raises ConfigError as `check_weights` does.
    """
    missing = dict(needed)
    found: dict[Path, dict[str, Source]] = {}
    for path, indexed in weight_files(folder):
        if indexed is not None and not any(
            _sources(n, spec).keys() & needed.keys() for n in indexed
        ):
            continue
        found[path] = {}
        for name, tensor in read_header(path).items():
            sources = _sources(name, spec)
            if sources.keys() <= missing.keys():
                _check_tensor(path, name, tensor, _take(sources, missing, name, spec))
                found[path] |= sources
    _refuse_missing(folder, missing)
    return found


def _take(
    sources: dict[str, Source], missing: dict[str, NeededTensor], name: str, spec: ModelSpec
) -> NeededTensor:
    """What a tensor of a file has to be; removes from `missing` what it holds."""
    needed = [missing.pop(whole) for whole in sources]
    fused = find_fused(whole_name(name, spec), spec)
    return needed[0] if fused is None else NeededTensor(shape=fused.shape, dtypes=fused.dtypes)


def _refuse_missing(folder: Path, missing: Mapping[str, NeededTensor]) -> None:
    lost = [(name, tensor) for name, tensor in missing.items() if not tensor.is_optional]
    if lost:
        name, first = lost[0]
        raise ConfigError(
            f"{folder}: {len(lost)} tensors are missing, the first is {name!r} with shape"
            f" {list(first.shape)}; a download is not complete, or {_MISMATCH}"
        )


def _sources(name: str, spec: ModelSpec) -> dict[str, Source]:
    """The tensors in `needed_tensors` whose numbers a tensor of this name in a file holds."""
    whole = whole_name(name, spec)
    fused = find_fused(whole, spec)
    if fused is None:
        return {whole: Source(name)}
    return {part: replace(source, name=name) for part, source in fused.parts.items()}


def _check_tensor(path: Path, name: str, tensor: StoredTensor, needed: NeededTensor) -> None:
    if tensor.dtype not in needed.dtypes:
        raise ConfigError(
            f"{path}: tensor {name!r} has dtype {tensor.dtype}; expected:"
            f" {', '.join(needed.dtypes)}; use weights that are quantised as config.json says"
        )
    if not needed.fits(tensor.shape):
        raise ConfigError(
            f"{path}: tensor {name!r} has shape {list(tensor.shape)}, config.json means"
            f" {list(needed.shape)}; {_MISMATCH}"
        )


def whole_name(name: str, spec: ModelSpec) -> str:
    """The tensor's name in a model with a head; without one, the prefix may be left out.

    Beside vision it has a prefix, which transformers 5 may write behind the first component.
    """
    inner = BODY + spec.file_prefix
    if name.startswith(inner):
        name = BODY + name.removeprefix(inner)
    name = name.removeprefix(spec.file_prefix)
    if spec.quantization is not None:
        name = spec.quantization.name_read(name)
    if spec.pooling is None or name == HEAD or name.startswith(BODY):
        return name
    return BODY + name


def _is_harmless(name: str, spec: ModelSpec) -> bool:
    if spec.file_prefix and name.removeprefix(BODY).startswith(_VISION):
        return True
    name = whole_name(name, spec)
    is_unused_head = name == HEAD and (spec.has_tied_embeddings or spec.pooling is not None)
    is_leftover = _HARMLESS.search(name) is not None or is_unused(name, spec)
    return is_unused_head or is_leftover or _guesses(name, spec)


def _guesses(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor is of the layers that guess further tokens (MTP), a drafter's."""
    found = _LAYER.match(name)
    index = -1 if found is None else int(found[1]) - spec.num_layers
    return 0 <= index < spec.num_guessing_layers


def _is_zero_bias(path: Path, name: str, tensor: StoredTensor, spec: ModelSpec) -> bool:
    """Whether this is a bias of zeros: early writers of GPTQ add one to every linear map."""
    is_gptq = spec.quantization is not None and spec.quantization.packing is Packing.GPTQ
    if not is_gptq or not name.endswith(".bias"):
        return False
    begin, end = tensor.data_offsets
    with path.open("rb") as file:
        (header_length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        file.seek(_LENGTH.size + header_length + begin)
        return not any(file.read(end - begin))


def weight_files(folder: Path) -> Iterator[tuple[Path, frozenset[str] | None]]:
    """Each weights file with the names that the index places there (None: unknown).

    Raises ConfigError if there are no weights, the index is unusable, or a shard is missing.
    """
    if (folder / SINGLE_FILE).exists():
        yield folder / SINGLE_FILE, None
        return
    if not (folder / INDEX_FILE).exists():
        raise ConfigError(
            f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors weights are"
            " read, convert pickled ones first"
        )
    index = ConfigFile.read(folder / INDEX_FILE)
    weight_map = index.section("weight_map")
    if weight_map is None:
        raise index.error("weight_map", "is missing")
    names_of: dict[str, set[str]] = {}
    for name in weight_map.keys:
        names_of.setdefault(weight_map.text(name), set()).add(name)
    for file_name, names in sorted(names_of.items()):
        if Path(file_name).name != file_name:
            raise index.error("weight_map", f"points outside the folder: {file_name!r}")
        path = folder / file_name
        if not path.exists():
            raise ConfigError(f"{path}: this shard of {INDEX_FILE} is missing; download it again")
        yield path, frozenset(names)
