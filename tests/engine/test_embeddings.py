"""Embeddings of prompts, against transformers in fp32 over each whole prompt at once."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from configs.load import load_config
from engine.build import build_engine
from engine.clock import MonotonicClock
from engine.engine import Engine
from engine.errors import ConfigError, RequestError
from engine.kv.transfer import OutgoingEvent
from engine.messages import TokenRecord
from engine.models.spec import load_spec
from engine.models.weight_files import check_weights
from engine.plan import RowAdmission, StepPlan
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.sampling.embeddings import Embeddings
from tests.harness.in_process import GREEDY, answer, start_engine
from tests.harness.tiny_models import (
    VOCAB_SIZE,
    edit_config,
    reference_embedding,
    save_embedding_model,
    save_model,
    write_pooling,
)

EMBED = SamplingParams(max_tokens=0, temperature=0.0, wants_embedding=True)
HIDDEN = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("embedding")
    save_embedding_model(made, seed=random.randrange(1000))
    return made


def engine_of(folder: Path, **overrides: object) -> Engine:
    settings = {"scheduler__max_num_batched_tokens": 19, "scheduler__max_num_seqs": 5} | overrides
    return start_engine(model__path=str(folder), **settings)


def prompts_of(*lengths: int) -> list[list[int]]:
    return [random.choices(range(3, VOCAB_SIZE), k=length) for length in lengths]


def vector_of(record: TokenRecord) -> npt.NDArray[np.float32]:
    assert record.prompt is not None
    assert (record.prompt.labels, record.prompt.pieces) == ([], [])
    return np.frombuffer(record.prompt.embedding, dtype=np.float32)


def embed(engine: Engine, prompts: Sequence[list[int]]) -> list[TokenRecord]:
    """One record of each prompt, all of them computed together."""
    answers = answer(engine, [(prompt, EMBED) for prompt in prompts])
    assert all(len(found.records) == 1 for found in answers)
    return [found.records[0] for found in answers]


def check(folder: Path, prompt: list[int], record: TokenRecord, *, is_normalised: bool) -> None:
    expected = reference_embedding(folder, prompt)
    if is_normalised:
        expected = torch.nn.functional.normalize(expected, dim=0)
    found = vector_of(record)
    assert found.shape == (HIDDEN,)
    assert (record.index, record.is_output, record.finish) == (0, False, "stop")
    assert np.linalg.norm(found) == pytest.approx(float(expected.norm()), rel=1e-4)
    assert found == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_embedding_is_that_of_the_whole_prompt_however_it_is_batched(
    folder: Path, overlap: bool
) -> None:
    """Some prompts fit a step of 19 tokens together, others take several steps each."""
    engine = engine_of(folder, scheduler__overlap=overlap)
    prompts = prompts_of(1, 2, 3, 7, 16, 17, 41, 63, 90)
    random.shuffle(prompts)
    for prompt, record in zip(prompts, embed(engine, prompts), strict=True):
        check(folder, prompt, record, is_normalised=True)
    counts = engine.core.scheduler.statistics()
    assert (counts.num_output_tokens, counts.num_running, counts.num_waiting) == (0, 0, 0)


def test_a_cached_prompt_has_the_same_embedding_from_its_last_block_alone(folder: Path) -> None:
    engine = engine_of(folder)
    (prompt,) = prompts_of(64)  # whole blocks: all but the last one can be found
    longer = [*prompt, 5, 6, 7]
    for asked, num_cached in ((prompt, 0), (prompt, 48), (longer, 64)):
        (record,) = embed(engine, [asked])
        assert record.num_cached_tokens == num_cached
        check(folder, asked, record, is_normalised=True)


def test_a_long_step_computes_only_last_tokens_in_its_last_layer(folder: Path) -> None:
    engine = engine_of(folder, scheduler__max_num_batched_tokens=1200, scheduler__max_num_seqs=8)
    prompts = prompts_of(200, 200, 200, 200, 200, 201)  # one step
    for prompt, record in zip(prompts, embed(engine, prompts), strict=True):
        check(folder, prompt, record, is_normalised=True)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_without_the_module_that_normalises_hidden_states_come_as_they_are(
    tmp_path: Path, architecture: str
) -> None:
    save_embedding_model(tmp_path, architecture, is_normalised=False, seed=3)
    edit_config(tmp_path, architectures=[architecture])  # as Qwen's own folders have it
    write_pooling(tmp_path, {"pooling_mode": "lasttoken"})  # as newer folders have it
    prompts = prompts_of(5, 30)
    for prompt, record in zip(prompts, embed(engine_of(tmp_path), prompts), strict=True):
        check(tmp_path, prompt, record, is_normalised=False)


def test_a_folder_may_keep_head_and_prefix(folder: Path, tmp_path: Path) -> None:
    save_embedding_model(tmp_path, seed=4)
    save_model(tmp_path, "Qwen3ForCausalLM", seed=4)  # the same body; its head is not tied
    (names,) = check_weights(tmp_path, load_spec(tmp_path)).values()
    assert "lm_head.weight" not in names
    assert all(source.name == name for name, source in names.items())
    (prompt,) = prompts_of(9)
    (record,) = embed(engine_of(tmp_path), [prompt])
    check(tmp_path, prompt, record, is_normalised=True)


def test_a_folder_of_several_files_is_read_by_the_names_in_its_index(tmp_path: Path) -> None:
    save_embedding_model(tmp_path, seed=5, max_shard_size="80KB")
    (prompt,) = prompts_of(9)
    (record,) = embed(engine_of(tmp_path), [prompt])
    check(tmp_path, prompt, record, is_normalised=True)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    places = index["weight_map"]
    assert len(set(places.values())) > 1
    assert places["norm.weight"] != places["embed_tokens.weight"]
    places["norm.weight"] = places["embed_tokens.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"'norm.weight' is in .*index"):
        check_weights(tmp_path, load_spec(tmp_path))


def test_a_prefill_worker_answers_itself_and_hands_nothing_over(folder: Path) -> None:
    events: list[OutgoingEvent] = []
    config = load_config(None, {"model.path": str(folder)})
    engine = build_engine(config, "test", MonotonicClock(), events.append)
    (prompt,) = prompts_of(30)
    request = Request(
        spec=RequestSpec(params=EMBED),
        key=RequestKey("a" * 32),
        ingress_id="test",
        tokens=list(prompt),
        num_prompt_tokens=len(prompt),
        arrival_s=0.0,
        decode_worker="decode-0",
    )
    engine.core.scheduler.add(request)
    records = []
    while engine.core.has_work:
        records += [record for _, record in engine.core.step().tokens]
    assert events == []
    check(folder, prompt, records[0], is_normalised=True)


def test_a_row_that_is_not_finite_has_no_embedding_and_spoils_no_other(folder: Path) -> None:
    executor = engine_of(folder).executor
    good, bad = prompts_of(6, 6)
    table = executor.model._embedding.weight  # the only way to a number that is not finite
    bad[-1] = next(i for i in range(3, VOCAB_SIZE) if i not in good)
    before = table[bad[-1]].clone()
    table[bad[-1]] = float("nan")
    try:
        plan = StepPlan(
            step=1,
            admissions=[
                RowAdmission(
                    row=row, token_ids=ids, num_prompt_tokens=6, params=EMBED, block_ids=[row]
                )
                for row, ids in enumerate((good, bad))
            ],
            rows=[0, 1],
            num_new_tokens=[6, 6],
            num_computed_tokens=[0, 0],
            num_samples=[1, 1],
            new_block_ids=[[], []],
        )
        result = executor.launch(plan).wait()
    finally:
        table[bad[-1]] = before
    assert (result.is_finite, result.tokens) == ([True, False], [[], []])
    assert list(result.embeddings) == [0]


@pytest.mark.parametrize("is_normalised", [False, True])
def test_an_embedding_with_a_number_that_is_not_finite_is_none(is_normalised: bool) -> None:
    hidden = torch.randn(4, 7)
    hidden[0, 3], hidden[1, 0], hidden[2, 6] = torch.nan, -torch.inf, torch.inf
    before = hidden.clone()
    sampled = Embeddings(is_normalised=is_normalised).sample(hidden, [5, 2, 0, 1])
    assert sampled.is_finite.tolist() == [False, False, False, True]
    torch.testing.assert_close(hidden, before, equal_nan=True)


def test_a_worker_refuses_what_its_model_does_not_do(folder: Path) -> None:
    embedding, generating = engine_of(folder), start_engine()
    for engine, good, bad in ((embedding, EMBED, GREEDY), (generating, GREEDY, EMBED)):
        engine.check_kind(good)
        with pytest.raises(RequestError) as raised:
            engine.check_kind(bad)
        assert raised.value.code == "unsupported_endpoint"


@pytest.mark.parametrize(
    ("modes", "found"),
    [
        ({"pooling_mode_mean_tokens": True}, "mean_tokens"),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
            "mean_tokens and last",
        ),
        ({"pooling_mode": "cls"}, "cls"),
        ({}, "none"),
    ],
)
def test_another_pooling_is_refused_by_name(
    tmp_path: Path, modes: dict[str, object], found: str
) -> None:
    save_embedding_model(tmp_path)
    write_pooling(tmp_path, modes)
    with pytest.raises(ConfigError, match=rf"1_Pooling/config.json.*{found}.*lasttoken"):
        load_spec(tmp_path)


@pytest.mark.parametrize(
    ("modules", "problem"),
    [
        ('[{"type": "a.Transformer"}, {"type": "a.Pooling"}, {"type": "a.Dense"}]', "Dense"),
        ('[{"type": "a.Pooling"}, {"type": "a.Transformer"}]', "Pooling, Transformer"),
        ('[{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "../x"}]', "outside"),
        ('{"type": "a.Pooling"}', "not a list"),
        ("[{]", "not a list"),
    ],
)
def test_modules_that_are_not_supported_are_refused_by_name(
    tmp_path: Path, modules: str, problem: str
) -> None:
    save_embedding_model(tmp_path)
    (tmp_path / "modules.json").write_text(modules)
    with pytest.raises(ConfigError, match=rf"modules.json.*{problem}"):
        load_spec(tmp_path)


def test_modules_without_pooling_leave_a_model_that_generates(tmp_path: Path) -> None:
    save_model(tmp_path, "Qwen3ForCausalLM")
    (tmp_path / "modules.json").write_text('[{"type": "a.Transformer"}, {"type": "a.LogitScore"}]')
    assert load_spec(tmp_path).pooling is None


def test_a_model_whose_tokens_see_later_ones_is_refused(tmp_path: Path) -> None:
    save_embedding_model(tmp_path)
    edit_config(tmp_path, is_causal=False)
    with pytest.raises(ConfigError, match="is_causal"):
        load_spec(tmp_path)


@pytest.mark.parametrize(
    ("keys", "can_shorten", "num_dimensions"),
    [
        ({}, False, ()),
        ({"is_matryoshka": True}, True, ()),
        ({"matryoshka_dimensions": [8, 32]}, True, (8, 32)),
        ({"is_matryoshka": False, "matryoshka_dimensions": [8]}, False, (8,)),
    ],
)
def test_whether_embeddings_may_be_shortened_is_in_the_config(
    tmp_path: Path, keys: dict[str, object], can_shorten: bool, num_dimensions: tuple[int, ...]
) -> None:
    save_embedding_model(tmp_path)
    edit_config(tmp_path, **keys)
    pooling = load_spec(tmp_path).pooling
    assert pooling is not None
    assert (pooling.can_shorten, pooling.num_dimensions) == (can_shorten, num_dimensions)
