"""A whole engine over two processes: the first schedules, the second launches what it launches."""

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from configs.load import load_config
from engine.build import build_engine
from engine.clock import MonotonicClock
from engine.engine import Engine
from engine.errors import ConfigError
from engine.model_folder import read_folder
from engine.models.kv_scales import write_kv_scales
from engine.ranks.rank import WHOLE_MODEL, Rank
from engine.request import Constraint, ConstraintKind, SamplingParams
from engine.runner.auto import StepSizes
from engine.runner.executor_builder import ExecutorBuilder
from engine.text.tokenizing import load_tokenizer
from tests.engine.ranks.exact_models import BEST_FAULT
from tests.engine.ranks.rank_stories import choices_of, fail_to_load, fitting_blocks
from tests.harness.in_process import Answer, answer, start_engine
from tests.harness.rank_processes import TIMEOUT_S, RankProcesses
from tests.harness.shared_engine import SharedEngine
from tests.harness.tiny_models import save_embedding_model, save_model

MODEL = Path(__file__).parents[3] / "demo_model" / "laps-demo"
SETTINGS = {
    "scheduler__max_num_batched_tokens": 48,  # so that prompts are computed in chunks
    "scheduler__max_num_seqs": 8,
    "scheduler__overlap": True,
    "cache__num_blocks": 256,
    "cache__block_size": 8,
}
SHARING = {"workers__sequence_parallel_min_tokens": 8}
TEXTS = (
    "def settings():\n    return ",
    "class Worker:\n    def __init__(self, name, address, port):\n        self.",
    "import os\nimport sys\n\n\ndef main():\n    path = os.path.join(",
    "for i in range(10):\n    print(i",
    "    if not isinstance(value, str):\n        raise TypeError(",
)
LARGEST_LOGPROB_ERROR = 1e-4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(2, tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.fixture(scope="module")
def alone() -> Engine:
    return start_engine(**SETTINGS)


@pytest.fixture
def shared(ranks: RankProcesses) -> Iterator[SharedEngine]:
    """Its longer steps are sequence-parallel."""
    with SharedEngine(ranks, SETTINGS | SHARING) as started:
        assert started.engine.executor.min_exchanged_tokens == 8
        yield started


def _prompts(texts: Sequence[str]) -> list[list[int]]:
    found = load_tokenizer(MODEL).encode_batch(list(texts), add_special_tokens=True)
    return [list(ids) for ids in found]


def _assert_same(ours: Sequence[Answer], theirs: Sequence[Answer]) -> None:
    """The same tokens and ends; log-probabilities as close as sums in another order are."""
    for our, their in zip(ours, theirs, strict=True):
        assert our.tokens == their.tokens
        assert our.finish == their.finish
        assert _numbers(our) == pytest.approx(_numbers(their), abs=LARGEST_LOGPROB_ERROR)


def _numbers(found: Answer) -> list[float]:
    """All log-probabilities of an answer, and the ids that they are of."""
    numbers: list[float] = []
    for record in found.records:
        if record.logprobs is not None:
            numbers += [*record.logprobs.top_ids, *record.logprobs.top_logprobs]
            numbers.append(record.logprobs.chosen)
        if record.prompt is not None:
            numbers += record.prompt.labels
            for piece in record.prompt.pieces:
                numbers += piece.chosen
    return numbers


def test_answers_are_those_of_one_rank_however_they_are_sampled(
    shared: SharedEngine, alone: Engine
) -> None:
    """Over many steps of chunks and single tokens, more requests than rows."""
    kinds = [
        SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=33, temperature=0.9, top_p=0.9, seed=4, ignore_eos=True),
        SamplingParams(max_tokens=25, temperature=0.0, logprobs=3, frequency_penalty=0.4),
        SamplingParams(max_tokens=30, temperature=1.1, top_k=20, seed=-9, logprobs=0),
        SamplingParams(max_tokens=21, temperature=0.6, min_p=0.02, seed=11, repetition_penalty=1.2),
        SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=2),
        SamplingParams(max_tokens=0, temperature=0.0, label_token_ids=(5, 6)),
    ]
    prompts = _prompts(TEXTS)
    prompts.append([token for prompt in prompts for token in prompt] * 2)
    requests = [(prompts[i % len(prompts)], kinds[i % len(kinds)]) for i in range(14)]
    found = answer(shared.engine, requests)
    _assert_same(found, answer(alone, requests))
    _assert_same(answer(shared.engine, requests[:7]), found[:7])  # and now from cached prefixes
    assert len(shared.digests) > 80


def test_structured_output_is_that_of_one_rank(shared: SharedEngine, alone: Engine) -> None:
    schema = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"enum":["x","yz"]}},'
    schema += '"required":["a","b"],"additionalProperties":false}'
    constraints = [
        Constraint(ConstraintKind.JSON_SCHEMA, schema),
        Constraint(ConstraintKind.REGEX, "[0-9]{3}-(ab|c){1,4}"),
    ]
    requests = [
        (prompt, SamplingParams(max_tokens=40, temperature=0.8, seed=i, constraint=constraint))
        for i, prompt in enumerate(_prompts(TEXTS[:2]))
        for constraint in constraints
    ]
    plain = (_prompts(TEXTS[2:3])[0], SamplingParams(max_tokens=20, temperature=0.0))
    found = answer(shared.engine, [*requests, plain])
    _assert_same(found, answer(alone, [*requests, plain]))
    assert {one.finish for one in found[:-1]} == {"stop"}


def test_steps_as_two_batches_give_the_answers_of_one_rank(
    ranks: RankProcesses, alone: Engine
) -> None:
    """Chunks, single tokens, scores, a language, and again from cached prefixes."""
    overlap = {
        "execution__enable_two_batch_overlap": True,
        "execution__tbo_min_prompt_tokens": 6,
        "execution__tbo_min_decode_rows": 2,
    }
    kinds = [
        SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=15, temperature=0.9, seed=4, ignore_eos=True),
        SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=2),
        SamplingParams(
            max_tokens=20,
            temperature=0.8,
            seed=1,
            constraint=Constraint(ConstraintKind.REGEX, "[0-9]{3}-(ab|c){1,4}"),
        ),
    ]
    requests = [(prompt * 3, kind) for prompt, kind in zip(_prompts(TEXTS[:4]), kinds, strict=True)]
    theirs = answer(alone, requests)
    with SharedEngine(ranks, SETTINGS | overlap) as shared:
        for _ in range(2):
            _assert_same(answer(shared.engine, requests), theirs)
    told = shared.engine.load().two_batches
    assert told is not None
    assert alone.load().two_batches is None
    assert min(told.num_split_prompts, told.num_split_decodes, told.num_two_chunk) > 0


def test_a_cached_prefix_is_used_and_changes_nothing(shared: SharedEngine, alone: Engine) -> None:
    long = _prompts([TEXTS[1] * 4])[0]
    asks = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    first = answer(shared.engine, [(long, asks)])
    second = answer(shared.engine, [(long, asks)])
    _assert_same(first + second, answer(alone, [(long, asks)]) * 2)
    assert first[0].records[0].num_cached_tokens == 0
    assert second[0].records[0].num_cached_tokens >= len(long) - 9


def test_embeddings_are_those_of_one_rank(ranks: RankProcesses, tmp_path: Path) -> None:
    save_embedding_model(tmp_path)
    settings = SETTINGS | {"model__path": str(tmp_path)}
    asks = SamplingParams(max_tokens=0, temperature=0.0, wants_embedding=True)
    requests = [(range(3 * i, 5 * i + 1), asks) for i in range(1, 20)]
    with SharedEngine(ranks, settings | SHARING) as together:
        found = answer(together.engine, requests)
    for ours, theirs in zip(found, answer(start_engine(**settings), requests), strict=True):
        vectors = [
            np.frombuffer(one.records[0].prompt.embedding, dtype=np.float32)
            for one in (ours, theirs)
            if one.records[0].prompt is not None
        ]
        np.testing.assert_allclose(*vectors, atol=1e-5)
        assert len(vectors[0]) == 64


@pytest.mark.parametrize(
    ("architecture", "min_exchanged"),
    [
        pytest.param("Qwen2MoeForCausalLM", None, marks=pytest.mark.nightly),
        ("DeepseekV3ForCausalLM", None),
        ("Qwen2MoeForCausalLM", 8),
    ],
)
def test_an_engine_with_whole_experts_on_each_rank_gives_the_answers_of_one(
    architecture: str, min_exchanged: int | None, ranks: RankProcesses, tmp_path: Path
) -> None:
    """Greedy, drawn and from a cached prefix; of latents too, and where tokens travel."""
    save_model(tmp_path, architecture, seed=11)
    settings = SETTINGS | {"model__path": str(tmp_path), "scheduler__max_num_batched_tokens": 32}
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
    drawn = SamplingParams(max_tokens=9, temperature=0.9, seed=4, ignore_eos=True)
    requests = [(range(10 * i, 13 * i + 40), (greedy, drawn)[i % 2]) for i in range(5)]
    theirs = answer(start_engine(**settings), requests)
    shares = {
        "workers__expert_parallel": True,
        "workers__expert_exchange_min_tokens": min_exchanged,
    }
    with SharedEngine(ranks, settings | shares) as together:
        for _ in range(2):
            _assert_same(answer(together.engine, requests), theirs)


def test_a_mixture_is_told_which_key_it_has_instead_of_sequence_parallel_steps(
    tmp_path: Path,
) -> None:
    save_model(tmp_path, "Qwen2MoeForCausalLM")
    asked = {"workers.tensor_parallel_size": 2, "workers.sequence_parallel_min_tokens": 8}
    config = load_config(None, asked | {"model.path": str(tmp_path), "cache.num_blocks": 9})
    folder = read_folder(config, WHOLE_MODEL)
    sizes = StepSizes(max_rows=2, max_tokens=16, max_graph_rows=2)
    builder = ExecutorBuilder(config, spec=folder.spec, layout=folder.layout, sizes=sizes)
    with pytest.raises(ConfigError, match="the model has experts; leave it out, or set"):
        builder.build_executor()


TWO_BATCHES = {
    "execution.enable_two_batch_overlap": True,
    "execution.tbo_min_prompt_tokens": 64,
}


@pytest.mark.parametrize(
    ("device", "num_ranks", "has_peer_memory", "settings", "expected"),
    [
        ("cuda", 4, True, {}, 40_960),  # rows of 1 KiB
        ("cuda", 4, False, {}, None),
        ("cuda", 2, True, {}, None),
        ("cuda", 4, True, TWO_BATCHES, None),
        ("cuda", 4, True, {"model.quantization": "fp8"}, None),
        ("cpu", 4, False, {}, None),
    ],
)
def test_steps_are_sequence_parallel_by_themselves_where_that_was_measured(
    device: str,
    num_ranks: int,
    has_peer_memory: bool,
    settings: dict[str, object],
    expected: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = settings | {"workers.tensor_parallel_size": num_ranks}
    config = load_config(None, settings)
    folder = read_folder(config, WHOLE_MODEL)
    sizes = StepSizes(max_rows=2, max_tokens=16, max_graph_rows=2)
    builder = ExecutorBuilder(config, spec=folder.spec, layout=folder.layout, sizes=sizes)
    sums = SimpleNamespace() if has_peer_memory else None
    comm = SimpleNamespace(rank=Rank(0, num_ranks), fused_sums=sums)
    gpu = SimpleNamespace(name="NVIDIA H200")
    monkeypatch.setattr(builder, "_device", torch.device(device))
    monkeypatch.setattr(builder, "_comm", comm)
    monkeypatch.setattr("engine.runner.executor_builder.device_properties", lambda _: gpu)
    assert builder._min_exchanged_tokens() == expected


def test_a_rank_keeps_its_heads_and_knows_the_whole_model(
    shared: SharedEngine, alone: Engine
) -> None:
    engine = shared.engine
    assert engine.layout.block_shape[3] * 2 == alone.layout.block_shape[3] == 2
    assert engine.layout.block_bytes * 2 == alone.layout.block_bytes
    assert engine.spec == alone.spec
    salted = [1] * 32, "salt"
    assert len(engine.hasher.chain(*salted)) == 4


def test_a_rank_that_goes_its_own_way_shows_in_the_digests(ranks: RankProcesses) -> None:
    asks = SamplingParams(max_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
    with (
        pytest.raises(AssertionError, match="rank 1 had other"),
        SharedEngine(ranks, SETTINGS, fault="logits in another order") as drifting,
    ):
        answer(drifting.engine, [(_prompts(TEXTS[:1])[0], asks)])


def test_each_of_four_ranks_is_compared_with_the_first(tmp_path: Path) -> None:
    asks = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    shows = pytest.raises(AssertionError, match="rank 3 had")
    with RankProcesses(4, tmp_path) as four:
        for fault, context in ((None, nullcontext()), (BEST_FAULT, shows)):
            with context, SharedEngine(four, SETTINGS, fault) as shared:
                answer(shared.engine, [(range(3, 9), asks)])


def test_ranks_whose_test_has_failed_serve_the_next(ranks: RankProcesses) -> None:
    with pytest.raises(ZeroDivisionError), SharedEngine(ranks, SETTINGS):
        raise ZeroDivisionError
    assert ranks.run(attrgetter("rank.index")) == [0, 1]


# ---- what ranks agree on -------------------------------------------------------------------------


def test_all_ranks_go_by_the_first_ranks_measurements(ranks: RankProcesses) -> None:
    first, other = ranks.run(choices_of)
    assert first == other
    assert first[1] is not None


def test_all_ranks_have_as_many_blocks_as_the_one_with_the_least_room(
    ranks: RankProcesses,
) -> None:
    assert ranks.run(fitting_blocks, [600, 500]) == [43, 43]


def test_too_little_room_on_one_rank_is_refused_by_all(ranks: RankProcesses) -> None:
    for refused in ranks.run(fitting_blocks, [600, 90]):
        assert isinstance(refused, str)
        assert "cache.gpu_memory_utilization" in refused


def test_another_number_of_processes_than_configured_is_refused(ranks: RankProcesses) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: 1, but 2 processes would share"):
        build_engine(load_config(None, {}), "test", MonotonicClock(), print, comm=ranks.comm)


def test_a_rank_that_cannot_build_keeps_no_other_waiting(tmp_path: Path) -> None:
    with RankProcesses(2, tmp_path) as pair:
        start_s = time.monotonic()
        first, second = pair.run(fail_to_load)
    assert first.startswith("WorkerError: rank 0 of 2: all_gather failed; another rank died")
    assert second == "ConfigError: no such file"
    assert time.monotonic() - start_s < TIMEOUT_S


@pytest.mark.nightly
def test_thresholds_of_two_batches_may_be_measured_at_the_start(
    ranks: RankProcesses, alone: Engine
) -> None:
    """Whatever the measurements say, ranks agree on it and answers stay."""
    measured = {
        "execution__enable_two_batch_overlap": True,
        "execution__tbo_min_prompt_tokens": "measured",
        "execution__tbo_min_decode_rows": "measured",
        "scheduler__max_num_seqs": 24,
    }
    asks = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    requests = [(prompt * 3, asks) for prompt in _prompts(TEXTS)] * 5
    with SharedEngine(ranks, SETTINGS | measured) as shared:
        told = shared.engine.load().two_batches
        assert told is not None
        assert told.num_steps == told.num_split_prompts == told.num_replayed == 0
        _assert_same(answer(shared.engine, requests), answer(alone, requests))


def test_a_second_stream_without_graphs_is_refused() -> None:
    with pytest.raises(ConfigError, match="dual_stream_token_threshold: only steps that replay"):
        start_engine(**SETTINGS, execution__dual_stream_token_threshold=1024)


def test_ranks_keep_their_heads_in_e4m3(ranks: RankProcesses, tmp_path: Path) -> None:
    """Each with the scales of its own heads, which are far apart."""
    scales = torch.tensor([0.05, 40.0]).repeat(6, 2, 1)
    write_kv_scales(tmp_path / "scales.safetensors", scales)
    settings = SETTINGS | {
        "cache__kv_dtype": "fp8_e4m3",
        "cache__kv_scales": str(tmp_path / "scales.safetensors"),
    }
    asked = [(ids, SamplingParams(max_tokens=12, temperature=0.0)) for ids in _prompts(TEXTS)]
    expected = answer(start_engine(**settings), asked)
    with SharedEngine(ranks, settings) as started:
        _assert_same(answer(started.engine, asked), expected)
        assert started.engine.layout.scales == started.engine.whole_layout.scales
