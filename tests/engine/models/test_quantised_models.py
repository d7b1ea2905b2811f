"""Quantised folders: what is read of each published layout, and what stops the start."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.layers.linear import LinearWeight
from engine.layers.quantized_weight import compacted, dequantize
from engine.models.llama import build_decoder
from engine.models.quantization.published_tensors import weight_bytes
from engine.models.registry import build_model
from engine.models.spec import load_spec
from engine.models.weight_files import check_weights
from engine.models.weights import LayerWeights, ModelWeights, load_weights, random_weights
from engine.ranks.rank import Rank
from kernels.reference import TorchOps
from load_tests.testbed.quantised_folders import (
    FORMS,
    ONE_OF_EACH,
    e4m3_values,
    pack_words,
    to_e4m3,
    write_quantised,
)
from tests.engine.models.closeness import assert_same_logits
from tests.engine.runner.step_driver import StepDriver
from tests.harness.quantised_folders import write_folders
from tests.harness.tiny_models import edit_config, reference_logits, save_model

CPU = torch.device("cpu")
TOKENS = [5, 4, 3, 99, 130, 7, 7]
# Multiples of 128, as groups of 128 need; q, k and v of unequal sizes.
WHOLE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
# Tiles of 128 end within q, within k and within gate, and the last tile of inputs is cut short.
CUT: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 200, "head_dim": 24}


def _folders(tmp_path: Path, form: str) -> tuple[Path, Path]:
    """A quantised folder, and one with what its numbers stand for."""
    sizes = CUT if FORMS[form].multiple == 1 else WHOLE
    architecture = "Qwen3ForCausalLM" if form in ("fp8-block", "gptq") else "LlamaForCausalLM"
    return write_folders(tmp_path, form, architecture, sizes | {"attention_bias": True})


def _load(folder: Path, **how: Any) -> ModelWeights:
    return load_weights(folder, load_spec(folder), dtype=torch.float32, device=CPU, **how)


def _matrix(weight: LinearWeight) -> torch.Tensor:
    if weight.scales is None:
        return weight.data
    matrix = dequantize(weight.data, weight.scales)
    assert torch.equal(dequantize(weight.data, compacted(weight.scales)), matrix)
    return matrix


def _linears(layer: LayerWeights) -> list[LinearWeight]:
    return [layer.qkv, layer.output, layer.gate_up, layer.down]


def _change(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _reconfigure(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit_config(folder, quantization_config=config["quantization_config"] | values)


def test_the_writer_rounds_to_e4m3_as_torch_does() -> None:
    numbers = torch.cat((torch.randn(5000) * 100, torch.randn(5000) * 0.01, torch.zeros(3)))
    theirs = numbers.clamp(-448, 448).to(torch.float8_e4m3fn)
    ours = torch.from_numpy(to_e4m3(numbers.double().numpy()))
    known = torch.from_numpy(e4m3_values())
    assert torch.equal(known[ours.int()].float(), theirs.float())
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(codes.float().nan_to_num(), known.float().nan_to_num())


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_folder_has_the_weights_that_its_numbers_stand_for(
    form: str, tmp_path: Path
) -> None:
    quantised, stands_for = _folders(tmp_path, form)
    ours, theirs = _load(quantised), _load(stands_for)
    for layer, expected in zip(ours.layers, theirs.layers, strict=True):
        for weight, dense in zip(_linears(layer), _linears(expected), strict=True):
            assert weight.scales is not None, "it was not quantised"
            assert torch.equal(_matrix(weight), dense.data)
        assert layer.qkv.bias is not None
        assert torch.equal(layer.qkv.bias, expected.qkv.bias)
        q_size = expected.output.data.shape[1]
        tail = layer.qkv.rows(q_size)
        assert torch.equal(_matrix(tail), expected.qkv.data[q_size:])
    assert torch.equal(ours.head, theirs.head)


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_transformers_on_the_same_numbers(form: str, tmp_path: Path) -> None:
    quantised, stands_for = _folders(tmp_path, form)
    driver = StepDriver(build_model(quantised, dtype=torch.float32, device=CPU), seed=0)
    driver.admit(0, TOKENS)
    assert_same_logits(driver.logits({0: len(TOKENS)})[0], reference_logits(stands_for, TOKENS))


def test_zero_points_of_the_first_gptq_format_are_whole_words_less_ones(tmp_path: Path) -> None:
    """A zero point of 0 borrows from the next of its word, as GPTQModel writes and reads them."""
    folder, _ = _folders(tmp_path, "gptq-asymmetric")
    zeros = np.random.default_rng(0).integers(0, 16, (8, 128))
    name = "model.layers.0.mlp.down_proj.qzeros"
    _change(folder, lambda t: t.update({name: pack_words(zeros, 1) - ONE_OF_EACH}))
    scales = _load(folder).layers[0].down.scales
    assert scales is not None
    assert scales.zeros is not None
    assert (zeros == 0).any()
    assert np.array_equal(scales.zeros.numpy(), zeros.T)


def test_scales_of_tiles_may_be_bytes(tmp_path: Path) -> None:
    """As transformers 5 writes them where scale_fmt is ue8m0: powers of two."""
    folder, _ = _folders(tmp_path, "fp8-block")
    _reconfigure(folder, scale_fmt="ue8m0")

    def to_powers(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale_inv")]:
            tensors[name] = tensors[name].to(torch.float8_e8m0fnu)

    _change(folder, to_powers)
    bytes_of = load_file(folder / "model.safetensors")
    found = _load(folder)
    _change(
        folder,
        lambda tensors: tensors.update(
            {n: t.float() for n, t in bytes_of.items() if n.endswith("weight_scale_inv")}
        ),
    )
    for layer, expected in zip(found.layers, _load(folder).layers, strict=True):
        for weight, other in zip(_linears(layer), _linears(expected), strict=True):
            assert torch.equal(_matrix(weight), _matrix(other))


@pytest.mark.parametrize("ending", ["weight_scale", "weight_scale_inv"])
def test_the_scale_of_a_whole_tensor_has_two_names(ending: str, tmp_path: Path) -> None:
    """AutoFP8's, and that of transformers 5, which has other names for those of inputs too."""
    folder, stands_for = _folders(tmp_path, "fp8-tensor")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".weight_scale")]:
            tensors[name.replace("weight_scale", ending)] = tensors.pop(name)
        for name in [name for name in tensors if name.endswith(".input_scale")]:
            tensors[name.replace("input_scale", "activation_scale")] = tensors.pop(name)

    _change(folder, rename)
    for layer, expected in zip(_load(folder).layers, _load(stands_for).layers, strict=True):
        for weight, dense in zip(_linears(layer), _linears(expected), strict=True):
            assert torch.equal(_matrix(weight), dense.data)


def test_fbgemm_has_a_scale_an_output(tmp_path: Path) -> None:
    """As Meta publishes Llama 3.1 405B: tensors as compressed-tensors has them."""
    folder, stands_for = _folders(tmp_path, "ct-fp8-channel")
    section = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    edit_config(folder, quantization_config=section | {"modules_to_not_convert": None})
    for layer, expected in zip(_load(folder).layers, _load(stands_for).layers, strict=True):
        for weight, dense in zip(_linears(layer), _linears(expected), strict=True):
            assert torch.equal(_matrix(weight), dense.data)


def test_tensors_of_one_map_may_stand_in_two_files(tmp_path: Path) -> None:
    quantised, stands_for = _folders(tmp_path, "gptq-v2-order")
    tensors = load_file(quantised / "model.safetensors")
    (quantised / "model.safetensors").unlink()
    names = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(names.values()):
        save_file({n: t for n, t in tensors.items() if names[n] == file}, quantised / file)
    index = json.dumps({"weight_map": names})
    (quantised / "model.safetensors.index.json").write_text(index)
    ours, theirs = _load(quantised), _load(stands_for)
    for layer, expected in zip(ours.layers, theirs.layers, strict=True):
        for weight, dense in zip(_linears(layer), _linears(expected), strict=True):
            assert torch.equal(_matrix(weight), dense.data)


def test_an_order_of_inputs_that_is_none_may_be_left_out(tmp_path: Path) -> None:
    quantised, stands_for = _folders(tmp_path, "gptq")

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("g_idx")]:
            del tensors[name]

    _change(quantised, drop)
    weight = _load(quantised).layers[1].down
    assert weight.scales is not None
    assert torch.equal(_matrix(weight), _load(stands_for).layers[1].down.data)
    small = compacted(weight.scales)
    assert small.order is None, "an order that changes nothing is dropped"
    assert small.zeros is None, "so are zero points of 8"


def test_biases_of_zeros_that_gptq_writers_add_are_left_out(tmp_path: Path) -> None:
    folder, _ = _folders(tmp_path, "gptq")
    name = "model.layers.1.mlp.up_proj.bias"
    _change(folder, lambda t: t.update({name: torch.zeros(256, dtype=torch.half)}))
    assert _load(folder).layers[1].gate_up.bias is None
    _change(folder, lambda t: t[name].__setitem__(255, 1e-6))
    with pytest.raises(ConfigError, match=rf"unexpected tensor '{name}'"):
        _load(folder)


# ---- ranks ---------------------------------------------------------------------------------------


SHARED_FORMS = ("fp8-tensor", "ct-fp8-channel", "ct-fp8-block", "ct-int4-32", "gptq-v2-order")
SHARED_FORMS += ("gptq-channel",)


@pytest.mark.parametrize("form", [*SHARED_FORMS, "ct-int4-order"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_hold_their_shares_with_the_scales(form: str, num_ranks: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "head_dim": 64, "num_key_value_heads": 4}
    save_model(tmp_path / "dense", **sizes)
    write_quantised(tmp_path / "dense", form, tmp_path / "q", stands_for=tmp_path / "s")
    for index in range(num_ranks):
        ours = _load(tmp_path / "q", rank=Rank(index, num_ranks))
        theirs = _load(tmp_path / "s", rank=Rank(index, num_ranks))
        for layer, expected in zip(ours.layers, theirs.layers, strict=True):
            for weight, dense in zip(_linears(layer), _linears(expected), strict=True):
                assert torch.equal(_matrix(weight), dense.data)


def test_one_group_of_all_inputs_has_no_order(tmp_path: Path) -> None:
    """Whatever desc_act says, ranks share the numbers as they are."""
    folder, stands_for = _folders(tmp_path, "gptq-channel")
    _reconfigure(folder, desc_act=True)
    weight = _load(folder, rank=Rank(1, 2)).layers[0].down
    assert weight.scales is not None, "it is not made a matrix"
    assert torch.equal(_matrix(weight), _load(stands_for, rank=Rank(1, 2)).layers[0].down.data)


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ("fp8-block", ["q_proj.weight_scale_inv", "256 outputs", "128", "parts of 64"]),
        ("ct-int4-128-asymmetric", ["o_proj.weight_scale", "256 inputs", "128", "parts of 64"]),
    ],
)
def test_what_ranks_would_cut_is_refused(form: str, named: list[str], tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "head_dim": 64, "num_key_value_heads": 4}
    save_model(tmp_path / "dense", **sizes)
    write_quantised(tmp_path / "dense", form, tmp_path / "q")
    with pytest.raises(ConfigError) as refused:
        build_model(tmp_path / "q", dtype=torch.float32, device=CPU, rank=Rank(1, 4))
    for part in named:
        assert part in refused.value.message


def test_inputs_that_a_rank_has_of_other_groups_are_refused(tmp_path: Path) -> None:
    """Where config.json says of no order, only the files show that there is one."""
    folder, _ = _folders(tmp_path, "gptq-v2-order")
    _reconfigure(folder, desc_act=False, group_size=64)
    with pytest.raises(ConfigError, match="not those of this rank"):
        _load(folder, rank=Rank(1, 2))


# ---- what stops the start ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "change", "named"),
    [
        ("fp8-block", {"quant_method": "quanto"}, ["quant_method", "quanto", "awq, gptq"]),
        ("fp8-block", {"fmt": "e5m2"}, ["fmt", "e5m2", "e4m3"]),
        ("fp8-block", {"weight_block_size": [128]}, ["weight_block_size", "two"]),
        ("fp8-block", {"activation_scheme": "block"}, ["activation_scheme", "block"]),
        ("awq", {"bits": 8}, ["bits", "8", "4"]),
        ("awq", {"version": "gemv"}, ["version", "gemv", "gemm"]),
        ("awq", {"zero_point": False}, ["zero_point"]),
        ("awq", {"pack_method": "order"}, ["pack_method", "'order'", "reorder"]),
        ("awq", {"rotation": "hadamard"}, ["rotation", "hadamard"]),
        ("gptq", {"checkpoint_format": "marlin"}, ["checkpoint_format", "marlin", "gptq_v2"]),
        ("gptq", {"dynamic": {r"+:.*\.1\..*": {"bits": 8}}}, ["dynamic", "+:", "-:"]),
        ("gptq", {"dynamic": {r".*\.1\..*": {"bits": 8}}}, ["dynamic", "-:"]),
        ("gptq", {"rotation": "hadamard"}, ["rotation", "hadamard"]),
        ("gptq", {"modules_in_block_to_quantize": [[1]]}, ["modules_in_block_to_quantize"]),
        ("gptq", {"lm_head": True}, ["lm_head"]),
        ("gptq", {"bits": 3}, ["bits", "3"]),
        ("ct-int4-32", {"format": "marlin-24"}, ["format", "marlin-24", "pack-quantized"]),
        ("ct-int4-32", {"format": "int-quantized"}, ["num_bits", "4", "8"]),
        ("ct-int4-32", {"ignore": []}, ["ignore", "lm_head"]),
        (
            "ct-int4-32",
            {"config_groups": {"a": {}, "b": {}}},
            ["config_groups", "a has no weights"],
        ),
        ("ct-int4-32", {"config_groups": {}}, ["config_groups", "no group"]),
        ("ct-int4-32", {"quantization_status": "calibration"}, ["quantization_status", "calibr"]),
        ("ct-int4-32", {"sparsity_config": {"format": "sparse-24"}}, ["sparsity_config"]),
        ("ct-int4-32", {"ignore": ["lm_head", "re:*.mlp("]}, ["ignore", "nothing to repeat"]),
        ("ct-mxfp4", {"format": "nvfp4-pack-quantized"}, ["group_size", "32", "16"]),
        ("modelopt-nvfp4", {"quant_algo": "MIXED_PRECISION"}, ["quant_algo", "MIXED", "NVFP4"]),
        ("modelopt-nvfp4", {"group_size": 32}, ["group_size", "32", "16"]),
    ],
)
def test_a_format_that_is_not_supported_is_named(
    form: str, change: dict[str, object], named: list[str], tmp_path: Path
) -> None:
    folder, _ = _folders(tmp_path, form)
    _reconfigure(folder, **change)
    with pytest.raises(ConfigError) as refused:
        load_spec(folder)
    for part in ["config.json", *named]:
        assert part in refused.value.message


@pytest.mark.parametrize(
    ("where", "change", "named"),
    [
        ("input_activations", {"num_bits": 4, "type": "int"}, ["input_activations", "int", "4"]),
        ("weights", {"num_bits": 2}, ["num_bits", "2"]),
        ("weights", {"strategy": "tensor_group"}, ["strategy", "tensor_group"]),
        ("weights", {"strategy": "tensor", "symmetric": False}, ["symmetric", "tensor"]),
        ("weights", {"dynamic": True}, ["dynamic"]),
        ("output_activations", {"num_bits": 8}, ["output_activations"]),
    ],
)
def test_a_scheme_of_compressed_tensors_that_is_not_supported_is_named(
    where: str, change: dict[str, object], named: list[str], tmp_path: Path
) -> None:
    folder, _ = _folders(tmp_path, "ct-int4-32")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    group[where] = (group[where] or {}) | change
    edit_config(folder, quantization_config=config)
    with pytest.raises(ConfigError) as refused:
        load_spec(folder)
    for part in named:
        assert part in refused.value.message


@pytest.mark.parametrize("is_one_scheme", [True, False])
def test_groups_of_modules_are_read_if_they_are_of_one_scheme(
    is_one_scheme: bool, tmp_path: Path
) -> None:
    folder, stands_for = _folders(tmp_path, "ct-int4-32")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    weights = group["weights"] | ({"strategy": None} if is_one_scheme else {"group_size": 64})
    config["config_groups"] = {
        "attention": group | {"targets": ["re:.*self_attn.*"]},
        "mlp": group | {"targets": ["re:.*mlp.*"], "weights": weights},
    }
    edit_config(folder, quantization_config=config)
    if is_one_scheme:
        weight = _load(folder).layers[1].down
        assert torch.equal(_matrix(weight), _load(stands_for).layers[1].down.data)
    else:
        with pytest.raises(ConfigError, match="several schemes"):
            load_spec(folder)


def test_four_bits_may_be_published_for_inputs_rounded_to_fp8(tmp_path: Path) -> None:
    """W4A8: the weights are those of inputs as they are."""
    folder, stands_for = _folders(tmp_path, "ct-int4-32")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    config["config_groups"]["group_0"]["input_activations"] = activations
    edit_config(folder, quantization_config=config)
    weight = _load(folder).layers[1].down
    assert weight.scales is not None
    assert weight.scales.quantizes_inputs
    assert torch.equal(_matrix(weight), _load(stands_for).layers[1].down.data)


def test_activations_that_are_not_float_are_refused(tmp_path: Path) -> None:
    folder, _ = _folders(tmp_path, "ct-fp8-channel")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int"}
    edit_config(folder, quantization_config=config)
    with pytest.raises(ConfigError, match="input_activations"):
        load_spec(folder)


@pytest.mark.parametrize(
    ("form", "change", "named"),
    [
        (
            "fp8-block",
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight_scale_inv"),
            ["missing", "up_proj.weight_scale_inv", "[2, 1]"],
        ),
        (
            "gptq-v2-order",
            lambda t: t.pop("model.layers.0.mlp.up_proj.g_idx"),
            ["missing", "up_proj.g_idx"],
        ),
        (
            "awq",
            lambda t: t.update({"model.layers.0.mlp.up_proj.qweight": torch.zeros(128, 8)}),
            ["up_proj.qweight", "F32", "I32"],
        ),
        (
            "awq",
            lambda t: t.update(
                {"model.layers.0.mlp.up_proj.scales": torch.zeros(1, 256, dtype=torch.half)}
            ),
            ["up_proj.scales", "[1, 256]", "[2, 256]"],
        ),
        (
            "fp8-tensor",
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}),
            ["lm_head.weight", "F8_E4M3", "BF16"],
        ),
        (
            "ct-int4-32",
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight_g_scale": torch.ones(1)}),
            ["unexpected", "weight_g_scale"],
        ),
    ],
)
def test_a_tensor_that_is_not_as_the_format_has_it_is_named(
    form: str,
    change: Callable[[dict[str, torch.Tensor]], object],
    named: list[str],
    tmp_path: Path,
) -> None:
    folder, _ = _folders(tmp_path, form)
    _change(folder, change)
    with pytest.raises(ConfigError) as refused:
        check_weights(folder, load_spec(folder))
    for part in named:
        assert part in refused.value.message


def test_parts_that_are_computed_together_are_quantised_together(tmp_path: Path) -> None:
    folder, _ = _folders(tmp_path, "fp8-block")
    _reconfigure(folder, modules_to_not_convert=["lm_head", "layers.1.self_attn.k_proj"])
    with pytest.raises(ConfigError, match=r"q_proj is quantised and .*k_proj is not"):
        check_weights(folder, load_spec(folder))


def test_sizes_that_do_not_fill_groups_are_refused(tmp_path: Path) -> None:
    folder, _ = _folders(tmp_path, "awq")
    _reconfigure(folder, group_size=96)
    with pytest.raises(ConfigError, match=r"q_proj has 128 outputs and 128 inputs"):
        check_weights(folder, load_spec(folder))


def test_orders_that_differ_between_parts_are_refused(tmp_path: Path) -> None:
    folder, _ = _folders(tmp_path, "gptq-v2-order")
    name = "model.layers.1.self_attn.v_proj.g_idx"
    _change(folder, lambda tensors: tensors.update({name: tensors[name].flip(0)}))
    with pytest.raises(ConfigError, match=r"layers\.1\..* and .*layers\.1\.self_attn"):
        _load(folder)


def test_modules_that_are_left_out_stay_as_they_are(tmp_path: Path) -> None:
    quantised, stands_for = _folders(tmp_path, "ct-int4-32")
    _reconfigure(quantised, ignore=["lm_head", "re:.*layers[.]0[.]mlp.*"])
    whole = load_file(stands_for / "model.safetensors")

    def restore(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "layers.0.mlp" in name]:
            del tensors[name]
        tensors.update({name: t for name, t in whole.items() if "layers.0.mlp" in name})

    _change(quantised, restore)
    ours, theirs = _load(quantised).layers, _load(stands_for).layers
    assert ours[0].down.scales is None
    assert ours[1].down.scales is not None
    for layer, expected in zip(ours, theirs, strict=True):
        for weight, dense in zip(_linears(layer), _linears(expected), strict=True):
            assert torch.equal(_matrix(weight), dense.data)


# ---- quantised while it is read ------------------------------------------------------------------


def test_a_folder_is_quantised_to_fp8_while_it_is_read(tmp_path: Path) -> None:
    save_model(tmp_path, **CUT)
    spec = load_spec(tmp_path, quantization="fp8")
    weights = load_weights(tmp_path, spec, dtype=torch.float32, device=CPU)
    dense = _load(tmp_path)
    for layer, expected in zip(weights.layers, dense.layers, strict=True):
        for weight, exact in zip(_linears(layer), _linears(expected), strict=True):
            ours, theirs = _matrix(weight).double(), exact.data.double()
            largest = theirs.abs().amax(dim=1, keepdim=True)
            # Half of the last of three bits, or half of the smallest number, 2^-9 of 448.
            allowed = torch.maximum(theirs.abs() / 16, largest / (448 * 2**10))
            assert ((ours - theirs).abs() <= allowed * (1 + 1e-6)).all()
            torch.testing.assert_close(ours.abs().amax(1), largest[:, 0], rtol=2e-7, atol=0)
    assert torch.equal(weights.head, dense.head)


def test_a_quantised_folder_is_not_quantised_again(tmp_path: Path) -> None:
    folder, _ = _folders(tmp_path, "awq")
    with pytest.raises(ConfigError, match=r"quantised already.*model\.quantization"):
        load_spec(folder, quantization="fp8")


# ---- without files -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_random_weights_have_the_folder_s_format(form: str, tmp_path: Path) -> None:
    folder, _ = _folders(tmp_path, form)
    (folder / "model.safetensors").unlink()
    spec = load_spec(folder)
    made = random_weights(spec, dtype=torch.float32, device=CPU, seed=3)
    for weight in _linears(made.layers[1]):
        matrix = _matrix(weight)
        assert 2e-4 < matrix.abs().max() < 1.1e-3
        assert matrix.float().std() > 1e-4
        assert abs(matrix.mean()) < 1e-4
    driver = StepDriver(
        build_decoder(spec, made, max_model_len=spec.max_model_len, ops=TorchOps()), seed=0
    )
    driver.admit(0, TOKENS)
    assert torch.isfinite(driver.logits({0: len(TOKENS)})[0]).all()


@pytest.mark.parametrize("form", FORMS)
def test_the_bytes_of_the_weights_are_known_before_they_are_read(form: str, tmp_path: Path) -> None:
    folder, _ = _folders(tmp_path, form)
    spec = load_spec(folder)
    made = load_weights(folder, spec, dtype=torch.float16, device=CPU)
    held = 0
    for layer in made.layers:
        for weight in _linears(layer):
            held += weight.data.nbytes + (0 if weight.bias is None else weight.bias.nbytes)
            assert weight.scales is not None
            factors = weight.scales.factors
            held += weight.scales.values.nbytes + (0 if factors is None else factors.nbytes)
        held += layer.input_norm.nbytes + layer.post_norm.nbytes
    held += made.embedding.nbytes + made.head.nbytes + made.final_norm.nbytes
    estimate = weight_bytes(spec, element_bytes=2, keeps_quantised=True)
    assert abs(estimate - held) < 0.02 * held
    dense = weight_bytes(spec, element_bytes=2, keeps_quantised=False)
    save_bytes = sum(t.numel() for t in load_file(tmp_path / "dense/model.safetensors").values())
    assert dense == 2 * save_bytes
