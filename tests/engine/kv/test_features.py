"""Vectors beside K and V: what is written is read, and nothing else changes."""

import random

import msgspec
import pytest
import torch

from engine.kv.features import FeaturePlanes
from engine.kv.layout import KvLayout, KvPart
from engine.kv.store import KvStore

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["heads", "latent"])
@pytest.mark.parametrize("width", [1, 59, 60, 61, 200])
def test_vectors_are_read_back_and_the_rest_stays(kind: str, width: int) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    torch.manual_seed(seed)
    if kind == "heads":
        plain = KvLayout.with_heads(
            num_layers=2, block_size=5, num_kv_heads=3, head_dim=10, dtype="float32"
        )
    else:
        plain = KvLayout.latent(num_layers=2, block_size=5, width=14, dtype="float32")
    layout = plain.with_features(width)
    assert layout.block_bytes >= plain.block_bytes + 5 * width * 4
    assert layout.block_shape[0] == 2 + layout.num_feature_layers
    store = KvStore(layout, num_blocks=7, device=CPU)
    store.tensor.normal_()
    before = store.tensor.clone()
    planes = FeaturePlanes(store, width, torch.float32)
    slots = torch.randperm(35)[:11].int()
    values = torch.randn(11, width)
    planes.write(slots, values)
    assert torch.equal(planes.read(slots), values)
    assert planes.read(torch.tensor([-1, 3])).shape == (2, width)
    changed = (store.tensor != before).flatten(2).any(2)  # [blocks, layers]
    assert not changed[:, :2].any()
    written = {int(slot) // 5 for slot in slots}
    assert set(changed.any(1).nonzero()[:, 0].tolist()) == written
    others = torch.tensor([slot for slot in range(35) if slot not in slots.tolist()])
    kept, old = planes.read(others), KvStore(layout, num_blocks=7, device=CPU)
    old.tensor.copy_(before)
    assert torch.equal(kept, FeaturePlanes(old, width, torch.float32).read(others))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_store_of_e4m3_numbers_keeps_vectors_as_they_are(dtype: torch.dtype) -> None:
    plain = KvLayout.latent(num_layers=2, block_size=4, width=14, dtype="fp8_e4m3")
    layout = plain.with_features(9 * dtype.itemsize)
    store = KvStore(layout, num_blocks=3, device=CPU)
    planes = FeaturePlanes(store, 9, dtype)
    slots, values = torch.randperm(12)[:5], (1000 * torch.randn(5, 9)).to(dtype)
    planes.write(slots, values)
    assert torch.equal(planes.read(slots), values)
    assert planes.read(slots).dtype == dtype
    assert not store.tensor[:, :2].any()


class _Gathered:
    """Returns what all ranks sent, of which one calls at a time."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.sent.append(x)
        return torch.cat(self.sent)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_hold_the_vectors_by_heads_as_one_store_does(num_ranks: int) -> None:
    """Of four heads; eight ranks hold each twice."""
    whole = KvLayout.with_heads(
        num_layers=1, block_size=3, num_kv_heads=4, head_dim=6, dtype="float32"
    ).with_features(50)
    one = KvStore(whole, num_blocks=5, device=CPU)
    values, slots = torch.randn(7, 50), torch.randperm(15)[:7]
    FeaturePlanes(one, 50, torch.float32).write(slots, values)
    comm = _Gathered()
    num_own = max(1, 4 // num_ranks)
    kind = whole.kinds[0]
    planes = tuple(msgspec.structs.replace(plane, num_heads=num_own) for plane in kind.planes)
    own = msgspec.structs.replace(whole, kinds=(msgspec.structs.replace(kind, planes=planes),))
    for rank in range(num_ranks):
        part = KvPart(whole=whole, first_head=rank * 4 // num_ranks, num_heads=num_own)
        store = KvStore(own, num_blocks=5, device=CPU)
        features = FeaturePlanes(store, 50, torch.float32, part=part, comm=comm)
        features.write(slots, values)
        assert torch.equal(store.tensor, one.tensor[..., part.heads, :])
        if rank == num_ranks - 1:
            assert torch.equal(features.read(slots), values)
        else:
            comm.all_gather(store.tensor[slots // 3, 1:, :, slots % 3])
