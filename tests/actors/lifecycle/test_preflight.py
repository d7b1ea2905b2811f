"""Every kind of damage to a model folder, and what is said of it before anything starts."""

import json
import logging
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.lifecycle import preflight
from actors.lifecycle.preflight import check_startable
from configs.load import load_config
from engine.errors import ConfigError
from engine.text.tokenizing import load_tokenizer
from load_tests.testbed.padded_tokenizer import padded_tokenizer
from load_tests.testbed.quantised_folders import write_quantised
from tests.harness.tiny_models import edit_config

MODEL = Path(__file__).resolve().parents[3] / "demo_model" / "laps-demo"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
Log = pytest.LogCaptureFixture
Tensors = dict[str, torch.Tensor]
JSON_FILES = ("config", "generation_config", "tokenizer", "tokenizer_config")
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 8663440\n"


@pytest.fixture(scope="module")
def _sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded") / "model"
    shutil.copytree(MODEL, folder)
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    weight_map = {}
    for shard, part in zip(SHARDS, (names[:20], names[20:]), strict=True):
        save_file({name: tensors[name] for name in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture
def sharded(_sharded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(_sharded, tmp_path / "model")


def check(folder: Path, **overrides: object) -> None:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    check_startable(load_config(None, {"model.path": str(folder), **dotted}))


def refusal(folder: Path) -> str:
    return _refusal_with(folder)


def _refusal_with(folder: Path, **overrides: object) -> str:
    with pytest.raises(ConfigError) as refused:
        check(folder, **overrides)
    assert "\n" not in refused.value.message
    return refused.value.message


def test_whole_folders_pass(sharded: Path) -> None:
    check(MODEL)
    check(sharded)


@pytest.mark.parametrize("address", ["not an address", "127.0.0.1:8000", "a..b"])
def test_an_address_that_nothing_could_listen_on_is_refused(sharded: Path, address: str) -> None:
    with pytest.raises(ConfigError, match=r"^handoff\.address: .*; set 127\.0\.0\.1 "):
        check(sharded, handoff__address=address)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "0", "::0"])
def test_an_address_that_nobody_could_call_is_refused(sharded: Path, address: str) -> None:
    with pytest.raises(ConfigError, match=r"^handoff\.address: .* all addresses of a machine"):
        check(sharded, handoff__address=address)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost"])
def test_an_address_of_this_machine_passes(sharded: Path, address: str) -> None:
    check(sharded, handoff__address=address)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tiny.Q4_K_M.gguf", "has weights as GGUF only; GGUF is not read"),
        ("pytorch_model.bin", "has pickled weights only"),
        ("consolidated.00.pth", "has pickled weights only"),
    ],
)
def test_weights_of_another_format_are_named_for_what_they_are(
    name: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(b"x")  # often without the JSON files, which are missed later
    assert refusal(tmp_path).startswith(f"{tmp_path}: {said}")


# ---- any file ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [*SHARDS, INDEX, *(f"{x}.json" for x in JSON_FILES)],
)
@pytest.mark.parametrize(
    ("content", "said"),
    [(POINTER, "git lfs pull"), (b"", "is empty"), (None, "a folder stands")],
    ids=["pointer", "empty", "folder"],
)
def test_a_file_without_content_is_named(
    sharded: Path, name: str, content: bytes | None, said: str
) -> None:
    path = sharded / name
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    message = refusal(sharded)
    assert str(path) in message
    assert said in message


@pytest.mark.parametrize("name", [INDEX, "config.json", "generation_config.json", "tokenizer.json"])
def test_a_json_file_cut_short_is_named(sharded: Path, name: str) -> None:
    path = sharded / name
    path.write_bytes(path.read_bytes()[:-20])
    assert str(path) in refusal(sharded)


# ---- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_lost", [1, 100_000])
def test_a_truncated_shard_is_named_with_its_sizes(sharded: Path, num_lost: int) -> None:
    path = sharded / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-num_lost])
    message = refusal(sharded)
    assert str(path) in message
    assert "cut short" in message
    assert "download it again" in message


def with_header(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])


def first_two(header: dict[str, object]) -> list[dict[str, list[int]]]:
    tensors = [t for name, t in header.items() if name != "__metadata__"]
    ordered: list[dict[str, list[int]]] = sorted(tensors, key=lambda t: t["data_offsets"])
    return ordered[:2]


def _overlap(header: dict[str, object]) -> None:
    _, second = first_two(header)
    second["data_offsets"] = [o - 4 for o in second["data_offsets"]]


def _negative(header: dict[str, object]) -> None:
    first, _ = first_two(header)
    first["data_offsets"] = [-8, first["data_offsets"][1]]


def _too_few_bytes(header: dict[str, object]) -> None:
    first, _ = first_two(header)
    first["shape"] = [*first["shape"], 2]


@pytest.mark.parametrize("change", [_overlap, _negative, _too_few_bytes])
def test_a_header_that_contradicts_itself_is_refused(
    sharded: Path, change: Callable[[dict[str, object]], None]
) -> None:
    with_header(sharded / SHARDS[0], change)
    message = refusal(sharded)
    assert SHARDS[0] in message
    assert "wrongly" in message


@pytest.mark.parametrize(
    "content",
    [
        b"\x00\x00\x00",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 50_000_000) + b"{}",
        b"<!DOCTYPE html><html>not found</html>",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 7) + b'{"a":1}',
        struct.pack("<Q", 2) + b"\xff\xfe",
        struct.pack("<Q", 2) + b"{}more",
    ],
)
def test_what_is_no_safetensors_file_is_refused_without_reading_it_whole(
    sharded: Path, content: bytes
) -> None:
    (sharded / SHARDS[0]).write_bytes(content)
    message = refusal(sharded)
    assert SHARDS[0] in message
    assert "not a readable safetensors file" in message


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    assert str(sharded / SHARDS[1]) in refusal(sharded)


NORM = "model.layers.0.input_layernorm.weight"


def _rewrite(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(NORM), [NORM, INDEX, "not here"]),
        (lambda t: t.update({NORM: torch.ones(7)}), [NORM, "[7]", "[256]"]),
        (lambda t: t.update({NORM: torch.ones(256, dtype=torch.int8)}), [NORM, "I8", "BF16"]),
        (lambda t: t.update(stray=torch.ones(1)), ["stray", "unexpected"]),
        (lambda t: t.update({"model.norm.weight": torch.ones(1)}), ["model.norm.weight"]),
    ],
    ids=["absent", "shape", "dtype", "stray", "twice"],
)
def test_a_tensor_that_does_not_fit_is_named(
    sharded: Path, change: Callable[[Tensors], object], said: list[str]
) -> None:
    _rewrite(sharded / SHARDS[0], change)
    message = refusal(sharded)
    assert SHARDS[0] in message or "model.norm.weight" in message
    for part in said:
        assert part in message


def test_layers_that_config_json_means_and_no_file_holds_are_counted(sharded: Path) -> None:
    num_layers = json.loads((sharded / "config.json").read_text())["num_hidden_layers"]
    edit_config(sharded, num_hidden_layers=num_layers + 1)
    message = refusal(sharded)
    assert "tensors are missing" in message
    assert f"model.layers.{num_layers}." in message


def test_known_leftovers_are_tolerated(sharded: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _rewrite(sharded / SHARDS[0], lambda t: t.update({name: torch.ones(8)}))
    check(sharded)


def test_ranks_that_cannot_share_the_model_are_refused() -> None:
    check(MODEL, workers__tensor_parallel_size=4)
    with pytest.raises(ConfigError, match=r"workers\.tensor_parallel_size: 8 ranks cannot share"):
        check(MODEL, workers__tensor_parallel_size=8)
    shared_out = {"workers__tensor_parallel_size": 2, "workers__expert_parallel": True}
    assert "has no experts" in _refusal_with(MODEL, **shared_out)


def test_random_weights_need_no_weights(sharded: Path) -> None:
    for name in (*SHARDS, INDEX):
        (sharded / name).unlink()
    check(sharded, model__weights="random")


def test_quantised_folders_are_checked_by_their_format(tmp_path: Path) -> None:
    folder = write_quantised(MODEL, "gptq", tmp_path / "model")
    check(folder)
    assert "model.quantization" in _refusal_with(folder, model__quantization="fp8")
    _rewrite(folder / SINGLE, lambda t: t.pop("model.layers.3.mlp.down_proj.qzeros"))
    assert "model.layers.3.mlp.down_proj.qzeros" in refusal(folder)
    check(MODEL, model__quantization="fp8")


def test_shares_of_quantised_weights_are_checked_before_the_start(tmp_path: Path) -> None:
    """Attention's output projection has 256 inputs in groups of 128: two ranks may share them."""
    folder = write_quantised(MODEL, "ct-int4-128-asymmetric", tmp_path / "model")
    edit_config(folder, num_attention_heads=8, num_key_value_heads=8, head_dim=32)
    refused = _refusal_with(folder, workers__tensor_parallel_size=4)
    assert "blocks of 128" in refused
    assert "parts of 64" in refused


def test_many_shards_of_any_size_are_checked_within_a_second(tmp_path: Path) -> None:
    """As large as a model of 70 billion parameters; the data is a hole that takes no space."""
    layers, hidden, inner = 80, 8192, 28672
    shutil.copytree(MODEL, tmp_path / "model", ignore=lambda *_: [SINGLE])
    folder = tmp_path / "model"
    edit_config(
        folder,
        architectures=["LlamaForCausalLM"],
        tie_word_embeddings=True,
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        attention_bias=False,
        mlp_bias=False,
    )
    attention = {"q": hidden, "k": 1024, "v": 1024}
    weight_map = {}
    for layer in range(layers):
        shapes = {f"self_attn.{x}_proj": [n, hidden] for x, n in attention.items()}
        shapes |= {"self_attn.o_proj": [hidden, hidden], "mlp.down_proj": [hidden, inner]}
        shapes |= {f"mlp.{x}_proj": [inner, hidden] for x in ("gate", "up")}
        shapes |= {"input_layernorm": [hidden], "post_attention_layernorm": [hidden]}
        named = {f"model.layers.{layer}.{n}.weight": shape for n, shape in shapes.items()}
        if layer == 0:
            named |= {"model.norm.weight": [hidden], "model.embed_tokens.weight": [128256, hidden]}
        file = f"model-{layer:05}.safetensors"
        write_hollow(folder / file, named)
        weight_map |= dict.fromkeys(named, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    started_s = time.process_time()
    check(folder)
    assert time.process_time() - started_s < 1.0  # of this process: others do not count


def write_hollow(path: Path, shapes: dict[str, list[int]]) -> None:
    header, position = {}, 0
    for name, shape in shapes.items():
        end = position + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + position)


# ---- chat templates ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_chat_template_with_a_syntax_error_is_named_with_its_line(
    sharded: Path, name: str
) -> None:
    broken = "{% for m in messages %}\n{{ m.content }\n{% endfor %}"
    is_json = name.endswith(".json")
    (sharded / name).write_text(json.dumps({"chat_template": broken}) if is_json else broken)
    message = refusal(sharded)
    assert str(sharded / name) in message
    assert "line 2" in message


def test_what_transformers_adds_to_jinja_is_no_error(sharded: Path) -> None:
    (sharded / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content | tojson(ensure_ascii=False) }}{% endgeneration %}"
        "{% endfor %}{{ raise_exception('no') }}"
    )
    check(sharded)


# ---- a tokenizer that is larger than the model ---------------------------------------------------


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Log]:
    """What is said at a start that goes on, whatever other tests did to our own loggers."""
    monkeypatch.setattr(preflight, "logger", logging.getLogger(__name__))
    with caplog.at_level(logging.WARNING):
        yield caplog


def with_added(folder: Path, text: str, *, opens_prompts: bool = False) -> int:
    """Add a special token past the model's embeddings; returns its id, the next one."""
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    token_id = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    token = {"id": token_id, "content": text, "special": True, "single_word": False}
    token |= {"lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"].append(token)
    if opens_prompts:
        ids = {text: {"id": text, "ids": [token_id], "tokens": [text]}}
        single = [{"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": _A}]
        pair = [*single, {"Sequence": _A | {"id": "B"}}]
        tokenizer["post_processor"] = {"type": "TemplateProcessing", "single": single}
        tokenizer["post_processor"] |= {"pair": pair, "special_tokens": ids}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return token_id


_A = {"id": "A", "type_id": 0}


def test_a_token_beyond_the_embeddings_is_told_and_served_without(sharded: Path, log: Log) -> None:
    token_id = with_added(sharded, "<|pad|>")
    check(sharded)
    (record,) = log.records
    for part in ("tokenizer.json", "config.json", str(token_id), "<|pad|>", "400"):
        assert part in record.getMessage()


def test_a_template_that_writes_such_a_token_is_told(sharded: Path, log: Log) -> None:
    with_added(sharded, "<|turn|>")
    (sharded / "chat_template.jinja").write_text("<|turn|>{{ messages[0].content }}")
    check(sharded)
    assert "the chat template writes <|turn|>" in log.text


@pytest.mark.parametrize("is_in_vocabulary", [True, False])
def test_a_token_beyond_the_embeddings_in_every_prompt_refuses_the_start(
    sharded: Path, is_in_vocabulary: bool
) -> None:
    token_id = with_added(sharded, "<|open|>", opens_prompts=True)
    if not is_in_vocabulary:  # a post-processor has ids of its own
        tokenizer = json.loads((sharded / "tokenizer.json").read_text())
        tokenizer["added_tokens"].pop()
        (sharded / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = refusal(sharded)
    assert "every prompt" in message
    for part in (str(sharded / "tokenizer.json"), str(sharded / "config.json"), str(token_id)):
        assert part in message


def test_embeddings_without_tokens_say_nothing(sharded: Path, log: Log) -> None:
    """Many models pad their embeddings: `load_tokenizer` knows fewer ids than there are."""
    vocab_size = json.loads((sharded / "config.json").read_text())["vocab_size"]
    (sharded / "tokenizer.json").write_text(json.dumps(padded_tokenizer(vocab_size)))
    edit_config(sharded, vocab_size=vocab_size + 267)
    check(sharded, model__weights="random")
    assert not log.records
    assert load_tokenizer(sharded, vocab_size + 267).vocab_size == vocab_size
