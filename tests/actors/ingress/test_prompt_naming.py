"""Who names a prompt's blocks: a batcher, once a prompt, and the ingress only where it is few."""

import asyncio
import random
import secrets
from typing import cast

import pytest

from actors.ingress import pipeline
from actors.ingress.generation import Generations
from actors.ingress.pipeline import Batchers, PreparedRequest, RequestPipeline
from actors.observability.metrics import IngressMetrics
from actors.observability.recent_ttft import RecentTtft
from actors.observability.request_times import RequestTimes
from actors.openai.protocol import Endpoint, ParsedRequest, Prompt, ServedModel
from actors.rpc.handles import BatcherHandle
from engine.clock import MonotonicClock
from engine.kv.hashes import RequestHasher
from engine.messages import TokenizeReply, TokenizeRequest
from engine.request import RequestSpec, SamplingParams
from engine.text.tokenizing import Tokenizing

HASHER = RequestHasher(secrets.token_bytes(32), model="m", dtype="float32", block_size=4)
FEW = pipeline.MAX_NAMED_HERE_TOKENS
SALT = "tenant"


class FakeGenerations:
    def __init__(self, hasher: RequestHasher | None) -> None:
        self.hasher = hasher


class FakeBatcher:
    """Turns a text into the numbers of its characters, and notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[TokenizeRequest] = []

    async def tokenize(self, request: TokenizeRequest) -> TokenizeReply:
        self.asked.append(request)
        ids = request.token_ids if request.text is None else [ord(c) for c in request.text]
        assert ids is not None
        hash_params = request.hash_params
        hashes = RequestHasher.of(hash_params).chain(ids, request.salt) if hash_params else []
        return TokenizeReply(token_ids=ids if request.text else [], block_hashes=hashes)


def prepare(
    prompts: list[Prompt], batcher: FakeBatcher, hasher: RequestHasher | None = HASHER
) -> PreparedRequest:
    async def find(name: str) -> BatcherHandle:
        return cast("BatcherHandle", batcher)

    async def main() -> PreparedRequest:
        clock = MonotonicClock()
        batchers = Batchers(find, patience_s=5.0, clock=clock)
        batchers.update(["tokenizer-0"])
        under_test = RequestPipeline(
            model=ServedModel(name="m", max_model_len=10_000, vocab_size=70_000, created_s=0),
            tokenizing=cast("Tokenizing", None),
            batchers=batchers,
            generations=cast("Generations", FakeGenerations(hasher)),
            metrics=IngressMetrics("m", RecentTtft(clock)),
            clock=clock,
            timeout_s=30.0,
        )
        return await under_test.prepare(parsed(prompts), RequestTimes(arrived_s=clock.now_s()))

    return asyncio.run(main())


def parsed(prompts: list[Prompt]) -> ParsedRequest:
    return ParsedRequest(
        endpoint=Endpoint.COMPLETION,
        model="m",
        prompts=prompts,
        n=3,
        max_tokens=5,
        spec=RequestSpec(params=SamplingParams(max_tokens=5), salt=SALT),
    )


def ids_of(num_tokens: int) -> list[int]:
    return [random.randrange(70_000) for _ in range(num_tokens)]


@pytest.mark.parametrize("num_tokens", [1, 3, 4, FEW, FEW + 1, 3 * FEW])
def test_a_prompt_of_ids_has_the_same_names_whoever_gives_them(num_tokens: int) -> None:
    ids, batcher = ids_of(num_tokens), FakeBatcher()
    prepared = prepare([ids], batcher)
    assert prepared.prompt_ids == [ids]
    assert prepared.block_hashes == [HASHER.chain(ids, SALT)]
    # Many ids would keep the event loop from its other clients.
    assert len(batcher.asked) == (num_tokens > FEW)


def test_all_choices_of_a_text_share_the_one_naming_that_came_with_its_ids() -> None:
    batcher, texts = FakeBatcher(), ["brief", "a text of some blocks"]
    prepared = prepare([TokenizeRequest(text=text) for text in texts], batcher)
    assert sorted(request.text or "" for request in batcher.asked) == sorted(texts)
    assert prepared.prompt_ids == [[ord(c) for c in text] for text in texts]
    assert prepared.block_hashes == [HASHER.chain(ids, SALT) for ids in prepared.prompt_ids]


def test_before_a_worker_has_said_how_blocks_are_named_none_are() -> None:
    batcher, ids = FakeBatcher(), ids_of(2 * FEW)
    prepared = prepare([ids, TokenizeRequest(text="words")], batcher, hasher=None)
    assert prepared.block_hashes == [[], []]
    assert [request.hash_params for request in batcher.asked] == [None]
