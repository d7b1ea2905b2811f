"""Quantised mixtures: transformers' logits on the same numbers, memory, shares, errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.layers.linear import LinearWeight
from engine.layers.moe import expert_matrices
from engine.models.mixture import build_mixture
from engine.models.quantization.published_tensors import weight_bytes
from engine.models.registry import WeightSource, build_model
from engine.models.spec import load_spec
from engine.models.weights import LayerWeights, load_weights, random_weights
from engine.ranks.rank import Rank
from kernels.reference import TorchOps
from load_tests.testbed.quantised_folders import FORMS
from tests.engine.models.closeness import assert_same_logits
from tests.engine.runner.step_driver import StepDriver
from tests.harness.quantised_folders import write_folders
from tests.harness.tiny_models import edit_config, reference_logits, save_model

CPU = torch.device("cpu")
ARCHITECTURES = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
# Multiples of 128, as groups of 128 need.
WHOLE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 256,
}
# Tiles of 128 end within gate and within an expert, and the last tile of inputs is cut short.
CUT: dict[str, Any] = {
    "hidden_size": 160,
    "intermediate_size": 72,
    "head_dim": 24,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
# Every form once, every family with several.
CASES = [(form, ARCHITECTURES[index % 3]) for index, form in enumerate(FORMS)]


def _folders(tmp_path: Path, form: str, architecture: str, **settings: Any) -> tuple[Path, Path]:
    """A quantised folder, and one with what its numbers stand for."""
    sizes = CUT if FORMS[form].multiple == 1 else WHOLE
    if architecture == "MixtralForCausalLM":
        sizes = {name: size for name, size in sizes.items() if "moe" not in name}
    return write_folders(tmp_path, form, architecture, sizes | settings)


def _load(folder: Path, **how: Any) -> list[LayerWeights]:
    return load_weights(folder, load_spec(folder), dtype=torch.float32, device=CPU, **how).layers


def _experts(layer: LayerWeights) -> list[LinearWeight]:
    return [layer.gate_up, layer.down]


def _matrices(weight: LinearWeight) -> torch.Tensor:
    """[experts, out, in]."""
    found = expert_matrices(weight)
    matrices = torch.stack([found[expert] for expert in range(found.shape[0])])
    assert matrices.shape == found.shape
    return matrices


def _reconfigure(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit_config(folder, quantization_config=config["quantization_config"] | values)


@pytest.mark.parametrize(("form", "architecture"), CASES)
def test_logits_are_those_of_transformers_on_the_same_numbers(
    form: str, architecture: str, tmp_path: Path
) -> None:
    quantised, stands_for = _folders(tmp_path, form, architecture)
    tokens = torch.randint(131, (19,)).tolist()
    driver = StepDriver(build_model(quantised, dtype=torch.float32, device=CPU), seed=0)
    driver.admit(0, tokens)
    assert_same_logits(driver.logits_in_chunks(0, 11), reference_logits(stands_for, tokens))
    for layer, expected in zip(_load(quantised), _load(stands_for), strict=True):
        for weight, dense in zip(_experts(layer), _experts(expected), strict=True):
            assert weight.scales is not None, "it was not quantised"
            assert weight.data.dtype in (torch.uint8, torch.float8_e4m3fn)
            assert torch.equal(_matrices(weight), dense.data)


@pytest.mark.parametrize(
    "form", ["fp8-block", "fp8-tensor", "ct-int4-32", "awq", "gptq-v2-order", "ct-nvfp4"]
)
def test_heads_that_are_rotated_in_part_are_reordered_with_their_scales(
    form: str, tmp_path: Path
) -> None:
    settings = {"head_dim": 32, "use_qk_norm": True}
    quantised, stands_for = _folders(tmp_path, form, "Glm4MoeForCausalLM", **settings)
    tokens = torch.randint(131, (19,)).tolist()
    driver = StepDriver(build_model(quantised, dtype=torch.float32, device=CPU), seed=0)
    driver.admit(0, tokens)
    assert_same_logits(driver.logits_in_chunks(0, 11), reference_logits(stands_for, tokens))


def test_tiles_that_a_reordered_head_would_leave_are_refused(tmp_path: Path) -> None:
    quantised, _ = _folders(tmp_path, "fp8-block", "Glm4MoeForCausalLM", head_dim=24)
    with pytest.raises(ConfigError, match=r"tiles of 16 rows.*whole heads of 24"):
        build_model(quantised, dtype=torch.float32, device=CPU)


def test_a_router_is_not_quantised_whatever_config_json_covers(tmp_path: Path) -> None:
    """AutoGPTQ lists no module that it leaves; others name `gate`, which is no `gate_proj`."""
    for form in ("gptq", "ct-int4-32"):
        folder, stands_for = _folders(tmp_path / form, form, "Qwen2MoeForCausalLM")
        if form == "ct-int4-32":
            _reconfigure(folder, ignore=["lm_head", "gate", "re:.*shared_expert_gate$"])
        for layer, expected in zip(_load(folder), _load(stands_for), strict=True):
            for ours, theirs in (
                (layer.router, expected.router),
                (layer.shared_gate, expected.shared_gate),
            ):
                assert ours is not None
                assert theirs is not None
                assert ours.scales is None
                assert torch.equal(ours.data, theirs.data)
            assert layer.shared_down is not None
            assert layer.shared_down.scales is not None
            assert layer.gate_up.scales is not None


def test_experts_or_the_shared_expert_may_be_left_out(tmp_path: Path) -> None:
    quantised, stands_for = _folders(tmp_path, "awq", "Qwen2MoeForCausalLM")
    dense = load_file(stands_for / "model.safetensors")
    left = ("shared_expert", "layers.0.mlp.experts")
    _reconfigure(quantised, modules_to_not_convert=["gate", *left])
    path = quantised / "model.safetensors"
    kept = {
        name: t
        for name, t in load_file(path).items()
        if not any(f".{part}." in f".{name}." for part in left)
    }
    whole = {n: t for n, t in dense.items() if any(f".{part}." in f".{n}." for part in left)}
    save_file(kept | whole, path, metadata={"format": "pt"})
    layers = _load(quantised)
    assert layers[0].gate_up.scales is None
    assert layers[1].gate_up.scales is not None
    assert all(layer.shared_down and layer.shared_down.scales is None for layer in layers)
    tokens = torch.randint(131, (7,)).tolist()
    driver = StepDriver(build_model(quantised, dtype=torch.float32, device=CPU), seed=0)
    driver.admit(0, tokens)
    assert_same_logits(driver.logits({0: 7})[0], reference_logits(stands_for, tokens))


@pytest.mark.parametrize("form", ["fp8-block", "ct-int4-32", "ct-nvfp4", "ct-mxfp4"])
def test_experts_stay_quantised_in_memory(form: str, tmp_path: Path) -> None:
    folder, _ = _folders(tmp_path, form, "Qwen3MoeForCausalLM")
    spec = load_spec(folder)
    made = random_weights(spec, dtype=torch.float16, device=CPU)
    held = 0
    for layer in made.layers:
        for weight in _experts(layer):
            assert weight.scales is not None
            tensors = (weight.data, weight.scales.values, weight.scales.factors)
            held += sum(tensor.nbytes for tensor in tensors if tensor is not None)
            assert 2e-4 < _matrices(weight).float().abs().max() < 1.1e-3
    quantised = weight_bytes(spec, element_bytes=2, keeps_quantised=False)
    (tmp_path / "none").mkdir()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "none" / "config.json").write_text(json.dumps(config))
    dense_spec = load_spec(tmp_path / "none")
    assert spec.mixture is not None
    num_numbers = 6 * spec.mixture.num_experts * spec.hidden_size * spec.mixture.expert_size
    others = weight_bytes(dense_spec, element_bytes=2, keeps_quantised=False) - 2 * num_numbers
    assert abs(quantised - others - held) < 0.02 * held
    assert held < 0.65 * 2 * num_numbers


# ---- ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["fp8-tensor", "ct-fp8-block", "ct-int4-32", "ct-nvfp4", "awq"])
def test_ranks_hold_their_part_of_every_expert_with_its_scales(form: str, tmp_path: Path) -> None:
    sizes = WHOLE | {"moe_intermediate_size": 256, "head_dim": 64}
    folder, stands_for = _folders(tmp_path, form, "Qwen2MoeForCausalLM", **sizes)
    spec = load_spec(folder)
    assert spec.mixture is not None
    x, outputs = torch.randn(9, 128), []
    for rank in (Rank(0, 1), Rank(0, 2), Rank(1, 2)):
        ours, theirs = _load(folder, rank=rank)[1], _load(stands_for, rank=rank)[1]
        for weight, dense in zip(_experts(ours), _experts(theirs), strict=True):
            assert torch.equal(_matrices(weight), dense.data)
        layer = build_mixture(spec.mixture, ours, TorchOps(), is_deterministic=False)
        outputs.append(layer(x))
    torch.testing.assert_close(outputs[1] + outputs[2], outputs[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "settings", "named"),
    [
        (
            "fp8-block",
            {"moe_intermediate_size": 384},
            "experts.0.gate_proj.weight_scale_inv: 384 .*workers.expert_parallel to true",
        ),
        (
            "ct-int4-128-asymmetric",
            {},
            r"experts.0.down_proj.weight_scale: 128 inputs in blocks .*fewer ranks, or set workers",
        ),
        ("gptq-v2-order", {}, r"mlp.experts.0.down_proj: 2 ranks .*order"),
    ],
)
def test_what_ranks_would_cut_of_an_expert_is_refused(
    form: str, settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    sizes = WHOLE | {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32} | settings
    folder, _ = _folders(tmp_path, form, "Qwen3MoeForCausalLM", **sizes)
    with pytest.raises(ConfigError, match=named):
        build_model(folder, dtype=torch.float32, device=CPU, rank=Rank(1, 2))


# ---- quantised while it is read ------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_mixture_is_quantised_to_fp8_while_it_is_read(architecture: str, tmp_path: Path) -> None:
    """From both layouts of experts, with the same numbers; a router is not rounded."""
    sizes = {
        name: size for name, size in CUT.items() if architecture[:3] != "Mix" or "moe" not in name
    }
    model = save_model(tmp_path / "parts", architecture, **sizes)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    dense = _load(tmp_path / "parts")
    found = []
    for name in ("parts", "fused"):
        folder = tmp_path / name
        spec = load_spec(folder, quantization="fp8")
        layers = load_weights(folder, spec, dtype=torch.float32, device=CPU).layers
        found.append(layers)
        for layer, expected in zip(layers, dense, strict=True):
            assert layer.router is not None
            assert expected.router is not None
            assert torch.equal(layer.router.data, expected.router.data)
            for weight, exact in zip(_experts(layer), _experts(expected), strict=True):
                largest = exact.data.abs().amax(dim=-1, keepdim=True)
                allowed = torch.maximum(exact.data.abs() / 16, largest / (448 * 2**10))
                assert ((_matrices(weight) - exact.data).abs() <= allowed * (1 + 1e-6)).all()
    for ours, others in zip(*found, strict=True):
        for weight, other in zip(_experts(ours), _experts(others), strict=True):
            assert torch.equal(weight.data.view(torch.uint8), other.data.view(torch.uint8))
    source = WeightSource(quantization="fp8")
    build_model(tmp_path / "fused", dtype=torch.float32, device=CPU, source=source)


def test_ranks_quantise_their_share_of_fused_experts(tmp_path: Path) -> None:
    model = save_model(tmp_path / "parts", "Qwen3MoeForCausalLM")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    for index in range(2):
        held = []
        for name in ("parts", "fused"):
            spec = load_spec(tmp_path / name, quantization="fp8")
            rank = Rank(index, 2)
            made = load_weights(
                tmp_path / name, spec, dtype=torch.float32, device=CPU, rank=rank
            ).layers[1]
            held.append([_matrices(weight) for weight in _experts(made)])
        assert torch.equal(held[0][0], held[1][0])
        assert torch.equal(held[0][1], held[1][1])


# ---- what stops the start ------------------------------------------------------------------------


def test_quantised_experts_in_one_tensor_are_refused_by_name(tmp_path: Path) -> None:
    """The layout that transformers has in memory is published of unquantised experts only."""
    folder, _ = _folders(tmp_path, "fp8-block", "Qwen3MoeForCausalLM")
    path = folder / "model.safetensors"
    tensors = {n: t for n, t in load_file(path).items() if "layers.0.mlp.experts" not in n}
    tensors["model.layers.0.mlp.experts.down_proj"] = torch.zeros(7, 160, 40).to(
        torch.float8_e4m3fn
    )
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"'model\.layers\.0\.mlp\.experts\.down_proj'.*F8_E4M3"):
        _load(folder)


def test_a_quantised_router_is_refused_by_name(tmp_path: Path) -> None:
    folder, _ = _folders(tmp_path, "fp8-tensor", "Qwen3MoeForCausalLM")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.gate.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"'model\.layers\.1\.mlp\.gate\.weight' has dtype F8_E4M3"
    ):
        _load(folder)


def test_modelopt_may_describe_its_format_in_a_file_of_its_own(tmp_path: Path) -> None:
    folder, stands_for = _folders(tmp_path, "modelopt-nvfp4", "Qwen3MoeForCausalLM")
    edit_config(folder, remove=("quantization_config",))
    described = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    described |= {"exclude_modules": ["lm_head", "model.layers.*.mlp.gate"]}  # type: ignore[dict-item]
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": described})
    )
    for layer, expected in zip(_load(folder), _load(stands_for), strict=True):
        assert torch.equal(_matrices(layer.down), expected.down.data)
