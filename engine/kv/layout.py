"""Describes how the bytes of one block are arranged, without tensors.

A layer stores planes for each token: attention with heads has a K and a V plane, latent attention
has one. Layers of one kind have the same planes. The order is block-first: a block is one
contiguous piece for all layers, so one copy moves it. With planes of equal shape a store is
`[blocks, layers, planes, block_size, heads, width]`. The scales of e4m3 numbers are known before
the first token and are in no block; the layout has their digest.

A drafter may need a vector of the model's hidden states for every token (`engine/kv/features.py`).
It lies in planes behind those of the last layer, so it is where the token's KV is: it is cached,
evicted, moved and checked with it. So does the KV of a model that drafts, where it moves between
workers. It has heads of its own, so the block is divided once more, into layers of its size:

    target's view    layer 0 | layer 1 | ... | layer n-1 |  padding  | (drafter's KV)
    drafter's view   num_layers_before of its layers ............... | layer 0 | layer 1 | ...

Both views are contiguous stores, and kernels need not know that there are two.
"""

from typing import Literal, Self

import msgspec

ComputeDtype = Literal["float32", "bfloat16", "float16"]
KvDtype = Literal["float32", "bfloat16", "float16", "fp8_e4m3"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1}


class KvPlane(msgspec.Struct, frozen=True, kw_only=True):
    """One of the tensors that a layer keeps for every token: `num_heads` vectors of `width`."""

    name: str
    num_heads: int
    width: int  # elements
    dtype: KvDtype

    @property
    def token_bytes(self) -> int:
        return self.num_heads * self.width * DTYPE_BYTES[self.dtype]


class KvLayers(msgspec.Struct, frozen=True, kw_only=True):
    """All layers of one kind: their number, and the planes of each."""

    num_layers: int
    planes: tuple[KvPlane, ...]


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a KV block. Two workers may exchange blocks only if their layouts are equal."""

    block_size: int  # tokens
    kinds: tuple[KvLayers, ...]
    scales: str = ""  # digest of the scales of all heads, whichever are here; "" = there are none
    num_feature_layers: int = 0  # behind the model's, with the same planes
    drafter: "KvLayout | None" = None  # of a model's that drafts, at the end of the block
    num_layers_before: int = 0  # of a drafter's view: what of the block is not its own

    @classmethod
    def with_heads(
        cls,
        *,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: KvDtype,
        scales: str = "",
    ) -> Self:
        """Layout of a model whose layers all keep K and V of `num_kv_heads` heads."""
        planes = tuple(
            KvPlane(name=name, num_heads=num_kv_heads, width=head_dim, dtype=dtype)
            for name in ("k", "v")
        )
        kinds = (KvLayers(num_layers=num_layers, planes=planes),)
        return cls(block_size=block_size, kinds=kinds, scales=scales)

    @classmethod
    def latent(
        cls, *, num_layers: int, block_size: int, width: int, dtype: KvDtype, scales: str = ""
    ) -> Self:
        """Layout of a model whose layers all keep one vector of `width` a token for all heads."""
        plane = KvPlane(name="latent", num_heads=1, width=width, dtype=dtype)
        kinds = (KvLayers(num_layers=num_layers, planes=(plane,)),)
        return cls(block_size=block_size, kinds=kinds, scales=scales)

    def with_features(self, width: int) -> "KvLayout":
        """The same with room for a vector of `width` elements a token."""
        return msgspec.structs.replace(self, num_feature_layers=-(-width // self._layer_width))

    def can_hold(self, drafter: "KvLayout") -> bool:
        """Whether `with_drafter` is possible: both keep K and V, as numbers of one dtype."""
        planes = [len(kind.planes) for layout in (self, drafter) for kind in layout.kinds]
        same = self.dtype == drafter.dtype and self.block_size == drafter.block_size
        return same and planes == [2, 2]

    def with_drafter(self, drafter: "KvLayout") -> "KvLayout":
        """The same with room for the KV of a model that drafts, which it `can_hold`."""
        fits = self.can_hold(drafter) and self.num_layers_behind == 0
        assert fits, f"{drafter} does not go into {self}"
        return msgspec.structs.replace(self, drafter=drafter)

    @property
    def of_drafter(self) -> "KvLayout":
        """The drafter's view of the whole block."""
        assert self.drafter is not None, f"no drafter's KV in {self}"
        num_layers = self._num_layers * self._layer_width // self.drafter._layer_width
        num_before = num_layers - self.drafter._num_layers
        return msgspec.structs.replace(self.drafter, num_layers_before=num_before)

    @property
    def num_layers_behind(self) -> int:
        """Layers behind the model's own: of features, or of padding and a drafter's KV."""
        if self.drafter is None:
            return self.num_feature_layers
        (kind,) = self.kinds
        own, theirs = self._layer_width, self.drafter._layer_width
        num_behind = -(-self.drafter._num_layers * theirs // own)
        while (kind.num_layers + num_behind) * own % theirs:
            num_behind += 1
        return num_behind

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[layers, planes, block_size, heads, width]; all planes must have one shape and dtype.

        Layers before and behind the model's are among the layers.
        """
        (kind,) = self.kinds
        plane = self._plane
        return (self._num_layers, len(kind.planes), self.block_size, plane.num_heads, plane.width)

    @property
    def dtype(self) -> KvDtype:
        """The dtype of all planes, which must have one shape and dtype."""
        return self._plane.dtype

    @property
    def numbers(self) -> str:
        """What bytes stand for: part of what the hash of a block covers."""
        return f"{self.dtype} {self.scales}" if self.scales else self.dtype

    @property
    def num_hashed_ahead(self) -> int:
        """Tokens behind a block that its hash covers, too (`engine/kv/hashes.py`).

        Vectors are kept for a drafter that reads each beside the next token.
        """
        return 1 if self.num_feature_layers else 0

    @property
    def block_bytes(self) -> int:
        token_bytes = sum(
            kind.num_layers * plane.token_bytes for kind in self.kinds for plane in kind.planes
        )
        if num_others := self.num_layers_before + self.num_layers_behind:
            (kind,) = self.kinds
            token_bytes += num_others * sum(p.token_bytes for p in kind.planes)
        return self.block_size * token_bytes

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    @property
    def _num_layers(self) -> int:
        num_own = sum(kind.num_layers for kind in self.kinds)
        return self.num_layers_before + num_own + self.num_layers_behind

    @property
    def _layer_width(self) -> int:
        """Numbers that a layer keeps of a token."""
        (kind,) = self.kinds
        return len(kind.planes) * self._plane.num_heads * self._plane.width

    @property
    def _plane(self) -> KvPlane:
        first, *others = [plane for kind in self.kinds for plane in kind.planes]
        shape = (first.num_heads, first.width, first.dtype)
        assert all((p.num_heads, p.width, p.dtype) == shape for p in others), f"unlike: {self}"
        return first


class KvPart(msgspec.Struct, frozen=True, kw_only=True):
    """Which heads of a block of the whole model one rank's store holds."""

    whole: KvLayout
    first_head: int
    num_heads: int

    @property
    def heads(self) -> slice:
        return slice(self.first_head, self.first_head + self.num_heads)
