"""A kernel that writes out the noise which draws compute inline."""

import triton
import triton.language as tl

from kernels.sampling.rows_triton import gumbel, noise_bits


@triton.jit
def noise_kernel(  # noqa: ANN201
    seeds_ptr,  # noqa: ANN001
    indices_ptr,  # noqa: ANN001
    tokens_ptr,  # noqa: ANN001
    bits_ptr,  # noqa: ANN001
    noise_ptr,  # noqa: ANN001
    num_tokens,  # noqa: ANN001
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Grid (S, blocks of tokens); seeds, indices int64 [S]; bits int64, noise fp32 [S, tokens]."""
    row = tl.program_id(0)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = places < num_tokens
    tokens = tl.load(tokens_ptr + places, mask=is_token, other=0)
    bits = noise_bits(tl.load(seeds_ptr + row), tl.load(indices_ptr + row), tokens)
    tl.store(bits_ptr + row * num_tokens + places, bits.to(tl.int64), mask=is_token)
    tl.store(noise_ptr + row * num_tokens + places, gumbel(bits), mask=is_token)
