"""How the linear maps of a model are quantised, as a record; config.py reads it."""

import re
from dataclasses import dataclass
from enum import Enum
from functools import cache

HEAD_MODULE = "lm_head"
SCALE_OF_TILES = "weight_scale_inv"
MXFP4_GROUP, NVFP4_GROUP = 32, 16  # inputs that share a scale
BITS_AND_BYTES_GROUP = 64


class Packing(Enum):
    """Which tensors a quantised linear map is published as."""

    FP8 = "weight in e4m3, and its scales"
    INT8 = "weight in int8, and its scales"
    BITS_AND_BYTES = "weight as places in a table, absmax of blocks, and what describes them"
    COMPRESSED_INT = "weight_packed, weight_scale, weight_zero_point, weight_g_idx"
    AWQ = "qweight, qzeros and scales, inputs by rows, outputs interleaved"
    GPTQ = "qweight, qzeros, scales and g_idx, inputs by rows"
    ONLINE_FP8 = "weight as without quantisation; quantised to e4m3 while it is read"
    MXFP4 = "weight_packed in e2m1, weight_scale in e8m0"
    QUARK_MXFP4 = "weight in e2m1, weight_scale in e8m0"
    NVFP4 = "weight_packed in e2m1, weight_scale in e4m3, and what it is to be divided by"
    MODELOPT_NVFP4 = "weight in e2m1, weight_scale in e4m3, and what it is to be multiplied by"


FP8_PACKINGS = (Packing.FP8, Packing.ONLINE_FP8)
MXFP4_PACKINGS = (Packing.MXFP4, Packing.QUARK_MXFP4)
FP4_PACKINGS = (*MXFP4_PACKINGS, Packing.NVFP4, Packing.MODELOPT_NVFP4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How the linear maps of a model's layers are quantised; all of them alike."""

    packing: Packing
    # Outputs and inputs that share a scale; None = all of the published tensor.
    tile_rows: int | None
    tile_columns: int | None
    bits: int = 4  # of an integer that is packed with others
    scale_name: str = "weight_scale"
    table_name: str = ""  # bitsandbytes: of the numbers that a place of the table stands for
    has_nested_scales: bool = False  # bitsandbytes: the scales are quantised, too
    has_exponents: bool = False  # FP8: the scales are published as exponents of two, in bytes
    has_zero_points: bool = False
    zero_offset: int = 0  # added to the stored zero points (GPTQ's first format: 1)
    # Whether inputs may be assigned to groups out of their order; True = the file has to say so.
    must_have_order: bool = False
    # Whether the publisher computed with FP8 activations too; else only weights are quantised.
    quantizes_activations: bool = False
    targets: tuple[str, ...] = ()  # modules, or re:<expression>; none = every linear map
    ignored: tuple[str, ...] = ()  # modules that are not quantised, likewise
    file_prefix: str = ""  # of the modules' names, as targets and ignored may have them

    @property
    def is_made_matrix(self) -> bool:
        """Whether a map is decoded when it is loaded, as no kernel multiplies by its numbers.

        It is a matrix in the model's dtype then, of 2 bytes a weight in bf16.
        """
        return self.packing in (Packing.INT8, Packing.BITS_AND_BYTES) or self.bits == 8

    @property
    def middle(self) -> int:
        """The zero point where none is published."""
        is_signed = self.packing in (Packing.INT8, Packing.BITS_AND_BYTES)
        return 0 if is_signed else 1 << (self.bits - 1)

    def covers(self, module: str) -> bool:
        """Whether the linear map `module` (model.layers.0.mlp.down_proj) is quantised."""
        names = self._names_in_files(module)
        is_target = not self.targets or any(_names_module(self.targets, name) for name in names)
        return is_target and not any(_names_module(self.ignored, name) for name in names)

    def _names_in_files(self, module: str) -> tuple[str, ...]:
        """The module's name, and those that it has as a part of a larger model."""
        if not self.file_prefix:
            return (module,)
        body, prefix = "model.", self.file_prefix
        return module, prefix + module, body + prefix + module.removeprefix(body)

    def name_read(self, name: str) -> str:
        """The name that a tensor of a file is read under.

        transformers 5 names the scale of a whole tensor as others name those of tiles.
        """
        has_one = self.packing is Packing.FP8 and self.tile_rows is None
        return name.removesuffix("_inv") if has_one and name.endswith(SCALE_OF_TILES) else name


ONLINE_FP8 = Quantization(
    packing=Packing.ONLINE_FP8,
    tile_rows=1,
    tile_columns=None,
    quantizes_activations=True,
    ignored=(HEAD_MODULE,),
)

# Of its experts only; config.json names what is left out, this says what is meant.
GPT_OSS_MXFP4 = Quantization(
    packing=Packing.MXFP4, tile_rows=1, tile_columns=MXFP4_GROUP, targets=("mlp.experts",)
)


def _names_module(entries: tuple[str, ...], module: str) -> bool:
    """Whether an entry names the module, modules around it, or its last components."""
    names, expressions = compiled_entries(entries)
    if "Linear" in entries or names.search(module) is not None:
        return True
    return any(expression.match(module) is not None for expression in expressions)


@cache
def compiled_entries(entries: tuple[str, ...]) -> tuple[re.Pattern[str], list[re.Pattern[str]]]:
    """The names among the entries as one expression, as a mixture has thousands of modules.

    Raises re.error for an expression that is not one.
    """
    names = [re.escape(entry) for entry in entries if not entry.startswith("re:")]
    found = rf"(?:\A|\.)(?:{'|'.join(names)})(?:\.|\Z)" if names else r"(?!)"
    expressions = [entry.removeprefix("re:") for entry in entries if entry.startswith("re:")]
    return re.compile(found), [re.compile(expression) for expression in expressions]
