"""What a forward pass computes, by which of its tokens are asked for."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.layers.attention import Attention
from engine.layers.context import ForwardContext, LastTokens, SingleRank
from engine.layers.operations import Op, coded_operations
from engine.models.llama import CausalLM, attention_shape
from engine.models.registry import build_model, build_ops
from kernels.attention.protocol import build_step
from kernels.attention.reference import ReferenceAttention
from kernels.quant.coded_tokens import CodedTokens, InputForm, decoded
from kernels.reference import TorchOps
from tests.engine.models.closeness import assert_same_logits
from tests.harness.tiny_models import reference_logits, save_model

CPU = torch.device("cpu")
BLOCK_SIZE = 4
# Two rows of one step, on scattered blocks: 1 token, then 9.
ROW_BLOCKS = [[5], [2, 0, 6]]
FIRST, SECOND = [17], [3, 99, 41, 8, 8, 120, 64, 2, 77]
TOKENS = torch.tensor([*FIRST, *SECOND])


@pytest.fixture(params=[1, 3])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_model(tmp_path, "Qwen3ForCausalLM", seed=3, num_hidden_layers=request.param)
    return tmp_path


@pytest.fixture
def model(folder: Path) -> CausalLM:
    return build_model(folder, dtype=torch.float32, device=CPU)


def _context(model: CausalLM) -> ForwardContext:
    """A new store, full of NaN."""
    spec = model.spec
    shape = attention_shape(spec)
    attention = ReferenceAttention(shape, block_size=BLOCK_SIZE, dtype=model.dtype, device=CPU)
    positions = torch.tensor([*range(len(FIRST)), *range(len(SECOND))], dtype=torch.int32)
    lengths = [len(FIRST), len(SECOND)]
    slots = [
        blocks[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE
        for blocks, length in zip(ROW_BLOCKS, lengths, strict=True)
        for token in range(length)
    ]
    sizes = (7, spec.num_layers, 2, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    return ForwardContext(
        rotary=model.rotary_at(positions),
        slots=torch.tensor(slots, dtype=torch.int32),
        kv_store=torch.full(sizes, torch.nan),
        attention=attention,
        attention_metadata=attention.plan(build_step(lengths, [0, 0], ROW_BLOCKS, CPU)),
        comm=SingleRank(),
    )


@pytest.mark.parametrize("indices", [[0], [9], [0, 9], [9, 4, 4]])
def test_the_tokens_asked_for_are_those_of_the_whole(
    folder: Path, model: CausalLM, indices: list[int]
) -> None:
    whole, part = _context(model), _context(model)
    with torch.inference_mode():
        every = model.forward(TOKENS, whole)
        some = model.forward(TOKENS, part, torch.tensor(indices))
        ours = model.logits(some.hidden)
    theirs = torch.cat([reference_logits(folder, row) for row in (FIRST, SECOND)])
    assert (every.is_finite, some.is_finite) == (None, None)
    assert_same_logits(ours, theirs[indices])
    assert_same_logits(model.logits(every.hidden), theirs)
    assert torch.equal(part.kv_store.nan_to_num(9.0), whole.kv_store.nan_to_num(9.0))


def test_the_last_tokens_alone_are_those_of_the_whole(folder: Path, model: CausalLM) -> None:
    """With K and V of all others in the store, their queries in the last layer are not missed."""
    # Zeros, as in the engine: a row's last block is read past its end, with weight 0.
    whole, part = (
        replace(ctx, kv_store=torch.zeros_like(ctx.kv_store))
        for ctx in (_context(model), _context(model))
    )
    lengths = [len(FIRST), len(SECOND)]
    histories = [length - 1 for length in lengths]
    step = build_step([1, 1], histories, ROW_BLOCKS, CPU)
    last = LastTokens(
        indices=torch.tensor([len(FIRST) - 1, len(TOKENS) - 1]),
        ctx=replace(
            part,
            rotary=model.rotary_at(torch.tensor(histories, dtype=torch.int32)),
            slots=torch.tensor([-1, -1], dtype=torch.int32),
            attention_metadata=part.attention.plan(step),
        ),
    )
    with torch.inference_mode():
        every = model.forward(TOKENS, whole, checks_finite=True)
        some = model.forward(TOKENS, replace(part, last=last), checks_finite=True)
        ours = model.logits(some.hidden)
    theirs = torch.cat([reference_logits(folder, row)[-1:] for row in (FIRST, SECOND)])
    assert_same_logits(ours, theirs)
    assert some.is_finite is not None
    assert torch.equal(some.is_finite, every.is_finite)
    torch.testing.assert_close(part.kv_store, whole.kv_store, rtol=1e-5, atol=1e-6)


def test_a_step_without_logits_fills_the_store_all_the_same(model: CausalLM) -> None:
    whole, part = _context(model), _context(model)
    with torch.inference_mode():
        model.forward(TOKENS, whole)
        nothing = model.forward(TOKENS, part, torch.tensor([], dtype=torch.int64))
    assert nothing.hidden.shape == (0, model.spec.hidden_size)
    assert torch.equal(part.kv_store.nan_to_num(9.0), whole.kv_store.nan_to_num(9.0))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("indices", [None, [], [0]])
def test_a_broken_embedding_shows_in_its_token_and_in_no_other_row(
    model: CausalLM, broken: float, indices: list[int] | None
) -> None:
    chosen = None if indices is None else torch.tensor(indices, dtype=torch.int64)
    ctx = _context(model)
    with torch.inference_mode():
        sound = model.forward(TOKENS, ctx, chosen, checks_finite=True)
        model._embedding.weight[SECOND[-1]] = broken
        seen = model.forward(TOKENS, ctx, chosen, checks_finite=True)
    assert sound.is_finite is not None
    assert seen.is_finite is not None
    assert sound.is_finite.tolist() == [True] * 10
    # Its own row may be broken whole, for 0 * NaN is NaN under the causal mask; the other is not.
    assert (seen.is_finite[0].item(), seen.is_finite[-1].item()) == (True, False)


class _BreaksLastV(TorchOps):
    """The last layer's V of token 4 overflows."""

    def rotate_and_store(self, *arguments: object) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().rotate_and_store(*arguments)  # type: ignore[arg-type]
        if arguments[4] == arguments[3].shape[1] - 1:  # type: ignore[attr-defined]
            v[4, 1, 2] = -torch.inf
        return q, k, v


def test_values_that_break_in_the_last_layer_are_seen_too(folder: Path) -> None:
    model = build_model(folder, dtype=torch.float32, device=CPU, ops=_BreaksLastV())
    with torch.inference_mode():
        result = model.forward(TOKENS, _context(model), torch.tensor([0]), checks_finite=True)
    assert result.is_finite is not None
    assert result.is_finite.tolist() == [token != 4 for token in range(10)]


def test_a_token_without_a_slot_changes_no_other(model: CausalLM) -> None:
    whole, padded = _context(model), _context(model)
    slots = padded.slots.clone()
    slots[0] = -1
    with torch.inference_mode():
        every = model.forward(TOKENS, whole)
        rest = model.forward(TOKENS, replace(padded, slots=slots))
    assert torch.equal(rest.hidden[1:], every.hidden[1:])
    assert padded.kv_store[5].isnan().all()


def test_a_processor_computes_with_torch() -> None:
    assert isinstance(build_ops(CPU), TorchOps)


class Decoding:
    """A linear map or a feed-forward part that has its inputs coded, and makes them whole again."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.num_coded = 0

    def form(self, num_tokens: int) -> InputForm | None:
        assert num_tokens == len(TOKENS)
        return InputForm(pieces=2, group=16)

    def of_coded(self, x: CodedTokens, lane: int = 0) -> Tensor:
        self.num_coded += 1
        return self._inner(decoded(x).float(), lane)  # type: ignore[no-any-return]

    def __call__(self, x: Tensor, lane: int = 0) -> Tensor:
        return self._inner(x, lane)  # type: ignore[no-any-return]

    def operations(self) -> tuple[Op, ...]:
        return coded_operations(self)


def test_norms_code_for_what_takes_coded_inputs(folder: Path, model: CausalLM) -> None:
    readers = []
    for layer in model.layers:
        attention = cast("Attention", layer._attention)
        attention._qkv, layer._mlp = Decoding(attention._qkv), Decoding(layer._mlp)
        readers += [attention._qkv, layer._mlp]
    model.operations = (
        *(layer.operations() for layer in model.layers[:-1]),
        model.layers[-1].last_operations(),
    )
    with torch.inference_mode():
        ours = model.logits(model.forward(TOKENS, _context(model)).hidden)
    theirs = torch.cat([reference_logits(folder, row) for row in (FIRST, SECOND)])
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-2, "nine bits of every input"
    assert [reader.num_coded for reader in readers] == [1] * len(readers)
