"""The layout of a KV block: what its planes take, and what must not be taken for equal."""

import pytest

from engine.kv.hashes import RequestHasher
from engine.kv.layout import KvLayers, KvLayout, KvPlane
from engine.messages import decode, encode


def test_heads_make_two_planes_a_layer() -> None:
    layout = KvLayout.with_heads(
        num_layers=3, block_size=5, num_kv_heads=2, head_dim=6, dtype="bfloat16"
    )
    assert layout.block_shape == (3, 2, 5, 2, 6)
    assert layout.block_bytes == 3 * 2 * 5 * 2 * 6 * 2
    assert layout.dtype == "bfloat16"
    assert decode(encode(layout), KvLayout) == layout


def test_numbers_of_other_scales_are_other_numbers() -> None:
    sizes = {"num_layers": 3, "block_size": 5, "num_kv_heads": 2, "head_dim": 6}
    plain = KvLayout.with_heads(**sizes, dtype="bfloat16")
    layouts = [KvLayout.with_heads(**sizes, dtype="fp8_e4m3", scales=s) for s in ("a", "b")]
    assert [2 * layout.block_bytes for layout in layouts] == [plain.block_bytes] * 2
    assert layouts[0] != layouts[1]
    hashers = [
        RequestHasher(b"k" * 32, model="m", dtype=layout.numbers, block_size=5)
        for layout in (plain, *layouts)
    ]
    roots = {tuple(hasher.chain(range(10), "")) for hasher in hashers}
    assert len(roots) == 3
    assert plain.numbers == plain.dtype  # blocks keep the hashes that they had


def test_planes_of_several_kinds_of_layers_add_up() -> None:
    """Three layers with one latent plane, two with K, V and a scale for each head."""
    latent = KvPlane(name="latent", num_heads=1, width=576, dtype="bfloat16")
    heads = [KvPlane(name=n, num_heads=4, width=64, dtype="float16") for n in ("k", "v")]
    scale = KvPlane(name="scale", num_heads=4, width=1, dtype="float32")
    layout = KvLayout(
        block_size=16,
        kinds=(
            KvLayers(num_layers=3, planes=(latent,)),
            KvLayers(num_layers=2, planes=(*heads, scale)),
        ),
    )
    token_bytes = 3 * 576 * 2 + 2 * (2 * 4 * 64 * 2 + 4 * 4)
    assert layout.block_bytes == 16 * token_bytes
    with pytest.raises(ValueError, match="unpack"):
        _ = layout.block_shape
    with pytest.raises(AssertionError, match="unlike"):
        _ = layout.dtype
