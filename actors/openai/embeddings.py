"""/v1/embeddings: reads requests for vectors of prompts, and writes the answers.

Knows no HTTP and no workers.
"""

import base64
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from actors.openai.prompt_only import Embedding
from actors.openai.prompts import MAX_CHARS_PER_TOKEN, Prompt, PromptReader, read_truncation
from actors.openai.protocol import MAX_SCORED_TOKENS, Endpoint, ParsedRequest
from actors.openai.request_bodies import EmbeddingBody, decode_body, unsupported
from actors.openai.request_rules import BOUNDS, Bounds, invalid, read_cache_identity
from actors.openai.response_objects import (
    EmbeddingList,
    EmbeddingObject,
    EmbeddingUsage,
    error_reply,
    to_json,
)
from actors.openai.response_parts import PromptDelta, ResponseIdentity, UsageCount
from actors.openai.served_model import EmbeddingSpace, ServedModel, check_embeds, check_model
from configs.schema import EdgeConfig
from engine.messages import TokenizeRequest
from engine.request import RequestSpec, SamplingParams
from engine.text.output_text import TextDelta

_SMALLEST_NORM = np.float32(1e-12)  # so that an embedding of zeros stays one


def parse_embedding(body: bytes, limits: EdgeConfig, model: ServedModel) -> ParsedRequest:
    """A /v1/embeddings body; raises RequestError with `param` and OpenAI's code."""
    asked = decode_body(body, EmbeddingBody)
    name = check_model(asked.model, model)
    space = check_embeds(name, model)
    BOUNDS["priority"].check("priority", asked.priority)
    if asked.dimensions is not None:
        _check_dimensions(asked.dimensions, space)
    reader = PromptReader(
        param=Endpoint.EMBEDDING.value,
        model=model,
        max_prompts=limits.max_prompts,
        add_special_tokens=asked.add_special_tokens,
        truncation=replace(
            read_truncation(asked, None, model), cuts_end=asked.truncation_side != "left"
        ),
        any_length=asked.truncate_prompt_tokens is not None,
    )
    prompts = reader.read(asked.input)
    _check_total_chars(prompts)
    return ParsedRequest(
        endpoint=Endpoint.EMBEDDING,
        model=name,
        prompts=prompts,
        n=1,
        max_tokens=0,
        spec=RequestSpec(
            params=SamplingParams(max_tokens=0, temperature=0.0, wants_embedding=True),
            priority=asked.priority or 0,
            salt=read_cache_identity(asked.cache_salt, asked.extra_key),
        ),
        prompt_only=Embedding(
            num_dimensions=asked.dimensions,
            is_normalised=space.is_normalised,
            as_base64=asked.encoding_format == "base64",
        ),
    )


def _check_dimensions(num_dimensions: int, space: EmbeddingSpace) -> None:
    Bounds(1, space.num_dimensions).check("dimensions", num_dimensions)
    if num_dimensions == space.num_dimensions:
        return
    if not space.can_shorten:
        raise unsupported(
            "dimensions",
            f" for this model, whose embeddings have {space.num_dimensions} numbers: nothing says"
            " that it was trained for shorter ones (api.matryoshka)",
        )
    if space.short_dimensions and num_dimensions not in space.short_dimensions:
        choices = ", ".join(map(str, space.short_dimensions))
        raise invalid("dimensions", f"expected one of {choices}, but got {num_dimensions}.")


def _check_total_chars(prompts: Sequence[Prompt]) -> None:
    """Refuses texts that would take long to tokenise, whatever is kept of them."""
    limit = MAX_CHARS_PER_TOKEN * MAX_SCORED_TOKENS
    num_chars = sum(len(p.text or "") for p in prompts if isinstance(p, TokenizeRequest))
    if num_chars > limit:
        raise invalid(
            Endpoint.EMBEDDING.value,
            f"the prompts have {num_chars} characters together. Expected at most {limit}; send"
            " fewer of them in one request.",
        )


def shorten(
    numbers: npt.NDArray[np.float32], num_dimensions: int, *, is_normalised: bool
) -> npt.NDArray[np.float32]:
    """The first dimensions of an embedding, scaled to a length of 1 if `is_normalised`."""
    first = numbers[:num_dimensions]
    return first / max(np.linalg.norm(first), _SMALLEST_NORM) if is_normalised else first


class EmbeddingUnary:
    """Gathers the embeddings of all prompts."""

    def __init__(self, parsed: ParsedRequest, identity: ResponseIdentity, asked: Embedding) -> None:
        self._identity = identity
        self._asked = asked
        self._usage = UsageCount(parsed.n)
        self._vectors: list[bytes] = [b""] * parsed.num_choices

    def start(self, prompt_ids: Sequence[Sequence[int]]) -> list[bytes]:
        self._usage.start(prompt_ids)
        return []

    def delta(self, choice_index: int, delta: TextDelta) -> list[bytes]:
        assert isinstance(delta, PromptDelta), f"prompt {choice_index} has no embedding"
        self._usage.add(choice_index, delta)
        self._vectors[choice_index] = delta.prompt.embedding
        return []

    def finish(self) -> list[bytes]:
        assert all(self._vectors), "a prompt is not finished"
        usage = self._usage.usage()
        answer = EmbeddingList(
            id=f"embd-{self._identity.request_id}",
            created=self._identity.created_s,
            model=self._identity.model,
            data=[
                EmbeddingObject(index=index, embedding=self._written(vector))
                for index, vector in enumerate(self._vectors)
            ],
            usage=EmbeddingUsage(
                prompt_tokens=usage.prompt_tokens,
                total_tokens=usage.total_tokens,
                prompt_tokens_details=usage.prompt_tokens_details,
            ),
        )
        return [to_json(answer)]

    def fail(self, error: Exception) -> bytes:
        return error_reply(error).body

    def _written(self, vector: bytes) -> list[float] | str:
        numbers = np.frombuffer(vector, dtype=np.float32)
        num_dimensions = self._asked.num_dimensions
        if num_dimensions is not None and num_dimensions < len(numbers):
            numbers = shorten(numbers, num_dimensions, is_normalised=self._asked.is_normalised)
        if self._asked.as_base64:
            return base64.b64encode(numbers.astype("<f4").tobytes()).decode()
        listed: list[float] = numbers.tolist()
        return listed
