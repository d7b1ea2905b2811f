"""Keys and values of some rows copied out of a store of e4m3 numbers, as what they stand for.

    k[cu_keys[r] + j] = scale * number at key j of row r       likewise v

in fp32, rounded once. Torch twin: `widen_torch`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.protocol import RowTensors
from kernels.instructions import knows_e4m3
from kernels.kv.append import layer_lines
from kernels.kv.scales import KvScales, from_e4m3
from kernels.pdl import pdl_supported
from kernels.quant.dequantize import decode_e4m3

_KEYS = 64  # of a program


@triton.jit(
    do_not_specialize=["layer", "num_keys"],
    do_not_specialize_on_alignment=["cu_keys_ptr", "cu_blocks_ptr", "block_ids_ptr"],
)
def _widen_kernel(
    store_ptr,  # [blocks, layers, 2, block_size, kv_heads, head_dim] uint8
    scales_ptr,  # fp32 [layers, 2, kv_heads]
    cu_keys_ptr,  # [R + 1]
    cu_blocks_ptr,  # [R + 1]
    block_ids_ptr,  # int32 [N]
    out_ptr,  # [2, num_keys, kv_heads, head_dim]
    layer,
    num_keys,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # head_dim, or the power of two above
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    KEYS: tl.constexpr,
    KNOWS_E4M3: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1)
    plane = tl.program_id(2) // NUM_KV_HEADS
    kv_head = tl.program_id(2) % NUM_KV_HEADS
    first = tl.load(cu_keys_ptr + row)
    num_of_row = tl.load(cu_keys_ptr + row + 1) - first
    keys = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    if tl.program_id(0) * KEYS >= num_of_row:
        return
    is_key = keys < num_of_row
    ids_ptr = block_ids_ptr + tl.load(cu_blocks_ptr + row)
    blocks = tl.load(ids_ptr + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    scale = tl.load(scales_ptr + (layer * 2 + plane) * NUM_KV_HEADS + kv_head)
    columns = tl.arange(0, COLUMNS)
    mask = is_key[:, None] & (columns < HEAD_DIM)[None, :]
    width: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    half = store_ptr + layer.to(tl.int64) * LAYER_STRIDE + plane * (BLOCK_SIZE * width)
    lines = blocks * BLOCK_STRIDE + keys % BLOCK_SIZE * width
    inside = kv_head * HEAD_DIM + columns[None, :]
    codes = tl.load(half + lines[:, None] + inside, mask=mask, other=0)
    numbers = decode_e4m3(codes, tl.float32, KNOWS_E4M3, False, True) * scale
    places = (plane.to(tl.int64) * num_keys + first + keys) * width
    numbers = numbers.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places[:, None] + inside, numbers, mask=mask)


def widen(
    store: Tensor,
    layer: int,
    scales: KvScales,
    rows: RowTensors,
    cu_keys: Tensor,
    *,
    num_keys: int,
    max_keys: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Returns new k, v [num_keys, kv_heads, head_dim] in `dtype`, one row after the other.

    store: [blocks, layers, 2, block_size, kv_heads, head_dim] uint8, contiguous. cu_keys: int32
    [R + 1], where a row's keys begin, of which it has as many as in `rows`, at most `max_keys`.
    """
    _, num_layers, num_planes, block_size, num_kv_heads, head_dim = store.shape
    assert store.dtype == torch.uint8, f"a store in {store.dtype}"
    assert store.is_contiguous(), f"a store with strides {store.stride()}"
    assert num_planes == 2, f"{num_planes} planes are not K and V"
    assert 0 <= layer < num_layers, f"layer {layer} of {num_layers}"
    size = (2, num_keys, num_kv_heads, head_dim)
    copied = torch.empty(size, dtype=dtype, device=store.device)
    use_pdl = pdl_supported(store.device)
    grid = (triton.cdiv(max_keys, _KEYS), len(cu_keys) - 1, 2 * num_kv_heads)
    _widen_kernel[grid](
        store,
        scales.scale,
        cu_keys,
        rows.cu_blocks,
        rows.block_ids,
        copied,
        layer,
        num_keys,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        COLUMNS=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        BLOCK_STRIDE=store.stride(0),
        LAYER_STRIDE=store.stride(1),
        KEYS=_KEYS,
        KNOWS_E4M3=knows_e4m3(store.device),
        USE_PDL=use_pdl,
        launch_pdl=use_pdl,
    )
    k, v = copied
    return k, v


def widen_torch(
    store: Tensor, layer: int, scales: KvScales, lines: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The torch twin of `widen`; lines: int64 [2, keys], layer-0 lines of each key's K and V."""
    of_layer = layer_lines(store, layer)

    def plane(index: int) -> Tensor:
        numbers = from_e4m3(of_layer.index_select(0, lines[index]), torch.float32)
        return numbers.mul_(scales.factors(layer, index)[:, None]).to(dtype)

    return plane(0), plane(1)
