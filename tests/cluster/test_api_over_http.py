"""The running application through OpenAI's own client: what it accepts, answers and refuses.

Token ids and log-probabilities are judged by transformers in float64.
"""

import random
from functools import cache
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM, AutoTokenizer

from load_tests.testbed.deployed import MODEL, PATIENCE_S, Application, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROMPT = "import os\nimport "
PROMPTS = ["def add(a, b):\n    return ", "for i in range(", "try:\n    import "]
MESSAGES: Any = [{"role": "user", "content": "def main():"}]
TOKENS = 24
EOS_ID = 1
VOCAB_SIZE = 3072
MAX_MODEL_LEN = 2048


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@cache
def reference() -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64)
    return model.eval()


def reference_logprobs(prompt_ids: list[int], token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), vocabulary]: of each output token's position."""
    with torch.inference_mode():
        logits = reference()(torch.tensor([prompt_ids + token_ids])).logits[0]
    return torch.log_softmax(logits[len(prompt_ids) - 1 : -1], dim=-1)


@pytest.fixture
def client(disaggregated: Application) -> Any:
    with disaggregated.client() as client:
        yield client


@pytest.fixture
def model(disaggregated: Application) -> str:
    return disaggregated.model


def complete(client: openai.OpenAI, model: str, prompt: Any = PROMPT, **params: Any) -> Any:
    """A greedy completion with the ids of prompt and output."""
    extra = {"return_token_ids": True} | params.pop("extra_body", {})
    params = {"temperature": 0.0, "max_tokens": TOKENS} | params
    return client.completions.create(model=model, prompt=prompt, extra_body=extra, **params)


# ---- answers -------------------------------------------------------------------------------------


def test_a_completion_has_the_ids_that_transformers_would_choose(
    client: openai.OpenAI, model: str
) -> None:
    answer = complete(client, model)
    [choice] = answer.choices
    assert choice.prompt_token_ids == tokenizer()(PROMPT).input_ids
    expected = reference_logprobs(choice.prompt_token_ids, choice.token_ids).argmax(-1).tolist()
    assert choice.token_ids == expected
    both = choice.prompt_token_ids + choice.token_ids
    assert PROMPT + choice.text == tokenizer().decode(both, skip_special_tokens=True)
    assert choice.finish_reason in ("length", "stop")
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    usage = answer.usage
    assert usage.prompt_tokens == len(choice.prompt_token_ids)
    assert usage.completion_tokens == len(choice.token_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_streamed_completion_is_the_unary_one(client: openai.OpenAI, model: str) -> None:
    [unary] = complete(client, model).choices
    chunks = list(complete(client, model, stream=True, stream_options={"include_usage": True}))
    *parts, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens == len(unary.token_ids)
    assert last.usage.prompt_tokens == len(unary.prompt_token_ids)
    assert all(part.usage is None for part in parts)
    assert "".join(part.choices[0].text for part in parts) == unary.text
    assert [i for part in parts for i in part.choices[0].token_ids] == unary.token_ids
    assert parts[0].choices[0].prompt_token_ids == unary.prompt_token_ids
    reasons = [part.choices[0].finish_reason for part in parts]
    assert reasons == [None] * (len(parts) - 1) + [unary.finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_chat_answers_the_template_s_prompt_unary_and_streamed(
    client: openai.OpenAI, model: str
) -> None:
    params: Any = {"model": model, "messages": MESSAGES, "temperature": 0.0, "max_tokens": TOKENS}
    extra = {"return_token_ids": True}
    unary: Any = client.chat.completions.create(**params, extra_body=extra)
    [choice] = unary.choices
    expected_ids = tokenizer().apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    assert unary.prompt_token_ids == expected_ids
    expected = reference_logprobs(expected_ids, choice.token_ids).argmax(-1).tolist()
    assert choice.token_ids == expected
    assert choice.message.role == "assistant"
    assert choice.message.content == tokenizer().decode(expected, skip_special_tokens=True)
    assert unary.object == "chat.completion"
    assert unary.id.startswith("chatcmpl-")
    chunks: list[Any] = list(client.chat.completions.create(**params, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason
    assert all(chunk.usage is None for chunk in chunks)


def test_every_form_of_prompt_gives_the_same_choices(client: openai.OpenAI, model: str) -> None:
    alone = [complete(client, model, prompt).choices[0] for prompt in PROMPTS]
    ids = [choice.prompt_token_ids for choice in alone]
    for form in (PROMPTS, ids):
        answer = complete(client, model, form)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [choice.token_ids for choice in answer.choices] == [c.token_ids for c in alone]
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert complete(client, model, ids[0]).choices[0].token_ids == alone[0].token_ids
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for chunk in complete(client, model, ids, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.token_ids
    assert list(streamed.values()) == [choice.token_ids for choice in alone]


def test_seeds_decide_what_is_sampled_and_each_choice_has_its_own(
    client: openai.OpenAI, model: str
) -> None:
    def sample(seed: int, **params: Any) -> list[list[int]]:
        answer = complete(client, model, temperature=1.0, seed=seed, **params)
        return [choice.token_ids for choice in answer.choices]

    two = sample(5, n=2)
    assert two == sample(5, n=2)
    assert two[0] != two[1]
    assert sample(5) == two[:1]
    assert sample(6) != two[:1]
    streamed: dict[int, list[int]] = {0: [], 1: []}
    for chunk in complete(client, model, temperature=1.0, seed=5, n=2, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.token_ids
    assert [streamed[0], streamed[1]] == two


def test_a_stop_string_across_two_tokens_cuts_the_text_before_it(
    client: openai.OpenAI, model: str
) -> None:
    [full] = complete(client, model).choices
    texts = [tokenizer().decode([token_id]) for token_id in full.token_ids]
    assert "".join(texts) == full.text
    # The last two characters of one token and the first of the next: in no token of its own.
    stops = [
        left[-2:] + right[:1]
        for left, right in pairwise(texts)
        if len(left) > 1 and not any(left[-2:] + right[:1] in text for text in texts)
    ]
    assert stops, f"no such place in {texts}"
    for stop in stops[:3]:
        [cut] = complete(client, model, stop=["not there", stop]).choices
        assert cut.text == full.text[: full.text.index(stop)]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
        chunks = list(complete(client, model, stop=stop, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == cut.text
        assert chunks[-1].choices[0].finish_reason == "stop"
    [kept] = complete(
        client, model, stop=stops[0], extra_body={"include_stop_str_in_output": True}
    ).choices
    assert kept.text == full.text[: full.text.index(stops[0])] + stops[0]


def test_a_stop_token_id_ends_the_choice_and_is_named(client: openai.OpenAI, model: str) -> None:
    [full] = complete(client, model).choices
    stop_id = full.token_ids[5]
    first = full.token_ids.index(stop_id)
    [cut] = complete(client, model, extra_body={"stop_token_ids": [stop_id]}).choices
    assert cut.token_ids == full.token_ids[: first + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop_id)


def test_logprobs_of_completions_and_chats_are_those_of_transformers(
    client: openai.OpenAI, model: str
) -> None:
    [choice] = complete(client, model, logprobs=3).choices
    expected = reference_logprobs(choice.prompt_token_ids, choice.token_ids)
    chosen = expected.gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
    got = torch.tensor(choice.logprobs.token_logprobs, dtype=torch.float64)
    torch.testing.assert_close(got, chosen, atol=1e-3, rtol=0)
    for top, best in zip(choice.logprobs.top_logprobs, expected.topk(3).values, strict=True):
        values = torch.tensor(sorted(top.values(), reverse=True), dtype=torch.float64)
        torch.testing.assert_close(values, best, atol=1e-3, rtol=0)
    chat: Any = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        temperature=0.0,
        max_tokens=TOKENS,
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_token_ids": True},
    )
    [answer] = chat.choices
    expected = reference_logprobs(chat.prompt_token_ids, answer.token_ids)
    entries = answer.logprobs.content
    got = torch.tensor([entry.logprob for entry in entries], dtype=torch.float64)
    chosen = expected.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(got, chosen, atol=1e-3, rtol=0)
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(entries)
    # Of the chosen tokens, all but an eos at the end are in the text.
    text = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert text.removesuffix("<|end|>") == answer.message.content


def test_a_repeated_long_prompt_is_found_in_the_cache_of_its_prefill_worker(
    client: openai.OpenAI, model: str, rng: random.Random
) -> None:
    prompt = [rng.randrange(10, VOCAB_SIZE) for _ in range(333)]
    answers = [complete(client, model, prompt) for _ in range(3)]
    cached = [a.usage.prompt_tokens_details.cached_tokens for a in answers]
    assert cached[0] == 0
    # Two prefill workers: of three requests two at least went to the same one.
    assert max(cached) == 333 // 16 * 16
    assert len({tuple(a.choices[0].token_ids) for a in answers}) == 1


def test_min_tokens_and_ignore_eos_hold_the_end_back(client: openai.OpenAI, model: str) -> None:
    eager = {str(EOS_ID): 100}
    [short] = complete(client, model, logit_bias=eager).choices
    assert (short.token_ids, short.text, short.finish_reason) == ([EOS_ID], "", "stop")
    [held] = complete(client, model, logit_bias=eager, extra_body={"min_tokens": 5}).choices
    assert EOS_ID not in held.token_ids[:5]
    assert (held.token_ids[5:], held.finish_reason) == ([EOS_ID], "stop")
    [ignored] = complete(client, model, logit_bias=eager, extra_body={"ignore_eos": True}).choices
    assert (ignored.token_ids, ignored.finish_reason) == ([EOS_ID] * TOKENS, "length")


def test_one_token_never_leaves_the_prefill_worker(
    disaggregated: Application, client: openai.OpenAI, model: str
) -> None:
    def num_handoffs() -> int:
        seen = disaggregated.statistics().values()
        return sum(int(s["incoming"]["num_reserved"]) for s in seen if "incoming" in s)

    before = num_handoffs()
    expected = complete(client, model).choices[0].token_ids[:1]
    assert num_handoffs() == before + 1
    [choice] = complete(client, model, max_tokens=1).choices
    assert (choice.token_ids, choice.finish_reason) == (expected, "length")
    assert num_handoffs() == before + 1


def test_the_client_raises_its_own_errors(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        complete(client, "other")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        complete(client, model, temperature=3.0)
    assert bad.value.param == "temperature"


# ---- everything else -----------------------------------------------------------------------------


def test_the_client_s_request_id_is_echoed_and_a_new_one_made_otherwise(
    disaggregated: Application,
) -> None:
    body = {"model": disaggregated.model, "prompt": PROMPT, "max_tokens": 2}

    def ask(fields: dict[str, Any], headers: dict[str, str]) -> list[str]:
        url = f"{disaggregated.url}/v1/completions"
        answer = httpx.post(url, json=body | fields, headers=headers, timeout=PATIENCE_S)
        return answer.headers.get_list("x-request-id")

    for fields in ({"stream": False}, {"stream": True}, {"max_tokens": 0}):
        assert ask(fields, {"X-Request-Id": "mine-1"}) == ["mine-1"]
        made = ask(fields, {}) + ask(fields, {})
        assert len(set(made)) == len(made) == 2


def test_models_are_listed_and_shown(client: openai.OpenAI, model: str) -> None:
    [listed] = client.models.list().data
    assert listed.id == model
    assert client.models.retrieve(model) == listed
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_health_version_and_readiness(disaggregated: Application) -> None:
    assert disaggregated.get("/health")[0] == 200
    assert disaggregated.get("/ready")[0] == 200
    status, text = disaggregated.get("/version")
    assert status == 200
    assert disaggregated.hash in text


def test_metrics_count_what_was_served_and_gauges_go_back_to_zero(
    disaggregated: Application, client: openai.OpenAI, model: str
) -> None:
    counters = {
        "vllm:prompt_tokens_total": 0.0,
        "vllm:generation_tokens_total": 0.0,
        "vllm:time_to_first_token_seconds_count": 0.0,
        "vllm:e2e_request_latency_seconds_count": 0.0,
    }
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "laps_queued_tokens")

    def scrape() -> dict[str, float]:
        _, text = disaggregated.get("/metrics")
        samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
        return {
            name: sum(sample.value for sample in samples if sample.name == name)
            for name in (*counters, *gauges, "laps_open_attempts", "laps_worker_up")
        }

    before = scrape()
    answer = complete(client, model)
    after = scrape()
    assert after["laps_worker_up"] == 4
    grown = {name: after[name] - before[name] for name in counters}
    assert grown == {
        "vllm:prompt_tokens_total": answer.usage.prompt_tokens,
        "vllm:generation_tokens_total": answer.usage.completion_tokens,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:e2e_request_latency_seconds_count": 1,
    }
    disaggregated.wait_quiet()

    def are_gauges_zero() -> bool:
        seen = scrape()
        return all(seen[name] == 0 for name in (*gauges, "laps_open_attempts"))

    wait_until(are_gauges_zero, lambda: f"gauges are back: {scrape()}")
