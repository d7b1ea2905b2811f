"""What is compiled is counted: "nothing compiles after ready" is asked of that count."""

import pytest
import torch
import triton

from kernels.compilation import CompilationCounter
from kernels.sampling import rows_triton
from tests.harness.gpus import gpu
from tests.kernels.cross_compile import compiled_for


def test_a_kernel_is_counted_when_it_is_compiled_and_not_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", None)
    counter = CompilationCounter()
    counter.install()
    with compiled_for(gpu("H200"), rows_triton):
        for _ in range(2):
            rows_triton.greedy_of_words(torch.zeros((4, 3), dtype=torch.int64))
    [name] = counter.names
    assert "_best_rank_kernel" in name
    counter.reset()
    assert counter.names == []
