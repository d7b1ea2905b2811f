"""Where prompts are encoded and their blocks hashed: the ids are the same everywhere."""

import asyncio
import random
import secrets
import threading
from collections.abc import Sequence
from typing import cast

import pytest

from actors.ingress.prompt_tokens import (
    MAX_HASHED_HERE_TOKENS,
    MAX_INLINE_CHARS,
    MAX_THREAD_CHARS,
    NUM_THREADS,
    Batchers,
    PromptTokens,
    TokenizedPrompt,
    num_prompt_chars,
)
from actors.openai.prompts import Prompt
from actors.rpc.handles import BatcherHandle
from actors.tokenizer_batcher import PromptTokenizer
from configs.schema import TokenizerConfig
from engine.clock import MonotonicClock
from engine.errors import RequestError
from engine.kv.hashes import RequestHasher
from engine.messages import TokenizeReply, TokenizeRequest
from engine.text.prompt_encoder import PromptEncoder, load_prompt_encoder
from tests.actors.ingress.edge_app import MODEL_FOLDER

HASHER = RequestHasher(secrets.token_bytes(32), model="m", dtype="float32", block_size=4)
FEW = MAX_HASHED_HERE_TOKENS
SALT = "tenant"


class LocalBatcher:
    """A tokenizer batcher in this process, which notes what it is asked."""

    def __init__(self) -> None:
        self._tokenizer = PromptTokenizer(str(MODEL_FOLDER), TokenizerConfig())
        self.asked: list[TokenizeRequest] = []

    async def tokenize(self, request: TokenizeRequest) -> TokenizeReply:
        self.asked.append(request)
        (reply,) = self._tokenizer.encode_batch([request])
        return reply


class WatchedEncoder:
    """Notes the threads that encode; waits for `may_go` in those that are not the main thread."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self.threads: list[str] = []
        self.may_go = threading.Event()
        self.may_go.set()

    def rendering_s(self) -> float | None:
        """Says that the template is fast, however slow a busy machine renders it."""
        return 0.0

    def encode(self, request: TokenizeRequest) -> list[int]:
        self.threads.append(threading.current_thread().name)
        if threading.current_thread() is not threading.main_thread():
            assert self.may_go.wait(30)
        return self._encoder.encode(request)


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return load_prompt_encoder(MODEL_FOLDER)


@pytest.fixture
def watched(encoder: PromptEncoder) -> WatchedEncoder:
    return WatchedEncoder(encoder)


@pytest.fixture
def batcher() -> LocalBatcher:
    return LocalBatcher()


def under_test(watched: WatchedEncoder, batcher: LocalBatcher) -> PromptTokens:
    async def find(name: str) -> BatcherHandle:
        return cast("BatcherHandle", batcher)

    batchers = Batchers(find, patience_s=5.0, clock=MonotonicClock())
    batchers.update(["tokenizer-0"])
    return PromptTokens(cast("PromptEncoder", watched), batchers)


def tokenize(
    watched: WatchedEncoder,
    batcher: LocalBatcher,
    prompts: Sequence[Prompt],
    hasher: RequestHasher | None = HASHER,
) -> list[TokenizedPrompt]:
    return asyncio.run(under_test(watched, batcher).tokenize(prompts, hasher, SALT))


def text_of(num_chars: int) -> str:
    return "".join(random.choices("def range(n): \n", k=num_chars))


def ids_of(num_tokens: int) -> list[int]:
    return [random.randrange(256) for _ in range(num_tokens)]


def expected(encoder: PromptEncoder, request: TokenizeRequest) -> TokenizedPrompt:
    ids = encoder.encode(request)
    return TokenizedPrompt(ids, HASHER.chain(ids, SALT))


@pytest.mark.parametrize("num_tokens", [1, 3, 4, FEW, FEW + 1, 3 * FEW])
def test_a_prompt_of_ids_has_the_same_hashes_wherever_they_are_made(
    watched: WatchedEncoder, batcher: LocalBatcher, num_tokens: int
) -> None:
    ids = ids_of(num_tokens)
    assert tokenize(watched, batcher, [ids]) == [TokenizedPrompt(ids, HASHER.chain(ids, SALT))]
    # Many ids would keep the event loop from its other clients.
    assert len(batcher.asked) == (num_tokens > FEW)


def test_an_encoder_measures_a_rendering_unless_its_template_refuses(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_s = encoder.rendering_s()
    assert measured_s is not None
    assert measured_s > 0.0

    def refuse(_: object) -> str:
        raise RequestError("two messages of one role")

    monkeypatch.setattr(encoder._chat_template, "render", refuse)
    assert encoder.rendering_s() is None


@pytest.mark.parametrize(
    ("num_chars", "where"),
    [
        (MAX_INLINE_CHARS, "here"),
        (MAX_INLINE_CHARS + 1, "thread"),
        (MAX_THREAD_CHARS, "thread"),
        (MAX_THREAD_CHARS + 1, "batcher"),
    ],
)
@pytest.mark.parametrize("is_chat", [False, True])
def test_a_prompt_is_encoded_where_its_length_says_and_alike(
    watched: WatchedEncoder,
    batcher: LocalBatcher,
    encoder: PromptEncoder,
    num_chars: int,
    where: str,
    is_chat: bool,
) -> None:
    request = TokenizeRequest(text=text_of(num_chars))
    if is_chat:
        text = text_of(num_chars - len("user"))
        request = TokenizeRequest(messages=[{"role": "user", "content": text}])
    assert num_prompt_chars(request) == num_chars
    tokenized = tokenize(watched, batcher, [request])
    assert tokenized == [expected(encoder, request)]
    assert len(batcher.asked) == (where == "batcher" or len(tokenized[0].ids) > FEW)
    main = threading.main_thread().name
    threads = ["here" if name == main else "thread" for name in watched.threads]
    assert threads == ([] if where == "batcher" else [where])


def test_prompts_that_come_together_count_together(
    watched: WatchedEncoder, batcher: LocalBatcher, encoder: PromptEncoder
) -> None:
    # One by one each is short; 40 of them would keep the loop for many milliseconds.
    requests = [TokenizeRequest(text=text_of(MAX_INLINE_CHARS // 2)) for _ in range(40)]
    tokenized = tokenize(watched, batcher, requests)
    assert tokenized == [expected(encoder, request) for request in requests]
    assert threading.main_thread().name not in watched.threads
    assert batcher.asked


def test_when_the_threads_are_busy_batchers_share_the_load(
    watched: WatchedEncoder, batcher: LocalBatcher, encoder: PromptEncoder
) -> None:
    requests = [TokenizeRequest(text=text_of(MAX_THREAD_CHARS)) for _ in range(NUM_THREADS + 3)]

    async def main() -> list[list[int]]:
        prompts = under_test(watched, batcher)
        watched.may_go.clear()
        asked = [asyncio.create_task(prompts.ids_of(request)) for request in requests]
        await asyncio.gather(*asked[NUM_THREADS:])
        assert not any(task.done() for task in asked[:NUM_THREADS])
        watched.may_go.set()
        ids = await asyncio.gather(*asked)
        assert await prompts.ids_of(requests[0]) == ids[0]  # a thread is free again
        return ids

    assert asyncio.run(main()) == [encoder.encode(request) for request in requests]
    assert len(batcher.asked) == 3
    assert len(watched.threads) == NUM_THREADS + 1


def test_a_heavy_template_is_for_batchers(
    watched: WatchedEncoder, batcher: LocalBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "rendering_s", lambda: 0.02)
    tokenize(watched, batcher, [TokenizeRequest(messages=[{"role": "user", "content": "hi"}])])
    assert (len(batcher.asked), watched.threads) == (1, [])
    tokenize(watched, batcher, [TokenizeRequest(text="hi")])
    assert (len(batcher.asked), len(watched.threads)) == (1, 1)


@pytest.mark.parametrize("num_chars", [5, MAX_INLINE_CHARS + 1, MAX_THREAD_CHARS + 1])
def test_a_text_without_ids_is_the_same_error_everywhere(
    watched: WatchedEncoder, batcher: LocalBatcher, num_chars: int
) -> None:
    with pytest.raises(RequestError, match="not valid text") as caught:
        tokenize(watched, batcher, [TokenizeRequest(text="\ud800" * num_chars)])
    assert caught.value.param == "prompt"


def test_without_a_hasher_nothing_is_hashed(watched: WatchedEncoder, batcher: LocalBatcher) -> None:
    prompts: list[Prompt] = [ids_of(2 * FEW), TokenizeRequest(text=text_of(MAX_THREAD_CHARS + 1))]
    tokenized = tokenize(watched, batcher, prompts, hasher=None)
    assert [prompt.block_hashes for prompt in tokenized] == [[], []]
    assert [request.hash_params for request in batcher.asked] == [None]
