"""Where programs of kernels that start early come to lie: not more on one multiprocessor."""

import random
from typing import Any

import pytest
import torch

from kernels.device import stages_for, stages_that_fit
from tests.harness.gpus import gpu

KIB = 2**10
# Qwen3-8B's gate and up, down, query with key and value, output; Llama-3.1-8B's gate and up.
SHAPES = ((24576, 4096), (4096, 12288), (6144, 4096), (4096, 4096), (28672, 4096))


def _programs_per_sm(num_stages: int, stage_bytes: int, memory: int) -> int:
    """Programs that fit a multiprocessor, with what CUDA reserves for each."""
    return (memory + KIB) // (num_stages * stage_bytes + KIB)


def test_stages_leave_no_room_for_more_programs_where_they_can() -> None:
    for _ in range(1000):
        memory = random.choice((99, 163, 227)) * KIB
        stage_bytes, least = 128 * random.randrange(8, 400), random.randrange(2, 7)
        share = random.randrange(1, 6)
        stages = stages_for(share, least=least, stage_bytes=stage_bytes, shared_memory_bytes=memory)
        given = stages_that_fit(least, stage_bytes=stage_bytes, shared_memory_bytes=memory)
        assert stages >= given
        if stages > given:
            assert _programs_per_sm(stages, stage_bytes, memory) == share
            assert _programs_per_sm(stages - 1, stage_bytes, memory) > share or stages == least
    assert stages_for(0, least=4, stage_bytes=KIB, shared_memory_bytes=227 * KIB) == 4


def test_products_of_many_rows_have_a_multiprocessor_each() -> None:
    """By a race on an H200 a layer of 64 tokens takes 10 % less."""
    from kernels.quant import fp8_few

    device = gpu("H200")
    memory, num_sms = device.shared_memory_per_block_bytes, device.num_sms
    for num_rows, num_columns in SHAPES:
        for num_tokens in (17, 33, 64):
            cut = fp8_few.choose_config(num_tokens, 1, num_rows, num_columns, num_sms)
            num_programs = -(-num_rows // cut.block_n) * cut.split_k
            cut = fp8_few.fitted_config(cut, 1, 0, 0, memory, -(-num_programs // num_sms))
            stage_bytes = cut.block_k * (cut.block_n + cut.block_m)
            assert num_programs <= num_sms
            assert _programs_per_sm(cut.num_stages, stage_bytes, memory) == 1, (num_rows, cut)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fp8", "fp8 one", "int4", "int4 one"])
def test_products_of_few_tokens_let_the_next_kernel_in_when_all_is_loaded(form: str) -> None:
    from kernels.linear.small import tile_counters
    from kernels.quant import fp8_few, int4_joined, one_token
    from kernels.quant.coded_tokens import InputForm, empty_coded
    from kernels.quant.fp8_linear import Fp8Operand
    from kernels.quant.int4_linear import FourBitOperand
    from kernels.quant.steps import Codes
    from tests.kernels.cross_compile import compiled_for

    kept: list[Any] = []
    x = torch.empty(1, 4096, dtype=torch.bfloat16)
    coded = empty_coded(1, 4096, InputForm(pieces=2, group=4096), x)
    counters = tile_counters(torch.device("cpu"))
    fp8 = Fp8Operand(
        codes=torch.empty(4096, 4096, dtype=torch.float8_e4m3fn), scales=torch.empty(4096, 1),
        tile_rows=1, tile_columns=4096,
    )  # fmt: skip
    int4 = FourBitOperand(
        packed=torch.empty(4096, 2048, dtype=torch.uint8),
        scales=torch.empty(4096, 32, dtype=torch.int32), half=64, group=128, codes=Codes.INT4,
    )  # fmt: skip
    with compiled_for(gpu("H200"), fp8_few, int4_joined, one_token, kept=kept):
        if form == "fp8":
            fp8_few.fp8_few_linear(coded, fp8, x.dtype, counters)
        elif form == "int4":
            int4_joined.int4_joined_linear(coded, int4, x.dtype, counters)
        else:
            one = one_token.fp8_one_token if form.startswith("fp8") else one_token.int4_one_token
            one(x, fp8 if form.startswith("fp8") else int4)  # type: ignore[arg-type]
    code = kept[0].asm["ptx"]
    last_load = code.rindex("cp.async.cg.shared.global")
    assert code.index("griddepcontrol.wait") < last_load < code.index("launch_dependents")
