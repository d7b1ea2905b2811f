"""Writes the planes of a step's new tokens into the paged store. Knows no requests.

The store [blocks, layers, planes, block_size, kv_heads, head_dim] has two planes, K and V, or one,
the latent. It is viewed as *lines*: one line is one token's K (or V, or latent) of one layer,
[kv_heads, head_dim], contiguous. Line of a token's first plane in layer 0:

    block * layers * planes * block_size + slot in block

Its V is block_size lines further, and layer l is l * planes * block_size lines further. So one
index tensor serves all layers, applied to a view that starts later.
"""

import torch
from torch import Tensor


def slot_lines(slots: Tensor, store: Tensor) -> Tensor:
    """Layer-0 lines of every plane at `slots`, int64 [planes, S].

    slots: integer [S], block * block_size + slot in block, none negative.
    """
    _, num_layers, num_planes, block_size, _, _ = store.shape
    slots = slots.long()
    blocks = slots.div(block_size, rounding_mode="floor")
    lines = slots.add(blocks, alpha=(num_layers * num_planes - 1) * block_size)
    return torch.stack([lines + plane * block_size for plane in range(num_planes)])


def layer_lines(store: Tensor, layer: int) -> Tensor:
    """The store from layer `layer` of block 0 on, as lines [n, kv_heads, head_dim]; a view."""
    num_blocks, num_layers, num_planes, block_size, num_kv_heads, head_dim = store.shape
    width = num_kv_heads * head_dim
    first = layer * num_planes * block_size
    num_lines = num_blocks * num_layers * num_planes * block_size - first
    return store.as_strided(
        (num_lines, num_kv_heads, head_dim),
        (width, head_dim, 1),
        store.storage_offset() + first * width,
    )


def layer_half_blocks(store: Tensor, layer: int) -> Tensor:
    """The store from `layer` of block 0 on, as [n, block_size * kv_heads * head_dim]; a view.

    Half-block `block * layers * 2` holds the layer's K of a block, the next one its V; with one
    plane a half-block is all that the layer has of a block.
    """
    num_blocks, num_layers, num_planes, block_size, num_kv_heads, head_dim = store.shape
    width = block_size * num_kv_heads * head_dim
    first = layer * num_planes
    return store.as_strided(
        (num_blocks * num_layers * num_planes - first, width),
        (width, 1),
        store.storage_offset() + first * width,
    )


def kv_append(k: Tensor, v: Tensor, store: Tensor, layer: int, kv_lines: Tensor) -> None:
    """store[line of each token] = k, v; writes to `store`.

    k, v: [T, kv_heads, head_dim] in the store's dtype, kv_lines: int64 [2, T], the layer-0 lines
    of each token's K and V, all different.
    """
    lines = layer_lines(store, layer)
    lines.index_copy_(0, kv_lines[0], k)
    lines.index_copy_(0, kv_lines[1], v)


def latent_append(latent: Tensor, store: Tensor, layer: int, lines: Tensor) -> None:
    """store[line of each token] = latent; writes to `store`.

    latent: [T, 1, width] in the store's dtype; lines: int64 [1, T], layer-0 lines, all different.
    """
    layer_lines(store, layer).index_copy_(0, lines[0], latent)
