"""Responses of /v1/score and /v1/rerank: one object, made of every prompt's labels."""

from collections.abc import Sequence

from msgspec import UNSET

from actors.api.openai_objects import (
    DocumentText,
    RerankAnswer,
    RerankResult,
    ScoreAnswer,
    to_json,
)
from actors.api.prompt_delta import PromptDelta
from actors.api.protocol import ParsedRequest
from actors.api.response_parts import ResponseIdentity, UsageCount
from actors.api.scoring import Reranking, Scoring, probabilities
from engine.output_text import TextDelta


class ScoreUnary:
    """Gathers the labels of all prompts; `scoring` says what they come to."""

    def __init__(
        self, parsed: ParsedRequest, identity: ResponseIdentity, scoring: Scoring | Reranking
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
        return [to_json(self._scores(self._scoring))]

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
