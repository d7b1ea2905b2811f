"""The layout of a KV block: what its planes take, and what must not be taken for equal."""

from math import prod

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


HEADS = [(1, 24), (2, 16), (3, 8), (8, 128), (8, 64)]


@pytest.mark.parametrize("drafters", HEADS, ids=str)
@pytest.mark.parametrize("own", HEADS, ids=str)
def test_a_drafters_layers_are_the_last_of_a_block_that_both_divide_into_layers(
    own: tuple[int, int], drafters: tuple[int, int]
) -> None:
    def of(num_layers: int, heads: tuple[int, int], **more: str) -> KvLayout:
        sizes = {"num_kv_heads": heads[0], "head_dim": heads[1], "block_size": 5}
        return KvLayout.with_heads(num_layers=num_layers, dtype="bfloat16", **sizes, **more)

    for num_own, num_theirs in ((1, 1), (6, 2), (5, 7)):
        plain = of(num_own, own)
        layout = plain.with_drafter(of(num_theirs, drafters, scales="a"))
        view = layout.of_drafter
        assert layout.block_bytes == prod(layout.block_shape) * 2 == prod(view.block_shape) * 2
        assert view.block_bytes == layout.block_bytes
        assert layout.block_shape[1:] == plain.block_shape[1:]
        assert view.block_shape[1:] == (2, 5, *drafters)
        assert view.block_shape[0] == view.num_layers_before + num_theirs
        theirs, whole = of(num_theirs, drafters).block_bytes, plain.block_bytes // num_own
        before = view.num_layers_before * theirs // num_theirs
        assert before >= plain.block_bytes, "they lie in the model's own layers"
        # No layer is there for nothing but that both divide the block.
        assert before - plain.block_bytes < whole * (theirs // num_theirs)
        assert layout.num_hashed_ahead == 0
        assert decode(encode(layout), KvLayout) == layout != plain


def test_latents_and_other_numbers_hold_no_drafters_layers() -> None:
    sizes = {"num_layers": 2, "block_size": 4}
    heads = KvLayout.with_heads(**sizes, num_kv_heads=2, head_dim=8, dtype="bfloat16")
    latent = KvLayout.latent(**sizes, width=32, dtype="bfloat16")
    other = KvLayout.with_heads(**sizes, num_kv_heads=2, head_dim=8, dtype="float32")
    assert heads.can_hold(heads)
    assert not heads.can_hold(other)
    assert not heads.can_hold(latent)
    assert not latent.can_hold(latent)
