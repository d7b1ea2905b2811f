"""Null, absent and odd values in config.json, read as transformers reads them or refused.

transformers builds the model that it reads out of the edited file, with random weights; ours is
loaded from the same file and has to compute the same.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers.quantizers_utils import should_convert_module

from engine.errors import ConfigError
from engine.models.config_file import ConfigFile
from engine.models.quantization.config import read_quantization
from engine.models.registry import build_model
from engine.models.spec import load_spec
from tests.engine.models.closeness import assert_same_logits
from tests.engine.runner.step_driver import StepDriver
from tests.harness.tiny_models import CONFIG_CLASSES, fill_randomly, save_model

ABSENT = object()
ARCHITECTURES = [name for name in CONFIG_CLASSES if not name.startswith(("Deepseek", "Glm"))]
LLAMA, QWEN2, QWEN3 = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
GPT_OSS, GEMMA3 = "GptOssForCausalLM", "Gemma3ForCausalLM"
TOKEN_IDS = list(range(3, 45))  # more than any window here
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
OLD_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

Changes = Mapping[str, object]


def edited(folder: Path, architecture: str, changes: Changes) -> bool:
    """Writes a small model with these changes; returns whether transformers can read it."""
    save_model(folder, architecture)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    text = json.dumps({key: value for key, value in values.items() if value is not ABSENT})
    path.write_text(text)
    try:
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        fill_randomly(model, architecture, seed=1)
        model.tie_weights()
        model.float().eval().save_pretrained(folder / "theirs")
        with torch.inference_mode():
            torch.save(model(torch.tensor([TOKEN_IDS])).logits[0], folder / "logits")
    except Exception:  # noqa: BLE001 - it checks little and fails as it happens
        return False
    shutil.copy(folder / "theirs" / "model.safetensors", folder)
    return True


def assert_computes_as_they_do(folder: Path) -> None:
    model = build_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    driver = StepDriver(model, seed=0)
    driver.admit(0, TOKEN_IDS)
    assert_same_logits(driver.logits_in_chunks(0, 7), torch.load(folder / "logits"))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        (LLAMA, {"num_key_value_heads": None, "head_dim": None, "rope_parameters": {}}),
        (QWEN2, {"num_key_value_heads": None}),
        (QWEN3, {"num_key_value_heads": None, "layer_types": None}),
        (LLAMA, {"rope_parameters": {**YARN, "truncate": None}}),
        (GPT_OSS, {"rope_parameters": {**YARN, "truncate": None}}),
        (GEMMA3, {"rope_parameters": ABSENT, "rope_scaling": {}, "rope_theta": 500.0}),
    ],
)
def test_null_is_read_as_transformers_reads_it(
    architecture: str, changes: Changes, tmp_path: Path
) -> None:
    assert edited(tmp_path, architecture, changes)
    assert_computes_as_they_do(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "changes", "key"),
    [
        (GEMMA3, {"tie_word_embeddings": None}, "tie_word_embeddings"),
        (GPT_OSS, {"attention_bias": None}, "attention_bias"),
        ("Qwen2MoeForCausalLM", {"qkv_bias": None}, "qkv_bias"),
        (GEMMA3, {"rope_parameters": ABSENT, "rope_scaling": OLD_YARN}, "rope_scaling.type"),
    ],
)
def test_what_may_mean_two_things_is_refused(
    architecture: str, changes: Changes, key: str, tmp_path: Path
) -> None:
    edited(tmp_path, architecture, changes)
    with pytest.raises(ConfigError, match=key):
        load_spec(tmp_path)


ODD_VALUES: dict[str, list[object]] = {
    "tie_word_embeddings": [None, ABSENT, True],
    "attention_bias": [None, ABSENT, True],
    "mlp_bias": [None, True],
    "qkv_bias": [None, ABSENT, False],
    "rope_scaling": [None, {}],
    "rope_parameters": [None, {}, ABSENT, {"rope_type": "default"}, {"rope_theta": 500.0}],
    "head_dim": [None, ABSENT],
    "num_key_value_heads": [None, ABSENT],
    "sliding_window": [None, 6, ABSENT],
    "use_sliding_window": [None, True, False, ABSENT],
    "layer_types": [None, ABSENT],
    "max_window_layers": [None, 0, 1, ABSENT],
    "rms_norm_eps": [None, ABSENT],
    "hidden_act": [None, ABSENT],
    "norm_topk_prob": [None, ABSENT],
    "decoder_sparse_step": [None, ABSENT],
    "mlp_only_layers": [None, ABSENT, [0]],
    "num_experts_per_tok": [None, ABSENT],
    "swiglu_limit": [None, ABSENT],
    "query_pre_attn_scalar": [None, ABSENT],
    "rope_local_base_freq": [None, 77.0],
    "sliding_window_pattern": [None, 2],
    "eos_token_id": [None, [2, 3], ABSENT],
    "partial_rotary_factor": [None, 1.0, 0.5],
}
TOGETHER: list[Changes] = [
    {"sliding_window": 6, "use_sliding_window": use, "max_window_layers": first, "layer_types": t}
    for use in (True, False)
    for first in (0, 1)
    for t in (ABSENT, None, ["sliding_attention", "full_attention"])
] + [
    {"rope_parameters": ABSENT, "rope_theta": 500.0, "rope_scaling": scaling}
    for scaling in (None, {}, {"rope_type": "default"}, OLD_YARN, {"type": "linear", "factor": 3.0})
]


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_whatever_both_read_both_read_alike(architecture: str, tmp_path: Path) -> None:
    alone = [{key: value} for key, values in ODD_VALUES.items() for value in values]
    num_compared = 0
    for number, changes in enumerate([*alone, *TOGETHER]):
        folder = tmp_path / str(number)
        if not edited(folder, architecture, changes):
            continue
        try:
            load_spec(folder)
        except ConfigError:
            continue
        assert_computes_as_they_do(folder)
        shutil.rmtree(folder)
        num_compared += 1
    assert num_compared > 30


ALL_NAMES = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"]
MODULES = [f"model.layers.{layer}.{name}" for layer in (0, 1, 11) for name in ALL_NAMES]


@pytest.mark.parametrize(
    "entry",
    [
        r"model.layers.1.mlp",
        r"model\.layers\.1\..*",
        r"model.layers.*.self_attn",
        r"model.layers.(0|11).mlp.down_proj",
        r".*mlp\.gate",
        r".*o_proj$",
        r"model.layers.[01].self_attn.[qk]_proj",
        r"^model.layers.11",
        r"layers\.1.*",
        "down_proj",
    ],
)
@pytest.mark.parametrize("method", ["fp8", "awq", "gptq"])
def test_entries_left_out_are_expressions(entry: str, method: str, tmp_path: Path) -> None:
    section: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": 32}
    section["modules_to_not_convert"] = [entry]
    config = ConfigFile(tmp_path / "config.json", {"quantization_config": section})
    quantization = read_quantization(config, has_head=True)
    assert quantization is not None
    covered = [module for module in MODULES if quantization.covers(module)]
    assert covered == [m for m in MODULES if should_convert_module(m, ["lm_head", entry])]


def test_an_entry_may_end_in_a_dot(tmp_path: Path) -> None:
    """Writers of AWQ search names for it, so that layer 1 is not layer 11."""
    section = {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["model.layers.1."]}
    config = ConfigFile(tmp_path / "config.json", {"quantization_config": section})
    quantization = read_quantization(config, has_head=True)
    assert quantization is not None
    covered = [module for module in MODULES if quantization.covers(module)]
    assert covered == [module for module in MODULES if "model.layers.1." not in module]


@pytest.mark.parametrize(
    ("section", "covered"),
    [
        ({"dynamic": {r"-:.*attn.*": {}}}, ["mlp.gate_proj", "mlp.down_proj"]),
        ({"dynamic": {r"-:model\.layers\.1\.": {}}}, None),
        ({"dynamic": {r"-:.*\.mlp\.gate$": {}, "-:lm_head": {}}}, ALL_NAMES),
        ({"modules_in_block_to_quantize": [["mlp.gate_proj"], ["mlp.down_proj"]]}, ALL_NAMES[2:]),
        ({"modules_in_block_to_quantize": ["self_attn.q_proj"]}, ALL_NAMES[:1]),
        ({"modules_in_block_to_quantize": None, "dynamic": {}}, ALL_NAMES),
    ],
)
def test_gptq_may_leave_modules_out(
    section: dict[str, Any], covered: list[str] | None, tmp_path: Path
) -> None:
    """dynamic: GPTQModel takes the first expression that matches from the name's beginning on."""
    section = {"quant_method": "gptq", "bits": 4, "group_size": 32} | section
    config = ConfigFile(tmp_path / "config.json", {"quantization_config": section})
    quantization = read_quantization(config, has_head=True)
    assert quantization is not None
    names = [f"model.layers.{layer}.{name}" for layer in (0, 1, 11) for name in ALL_NAMES]
    if covered is None:
        expected = [name for name in names if not name.startswith("model.layers.1.")]
    else:
        expected = [name for name in names if name.split(".", 3)[3] in covered]
    assert [name for name in names if quantization.covers(name)] == expected


def test_an_entry_that_is_no_expression_is_refused(tmp_path: Path) -> None:
    section = {"quant_method": "fp8", "modules_to_not_convert": ["layers.(1"]}
    config = ConfigFile(tmp_path / "config.json", {"quantization_config": section})
    with pytest.raises(ConfigError, match="not one"):
        read_quantization(config, has_head=True)
