"""Reads the scales of K and V in e4m3: from a file of their own, or from beside a model's weights.

    model.layers.3.self_attn.k_scale           compressed-tensors, llm-compressor; [1] or one a head
    model.layers.3.self_attn.attn.k_scale      as vLLM names it inside
    model.layers.3.self_attn.k_proj.k_scale    ModelOpt; qkv_proj.k_scale where it is one map
    model.layers.3.self_attn.k_proj.output_scale   AutoFP8, Quark
    model.layers.3.self_attn.kv_scale          AutoFP8 before: of both

and v likewise. Latent attention keeps latents and rotated keys. A published k_scale is of both, and
v_scale of nothing that is kept; in a file of its own each has its scale:

    model.layers.3.self_attn.latent_scale, model.layers.3.self_attn.rotated_key_scale

Each is what a stored number is multiplied with. A file of scales has the first of these names, or
the last two (`write_kv_scales`). Where nothing is found every scale is 1, which a warning says.
"""

import hashlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import ConfigError
from engine.models.config_file import ConfigFile
from engine.models.quantization.config import published_section
from engine.models.spec import ModelSpec
from engine.models.weight_files import read_header, weight_files, whole_name
from engine.ranks.rank import Rank

logger = logging.getLogger(__name__)

_NAME = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:attn\.|(?:[kv]|qkv)_proj\.)?(?P<plane>k|v|kv|latent|rotated_key)_scale"
    r"|(?P<output>[kv])_proj\.output_scale)"
)
# Planes, as written, and what a scale of each name is of.
_OF_HEADS: dict[str, tuple[int, ...]] = {"k": (0,), "v": (1,), "kv": (0, 1)}
_OF_LATENTS: dict[str, tuple[int, ...]] = {
    "latent": (0,),
    "rotated_key": (1,),
    "k": (0, 1),
    "v": (),
    "kv": (0, 1),
}
_NUM_PLANES = 2
_WORDS_FOR_E4M3 = ("static", "fp8")
_CALIBRATE = (
    "`python -m engine.kv_calibration` writes a file of scales, and cache.kv_scales names it"
)


def load_kv_scales(folder: Path, spec: ModelSpec, *, file: Path | None, is_random: bool) -> Tensor:
    """fp32 [layers, 2, KV heads] of the whole model, from `file`, or from the model's folder.

    With latent attention [layers, 2, 1], of latents and of rotated keys. is_random: the folder's
    weights are not used, nor are its scales. Raises ConfigError for scales that are missing in
    part, are not positive, or are of another format or model.
    """
    if file is not None:
        return _all_scales(str(file), spec, _read(file, spec))
    found: dict[str, Tensor] = {}
    if not is_random:
        for path, _ in weight_files(folder):
            found |= _read(path, spec)
    if found:
        _check_scheme(folder)
        return _all_scales(str(folder), spec, found)
    logger.warning(
        "cache.kv_dtype: fp8_e4m3, but the model has no scales of K and V: all are 1, and what"
        " is above 448 is cut off; %s",
        _CALIBRATE,
    )
    return torch.ones(spec.num_layers, _NUM_PLANES, num_scaled_heads(spec))


def write_kv_scales(path: Path, scales: Tensor, *, is_latent: bool = False) -> None:
    """Writes what `load_kv_scales` reads; scales: as that returns."""
    tensors = {
        f"model.layers.{layer}.self_attn.{_plane_name(plane, is_latent)}_scale": of_plane.clone()
        for layer, of_layer in enumerate(scales)
        for plane, of_plane in enumerate(of_layer)
    }
    save_file(tensors, path)


def num_scaled_heads(spec: ModelSpec) -> int:
    """Heads with scales of their own: all KV heads; one, of all heads, with latent attention."""
    return spec.num_kv_heads if spec.latent is None else 1


def _plane_name(plane: int, is_latent: bool) -> str:
    names = _OF_LATENTS if is_latent else _OF_HEADS
    return next(name for name, planes in names.items() if planes == (plane,))


def digest_of_scales(scales: Tensor) -> str:
    """Names the scales: blocks that were written with others mean something else."""
    data = scales.float().contiguous().numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def scales_of_rank(scales: Tensor, rank: Rank) -> Tensor:
    """[layers, 2, the rank's KV heads]; of fewer heads than ranks several ranks have the same."""
    return scales[:, :, rank.share(scales.shape[2], "KV heads", unit=1)]


def _read(path: Path, spec: ModelSpec) -> dict[str, Tensor]:
    """The scales in one file, by their names in a model with a head."""
    wanted = {
        name: whole
        for name in read_header(path)
        if _NAME.fullmatch(whole := whole_name(name, spec))
    }
    if not wanted:
        return {}
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            return {whole: file.get_tensor(name) for name, whole in wanted.items()}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file: {error}") from error


def _all_scales(where: str, spec: ModelSpec, found: Mapping[str, Tensor]) -> Tensor:
    is_latent, num_heads = spec.latent is not None, num_scaled_heads(spec)
    scales = torch.zeros(spec.num_layers, _NUM_PLANES, num_heads)
    for name, tensor in found.items():
        layer, planes = _places(where, name, is_latent=is_latent)
        if layer >= spec.num_layers:
            raise ConfigError(f"{where}: {name!r} is of a layer that the model does not have")
        for plane in planes:
            scales[layer, plane] = _heads(where, name, tensor, num_heads)
    missing = (scales == 0).any(dim=2).nonzero().tolist()
    if missing:
        layer, plane = missing[0]
        raise ConfigError(
            f"{where}: {len(missing)} scales of K and V are missing, the first is"
            f" model.layers.{layer}.self_attn.{_plane_name(plane, is_latent)}_scale; {_CALIBRATE}"
        )
    return scales


def _places(where: str, name: str, *, is_latent: bool) -> tuple[int, tuple[int, ...]]:
    """Layer and planes of a scale."""
    found = _NAME.fullmatch(name)
    assert found is not None, f"{name} was found by this expression"
    plane, planes = found["plane"] or found["output"], _OF_LATENTS if is_latent else _OF_HEADS
    if plane not in planes:
        raise ConfigError(
            f"{where}: {name!r} is of latent attention, which the model does not have"
        )
    return int(found["layer"]), planes[plane]


def _heads(where: str, name: str, tensor: Tensor, num_heads: int) -> Tensor:
    if tensor.numel() not in (1, num_heads):
        raise ConfigError(
            f"{where}: {name!r} has {tensor.numel()} numbers; expected one, or one for each of"
            f" {num_heads} KV heads"
        )
    values = tensor.float().reshape(-1)
    if not bool((values.isfinite() & (values > 0)).all()):
        raise ConfigError(f"{where}: {name!r} is {values.tolist()}; scales are positive")
    return values


def _check_scheme(folder: Path) -> None:
    """Raises ConfigError if the folder's scales are those of another format than e4m3.

    `kv_cache_scheme` of config.json is an object, or a word: "static" of AutoFP8, which has e4m3
    alone, and "NVFP4", say, of ModelOpt; `kv_cache_quant_algo` of ModelOpt's own file likewise.
    """
    section = published_section(ConfigFile.read(folder / "config.json"))
    if section is None:
        return
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if section.is_text(key) and section.text(key).lower() not in _WORDS_FOR_E4M3:
            raise section.error(key, f"{section.text(key)!r} is not static e4m3; {_CALIBRATE}")
    scheme = None if section.is_text("kv_cache_scheme") else section.section("kv_cache_scheme")
    if scheme is None:
        return
    kind = scheme.text("type", "float"), scheme.integer("num_bits", 8)
    if kind != ("float", 8) or scheme.flag("dynamic", False):
        raise scheme.error("type", f"{kind[0]} of {kind[1]} bits is not static e4m3; {_CALIBRATE}")
