"""Digests of blocks where they lie, of copies, and by the kernel."""

import random

import pytest
import torch

from engine.kv.kv_store import KvStore
from engine.kv.layout import KvDtype, KvLayout
from tests.kernels.interpreter import run_interpreted


@pytest.mark.slow
def test_the_kernel_sums_what_its_torch_twin_and_plain_integers_sum() -> None:
    pytest.importorskip("triton")
    seed = str(random.randrange(2**60))
    assert "checked" in run_interpreted("tests.engine.kv.digest_kernel_checks:check", seed)


@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 3), ("bfloat16", 1), ("float16", 8)])
def test_a_block_has_one_digest_wherever_it_is(dtype: KvDtype, head_dim: int) -> None:
    layout = KvLayout(num_layers=3, block_size=5, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    store = KvStore(layout, num_blocks=13, device=torch.device("cpu"))
    store.tensor.copy_(torch.randn(store.tensor.shape))
    block_ids = random.sample(range(13), 6)
    expected = store.digest(block_ids)
    assert store.digest_staged(store.gather(block_ids)) == expected
    staging = store.gather(block_ids).view(-1).view(torch.uint8)
    assert store.digest_staged(staging) == expected
    assert [store.digest([block])[0] for block in block_ids] == expected
    assert store.digest([]) == []


@pytest.mark.gpu
def test_a_gpu_digests_as_a_cpu_does() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    for head_dim, dtype in ((128, "bfloat16"), (1, "float16")):
        layout = KvLayout(
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
