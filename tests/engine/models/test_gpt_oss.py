"""gpt-oss: transformers' logits on the same folder, in bf16 and MXFP4, in every kind of step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.errors import ConfigError
from engine.layers.moe import expert_matrices
from engine.layers.quantized_weight import e2m1_values
from engine.models.llama import CausalLM
from engine.models.mixture import build_mixture
from engine.models.quantization.published_numbers import read_numbers
from engine.models.quantization.published_tensors import check_shares
from engine.models.quantization.scheme import GPT_OSS_MXFP4
from engine.models.registry import build_model
from engine.models.spec import load_spec
from engine.models.weights import load_weights, random_weights
from engine.ranks.rank import Rank
from kernels.reference import TorchOps
from tests.engine.models.closeness import (
    assert_no_further_than,
    assert_same_logits,
    errors_in_bfloat16,
)
from tests.engine.models.family_checks import (
    check_answers,
    check_chunks,
    check_prefix_hit_and_preemption,
)
from tests.engine.runner.step_driver import StepDriver
from tests.harness.gpt_oss_folders import save_gpt_oss_mxfp4
from tests.harness.seeds import fresh_seed
from tests.harness.tiny_models import edit_config, random_tokens, reference_logits, save_model
from tests.harness.weight_counts import num_parameters

CPU = torch.device("cpu")
NAME = "GptOssForCausalLM"
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full_first": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "without_attention_bias": {"attention_bias": False, "num_key_value_heads": 1},
    "other_gate": {"swiglu_alpha": 0.7, "swiglu_limit": 7.0, "num_experts_per_tok": 5},
}


def _build(folder: Path) -> CausalLM:
    return build_model(folder, dtype=torch.float32, device=CPU)


@pytest.fixture
def seed() -> int:
    return fresh_seed()


# ---- logits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_chunk_size_gives_the_reference_logits_of_gpt_oss(
    variant: str, tmp_path: Path, seed: int
) -> None:
    save_model(tmp_path, NAME, seed=seed, **VARIANTS[variant])
    check_chunks(tmp_path, seed, (1, 2, 5, 18, 19))


def test_gpt_oss_after_a_prefix_hit_and_a_preemption_in_mixed_steps(
    tmp_path: Path, seed: int
) -> None:
    save_model(tmp_path, NAME, seed=seed)
    check_prefix_hit_and_preemption(tmp_path, seed)


def test_gpt_oss_in_bfloat16_is_no_further_from_fp32_than_transformers(
    tmp_path: Path, seed: int
) -> None:
    # All experts are active: a rounded router may choose other experts than fp32, and then no
    # distance says anything.
    save_model(tmp_path, NAME, seed=seed, dtype=torch.bfloat16, num_experts_per_tok=5)
    ours, theirs = errors_in_bfloat16(tmp_path, seed)
    assert_no_further_than(theirs, ours)


def test_an_engine_answers_as_transformers_does_for_gpt_oss(tmp_path: Path, seed: int) -> None:
    save_model(tmp_path, NAME, seed=seed)
    prompts = [random_tokens(21, seed), random_tokens(30, seed + 2)]
    prompts.append(prompts[0][:17] + random_tokens(4, seed + 3))
    check_answers(tmp_path, prompts, 5)


# ---- files ---------------------------------------------------------------------------------------


def test_the_ranks_of_gpt_oss_add_up_to_the_whole(tmp_path: Path, seed: int) -> None:
    save_model(tmp_path, NAME, seed=seed)
    spec = load_spec(tmp_path)
    assert spec.mixture is not None
    x, outputs, sinks = torch.randn(11, 64), [], []
    for rank in (Rank(0, 1), Rank(0, 2), Rank(1, 2)):
        (layer, *_) = load_weights(
            tmp_path, spec, dtype=torch.float32, device=CPU, rank=rank
        ).layers
        assert layer.sinks is not None
        sinks.append(layer.sinks)
        outputs.append(build_mixture(spec.mixture, layer, TorchOps(), is_deterministic=False)(x))
    torch.testing.assert_close(outputs[1] + outputs[2], outputs[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(torch.cat(sinks[1:]), sinks[0])


def test_parameters_of_gpt_oss_are_those_of_transformers(tmp_path: Path) -> None:
    model = save_model(tmp_path, NAME)
    spec = load_spec(tmp_path)
    assert num_parameters(spec) == model.num_parameters()
    made = random_weights(spec, dtype=torch.float32, device=CPU).layers[1]
    assert made.gate_up.bias is not None
    assert made.gate_up.bias.shape == (5, 192)


@pytest.mark.filterwarnings("default")
def test_experts_in_mxfp4_are_what_transformers_makes_of_them(tmp_path: Path, seed: int) -> None:
    save_gpt_oss_mxfp4(tmp_path, seed)
    token_ids = random_tokens(13, seed)
    theirs = reference_logits(tmp_path, token_ids)
    driver = StepDriver(_build(tmp_path), seed=seed)
    driver.admit(0, token_ids)
    assert_same_logits(driver.logits({0: 13})[0], theirs)
    spec = load_spec(tmp_path)
    stored = load_file(tmp_path / "a.safetensors") | load_file(tmp_path / "b.safetensors")
    for rank in (Rank(0, 1), Rank(1, 2)):  # 48 units, which are no whole blocks
        loaded = load_weights(tmp_path, spec, dtype=torch.bfloat16, device=CPU, rank=rank)
        for index, layer in enumerate(loaded.layers):
            units = slice(rank.index * 96 // rank.size, (rank.index + 1) * 96 // rank.size)
            gate_up, down = (_dequantised(stored, index, which) for which in ("gate_up", "down"))
            own = torch.cat((gate_up[:, ::2][:, units], gate_up[:, 1::2][:, units]), dim=1)
            assert layer.gate_up.data.dtype is torch.uint8, "experts stay as they are published"
            for weight, expected in ((layer.gate_up, own), (layer.down, down[:, :, units])):
                ours = expert_matrices(weight)
                assert torch.equal(torch.stack([ours[i] for i in range(5)]), expected)


def _dequantised(tensors: dict[str, Tensor], layer: int, which: str) -> Tensor:
    """transformers' numbers, [experts, out, in] bf16."""
    name = f"model.layers.{layer}.mlp.experts.{which}_proj"
    blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
    return convert_moe_packed_tensors(blocks, scales).transpose(1, 2)


def test_every_byte_and_scale_of_mxfp4_is_that_of_transformers() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(254, -1, -1)
    scales = torch.arange(1, 255, dtype=torch.uint8)[:, None].expand(-1, 16)
    theirs = convert_moe_packed_tensors(blocks[None], scales[None])[0].T
    tensors = {"weight_packed": blocks.flatten(1), "weight_scale": scales}
    found = read_numbers(GPT_OSS_MXFP4, tensors)
    assert found.numbers is not None
    ours = e2m1_values(found.numbers) * found.scales.float().repeat_interleave(32, dim=1)
    assert torch.equal(ours.bfloat16(), theirs)


@pytest.mark.parametrize(("num_ranks", "num_units"), [(4, 720), (8, 360)])
def test_ranks_of_a_gpu_cannot_cut_published_experts_but_can_share_them_out(
    num_ranks: int, num_units: int, tmp_path: Path
) -> None:
    """gpt-oss's sizes: known before anything is loaded. A CPU computes any part."""
    sizes = {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
    save_model(tmp_path, NAME, num_hidden_layers=1)
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"}, **sizes, **heads)
    rank, cut = Rank(1, num_ranks), load_spec(tmp_path)
    named = rf"experts.0.*: a rank's .* {num_units} inputs .*workers\.expert_parallel to true"
    with pytest.raises(ConfigError, match=named):
        check_shares(cut, rank, is_on_gpu=True)
    check_shares(cut, rank)
    check_shares(cut, Rank(1, 2), is_on_gpu=True)
    check_shares(load_spec(tmp_path, sharing="experts"), rank, is_on_gpu=True)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "'awq' is not supported for gpt-oss"),
        ({"rope_parameters": None}, "rope_scaling is missing; gpt-oss has YaRN"),
        ({"num_experts_per_tok": 6}, "is 6 of 5 experts"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
    ],
)
def test_settings_of_gpt_oss_that_nobody_checked_are_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    save_model(tmp_path, NAME)
    edit_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        load_spec(tmp_path)


def test_folders_of_the_other_kind_and_missing_scales_stop_the_start(tmp_path: Path) -> None:
    save_gpt_oss_mxfp4(tmp_path, 1)
    config = json.loads((tmp_path / "config.json").read_text())
    edit_config(tmp_path, remove=("quantization_config",))
    with pytest.raises(ConfigError, match=r"unexpected tensor .*_blocks"):
        _build(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"quantization: fp8"):
        load_spec(tmp_path, quantization="fp8")
    path = tmp_path / "b.safetensors"
    tensors = load_file(path)
    lost = "model.layers.1.mlp.experts.down_proj_scales"
    first = "model.layers.1.mlp.experts.0.down_proj.weight_scale"
    save_file({name: t for name, t in tensors.items() if name != lost}, path)
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    del index["weight_map"][lost]
    index_path.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=rf"5 tensors are missing.*'{first}'.*\[64, 3\]"):
        _build(tmp_path)
