"""What config.json and generation_config.json mean, and what is refused at start-up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from configs.load import PROJECT_ROOT
from engine.errors import ConfigError
from engine.layers.rope_spec import LinearScaling, Llama3Scaling, YarnScaling
from engine.models.spec import SUPPORTED_ARCHITECTURES, load_spec

PLAIN: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
}


def _write(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps({**PLAIN, **changes}))
    return folder


def test_absent_keys_have_the_family_defaults(tmp_path: Path) -> None:
    spec = load_spec(_write(tmp_path))
    assert (spec.num_kv_heads, spec.head_dim, spec.rms_norm_eps) == (6, 8, 1e-6)
    assert (spec.rope.theta, spec.rope.scaling) == (10000.0, None)
    assert not spec.has_tied_embeddings
    assert spec.layer_windows == (None, None, None)
    assert spec.eos_token_ids == ()
    assert spec.max_model_len == 512
    assert spec.dtype == "float32"


def test_qwen3_heads_are_128_wide_unless_said_otherwise(tmp_path: Path) -> None:
    _write(tmp_path, architectures=["Qwen3ForCausalLM"], num_key_value_heads=2)
    assert load_spec(tmp_path).head_dim == 128
    _write(tmp_path, architectures=["Qwen3ForCausalLM"], num_key_value_heads=2, head_dim=32)
    assert load_spec(tmp_path).head_dim == 32


def test_null_means_absent(tmp_path: Path) -> None:
    spec = load_spec(
        _write(tmp_path, head_dim=None, num_key_value_heads=None, rope_scaling=None, dtype=None)
    )
    assert spec.head_dim == 8


@pytest.mark.parametrize(
    ("changes", "window"),
    [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 9}, 9)],
)
def test_mistral_tells_an_absent_window_from_a_null_one(
    changes: dict[str, object], window: int | None, tmp_path: Path
) -> None:
    _write(tmp_path, architectures=["MistralForCausalLM"], num_key_value_heads=3, **changes)
    assert load_spec(tmp_path).layer_windows == (window,) * 3


def test_qwen2_windows_start_at_max_window_layers(tmp_path: Path) -> None:
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
    _write(tmp_path, **qwen2, sliding_window=9, max_window_layers=1)
    assert load_spec(tmp_path).layer_windows == (None, None, None)
    _write(tmp_path, **qwen2, sliding_window=9, max_window_layers=1, use_sliding_window=True)
    assert load_spec(tmp_path).layer_windows == (None, 9, 9)


def test_eos_ids_come_from_both_files_without_repeats(tmp_path: Path) -> None:
    _write(tmp_path, eos_token_id=7)
    assert load_spec(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7, 0]}')
    assert load_spec(tmp_path).eos_token_ids == (7, 9, 0)


@pytest.mark.parametrize(
    ("rope", "max_model_len"),
    [
        ({"rope_type": "default"}, 512),
        ({"type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            512,
        ),
    ],
)
def test_the_context_length_follows_the_rope_scaling(
    rope: dict[str, object], max_model_len: int, tmp_path: Path
) -> None:
    assert load_spec(_write(tmp_path, rope_scaling=rope)).max_model_len == max_model_len
    assert load_spec(_write(tmp_path, rope_parameters=rope)).max_model_len == max_model_len


def test_rope_parameters_may_carry_their_own_theta(tmp_path: Path) -> None:
    inside = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2}
    spec = load_spec(_write(tmp_path, rope_theta=1e6, rope_parameters=inside))
    assert spec.rope.theta == 5e5
    assert spec.rope.scaling == LinearScaling(factor=2.0)
    spec = load_spec(_write(tmp_path, rope_theta=1e6, rope_scaling={"type": "default"}))
    assert spec.rope.theta == 1e6


def test_scalings_without_an_original_length_take_the_stated_one(tmp_path: Path) -> None:
    llama3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    scaling = load_spec(_write(tmp_path, rope_scaling=llama3)).rope.scaling
    assert isinstance(scaling, Llama3Scaling)
    assert scaling.original_max_tokens == 512
    yarn = {"rope_type": "yarn", "factor": 2}
    _write(tmp_path, rope_scaling=yarn, original_max_position_embeddings=300)
    scaling = load_spec(tmp_path).rope.scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.original_max_tokens == 300


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", *SUPPORTED_ARCHITECTURES]),
        ({"architectures": None}, ["architectures", *SUPPORTED_ARCHITECTURES]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures", "list of strings"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"hidden_size": "48"}, ["hidden_size", "integer", "str"]),
        ({"hidden_size": 48.5}, ["hidden_size", "integer"]),
        ({"hidden_size": True}, ["hidden_size", "integer", "bool"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "at least 1"]),
        ({"max_position_embeddings": None}, ["max_position_embeddings", "missing"]),
        ({"num_key_value_heads": 4}, ["num_key_value_heads", "4", "6"]),
        ({"head_dim": 7}, ["head_dim", "7", "odd"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"rms_norm_eps": -1e-6}, ["rms_norm_eps", "positive"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "finite"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "true or false"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, ["rope_scaling.rope_type", "dynamic"]),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            ["longrope", "default, linear, llama3, yarn"],
        ),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor", "missing"]),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, ["rope_scaling.factor", "number"]),
        ({"rope_scaling": [2]}, ["rope_scaling", "object"]),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            ["rope_parameters.full_attention", "not supported"],
        ),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "not supported"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        (
            {"quantization_config": {"quant_method": "torchao"}},
            ["quantization_config", "torchao"],
        ),
        ({"torch_dtype": "int8"}, ["dtype", "int8", "bfloat16"]),
        ({"eos_token_id": "2"}, ["eos_token_id", "token id"]),
        ({"eos_token_id": 100}, ["eos_token_id", "100", "vocabulary"]),
        (
            {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "layer_types": ["x"]},
            ["layer_types", "1 entries", "3 layers"],
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "num_key_value_heads": 2,
                "layer_types": ["linear_attention"] * 3,
            },
            ["layer_types", "linear_attention", "sliding_attention"],
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "num_key_value_heads": 2,
                "layer_types": ["sliding_attention"] * 3,
            },
            ["layer_types", "use_sliding_window"],
        ),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "num_key_value_heads": 2,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            ["layer_types"],
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_file_and_key(
    changes: dict[str, object], named: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_spec(_write(tmp_path, **changes))
    for part in [str(tmp_path / "config.json"), *named]:
        assert part in refused.value.message


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/config\.json: no such file"):
        load_spec(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "[1]", "\x80"])
def test_a_config_that_is_no_json_object_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="JSON"):
        load_spec(tmp_path)


def test_a_broken_generation_config_is_not_ignored(tmp_path: Path) -> None:
    _write(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        load_spec(tmp_path)


def test_reading_a_spec_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import engine.models.spec, sys;"
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_readme_names_every_architecture_that_is_read() -> None:
    page = (PROJECT_ROOT / "README.md").read_text()
    assert [name for name in SUPPORTED_ARCHITECTURES if f"`{name}`" not in page] == []
