"""What is staged arrives as it was, whatever becomes of the arrays afterwards."""

import numpy as np
import pytest
import torch

from engine.sampling.staging import Staging


def test_arrays_arrive_with_shape_and_dtype_and_aligned() -> None:
    arrays = (
        np.array([-(2**63), 5, 2**63 - 1]),
        np.array([[0.5], [np.inf]], dtype=np.float32),
        np.empty(0, dtype=np.int64),
        np.arange(7, dtype=np.int32)[::2],
    )
    tensors = Staging(torch.device("cpu")).send(*arrays)
    assert [t.dtype for t in tensors] == [torch.int64, torch.float32, torch.int64, torch.int32]
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.shape == array.shape
        assert tensor.numpy().tolist() == array.tolist()
        assert (tensor.data_ptr() - tensors[0].data_ptr()) % 16 == 0


def test_the_arrays_may_change_at_once() -> None:
    array = np.arange(5)
    (tensor,) = Staging(torch.device("cpu")).send(array)
    array += 100
    assert tensor.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.gpu
def test_many_copies_behind_a_busy_gpu_arrive_unmixed() -> None:
    staging = Staging(torch.device("cuda"))
    staging.send(np.zeros(300))  # first use sets up
    busy = torch.randn((8192, 8192), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            busy = busy @ busy * 1e-4
        tensors = [staging.send(np.full(300, i))[0] for i in range(500)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for i, tensor in enumerate(tensors):
        assert (tensor == i).all(), i
