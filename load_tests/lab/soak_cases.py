"""Requests that have one right answer, and that answer, from an engine in this process."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from configs.schema import AppConfig, CacheConfig, ModelConfig, SchedulerConfig
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.scheduling.contracts import StepOutput
from engine.text.tokenizing import Tokenizing, load_tokenizer
from load_tests.lab.in_process import EngineInProcess
from load_tests.prompts import SourceText

SHORT_CHARS, LONG_CHARS = (12, 200), (600, 2400)  # of prompts; about three a token
NEW_TOKENS = (4, 120)
LONG_EVERY, SEEDED_EVERY, IDS_EVERY = 4, 2, 3  # cases
SAMPLINGS: tuple[dict[str, float], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "frequency_penalty": 0.5},
)
STEP_TOKENS = (512, 33)  # of the two opinions: other chunks, and so other shapes of the products
MAX_UNDECIDED_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A completion, and the tokens that it must bring."""

    prompt_ids: list[int]
    text: str | None  # None = it is asked as ids, past the tokenizer
    sampling: dict[str, float]  # as in the body of a request
    num_tokens: int
    expected: list[int] = field(default_factory=list)

    def body(self, model: str, *, is_stream: bool, salt: str | None = None) -> bytes:
        """Of one request, as JSON; with a salt of its own, nothing of its prompt is cached."""
        salted = {} if salt is None else {"cache_salt": salt}
        return msgspec.json.encode(self.fields(model, is_stream=is_stream) | salted)

    def fields(self, model: str, *, is_stream: bool) -> dict[str, object]:
        """Of a request's body."""
        fields: dict[str, object] = {
            "model": model,
            "prompt": self.prompt_ids if self.text is None else self.text,
            "max_tokens": self.num_tokens,
            "stream": is_stream,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return fields | self.sampling


def build_cases(model: Path, num_cases: int, *, seed: int) -> list[Case]:
    """Greedy and seeded, short and long, as text and as ids, with what they must bring."""
    rng = random.Random(f"cases {seed}")
    tokenizer, source = load_tokenizer(model), SourceText()
    return answer_cases(model, [_draw(i, tokenizer, source, rng) for i in range(num_cases)])


def answer_cases(model: Path, asked: Sequence[Case]) -> list[Case]:
    """`asked` with their answers, but for those that have no one answer.

    Each is computed alone, and again among all the others in other chunks. Where the two differ,
    the next token hangs on how a sum was rounded. Raises ValueError if that is so for more than a
    tenth, which no rounding explains.
    """
    alone_in, together_in = (_engine(model, num_tokens) for num_tokens in STEP_TOKENS)
    alone = [_answer(alone_in, [case])[0] for case in asked]
    together = _answer(together_in, asked)
    cases = [
        replace(case, expected=one)
        for case, one, other in zip(asked, alone, together, strict=True)
        if one == other
    ]
    if len(asked) - len(cases) > MAX_UNDECIDED_SHARE * len(asked):
        raise ValueError(f"{len(asked) - len(cases)} of {len(asked)} cases have no one answer")
    return cases


def _draw(number: int, tokenizer: Tokenizing, source: SourceText, rng: random.Random) -> Case:
    num_chars = rng.randint(*(SHORT_CHARS if number % LONG_EVERY else LONG_CHARS))
    text = source.slice(num_chars, rng)
    [ids] = tokenizer.encode_batch([text], add_special_tokens=True)
    assert isinstance(ids, list), f"{text!r}: {ids}"
    sampling: dict[str, float] = {"temperature": 0.0}
    if number % SEEDED_EVERY:
        sampling = rng.choice(SAMPLINGS) | {"seed": rng.randrange(2**31)}
    return Case(
        prompt_ids=ids,
        text=text if number % IDS_EVERY else None,
        sampling=sampling,
        num_tokens=rng.randint(*NEW_TOKENS),
    )


def _engine(model: Path, step_tokens: int) -> EngineInProcess:
    return EngineInProcess(
        AppConfig(
            model=ModelConfig(path=str(model)),
            cache=CacheConfig(enable_prefix_caching=False),
            scheduler=SchedulerConfig(max_num_batched_tokens=step_tokens, max_num_seqs=16),
        )
    )


def _answer(engine: EngineInProcess, cases: Sequence[Case]) -> list[list[int]]:
    """The tokens of all of them, computed together."""
    keys = [RequestKey(f"{i:032x}") for i in range(len(cases))]
    tokens: dict[RequestKey, list[int]] = {key: [] for key in keys}
    for key, case in zip(keys, cases, strict=True):
        engine.engine.core.scheduler.add(_request(key, case))

    def keep(output: StepOutput) -> None:
        for _, record in output.tokens:
            tokens[record.key].append(record.token_id)

    engine.run_until_idle(keep)
    return list(tokens.values())


def _request(key: RequestKey, case: Case) -> Request:
    fixed = {"max_tokens": case.num_tokens, "ignore_eos": True}
    return Request(
        spec=RequestSpec(params=msgspec.convert(case.sampling | fixed, SamplingParams)),
        key=key,
        ingress_id="soak",
        tokens=list(case.prompt_ids),
        num_prompt_tokens=len(case.prompt_ids),
        arrival_s=0.0,
    )
