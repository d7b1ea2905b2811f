"""The digest kernel against its torch twin, run by Triton's interpreter."""

import torch

from kernels.kv.digest import block_digests, copy_blocks, write_blocks
from kernels.kv.digest_triton import digests


def check(seed: str) -> None:
    generator = torch.Generator().manual_seed(int(seed))
    for dtype, num_words in ((torch.int64, 1), (torch.int64, 1025), (torch.int32, 17_000)):
        bounds = torch.iinfo(dtype)
        words = torch.randint(
            bounds.min, bounds.max, (5, num_words), dtype=dtype, generator=generator
        )
        weights = torch.randint(
            -(2**62), 2**62, (num_words,), dtype=torch.int64, generator=generator
        )
        block_ids = torch.tensor([4, 0, 3])
        expected = block_digests(words, weights, block_ids)
        assert torch.equal(digests(words, weights, block_ids), expected)
        for i, block in enumerate(block_ids.tolist()):
            pairs = zip(words[block].tolist(), weights.tolist(), strict=True)
            total = sum(word * weight for word, weight in pairs) % 2**64
            assert int(expected[i]) % 2**64 == total
        staged = torch.randint(
            bounds.min, bounds.max, (3, num_words), dtype=dtype, generator=generator
        )
        by_torch = words.clone()
        expected = write_blocks(by_torch, staged, weights, block_ids)
        assert torch.equal(digests(words, weights, block_ids, staged=staged), expected)
        assert torch.equal(words, by_torch)
        assert torch.equal(block_digests(words, weights, block_ids), expected)
        copies, rows = torch.zeros((7, num_words), dtype=dtype), torch.tensor([6, 1, 2])
        by_torch, before = copies.clone(), words.clone()
        assert torch.equal(copy_blocks(words, weights, block_ids, by_torch, rows), expected)
        assert torch.equal(by_torch[rows], words[block_ids])
        assert torch.equal(digests(words, weights, block_ids, copies=(copies, rows)), expected)
        assert torch.equal(copies, by_torch)
        assert torch.equal(words, before)
    print("checked")
