"""Holds the tensor behind the KV blocks, and copies whole blocks into and out of it.

Knows blocks by number only: the block pool decides who owns one and whether it may be overwritten.
Offsets are int64 throughout; a store may exceed 2^31 elements.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kv.digests import BlockDigests
from engine.kv.layout import KvLayout, KvPart
from engine.kv.shared_memory import MemoryOffer, SharedMemory
from kernels.kv.digest import block_digests, copy_blocks, host_digest, write_blocks

# One size for all: torch caches page-locked memory by size, and allocating more takes milliseconds.
_MIN_NUMBERS = 4096


def to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64 [n] on `device`; the copy is complete once the current stream reaches it."""
    values = torch.tensor(numbers, dtype=torch.int64)
    if device.type != "cuda":
        return values
    return _page_locked(len(values)).copy_(values).to(device, non_blocking=True)


def to_host(numbers: Tensor) -> Tensor:
    """int64 [n] in host memory; the copy is complete once the current stream reaches it."""
    if not numbers.is_cuda:
        return numbers
    return _page_locked(len(numbers)).copy_(numbers, non_blocking=True)


def _page_locked(number: int) -> Tensor:
    room = max(number, _MIN_NUMBERS)
    return torch.empty(room, dtype=torch.int64, pin_memory=True)[:number]


_TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.uint8,  # not every operation on blocks knows the type of these bytes
}
# The widest integer that divides a block's bytes: fewer, wider words make the digest cheaper.
# int32 divides all but latents of e4m3 numbers in blocks of few tokens: a block has K and V of even
# width, or a latent of even width.
_WORD_DTYPES = {8: torch.int64, 4: torch.int32}


class KvStore:
    """`num_blocks` blocks of one layout on one device, initialised to zero."""

    def __init__(
        self,
        layout: KvLayout,
        *,
        num_blocks: int,
        device: torch.device,
        tensor: Tensor | None = None,
    ) -> None:
        """tensor: [num_blocks, *block_shape], memory to use as it is; None = new memory, zero."""
        assert num_blocks > 0, f"{num_blocks} blocks"
        self.layout = layout
        self.num_blocks = num_blocks
        self.dtype = _TORCH_DTYPES[layout.dtype]
        self.shared: SharedMemory | None = None
        # [num_blocks, layers, planes, block_size, kv_heads, head_dim]
        self.tensor = (
            torch.zeros((num_blocks, *layout.block_shape), dtype=self.dtype, device=device)
            if tensor is None
            else tensor
        )
        self.digests = BlockDigests(num_blocks)  # of blocks that are to be sent to another worker
        self._weights = _digest_weights(layout).to(device)
        self._words = self._words_of(self.tensor)  # kernels copy and digest wide words
        if device.type == "cuda":
            self._compile()

    def share(self, part: KvPart) -> MemoryOffer:
        """Keep digests, and on a CPU the blocks, in memory that rank 0 maps; before the first step.

        On a CPU the blocks are zero again. Raises ConfigError as `hold_part` does.
        """
        kv_bytes = 0 if self.tensor.is_cuda else self.num_blocks * self.layout.block_bytes
        self._use(SharedMemory.create(self.num_blocks, kv_bytes))
        self.hold_part(part)
        assert self.shared is not None, "it is used now"
        return self.shared.offer

    @classmethod
    def attached(
        cls, offer: MemoryOffer, part: KvPart, layout: KvLayout, tensor: Tensor | None = None
    ) -> "KvStore":
        """Another rank's store, mapped here; tensor: its blocks, if they are on a GPU."""
        shared = SharedMemory.attach(offer)
        blocks = _blocks_in(shared, layout) if tensor is None else tensor
        store = cls(layout, num_blocks=offer.num_blocks, device=blocks.device, tensor=blocks)
        store.shared, store.digests = shared, shared.digests
        store.hold_part(part)
        return store

    def hold_part(self, part: KvPart) -> None:
        """From now on a digest is this part's term of the whole block's: they add up to it.

        Raises ConfigError if a head does not have a whole number of the digest's words.
        """
        self._weights = _digest_weights(self.layout, part).to(self.device)

    def _use(self, shared: SharedMemory) -> None:
        self.shared, self.digests = shared, shared.digests
        if not self.tensor.is_cuda:
            self.tensor = _blocks_in(shared, self.layout)
            self._words = self._words_of(self.tensor)

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def gather(self, block_ids: Sequence[int]) -> Tensor:
        """A contiguous copy [n, *block_shape] in the order of `block_ids`."""
        return self.tensor.index_select(0, self.index(block_ids))

    def scatter(self, block_ids: Sequence[int], data: Tensor) -> None:
        """Overwrite distinct blocks with `data`.

        data: [n, *block_shape] in the layout's dtype, or uint8 of as many bytes in any shape.
        """
        if data.dtype == torch.uint8:
            expected_bytes = len(block_ids) * self.layout.block_bytes
            assert data.numel() == expected_bytes, (
                f"{data.numel()} bytes for {len(block_ids)} blocks of {self.layout.block_bytes}"
            )
            data = data.contiguous().view(-1).view(self.dtype)
            data = data.view(len(block_ids), *self.layout.block_shape)
        assert data.dtype == self.dtype, f"{data.dtype} data for a store of {self.dtype}"
        assert data.shape == (len(block_ids), *self.layout.block_shape), (
            f"data of shape {list(data.shape)} for {len(block_ids)} blocks"
        )
        assert len(set(block_ids)) == len(block_ids), f"a block is named twice: {block_ids}"
        self.tensor.index_copy_(0, self.index(block_ids), data.to(self.device))

    def zero(self, block_ids: Sequence[int]) -> None:
        """Overwrite blocks with zeros; in a drafter's view, its layers of them."""
        own = self.tensor[:, self.layout.num_layers_before :]
        own.index_fill_(0, self.index(block_ids), 0)

    def digest(self, block_ids: Sequence[int]) -> list[int]:
        """Digest of each block in the store, in order; see `digest_staged`."""
        values: list[int] = self.queue_digests(self.index(block_ids)).tolist()  # waits, on a GPU
        return values

    def queue_digests(self, block_ids: Tensor) -> Tensor:
        """`digest` as int64 [n] on the store's device, without waiting for it.

        block_ids: from `index`.
        """
        return block_digests(self._words, self._weights, block_ids)

    def queue_write(self, block_ids: Tensor, data: Tensor) -> Tensor:
        """Overwrite distinct blocks; returns the `queue_digests` of the data written.

        data: contiguous uint8 [n * block_bytes] on the store's device. block_ids: from `index`.
        """
        staged = self._words_of(data)
        return write_blocks(self._words, staged, self._weights, block_ids)

    def queue_copies(self, block_ids: Tensor, copies: Tensor, rows: Tensor) -> Tensor:
        """Copy blocks to `rows` of `copies`; returns their `queue_digests`.

        copies: contiguous uint8 [any, block_bytes] on the store's device. block_ids and rows: from
        `index`, equally many; rows are distinct.
        """
        return copy_blocks(self._words, self._weights, block_ids, self._words_of(copies), rows)

    def digest_staged(self, data: Tensor) -> list[int]:
        """Digest of each of n blocks held outside the store, computed on the store's device.

        digest = sum over i of word_i * weight_i modulo 2^64, with the block's bits read as
        integers, so there is no rounding and a NaN counts like any other pattern. Weights are odd,
        so any change of one word is always noticed. They differ by position, so swapped words, rows
        or halves are noticed with a probability of about 1 - 2^-63.

        data: contiguous [n, *block_shape] in the layout's dtype, or uint8 of as many bytes.
        """
        words = self._words_of(data.contiguous()).to(self.device)
        block_ids = torch.arange(words.shape[0], device=self.device)
        digests = block_digests(words, self._weights, block_ids)
        values: list[int] = digests.tolist()  # the one copy to the host
        return values

    def digests_in(self, blocks: Tensor) -> Callable[[int], int]:
        """A function that digests one of the blocks in another memory, of a store on a CPU.

        blocks: contiguous uint8 [any, block_bytes].
        """
        words = self._words_of(blocks).numpy()
        return lambda index: host_digest(words[index], self._weights.numpy())

    def _compile(self) -> None:
        """Compile both kernels now, not during the first handoff; block 0 keeps its content."""
        first = self.index([0])
        self.queue_digests(first)
        self.queue_write(first, self.gather([0]).view(-1).view(torch.uint8))

    def _words_of(self, blocks: Tensor) -> Tensor:
        """View of the same memory as [n, words per block]."""
        words = blocks.view(-1).view(torch.uint8).view(_WORD_DTYPES[_word_bytes(self.layout)])
        return words.view(-1, self._weights.numel())

    def index(self, block_ids: Sequence[int]) -> Tensor:
        """int64 [n] on the store's device; complete once the current stream reaches the copy."""
        # Checked here: on a GPU an index out of range makes the whole context unusable.
        assert not block_ids or 0 <= min(block_ids) <= max(block_ids) < self.num_blocks, (
            f"block ids {list(block_ids)} for a store of {self.num_blocks}"
        )
        return to_device(block_ids, self.device)


def _word_bytes(layout: KvLayout) -> int:
    for size in _WORD_DTYPES:
        if layout.block_bytes % size == 0:
            return size
    raise ConfigError(
        f"cache.block_size: blocks of {layout.block_bytes} bytes do not divide into words of"
        f" {min(_WORD_DTYPES)}; set it to a multiple of {min(_WORD_DTYPES)}"
    )


def _blocks_in(shared: SharedMemory, layout: KvLayout) -> Tensor:
    """[num_blocks, *block_shape] of the shared memory."""
    return shared.kv.view(_TORCH_DTYPES[layout.dtype]).view(-1, *layout.block_shape)


def _digest_weights(layout: KvLayout, part: KvPart | None = None) -> Tensor:
    """Odd int64 weights [words per block], equal on every worker: splitmix64 of the position.

    part: the position is the one in a block of the whole model, so that ranks that hold each head
    once have digests that add up to that block's. Raises ConfigError if words would hold two heads.
    """
    whole = layout if part is None else part.whole
    word_bytes = _word_bytes(whole)
    num_words = whole.block_bytes // word_bytes
    assert num_words > 0, f"empty block: {whole}"
    x = torch.arange(1, num_words + 1, dtype=torch.int64) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    weights = (x ^ _shift_right(x, 31)) | 1
    *outer, num_heads, _ = whole.block_shape
    if part is None or part.num_heads == num_heads:
        return weights
    if num_words % (num_words_outer := num_heads * torch.Size(outer).numel()):
        raise ConfigError(
            f"a KV head of {whole.block_bytes // num_words_outer} bytes a token does not divide"
            f" into words of {word_bytes}; prefill and decode workers of one rank can move such KV:"
            " set workers.tensor_parallel_size to 1"
        )
    return weights.view(*outer, num_heads, -1)[..., part.heads, :].reshape(-1)


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit `value`."""
    return value - 2**64 if value >= 2**63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
