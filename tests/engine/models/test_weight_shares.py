"""What a rank reads of the files, and that ranks share the very weights of one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from engine.models import weights
from engine.models.spec import ModelSpec, load_spec
from engine.models.weights import Part, allocate_weights, load_weights, random_weights
from engine.ranks.rank import WHOLE_MODEL, Rank
from tests.harness.tiny_models import save_model
from tests.harness.weight_counts import num_parameters

CPU = torch.device("cpu")
SHAPES = {
    "whole heads": {"attention_bias": True, "mlp_bias": True},
    "heads held twice": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True, "vocab_size": 130},
}


@pytest.fixture(params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_model(tmp_path, **SHAPES[request.param])
    return tmp_path


def _parts_of(spec: ModelSpec, rank: Rank) -> dict[str, Part]:
    return allocate_weights(spec, dtype=torch.float32, device=CPU, rank=rank)[1]


def _tensors(held: weights.ModelWeights) -> list[Tensor]:
    """All that a rank holds, padding included, in one order."""
    found = [held.embedding, held.final_norm, held.head]
    for layer in held.layers:
        linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
        found += [linear.data for linear in linears]
        found += [linear.bias for linear in linears if linear.bias is not None]
    return found


class _CountedFile:
    """A safetensors file that counts the bytes of what is taken out of it."""

    num_bytes = 0

    def __init__(self, path: str, **how: str) -> None:
        self._file = safe_open(path, **how)

    def __enter__(self) -> "_CountedFile":
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def get_tensor(self, name: str) -> Tensor:
        return self._count(self._file.get_tensor(name))

    def get_slice(self, name: str) -> "_CountedSlice":
        return _CountedSlice(self._file.get_slice(name))

    @classmethod
    def _count(cls, taken: Tensor) -> Tensor:
        cls.num_bytes += taken.nbytes
        return taken


class _CountedSlice:
    def __init__(self, whole: Any) -> None:
        self._whole = whole

    def get_shape(self) -> list[int]:
        shape: list[int] = self._whole.get_shape()
        return shape

    def __getitem__(self, share: tuple[slice, ...]) -> Tensor:
        return _CountedFile._count(self._whole[share])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_rank_reads_its_slices_and_no_more(
    num_ranks: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "safe_open", _CountedFile)
    spec = load_spec(folder)
    file_bytes = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    for index in range(num_ranks):
        rank = Rank(index, num_ranks)
        _CountedFile.num_bytes = 0
        load_weights(folder, spec, dtype=torch.float32, device=CPU, rank=rank)
        own_bytes = sum(part.tensor.nbytes for part in _parts_of(spec, rank).values())
        assert _CountedFile.num_bytes == own_bytes
        # Beside its share only norms, the biases of sums, and KV heads that are held twice.
        assert own_bytes < file_bytes / num_ranks + 0.15 * file_bytes


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_a_rank_reads_its_experts_and_no_others(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both layouts of the files; random experts are those of one model, too."""
    experts = {"num_experts": 8} if architecture.startswith("Qwen") else {}
    model = save_model(tmp_path / "parts", architecture, **experts)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    monkeypatch.setattr(weights, "safe_open", _CountedFile)
    whole = load_weights(
        tmp_path / "parts", load_spec(tmp_path / "parts"), dtype=torch.float32, device=CPU
    )
    given = {"dtype": torch.float32, "device": CPU}
    drawn = random_weights(load_spec(tmp_path / "parts"), **given, seed=4)
    for index in range(4):
        rank = Rank(index, 4)
        for name in ("parts", "fused"):
            spec = load_spec(tmp_path / name, sharing="experts")
            _CountedFile.num_bytes = 0
            own = load_weights(tmp_path / name, spec, **given, rank=rank).layers[1]
            parts = _parts_of(spec, rank)
            assert _CountedFile.num_bytes == sum(part.tensor.nbytes for part in parts.values())
            random = random_weights(spec, **given, rank=rank, seed=4).layers[1]
            for held, all_ranks in ((own, whole.layers[1]), (random, drawn.layers[1])):
                for field in ("gate_up", "down"):
                    mine, theirs = getattr(held, field).data, getattr(all_ranks, field).data
                    assert torch.equal(mine, theirs.chunk(4)[index])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_loaded_and_random_weights_are_slices_of_one_model(num_ranks: int, folder: Path) -> None:
    spec = load_spec(folder)
    published = load_file(folder / "model.safetensors")
    drawn = random_weights(spec, dtype=torch.float32, device=CPU, seed=9)
    whole_parts = allocate_weights(spec, dtype=torch.float32, device=CPU)[1]
    assert set(whole_parts) <= set(published)
    for index in range(num_ranks):
        rank = Rank(index, num_ranks)
        loaded = load_weights(folder, spec, dtype=torch.float32, device=CPU, rank=rank)
        random = random_weights(spec, dtype=torch.float32, device=CPU, rank=rank, seed=9)
        assert sum(t.numel() for t in {id(t): t for t in _tensors(loaded)}.values()) < (
            num_parameters(spec, rank)
        )  # the norms of layers are not listed
        share = rank.padded_share(spec.vocab_size)
        for held, embedding in ((loaded, published["model.embed_tokens.weight"]), (random, drawn)):
            whole = embedding if isinstance(embedding, Tensor) else embedding.embedding
            num_own = share.stop - share.start
            assert torch.equal(held.embedding[:num_own], whole[share])
            assert not held.embedding[num_own:].any()
        q, k, v = drawn.layers[1].qkv.data.split(
            [n * 16 for n in (4, spec.num_kv_heads, spec.num_kv_heads)]
        )
        kv = rank.share(spec.num_kv_heads * 16, "heads", unit=16)
        own = torch.cat((q.chunk(num_ranks)[index], k[kv], v[kv]))
        assert torch.equal(random.layers[1].qkv.data, own)
        down = drawn.layers[1].down.data.chunk(num_ranks, dim=1)[index]
        assert torch.equal(random.layers[1].down.data, down)
        assert (random.layers[0].output.bias is None) == (
            index > 0 or drawn.layers[0].output.bias is None
        )


def test_one_ranks_random_weights_are_drawn_in_place(tmp_path: Path) -> None:
    save_model(tmp_path)
    spec = load_spec(tmp_path)
    first = random_weights(spec, dtype=torch.float32, device=CPU, rank=WHOLE_MODEL, seed=1)
    generator = torch.Generator().manual_seed(1)
    expected = torch.empty(131, 64).uniform_(-1e-3, 1e-3, generator=generator)
    assert torch.equal(first.embedding, expected)
