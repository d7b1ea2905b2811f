"""How one block's bytes are arranged; all that scheduler, handoff and digest know of tensors.

Block-first: `[blocks, layers, 2, block_size, kv_heads, head_dim]`, so that a block is one
contiguous piece for all layers and one copy moves it anywhere.
"""

from typing import Literal

import msgspec

KvDtype = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a KV block. Two workers may exchange blocks only if their layouts are equal."""

    num_layers: int
    block_size: int  # tokens
    num_kv_heads: int
    head_dim: int
    dtype: KvDtype

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[layers, 2 (K then V), block_size, kv_heads, head_dim]"""
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        num_elements = 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim
        return num_elements * DTYPE_BYTES[self.dtype]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)
