"""Keys of `quantization_config` that several of its formats have, and what errors say of it."""

from engine.models.config_file import ConfigFile

KINDS = (
    "fp8, fbgemm_fp8, compressed-tensors (float-quantized, int-quantized, pack-quantized,"
    " mxfp8-quantized, mxfp4-pack-quantized, nvfp4-pack-quantized), awq, gptq, auto-round, modelopt"
    " (FP8, MXFP8, NVFP4), quark (fp8_e4m3, fp4), bitsandbytes (4 bits)"
)
WAY_OUT = "use unquantized weights, or quantise them with model.quantization: fp8"
INT_BITS = (4, 8)
MXFP8_GROUP = 32  # inputs that share a scale


def names_of(section: ConfigFile, *keys: str) -> tuple[str, ...]:
    """The strings of the lists under all of these keys."""
    return tuple(name for key in keys for name in section.texts(key) or ())


def require(section: ConfigFile, key: str, *values: int) -> None:
    """Raises ConfigError if the integer under `key` is none of these."""
    found = section.integer(key)
    if found not in values:
        supported = ", ".join(map(str, values))
        raise section.error(key, f"{found} is not supported here; supported: {supported}")
