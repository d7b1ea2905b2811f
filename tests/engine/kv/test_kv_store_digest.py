"""Digests of blocks where they lie, of copies, and by the kernel."""

import random

import pytest
import torch

from engine.kv.layout import KvDtype, KvLayout
from engine.kv.store import KvStore
from tests.kernels.interpreter import run_interpreted


@pytest.mark.slow
def test_the_kernel_sums_what_its_torch_twin_and_plain_integers_sum() -> None:
    pytest.importorskip("triton")
    seed = str(random.randrange(2**60))
    assert "checked" in run_interpreted("tests.engine.kv.digest_kernel_checks:check", seed)


@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 3), ("bfloat16", 1), ("float16", 8)])
def test_a_block_has_one_digest_wherever_it_is(dtype: KvDtype, head_dim: int) -> None:
    layout = KvLayout.with_heads(
        num_layers=3, block_size=5, num_kv_heads=1, head_dim=head_dim, dtype=dtype
    )
    store = KvStore(layout, num_blocks=13, device=torch.device("cpu"))
    store.tensor.copy_(torch.randn(store.tensor.shape))
    block_ids = random.sample(range(13), 6)
    expected = store.digest(block_ids)
    assert store.digest_staged(store.gather(block_ids)) == expected
    staging = store.gather(block_ids).view(-1).view(torch.uint8)
    assert store.digest_staged(staging) == expected
    assert [store.digest([block])[0] for block in block_ids] == expected
    assert store.digest([]) == []


def written(device: str, layout: KvLayout) -> None:
    """Write random bytes to random blocks, and hold store and digests to what was written."""
    store = KvStore(layout, num_blocks=19, device=torch.device(device))
    number = random.randint(1, 19)
    block_ids = random.sample(range(19), number)
    data = torch.randint(256, (number * layout.block_bytes,), dtype=torch.uint8, device=device)
    before = store.tensor.clone()
    digests = store.queue_write(store.index(block_ids), data)
    assert torch.equal(store.gather(block_ids).view(-1).view(torch.uint8), data)
    assert digests.tolist() == store.digest(block_ids) == store.digest_staged(data)
    others = [block for block in range(19) if block not in block_ids]
    assert torch.equal(store.tensor[others], before[others])


LAYOUTS = [
    KvLayout.with_heads(num_layers=3, block_size=5, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    for head_dim, dtype in ((3, "bfloat16"), (1, "float16"), (64, "float32"))
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_is_digested_on_its_way(layout: KvLayout) -> None:
    written("cpu", layout)


@pytest.mark.gpu
def test_a_gpu_digests_what_it_writes_in_one_go() -> None:
    for layout in (
        *LAYOUTS,
        KvLayout.with_heads(
            num_layers=36, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16"
        ),
    ):
        written("cuda", layout)


@pytest.mark.gpu
def test_a_gpu_digests_as_a_cpu_does() -> None:
    for head_dim, dtype in ((128, "bfloat16"), (1, "float16")):
        layout = KvLayout.with_heads(
            num_layers=3, block_size=5, num_kv_heads=1, head_dim=head_dim, dtype=dtype
        )
        here, there = (
            KvStore(layout, num_blocks=40, device=torch.device(kind)) for kind in ("cpu", "cuda")
        )
        here.tensor.copy_(torch.randn(here.tensor.shape))
        there.tensor.copy_(here.tensor)
        block_ids = random.sample(range(40), 23)
        assert there.digest(block_ids) == here.digest(block_ids)
        assert there.digest_staged(here.gather(block_ids)) == here.digest(block_ids)
