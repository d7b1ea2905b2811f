"""What is emitted for a row is the same whether it is one of the step's decodes or not."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.plan import StepResult, TokenLogprobs
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.scheduling.contracts import StepOutput
from engine.scheduling.finish import FinishRules, SampledTokens
from engine.scheduling.in_flight import StepInFlight

EOS_TOKEN_ID, MAX_MODEL_LEN = 0, 9
LOGPROBS = TokenLogprobs(-0.5, [3], [-0.5])
RULES = FinishRules((EOS_TOKEN_ID,), MAX_MODEL_LEN)
Story = tuple[list[int], int, int, bool, bool]

# For each row: sampled ids, tokens known before, how many of them are output, whether it has left,
# whether it asked for log-probabilities.
STORIES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3), max_size=3),
        st.integers(2, MAX_MODEL_LEN - 1),
        st.integers(0, 4),
        st.booleans(),
        st.booleans(),
    ),
    max_size=6,
)


def _with_single_decodes(stories: list[Story], num_decodes: int) -> list[Story]:
    """A decode samples one token at most, any other row as many as it computed."""
    return [
        (ids[:1] if i < num_decodes else ids, num_known, num_output, has_left, asks)
        for i, (ids, num_known, num_output, has_left, asks) in enumerate(stories)
    ]


def _step(stories: list[Story], num_decodes: int) -> tuple[StepInFlight, StepResult]:
    """Decodes as a scheduler has them: with a token emitted from here or before they came."""
    requests = []
    for i, (_, num_known, num_output, has_left, _) in enumerate(stories):
        request = Request(
            spec=RequestSpec(
                params=SamplingParams(max_tokens=6, stop_token_ids=(2,), ignore_eos=i % 3 == 0)
            ),
            key=RequestKey(str(i)),
            ingress_id=f"ingress-{i % 2}",
            tokens=[3] * num_known,
            num_prompt_tokens=max(1, num_known - num_output),
            num_emitted_tokens=num_known - max(1, num_known - num_output),
            arrival_s=0.0,
            row=None if has_left else i,
        )
        if i >= num_decodes:
            request.num_cached_tokens = i
            request.decode_worker = "decode-0" if i % 2 else None
        RULES.apply(request)
        requests.append(request)
    result = StepResult(
        step=0,
        tokens=[token_ids for token_ids, *_ in stories],
        logprobs=[[LOGPROBS] * len(token_ids) if asks else None for token_ids, *_, asks in stories],
        is_finite=[True] * len(stories),
    )
    step = StepInFlight(requests=requests, num_decodes=num_decodes, zero_block_ids=[], filled=[])
    return step, result


@given(stories=STORIES, num_decodes=st.integers(0, 6))
def test_the_short_way_for_decodes_says_what_the_long_one_does(
    stories: list[Story], num_decodes: int
) -> None:
    stories, outcomes = _with_single_decodes(stories, num_decodes), []
    for is_short in (True, False):
        step, result = _step(stories, min(num_decodes, len(stories)))
        output = StepOutput()
        taken = step if is_short else msgspec.structs.replace(step, num_decodes=0)
        endings = SampledTokens(RULES).append_all(taken, result, output)
        tokens = [request.tokens for request in step.requests]
        outcomes.append((output, [(r.key, finish) for r, finish in endings], tokens))
    assert outcomes[0] == outcomes[1]


@given(stories=STORIES, num_decodes=st.integers(0, 6))
def test_every_token_of_a_request_that_is_here_is_emitted_once(
    stories: list[Story], num_decodes: int
) -> None:
    stories = _with_single_decodes(stories, num_decodes)
    step, result = _step(stories, min(num_decodes, len(stories)))
    output = StepOutput()
    endings = {r.key: why for r, why in SampledTokens(RULES).append_all(step, result, output)}
    due = []
    for request, (token_ids, num_known, _, has_left, asks) in zip(
        step.requests, stories, strict=True
    ):
        tokens, finish, ends_here = [3] * num_known, None, False
        for position, token_id in enumerate([] if has_left else token_ids):
            tokens.append(token_id)
            if len(tokens) >= request.max_known_tokens:
                finish = "length"
            if token_id in request.stop_ids:
                finish = "stop"
            index = num_known + position - request.num_prompt_tokens
            num_cached = request.num_cached_tokens if position == 0 else None
            logprobs = LOGPROBS if asks else None
            due.append((request.key, index, token_id, logprobs, num_cached, finish))
            ends_here = finish is not None or request.decode_worker is not None
            if ends_here:
                break  # what a step made behind the last token is dropped
        assert request.tokens == tokens
        assert (request.key in endings) == ends_here
        assert endings.get(request.key) == finish
    emitted = [
        (t.key, t.index, t.token_id, t.logprobs, t.num_cached_tokens, t.finish)
        for _, t in output.tokens
    ]
    assert emitted == due
    assert [ingress_id for ingress_id, _ in output.tokens] == [
        f"ingress-{int(key.request_id) % 2}" for key, *_ in due
    ]


@pytest.mark.parametrize("num_decodes", [0, 2])
def test_results_for_another_number_of_rows_are_refused(num_decodes: int) -> None:
    step, _ = _step([([3], 4, 2, False, False)] * 2, num_decodes)
    _, result = _step([([3], 4, 2, False, False)] * 3, num_decodes)
    with pytest.raises(ValueError, match="zip"):
        SampledTokens(RULES).append_all(step, result, StepOutput())
