"""Weights files: what is read, what is tolerated, and what stops the start, by name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.layers.linear import LinearWeight
from engine.models import weights
from engine.models.llama import build_decoder
from engine.models.registry import build_model
from engine.models.spec import load_spec
from engine.models.weights import (
    LayerWeights,
    Part,
    allocate_weights,
    chunk_pairs,
    load_weights,
    random_weights,
)
from engine.ranks.rank import WHOLE_MODEL, Rank
from kernels.reference import TorchOps
from tests.engine.models.closeness import assert_same_logits
from tests.engine.runner.step_driver import StepDriver
from tests.harness.tiny_models import edit_config, reference_logits, save_model

Tensors = dict[str, torch.Tensor]


def _build(folder: Path) -> None:
    build_model(folder, dtype=torch.float32, device=torch.device("cpu"))


def _rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_model(tmp_path, max_shard_size="40KB")
    return tmp_path


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            ["missing", "model.layers.1.mlp.up_proj.weight", "[88, 64]"],
        ),
        (lambda t: t.pop("lm_head.weight"), ["missing", "lm_head.weight", "[131, 64]"]),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            ["model.safetensors", "unexpected", "model.layers.0.self_attn.q_proj.bias"],
        ),
        (
            lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(64)}),
            ["model.safetensors", "unexpected", "model.layers.2.input_layernorm.weight"],
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(63)}),
            ["model.safetensors", "model.norm.weight", "[63]", "[64]"],
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            ["model.safetensors", "model.norm.weight", "I8", "BF16"],
        ),
    ],
)
def test_a_tensor_that_does_not_fit_stops_the_start(
    change: Callable[[Tensors], object], named: list[str], folder: Path
) -> None:
    _rewrite(folder, change)
    with pytest.raises(ConfigError) as refused:
        _build(folder)
    for part in named:
        assert part in refused.value.message


def test_known_leftovers_are_tolerated(tmp_path: Path) -> None:
    save_model(tmp_path, tie_word_embeddings=True)
    theirs = reference_logits(tmp_path, [5, 4, 3])

    def add_leftovers(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = torch.full((131, 64), torch.nan)  # tied: never looked at

    _rewrite(tmp_path, add_leftovers)
    model = build_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    driver = StepDriver(model, seed=0)
    driver.admit(0, [5, 4, 3])
    assert_same_logits(driver.logits({0: 3})[0], theirs)


def test_a_folder_without_safetensors_says_what_is_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json.*only safetensors"):
        _build(folder)


@pytest.mark.parametrize("keep_bytes", [4, 100, 5000])
def test_a_truncated_file_is_named(keep_bytes: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(ConfigError, match=r"model\.safetensors: not a readable safetensors file"):
        _build(folder)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=shard.name):
        _build(sharded)


def test_a_shard_without_its_tensor_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    tensors = load_file(shard)
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(ConfigError) as refused:
        _build(sharded)
    assert shard.name in refused.value.message
    assert lost in refused.value.message


@pytest.mark.parametrize(
    ("weight_map", "problem"),
    [
        (None, "weight_map is missing"),
        ({"model.norm.weight": 3}, "must be a string"),
        ({"model.norm.weight": "../elsewhere.safetensors"}, "outside the folder"),
    ],
)
def test_a_wrong_index_is_refused(weight_map: object, problem: str, sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=problem):
        _build(sharded)


def test_a_longer_context_than_the_model_allows_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="allows 256 tokens, max_model_len is 257"):
        build_model(folder, dtype=torch.float32, device=torch.device("cpu"), max_model_len=257)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_of_two_tensors_cover_both_side_by_side(dtype: torch.dtype) -> None:
    source = torch.randn(23, 7).to(dtype)
    destination = torch.full((30, 7), torch.nan)[3:26]
    num_chunks = 0
    for chunk, target in chunk_pairs(source, destination, 100):
        assert chunk.nbytes <= 100
        target.copy_(chunk)
        num_chunks += 1
    assert num_chunks == -(-source.nbytes // 100)
    assert torch.equal(destination, source.float())


@pytest.mark.parametrize("chunk_bytes", [8, 28, 100, 10**4])
def test_chunks_of_columns_are_read_where_they_lie(chunk_bytes: int) -> None:
    """A rank's columns are copied by the lanes, like rows; but for rows longer than a chunk."""
    whole = torch.randn(23, 20)
    source, destination = whole[:, 5:12], torch.full((23, 7), torch.nan)
    for chunk, target in chunk_pairs(source, destination, chunk_bytes):
        assert chunk.nbytes <= chunk_bytes
        is_in_place = chunk.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert is_in_place == (chunk_bytes >= 7 * 4)
        target.copy_(chunk)
    assert torch.equal(destination, source)


@pytest.mark.parametrize("is_tied", [True, False])
def test_random_weights_need_only_config_json(is_tied: bool, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    edit_config(folder, tie_word_embeddings=is_tied, attention_bias=True)
    spec = load_spec(folder)
    device = torch.device("cpu")
    made = random_weights(spec, dtype=torch.bfloat16, device=device, seed=3)
    again = random_weights(spec, dtype=torch.bfloat16, device=device, seed=3)
    other = random_weights(spec, dtype=torch.bfloat16, device=device, seed=4)
    assert (made.head is made.embedding) == is_tied
    assert len(made.layers) == spec.num_layers
    for tensor in (made.embedding, made.head, made.layers[1].qkv.data, made.layers[0].down.data):
        assert 0.9e-3 < tensor.abs().max().item() <= 1.001e-3  # bf16 rounds 1e-3 up
        assert abs(tensor.float().mean().item()) < 1e-4
    assert made.layers[1].qkv.bias is not None
    assert (made.layers[1].qkv.bias != 0).any()
    for norm in (made.final_norm, made.layers[0].input_norm, made.layers[1].post_norm):
        assert torch.equal(norm, torch.ones_like(norm))
    assert torch.equal(made.layers[1].gate_up.data, again.layers[1].gate_up.data)
    assert not torch.equal(made.layers[1].gate_up.data, other.layers[1].gate_up.data)


def test_a_model_of_random_weights_computes_finite_logits_that_depend_on_its_input(
    folder: Path,
) -> None:
    spec = load_spec(folder)
    weights = random_weights(spec, dtype=torch.float32, device=torch.device("cpu"))
    driver = StepDriver(
        build_decoder(spec, weights, max_model_len=spec.max_model_len, ops=TorchOps()), seed=0
    )
    driver.admit(0, [5, 4, 3])
    driver.admit(1, [9, 9, 2])
    logits = driver.logits({0: 3, 1: 3})
    assert all(torch.isfinite(logits[row]).all() for row in (0, 1))
    assert not torch.allclose(logits[0], logits[1])


def _tensors(layer: LayerWeights) -> list[torch.Tensor]:
    """All that the layer has, weights and biases, in one order."""
    fields = [getattr(layer, name) for name in LayerWeights.__slots__]
    linears = [field for field in fields if isinstance(field, LinearWeight)]
    found = [field for field in fields if isinstance(field, torch.Tensor)]
    found += [linear.data for linear in linears]
    return found + [linear.bias for linear in linears if linear.bias is not None]


def test_all_tensors_of_a_layer_are_compared(sharded: Path) -> None:
    files = sharded.glob("*.safetensors")
    published = {name: tensor for path in files for name, tensor in load_file(path).items()}
    of_layers = sum(t.numel() for name, t in published.items() if ".layers." in name)
    cpu = torch.device("cpu")
    loaded = load_weights(sharded, load_spec(sharded), dtype=torch.float32, device=cpu)
    compared = [tensor for layer in loaded.layers for tensor in _tensors(layer)]
    assert sum(tensor.numel() for tensor in compared) == of_layers > 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_bytes", [256, 4096, weights.CHUNK_BYTES])
def test_loading_to_a_gpu_gives_the_same_weights_as_to_a_cpu(
    dtype: torch.dtype, chunk_bytes: int, sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "CHUNK_BYTES", chunk_bytes)
    spec = load_spec(sharded)
    expected = load_weights(sharded, spec, dtype=dtype, device=torch.device("cpu"))
    # What the allocator hands out next should not hold these weights already.
    torch.full((2**22,), torch.nan, device="cuda")
    loaded = load_weights(sharded, spec, dtype=dtype, device=torch.device("cuda"))
    assert torch.equal(loaded.embedding.cpu(), expected.embedding)
    assert torch.equal(loaded.head.cpu(), expected.head)
    assert torch.equal(loaded.final_norm.cpu(), expected.final_norm)
    for ours, theirs in zip(loaded.layers, expected.layers, strict=True):
        pairs = zip(_tensors(ours), _tensors(theirs), strict=True)
        assert all(torch.equal(tensor.cpu(), right) for tensor, right in pairs)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_bytes", [256, weights.CHUNK_BYTES])
@pytest.mark.parametrize("index", [0, 1])
def test_a_ranks_weights_on_a_gpu_are_those_on_a_cpu(
    index: int, chunk_bytes: int, sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "CHUNK_BYTES", chunk_bytes)
    spec, rank = load_spec(sharded), Rank(index, 2)
    on_cpu, on_gpu = (
        load_weights(sharded, spec, dtype=torch.bfloat16, device=torch.device(kind), rank=rank)
        for kind in ("cpu", "cuda")
    )
    for ours, theirs in zip(on_gpu.layers, on_cpu.layers, strict=True):
        pairs = zip(_tensors(ours), _tensors(theirs), strict=True)
        assert all(torch.equal(tensor.cpu(), right) for tensor, right in pairs)


@pytest.mark.gpu
def test_loading_to_a_gpu_holds_no_second_copy(tmp_path: Path) -> None:
    save_model(tmp_path, vocab_size=100_003, hidden_size=512)
    spec = load_spec(tmp_path)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = load_weights(tmp_path, spec, dtype=torch.bfloat16, device=torch.device("cuda"))
    held = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    assert loaded.embedding.nbytes > weights.CHUNK_BYTES
    assert peak - held <= 2 * weights.NUM_LANES * weights.CHUNK_BYTES


@pytest.mark.gpu
def test_a_tensor_that_does_not_fit_stops_the_start_on_a_gpu_too(folder: Path) -> None:
    _rewrite(folder, lambda t: t.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
        load_weights(folder, load_spec(folder), dtype=torch.float32, device=torch.device("cuda"))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_hold_together_what_the_files_hold(folder: Path, num_ranks: int) -> None:
    """Every published element is on exactly one rank where it is split, and on all where not."""
    edit_config(folder, num_attention_heads=4, num_key_value_heads=4, head_dim=4)
    (folder / "model.safetensors").unlink()
    spec = load_spec(folder)
    device, dtype = torch.device("cpu"), torch.float32
    _, whole = allocate_weights(spec, dtype=dtype, device=device, rank=WHOLE_MODEL)
    published = {n: torch.randn_like(p.tensor) for n, p in whole.items() if isinstance(p, Part)}
    save_file(published, folder / "model.safetensors", metadata={"format": "pt"})
    covered = {name: torch.zeros_like(tensor) for name, tensor in published.items()}
    for index in range(num_ranks):
        rank = Rank(index, num_ranks)
        loaded = load_weights(folder, spec, dtype=dtype, device=device, rank=rank)
        _, parts = allocate_weights(spec, dtype=dtype, device=device, rank=rank)
        layer = loaded.layers[1]
        q, k, v = (
            published[f"model.layers.1.self_attn.{name}_proj.weight"].chunk(num_ranks)[index]
            for name in "qkv"
        )
        assert torch.equal(layer.qkv.data, torch.cat((q, k, v)))
        down = published["model.layers.1.mlp.down_proj.weight"]
        assert torch.equal(layer.down.data, down.chunk(num_ranks, dim=1)[index])
        assert torch.equal(layer.input_norm, published["model.layers.1.input_layernorm.weight"])
        for name, part in parts.items():
            assert isinstance(part, Part)
            share = covered[name] if part.share is None else covered[name][part.share]
            assert share.shape == part.tensor.shape, name
            share += 1
    for name, count in covered.items():
        assert count.min() == count.max(), name
        assert count.min() in (1, num_ranks), name


def test_heads_that_ranks_cannot_share_are_refused(folder: Path) -> None:
    spec = load_spec(folder)
    with pytest.raises(ConfigError, match="3 ranks cannot share 4"):
        load_weights(folder, spec, dtype=torch.float32, device=torch.device("cpu"), rank=Rank(0, 3))
