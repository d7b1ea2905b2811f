"""A stop string cuts an answer with drafts, of which a step brings several tokens, as one without.

Every text of up to five characters of every answer is a stop string once, so each place is cut:
within a token, between accepted ones, between these and a correction, and between two steps.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import islice, product
from pathlib import Path

import pytest

from actors.openai.response_parts import read_records
from engine.engine import Engine
from engine.messages import TokenRecord
from engine.request import FinishReason, RequestKey, SamplingParams
from engine.text.detokenizing import DecoderRules, Detokenizer, build_token_bytes
from engine.text.output_text import OutputText, TextDelta
from engine.text.stop_strings import StopStrings
from tests.engine.speculation.exact_engines import exact_arithmetic, start_exact
from tests.engine.speculation.guessed_engines import Asked, Kind, guess, run, save_exact_model
from tests.harness.in_process import Answer, add_all
from tests.harness.seeds import seed_of
from tests.harness.tiny_models import VOCAB_SIZE

SEED = seed_of(__name__)
NUM_TOKENS = 14
NUM_DRAFTS = 3
KINDS: Sequence[Kind] = (
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.2, "logprobs": 0},
    {"temperature": 0.7, "logprobs": 1, "frequency_penalty": 0.5},
    {"temperature": 1.0, "logprobs": 3, "logit_bias": {9: 4.0, 30: 3.0}},
    {"temperature": 1.0, "logprobs": 1, "min_tokens": 6},
)
Batches = list[list[TokenRecord]]  # of one request: the records of each step that had some


def _words() -> Iterator[str]:
    """Texts of one letter, then of two, then of three."""
    for length in (1, 2, 3):
        yield from map("".join, product("abcde", repeat=length))


TOKEN_BYTES = build_token_bytes(
    {word: token_id for token_id, word in enumerate(islice(_words(), VOCAB_SIZE))},
    frozenset(),
    DecoderRules(byte_level=True),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exact")
    save_exact_model(path, seed=SEED)
    return path


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    draw = random.Random(SEED)
    return [
        (
            draw.choices(range(3, VOCAB_SIZE), k=draw.randint(2, 20)),
            SamplingParams(
                max_tokens=NUM_TOKENS, ignore_eos=True, seed=draw.getrandbits(60), **kind
            ),
        )
        for kind in KINDS
    ]


@pytest.fixture(scope="module")
def plain(folder: Path, asked: list[Asked]) -> list[Answer]:
    with exact_arithmetic():
        return run(start_exact(folder, speculation__drafter="none"), asked)


def _text(params: SamplingParams, stop: str, *, include: bool) -> OutputText:
    return OutputText(
        Detokenizer(TOKEN_BYTES),
        StopStrings([stop], include=include),
        min_tokens=params.min_tokens,
        include_stop=include,
    )


def _read(batches: Sequence[Sequence[TokenRecord]], output: OutputText) -> list[TextDelta]:
    """The deltas up to the end of the choice."""
    deltas: list[TextDelta] = []
    for records in batches:
        deltas.append(read_records(records, output))
        if output.is_finished:
            break
    return deltas


def _said(deltas: Sequence[TextDelta]) -> dict[str, object]:
    """What all deltas say together."""
    assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    return {
        "text": "".join(delta.text for delta in deltas),
        "tokens": [token for delta in deltas for token in delta.tokens],
        "finish": deltas[-1].finish,
        "stop_reason": deltas[-1].stop_reason,
    }


def _stops(tokens: Sequence[int]) -> list[str]:
    """Every text of one to five characters that the answer has, and beginnings that it ends with.

    The last cannot stop it, but hold its end back.
    """
    text = _plain_text(tokens)
    within = {text[a:b] for a in range(len(text)) for b in range(a + 1, min(a + 6, len(text) + 1))}
    return [*sorted(within), *(text[-length:] + "z" for length in range(1, 8))]


def _plain_text(tokens: Sequence[int]) -> str:
    return "".join(TOKEN_BYTES.piece(token_id).decode() for token_id in tokens)


def _step(engine: Engine) -> dict[RequestKey, list[TokenRecord]]:
    """Every request's records of one step."""
    output = engine.core.step()
    assert not output.failures, f"failed: {output.failures}"
    found: dict[RequestKey, list[TokenRecord]] = {}
    for _, record in output.tokens:
        found.setdefault(record.key, []).append(record)
    return found


def _by_step(engine: Engine, asked: Sequence[Asked]) -> list[Batches]:
    keys = add_all(engine, asked)
    batches: dict[RequestKey, Batches] = {key: [] for key in keys}
    while engine.core.has_work:
        for key, records in _step(engine).items():
            batches[key].append(records)
    return [batches[key] for key in keys]


@pytest.mark.parametrize("error_rate", [0.0, 0.4])
def test_every_cut_of_an_answer_is_that_without_drafts(
    folder: Path, asked: list[Asked], plain: list[Answer], error_rate: float
) -> None:
    engine = start_exact(folder)
    guess(engine, asked, plain, num_drafts=NUM_DRAFTS, error_rate=error_rate, seed=SEED)
    with exact_arithmetic():
        found = _by_step(engine, asked)
    cut_within = cut_at_end = 0
    for (_, params), answer, batches in zip(asked, plain, found, strict=True):
        assert max(map(len, batches)) > 1
        for stop, include in product(_stops(answer.tokens), (False, True)):
            one_by_one = _read(
                [[one] for one in answer.records], _text(params, stop, include=include)
            )
            together = _read(batches, _text(params, stop, include=include))
            assert _said(together) == _said(one_by_one), (stop, include)
            if together[-1].finish is FinishReason.STOP:
                is_within = len(together[-1].tokens) < len(batches[len(together) - 1])
                cut_within += is_within
                cut_at_end += not is_within
    assert cut_within > 50
    assert cut_at_end > 50


@pytest.mark.parametrize("include", [False, True])
def test_an_answer_is_cut_where_a_search_of_its_whole_text_finds_the_stop_string(
    folder: Path, asked: list[Asked], plain: list[Answer], include: bool
) -> None:
    """So the answers without drafts, which the others are compared with, are right, too."""
    for (_, params), answer in zip(asked, plain, strict=True):
        whole = _plain_text(answer.tokens)
        free = len(_plain_text(answer.tokens[: max(params.min_tokens - 1, 0)]))
        for stop in _stops(answer.tokens):
            said = _said(
                _read([[one] for one in answer.records], _text(params, stop, include=include))
            )
            begin = whole.find(stop, max(free - len(stop) + 1, 0))
            if begin < 0:
                assert (said["text"], said["stop_reason"]) == (whole, None)
                assert said["finish"] is FinishReason.LENGTH
            else:
                assert said["text"] == whole[: begin + len(stop) if include else begin]
                assert (said["finish"], said["stop_reason"]) == (FinishReason.STOP, stop)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_what_ends_by_its_text_leaves_the_others_and_the_cache_as_they_were(
    folder: Path, asked: list[Asked], plain: list[Answer], overlap: bool
) -> None:
    """Requests are aborted at their stop strings, as the ingress does, while drafts are judged."""
    engine = start_exact(folder, scheduler__overlap=overlap)
    guess(engine, asked, plain, num_drafts=NUM_DRAFTS, error_rate=0.2, seed=SEED)
    stops = [
        _plain_text(answer.tokens[4 + place : 6 + place]) if place % 2 else "never"
        for place, answer in enumerate(plain)
    ]
    outputs = [
        _text(params, stop, include=False) for (_, params), stop in zip(asked, stops, strict=True)
    ]
    deltas: list[list[TextDelta]] = [[] for _ in asked]
    with exact_arithmetic():
        keys = add_all(engine, asked)
        while engine.core.has_work:
            for key, records in _step(engine).items():
                place = keys.index(key)
                assert not outputs[place].is_finished, "a token of an aborted request"
                deltas[place].append(read_records(records, outputs[place]))
                if outputs[place].is_finished:
                    ended = records[-1].finish is not None
                    assert engine.core.scheduler.abort(key) is not ended
        for (_, params), answer, stop, ours in zip(asked, plain, stops, deltas, strict=True):
            alone = _text(params, stop, include=False)
            assert _said(ours) == _said(_read([[one] for one in answer.records], alone))
        # Nothing is held, and blocks of the aborted hold what they are found by.
        again = run(engine, asked)
    assert [found.tokens for found in again] == [found.tokens for found in plain]
    assert engine.core.scheduler.statistics().num_cached_tokens > 0
