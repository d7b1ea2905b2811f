"""The kernels of latent attention compile for GPUs that are not here, within their memory."""

import pytest
import torch

from kernels.attention import (
    decode_items,
    latent_decode,
    latent_keys,
    latent_parts,
    latent_prefill,
    latent_triton,
)
from kernels.kv import latent_store
from kernels.linear import by_head
from kernels.moe import limited_choice
from kernels.moe.routes import Selection
from kernels.ops import LatentNorm
from tests.harness.gpus import GPUS, gpu
from tests.kernels.attention.test_latent_attention import GLM, V2_LITE, V3, build_problem
from tests.kernels.cross_compile import compiled_for

ONE_EACH = {capability: name for name, (capability, _, _) in GPUS.items()}
MODULES = (
    latent_triton, latent_decode, latent_parts, latent_keys, latent_prefill, decode_items,
    latent_store, by_head, limited_choice,
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(ONE_EACH.values()))
def test_latent_attention_compiles_for_every_gpu(name: str) -> None:
    device = gpu(name)
    with compiled_for(device, *MODULES) as found:
        for shape in (V2_LITE, V3, GLM):
            problem = build_problem([(5, 1), (700, 1), (0, 9)], shape, dtype=torch.bfloat16)
            in_e4m3 = problem.in_e4m3()
            for options in ({}, {"fixed_tile": True}, {"piece_bytes": 2**20}):
                backend = latent_triton.TritonLatent(
                    shape, block_size=16, dtype=torch.bfloat16, device=torch.device("cpu"),
                    **options,
                )  # fmt: skip
                metadata = backend.plan(problem.step)
                given = problem.q, problem.latent_new, problem.up, 1
                backend.run(*given, problem.store, metadata)
                backend.run(*given, in_e4m3.store, metadata, None, in_e4m3.scales)
            made = torch.empty(7, shape.num_heads, shape.nope_dim + shape.value_dim)
            vectors = torch.empty(7, shape.width, dtype=torch.bfloat16)
            latent_keys.join_keys(made.bfloat16(), vectors, shape)
            weight = torch.ones(shape.rank, dtype=torch.bfloat16)
            places = torch.zeros(len(problem.q), dtype=torch.int32)
            for case in (problem, in_e4m3):
                latent_store.rotate_and_store_latent(
                    problem.q,
                    torch.empty(len(problem.q), shape.width, dtype=torch.bfloat16),
                    LatentNorm(weight=weight, eps=1e-6, is_interleaved=True),
                    torch.empty(64, shape.rope_dim),
                    places,
                    case.store,
                    0,
                    places,
                    case.scales,
                )
        for scores, bias, num_tokens in (("sigmoid", torch.zeros(256), 7), ("softmax", None, 300)):
            selection = Selection(
                scores=scores, bias=bias, num_groups=8, num_chosen_groups=4, scale=2.5
            )
            limited_choice.choose_limited(
                torch.empty(4, num_tokens, 256), 8, selection, normalises=True
            )
    assert {"_latent_decode_kernel", "_join_keys_kernel", "_by_head_kernel"} < set(found)
    assert max(found.values()) <= device.shared_memory_per_block_bytes, found
