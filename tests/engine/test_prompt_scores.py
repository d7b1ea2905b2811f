"""What requests learn of their prompts: labels behind them and the prompts' own log-probabilities.

The oracle is transformers, in fp32, over the whole prompt at once.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from configs.load import load_config
from engine.build import build_engine
from engine.clock import MonotonicClock
from engine.engine import Engine
from engine.kv.transfer import OutgoingEvent
from engine.messages import TokenRecord
from engine.request import PromptLogprobs, Request, RequestKey, RequestSpec, SamplingParams
from tests.harness.in_process import GREEDY, answer, start_engine
from tests.harness.tiny_models import VOCAB_SIZE, reference_logits, save_model

TOLERANCE = partial(pytest.approx, rel=1e-4, abs=1e-4)
ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class Tiny:
    """A model on disk, and what transformers makes of prompts."""

    folder: Path

    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """fp64 [T, vocab]"""
        return reference_logits(self.folder, list(token_ids)).double().log_softmax(dim=-1)

    def engine(self, **overrides: object) -> Engine:
        settings = {
            "scheduler__max_num_batched_tokens": 19,
            "scheduler__max_num_seqs": 5,
        } | overrides
        return start_engine(model__path=str(self.folder), **settings)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder, request.param, seed=random.randrange(1000))
    return Tiny(folder)


def prompts_of(num: int, low: int = 1, high: int = 70) -> list[list[int]]:
    return [random.choices(range(3, VOCAB_SIZE), k=random.randint(low, high)) for _ in range(num)]


def labels(*token_ids: int) -> SamplingParams:
    return SamplingParams(max_tokens=0, temperature=0.0, label_token_ids=token_ids)


def asks(num_best: int, max_tokens: int = 3) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True, prompt_logprobs=num_best
    )


def request_of(
    name: str, prompt: list[int], params: SamplingParams, decode_worker: str | None = None
) -> Request:
    return Request(
        spec=RequestSpec(params=params),
        key=RequestKey(name),
        ingress_id="test",
        tokens=list(prompt),
        num_prompt_tokens=len(prompt),
        arrival_s=time.monotonic(),
        decode_worker=decode_worker,
    )


def pieces_of(record: TokenRecord) -> list[PromptLogprobs]:
    return [] if record.prompt is None else record.prompt.pieces


def check_prompt(tiny: Tiny, prompt: list[int], pieces: list[PromptLogprobs], k: int) -> None:
    """Every token but the first, once and in order, with the oracle's numbers."""
    expected = tiny.logprobs(prompt)
    position = 1
    for piece in pieces:
        assert piece.first == position
        for i, chosen in enumerate(piece.chosen):
            line, token_id = expected[position - 1], prompt[position]
            assert chosen == TOLERANCE(line[token_id].item())
            assert abs(piece.ranks[i] - 1 - int((line > line[token_id]).sum())) <= 1
            assert len(piece.top_ids[i]) == len(piece.top_logprobs[i]) == k
            assert piece.top_logprobs[i] == TOLERANCE(line.topk(k).values.tolist())
            assert line[piece.top_ids[i]].tolist() == TOLERANCE(piece.top_logprobs[i])
            position += 1
    assert position == len(prompt)


@pytest.mark.parametrize("overlap", [False, True])
def test_labels_are_those_of_the_whole_prompt_however_it_is_batched(
    tiny: Tiny, overlap: bool
) -> None:
    engine = tiny.engine(scheduler__overlap=overlap)
    prompts = prompts_of(9)
    asked = [random.sample(range(VOCAB_SIZE), k=random.randint(1, 12)) for _ in prompts]
    scored = [(p, labels(*ids)) for p, ids in zip(prompts, asked, strict=True)]
    others = [(prompt, GREEDY) for prompt in prompts_of(4)]
    mixed = [*scored, *others]
    order = random.sample(range(len(mixed)), k=len(mixed))
    answers = answer(engine, [mixed[i] for i in order])
    for place, i in enumerate(order):
        if i >= len(scored):
            assert len(answers[place].tokens) == GREEDY.max_tokens
            continue
        (record,) = answers[place].records
        assert (record.index, record.is_output, record.finish) == (0, False, "stop")
        assert record.prompt is not None
        expected = tiny.logprobs(prompts[i])[-1, asked[i]].tolist()
        assert record.prompt.labels == TOLERANCE(expected)
        assert record.prompt.pieces == []
    counts = engine.core.scheduler.statistics()
    assert counts.num_output_tokens == len(others) * GREEDY.max_tokens
    assert counts.num_running == counts.num_waiting == 0


def test_labels_of_a_cached_prompt_are_found_with_its_last_block_alone(tiny: Tiny) -> None:
    engine = tiny.engine()
    (prompt,) = prompts_of(1, low=60)
    params = labels(5, 77)
    (first,), (again,) = (answer(engine, [(prompt, params)])[0].records for _ in range(2))
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens is not None
    assert again.num_cached_tokens > 40
    assert first.prompt is not None
    assert again.prompt is not None
    assert again.prompt.labels == TOLERANCE(first.prompt.labels)


@pytest.mark.parametrize("overlap", [False, True])
def test_prompt_logprobs_are_those_of_the_whole_prompt_however_it_is_batched(
    tiny: Tiny, overlap: bool
) -> None:
    engine = tiny.engine(scheduler__overlap=overlap)
    prompts = prompts_of(7)
    asked = [asks(random.choice((0, 1, 5, 20)), random.choice((0, 1, 4))) for _ in prompts]
    plain = [(prompt, GREEDY) for prompt in prompts_of(3)]
    requests = [*zip(prompts, asked, strict=True), *plain]
    answers = answer(engine, requests)
    alone = answer(tiny.engine(), plain)
    assert [a.tokens for a in answers[-3:]] == [a.tokens for a in alone]
    for prompt, params, got in zip(prompts, asked, answers, strict=False):
        first, *later = got.records
        assert params.prompt_logprobs is not None
        check_prompt(tiny, prompt, pieces_of(first), params.prompt_logprobs)
        assert all(record.prompt is None for record in later)
        assert got.finish == "length"
        assert sum(r.is_output for r in got.records) == params.max_tokens


def test_a_prompt_that_is_asked_about_is_computed_whole_and_serves_others_afterwards(
    tiny: Tiny,
) -> None:
    engine = tiny.engine()
    (prompt,) = prompts_of(1, low=60)
    for params, is_cached in ((GREEDY, False), (asks(2), False), (asks(2), False), (GREEDY, True)):
        got = answer(engine, [(prompt, params)])[0].records[0]
        assert bool(got.num_cached_tokens) == is_cached
        if params.prompt_logprobs is not None:
            check_prompt(tiny, prompt, pieces_of(got), 2)


def test_a_preempted_prompt_tells_every_token_once(tiny: Tiny) -> None:
    # The decodes outgrow their blocks while the prompt, the newest, computes a few tokens a step.
    engine = tiny.engine(
        cache__num_blocks=16, scheduler__max_num_batched_tokens=5, scheduler__max_num_seqs=4
    )
    (prompt,) = prompts_of(1, low=90, high=100)
    busy = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    for number, other in enumerate(prompts_of(3, low=14, high=15)):
        engine.core.scheduler.add(request_of(f"{number:032x}", other, busy))
    asked = request_of("f" * 32, prompt, asks(3))
    engine.core.scheduler.add(asked)
    records: list[TokenRecord] = []
    num_preemptions = 0  # before the prompt was computed
    while engine.core.has_work:
        records += [r for _, r in engine.core.step().tokens if r.key == asked.key]
        if not records:
            num_preemptions = asked.num_preemptions
    assert num_preemptions > 0
    check_prompt(tiny, prompt, pieces_of(records[0]), 3)
    assert all(record.prompt is None for record in records[1:])


def test_a_prefill_worker_answers_labels_itself_and_hands_nothing_over(tiny: Tiny) -> None:
    events: list[OutgoingEvent] = []
    settings = {"model.path": str(tiny.folder), "scheduler.max_num_batched_tokens": 99}
    config = load_config(None, settings)
    engine = build_engine(config, "test", MonotonicClock(), events.append)
    prompts = prompts_of(2, low=30)
    scored = request_of("a" * 32, prompts[0], labels(9), "decode-0")
    moved = request_of("b" * 32, prompts[1], asks(1, max_tokens=5), "decode-0")
    engine.core.scheduler.add(scored)
    engine.core.scheduler.add(moved)
    records = []
    while engine.core.has_work:
        records += [record for _, record in engine.core.step().tokens]
    by_key = {record.key: record for record in records}
    assert len(records) == 2
    assert by_key[scored.key].finish == "stop"
    assert {event.key for event in events} == {moved.key}
    first = by_key[moved.key]
    assert first.finish is None
    check_prompt(tiny, moved.tokens[: moved.num_prompt_tokens], pieces_of(first), 1)


def test_an_aborted_prompt_leaves_nothing(tiny: Tiny) -> None:
    engine = tiny.engine()
    prompts = prompts_of(2, low=60)
    keys = [RequestKey(name * 32) for name in "ab"]
    for key, prompt, params in zip(keys, prompts, (labels(7), asks(4)), strict=True):
        engine.core.scheduler.add(request_of(key.request_id, prompt, params))
    engine.core.step()
    for key in keys:
        assert engine.core.scheduler.abort(key)
    while engine.core.has_work:
        assert not engine.core.step().tokens
    assert answer(engine, [(prompts[0], GREEDY)])[0].finish == "length"
