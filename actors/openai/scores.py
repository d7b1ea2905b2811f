"""/v1/score and /v1/rerank: reads requests that ask only for labels, and writes the answers.

A label is a token; the request asks how likely it is after a prompt, and nothing is generated.
Knows no HTTP and no workers.
"""

import math
import re
from collections.abc import Sequence

from msgspec import UNSET

from actors.openai.prompt_only import PairScoring, Reranking, Scoring
from actors.openai.prompts import MAX_CHARS_PER_TOKEN, Prompt, check_prompt_chars, prompt_too_long
from actors.openai.protocol import MAX_SCORED_TOKENS, Endpoint, ParsedRequest
from actors.openai.request_bodies import RerankBody, RerankDocument, ScoreBody, decode_body
from actors.openai.request_rules import (
    BOUNDS,
    Bounds,
    check_chars,
    check_length,
    check_token_ids,
    invalid,
    missing,
    read_cache_identity,
)
from actors.openai.response_objects import (
    DocumentText,
    PairScore,
    PairScoreAnswer,
    RerankAnswer,
    RerankResult,
    ScoreAnswer,
    error_reply,
    to_json,
)
from actors.openai.response_parts import PromptDelta, ResponseIdentity, UsageCount
from actors.openai.served_model import ServedModel, check_generates
from configs.schema import EdgeConfig
from engine.errors import RequestError
from engine.messages import TokenizeRequest
from engine.request import RequestSpec, SamplingParams
from engine.text.output_text import TextDelta
from engine.text.tokenizing import Tokenizing

MAX_LABELS = 128
YES_AND_NO = ("yes", "no")
MAX_INSTRUCTION_CHARS = 4096
MAX_TEMPLATE_CHARS = 16384
DEFAULT_INSTRUCTION = "Find the documents that answer the query."
QUESTION = (
    'Does the document meet the query, as the instruction asks? Say only "yes" or "no".\n\n'
    "Instruction: {instruction}\nQuery: {query}\nDocument: {document}"
)
_PLACE = re.compile(r"\{(instruction|query|document)\}")


def parse_score(
    body: bytes, limits: EdgeConfig, model: ServedModel, tokenizing: Tokenizing
) -> ParsedRequest:
    """A /v1/score body; raises RequestError with `param` and OpenAI's code.

    `tokenizing` finds the tokens of yes and no.
    """
    asked = decode_body(body, ScoreBody)
    name = check_generates(asked.model, model)
    if asked.text_1 is not None or asked.queries is not None:
        return _parse_pairs(asked, name, limits, model, tokenizing)
    if asked.query is None:
        raise missing("query")
    if asked.items is None:
        raise missing("items")
    if asked.label_token_ids is None:
        raise missing("label_token_ids")
    items = [asked.items] if isinstance(asked.items, str) else asked.items
    check_length("items", len(items), limits.max_prompts)
    _check_total_chars("items", [*items, *[asked.query] * len(items)])
    prompts = [
        _join(asked, asked.query, item, f"items[{i}]", model) for i, item in enumerate(items)
    ]
    return _parsed(
        asked,
        Endpoint.SCORE,
        prompts,
        _check_labels(asked.label_token_ids, model),
        Scoring(apply_softmax=bool(asked.apply_softmax)),
        name,
    )


def parse_rerank(
    body: bytes, limits: EdgeConfig, model: ServedModel, tokenizing: Tokenizing
) -> ParsedRequest:
    """A /v1/rerank body; raises as `parse_score`. `tokenizing` finds the tokens of yes and no."""
    asked = decode_body(body, RerankBody)
    name = check_generates(asked.model, model)
    check_length("documents", len(asked.documents), limits.max_prompts)
    Bounds(1, BOUNDS["max_tokens"].high).check("top_n", asked.top_n)
    check_chars("query", asked.query, MAX_CHARS_PER_TOKEN * model.max_model_len)
    documents = [d.text if isinstance(d, RerankDocument) else d for d in asked.documents]
    _check_total_chars("documents", [*documents, *[asked.query] * len(documents)])
    labels = _read_question(asked, model, tokenizing)
    ranking = Reranking(
        documents=documents,
        num_results=min(asked.top_n or len(documents), len(documents)),
        returns_documents=bool(asked.return_documents),
    )
    prompts: list[Prompt] = [
        _question(asked, asked.query, document, model) for document in documents
    ]
    return _parsed(asked, Endpoint.RERANK, prompts, labels, ranking, name)


def _parse_pairs(
    asked: ScoreBody, name: str, limits: EdgeConfig, model: ServedModel, tokenizing: Tokenizing
) -> ParsedRequest:
    """vLLM's shape: the second text of each pair is asked about as a document is."""
    first, second = ("text_1", "text_2") if asked.text_1 is not None else ("queries", "documents")
    queries = _texts(first, getattr(asked, first), limits)
    documents = _texts(second, getattr(asked, second), limits)
    if len(queries) == 1:
        queries *= len(documents)
    if len(queries) != len(documents):
        raise invalid(
            first,
            f"expected one text, or as many as '{second}' has ({len(documents)}), but got"
            f" {len(queries)} instead.",
        )
    _check_total_chars(second, [*queries, *documents])
    labels = _read_question(asked, model, tokenizing)
    prompts: list[Prompt] = [
        _question(asked, query, document, model)
        for query, document in zip(queries, documents, strict=True)
    ]
    return _parsed(asked, Endpoint.RERANK, prompts, labels, PairScoring(), name)


def _texts(param: str, texts: str | list[str] | None, limits: EdgeConfig) -> list[str]:
    if texts is None:
        raise missing(param)
    found = [texts] if isinstance(texts, str) else texts
    check_length(param, len(found), limits.max_prompts)
    return found


def _parsed(
    asked: ScoreBody | RerankBody,
    endpoint: Endpoint,
    prompts: list[Prompt],
    labels: tuple[int, ...],
    scoring: Scoring | Reranking | PairScoring,
    model_name: str,
) -> ParsedRequest:
    BOUNDS["priority"].check("priority", asked.priority)
    return ParsedRequest(
        endpoint=endpoint,
        model=model_name,
        prompts=prompts,
        n=1,
        max_tokens=0,
        spec=RequestSpec(
            params=SamplingParams(max_tokens=0, temperature=0.0, label_token_ids=labels),
            priority=asked.priority or 0,
            salt=read_cache_identity(asked.cache_salt, asked.extra_key),
        ),
        prompt_only=scoring,
    )


def _check_labels(token_ids: Sequence[int], model: ServedModel) -> tuple[int, ...]:
    check_length("label_token_ids", len(token_ids), MAX_LABELS)
    check_token_ids("label_token_ids", token_ids, model.vocab_size)
    return tuple(token_ids)


def _check_total_chars(param: str, parts: Sequence[str | list[int]]) -> None:
    """Refuses texts that must exceed `MAX_SCORED_TOKENS`, before any work on them."""
    limit = MAX_CHARS_PER_TOKEN * MAX_SCORED_TOKENS
    num_chars = sum(map(len, parts))
    if num_chars > limit:
        raise invalid(
            param,
            f"with the query before each of them, they have {num_chars} characters together."
            f" Expected at most {limit}; send fewer of them in one request.",
        )


# ---- /v1/score ----------------------------------------------------------------------------------


def _join(
    asked: ScoreBody, query: str | list[int], item: str | list[int], param: str, model: ServedModel
) -> Prompt:
    """Query and item as one prompt: two texts, or the ids of both."""
    if isinstance(query, str) and isinstance(item, str):
        text = item + query if asked.item_first else query + item
        if not text:
            raise invalid(param, "the prompt is an empty string.", "empty_string")
        check_prompt_chars("items", len(text), model)
        adds = asked.add_special_tokens is not False
        return TokenizeRequest(text=text, add_special_tokens=adds)
    if isinstance(query, str) or isinstance(item, str):
        raise RequestError(
            f"Invalid type for '{param}': query and items are all strings, or all arrays of token"
            " ids.",
            param=param,
            code="invalid_type",
        )
    if len(query) + len(item) >= model.max_model_len:
        raise prompt_too_long("items", len(query) + len(item), None, model.max_model_len)
    check_token_ids("query", query, model.vocab_size)
    check_token_ids(param, item, model.vocab_size)
    return item + query if asked.item_first else query + item


# ---- /v1/rerank ---------------------------------------------------------------------------------


def _yes_and_no(tokenizing: Tokenizing) -> tuple[int, ...]:
    """The tokens of both words; raises RequestError where one of them is more than a token."""
    found = tokenizing.encode_batch(YES_AND_NO, add_special_tokens=False)
    labels = [ids[0] for ids in found if isinstance(ids, list) and len(ids) == 1]
    if len(labels) != len(YES_AND_NO):
        raise invalid(
            "label_token_ids",
            "needed for this model, to which 'yes' and 'no' are not one token each: send two token"
            " ids, the one of a relevant document first.",
            "missing_required_parameter",
        )
    return tuple(labels)


def _check_template(template: str) -> None:
    check_chars("template", template, MAX_TEMPLATE_CHARS)
    places = set(_PLACE.findall(template))
    for name in ("query", "document"):
        if name not in places:
            raise invalid("template", f"it has no place for '{{{name}}}'.")


def _read_question(
    asked: RerankBody | ScoreBody, model: ServedModel, tokenizing: Tokenizing
) -> tuple[int, ...]:
    """Checks how the model is asked; returns the labels of yes and no."""
    if asked.instruction is not None:
        check_chars("instruction", asked.instruction, MAX_INSTRUCTION_CHARS)
    if asked.template is not None:
        _check_template(asked.template)
    ids = asked.label_token_ids
    labels = _yes_and_no(tokenizing) if ids is None else _check_labels(ids, model)
    if len(labels) != len(YES_AND_NO):
        raise invalid(
            "label_token_ids",
            f"expected two token ids, the one of a relevant document first, but got {len(labels)}.",
        )
    return labels


def _question(
    asked: RerankBody | ScoreBody, query: str, document: str, model: ServedModel
) -> TokenizeRequest:
    """Builds the prompt about a document: by the client's template, or as a chat of our own."""
    parts = {
        "instruction": asked.instruction or DEFAULT_INSTRUCTION,
        "query": query,
        "document": document,
    }
    # In one pass, so that placeholders inside a document are not replaced.
    text = _PLACE.sub(lambda place: parts[place[1]], asked.template or QUESTION)
    check_prompt_chars("documents", len(text), model)
    if asked.template is not None:
        adds = asked.add_special_tokens is not False
        return TokenizeRequest(text=text, add_special_tokens=adds)
    return TokenizeRequest(
        messages=[{"role": "user", "content": text}],
        add_special_tokens=bool(asked.add_special_tokens),
        # The answer has to be the next token; templates that know no thinking ignore it.
        chat_template_kwargs={"enable_thinking": False},
    )


def probabilities(logprobs: Sequence[float], *, apply_softmax: bool) -> list[float]:
    """Returns each label's probability, or its share among the labels.

    A label that the model rules out (-inf) has 0; if it rules out all of them, each share is 0.
    """
    if not apply_softmax:
        return [math.exp(value) for value in logprobs]
    best = max(logprobs)
    if best == -math.inf:
        return [0.0] * len(logprobs)
    weights = [math.exp(value - best) for value in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


class ScoreUnary:
    """Gathers the labels of all prompts; `scoring` says how to score them."""

    def __init__(
        self,
        parsed: ParsedRequest,
        identity: ResponseIdentity,
        scoring: Scoring | Reranking | PairScoring,
    ) -> None:
        self._identity = identity
        self._scoring = scoring
        self._usage = UsageCount(parsed.n)
        self._labels: list[Sequence[float]] = [()] * parsed.num_choices

    def start(self, prompt_ids: Sequence[Sequence[int]]) -> list[bytes]:
        self._usage.start(prompt_ids)
        return []

    def delta(self, choice_index: int, delta: TextDelta) -> list[bytes]:
        assert isinstance(delta, PromptDelta), f"prompt {choice_index} has no labels"
        self._usage.add(choice_index, delta)
        self._labels[choice_index] = delta.prompt.labels
        return []

    def finish(self) -> list[bytes]:
        assert all(self._labels), "a prompt is not finished"
        if isinstance(self._scoring, Reranking):
            return [to_json(self._ranking(self._scoring))]
        if isinstance(self._scoring, PairScoring):
            return [to_json(self._pairs())]
        return [to_json(self._scores(self._scoring))]

    def fail(self, error: Exception) -> bytes:
        return error_reply(error).body

    def _scores(self, scoring: Scoring) -> ScoreAnswer:
        return ScoreAnswer(
            id=f"score-{self._identity.request_id}",
            created=self._identity.created_s,
            model=self._identity.model,
            scores=[
                probabilities(labels, apply_softmax=scoring.apply_softmax)
                for labels in self._labels
            ],
            usage=self._usage.usage(),
        )

    def _pairs(self) -> PairScoreAnswer:
        scores = [probabilities(labels, apply_softmax=True)[0] for labels in self._labels]
        return PairScoreAnswer(
            id=f"score-{self._identity.request_id}",
            created=self._identity.created_s,
            model=self._identity.model,
            data=[PairScore(index=i, score=score) for i, score in enumerate(scores)],
            usage=self._usage.usage(),
        )

    def _ranking(self, ranking: Reranking) -> RerankAnswer:
        relevances = [probabilities(labels, apply_softmax=True)[0] for labels in self._labels]
        # Stable: of equals, the first that was sent comes first.
        order = sorted(range(len(relevances)), key=lambda i: -relevances[i])
        documents = ranking.documents if ranking.returns_documents else None
        return RerankAnswer(
            id=f"rerank-{self._identity.request_id}",
            model=self._identity.model,
            results=[
                RerankResult(
                    index=i,
                    relevance_score=relevances[i],
                    document=UNSET if documents is None else DocumentText(text=documents[i]),
                )
                for i in order[: ranking.num_results]
            ],
            usage=self._usage.usage(),
        )
