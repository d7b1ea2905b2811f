"""What a step sends beside its inputs arrives with them, however much it is."""

import numpy as np
import pytest
import torch

from engine.runner.step_buffers import _MAX_EXTRA, StepBuffers


@pytest.mark.parametrize("size", [1, 33, _MAX_EXTRA, _MAX_EXTRA + 1])
def test_what_is_sent_besides_arrives_and_leaves_the_fields_alone(size: int) -> None:
    buffers = StepBuffers(
        max_rows=3, max_tokens=8, max_block_ids=12, device=torch.device("cpu"), num_in_flight=1
    )
    for first in (100, 200, 300):
        fields = buffers.write()
        fields["slots"][:] = first + np.arange(8)
        fields["block_ids"][:] = first + np.arange(12)
        extra = np.arange(first, first + size, dtype=np.int32)
        found = buffers.send(5, extra)
        assert found is not None
        assert np.array_equal(found.numpy(), extra)
        assert buffers.on_device("slots").tolist() == list(range(first, first + 8))
        assert buffers.on_device("block_ids", 5).tolist() == list(range(first, first + 5))
        again = buffers.write_again()
        assert again["slots"].tolist() == list(range(first, first + 8))
        assert again["block_ids"][:5].tolist() == list(range(first, first + 5))
    assert buffers.send(5) is None
