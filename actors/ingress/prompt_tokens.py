"""Prompts to token ids, and to the hashes of their blocks, where that costs least.

A short text is encoded here at once, a longer one in a thread here (the tokenizer releases the
interpreter lock), and a long one by a tokenizer batcher, so that one replica's loop serves its
streams meanwhile. Knows no HTTP and no workers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from actors.openai.prompts import Prompt
from actors.rpc.handles import BatcherHandle
from engine.clock import Clock
from engine.errors import CapacityError, RequestError, WorkerError
from engine.kv.hashes import RequestHasher
from engine.messages import TokenizeReply, TokenizeRequest
from engine.request import Constraint
from engine.text.prompt_encoder import PromptEncoder

T = TypeVar("T")

TOKENIZER_TIMEOUT_S = 20.0  # far longer than the largest prompt takes
CHECK_TIMEOUT_S = 60.0  # a check limits itself, but others may be queued before it
CHECK_RETRY_S = 10.0
BATCHER_RETRY_S = 0.2  # then batchers that were away are asked again

# Measured on two cores: 512 characters take 0.5 ms, 8,192 take 10; a thread adds 0.2 ms, and a
# batcher 1 ms and as much of the processor.
MAX_INLINE_CHARS = 512
MAX_THREAD_CHARS = 8192
NUM_THREADS = 2  # when all are busy, batchers share the load
MAX_RENDERING_S = 0.0005  # of a short conversation; a heavier template is for batchers
# Hashing the blocks of so many ids takes 0.06 ms here, and asking a batcher some ms.
MAX_HASHED_HERE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt's tokens, and the hashes of its full blocks; none where nobody needs them."""

    ids: list[int]
    block_hashes: list[bytes]


class Batchers:
    """The tokenizer batchers, in turn; one that is away is skipped."""

    def __init__(
        self, find: Callable[[str], Awaitable[BatcherHandle]], *, patience_s: float, clock: Clock
    ) -> None:
        """A request waits up to `patience_s` for batchers that restart."""
        self._find = find
        self._patience_s = patience_s
        self._clock = clock
        self._names: list[str] = []
        self._handles: dict[str, BatcherHandle] = {}
        self._turn = 0

    def update(self, names: list[str]) -> None:
        self._names = names

    async def ask(self, request: TokenizeRequest) -> TokenizeReply:
        """Returns the ids and block hashes that are asked for.

        Raises RequestError for text that has no ids, CapacityError if no batcher answers.
        Tokenising is a pure function, so a batcher that dies is simply replaced by the next.
        """
        reply = await self._any(lambda handle: handle.tokenize(request), TOKENIZER_TIMEOUT_S)
        if reply.error is not None:
            raise RequestError(reply.error, param=_param_of(request))
        return reply

    async def check(self, constraint: Constraint) -> None:
        """Raises RequestError for an impossible constraint, and else what `ask` raises."""
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                verdict = await self._any(lambda handle: handle.check(constraint), None)
        except TimeoutError as error:  # do not ask another batcher: it would repeat the work
            raise CapacityError(
                "too many constraints are being checked", retry_after_s=CHECK_RETRY_S
            ) from error
        if verdict.error is not None:
            raise RequestError(verdict.error, code="invalid_value")

    async def _any(
        self, call: Callable[[BatcherHandle], Awaitable[T]], timeout_s: float | None
    ) -> T:
        """Returns the first answer of a batcher. Raises CapacityError if none answers."""
        give_up_s = self._clock.now_s() + self._patience_s
        while True:
            for _ in range(len(self._names)):
                reply = await self._call_next(call, timeout_s)
                if reply is not None:
                    return reply
            if self._clock.now_s() + BATCHER_RETRY_S > give_up_s:
                raise CapacityError("no tokenizer is available", retry_after_s=1.0)
            await asyncio.sleep(BATCHER_RETRY_S)

    async def _call_next(
        self, call: Callable[[BatcherHandle], Awaitable[T]], timeout_s: float | None
    ) -> T | None:
        """Returns the next batcher's answer; None if it is away."""
        if not self._names:
            return None  # the topology changed since
        name = self._names[self._turn % len(self._names)]
        self._turn += 1
        try:
            async with asyncio.timeout(timeout_s):
                handle = self._handles.get(name) or await self._find(name)
                self._handles[name] = handle
                return await call(handle)
        except (WorkerError, TimeoutError):
            self._handles.pop(name, None)
            return None


class PromptTokens:
    """Chooses where a prompt is encoded."""

    def __init__(self, encoder: PromptEncoder, batchers: Batchers) -> None:
        self.batchers = batchers
        self._encoder = encoder
        rendering_s = encoder.rendering_s()
        self._renders_here = rendering_s is not None and rendering_s <= MAX_RENDERING_S
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prompts")
        self._num_in_threads = 0

    async def tokenize(
        self, prompts: Sequence[Prompt], hasher: RequestHasher | None = None, salt: str = ""
    ) -> list[TokenizedPrompt]:
        """Returns the ids of a request's prompts, with block hashes if there is a hasher.

        Raises RequestError for a prompt that has none, CapacityError if no batcher answers.
        """
        num_chars = sum(num_prompt_chars(p) for p in prompts if not isinstance(p, list))
        is_short = num_chars <= MAX_INLINE_CHARS
        return await asyncio.gather(
            *(self._tokenize(prompt, hasher, salt, is_short=is_short) for prompt in prompts)
        )

    async def ids_of(self, request: TokenizeRequest) -> list[int]:
        """Returns a prompt's ids; raises as `tokenize`."""
        (tokenized,) = await self.tokenize([request])
        return tokenized.ids

    async def _tokenize(
        self, prompt: Prompt, hasher: RequestHasher | None, salt: str, *, is_short: bool
    ) -> TokenizedPrompt:
        """is_short: it, and those that came with it, can be encoded before anything else runs."""
        if isinstance(prompt, list):
            ids = prompt
        else:
            encoded = await self._encode_here(prompt, is_short=is_short)
            if encoded is None:
                return await self._ask(prompt, hasher, salt)
            ids = encoded
        if hasher is None:
            return TokenizedPrompt(ids, [])
        if len(ids) <= MAX_HASHED_HERE_TOKENS:
            return TokenizedPrompt(ids, hasher.chain(ids, salt))
        hashed = await self._ask(TokenizeRequest(token_ids=ids), hasher, salt)
        return TokenizedPrompt(ids, hashed.block_hashes)

    async def _encode_here(self, request: TokenizeRequest, *, is_short: bool) -> list[int] | None:
        """Returns the prompt's ids; None = a batcher is to encode it."""
        if request.messages is not None and not self._renders_here:
            return None
        try:
            if is_short:
                return self._encoder.encode(request)
            if self._num_in_threads < NUM_THREADS and num_prompt_chars(request) <= MAX_THREAD_CHARS:
                return await self._encode_in_thread(request)
        except RequestError as error:
            raise RequestError(error.message, param=_param_of(request)) from error
        return None

    async def _encode_in_thread(self, request: TokenizeRequest) -> list[int]:
        self._num_in_threads += 1
        encoding = self._threads.submit(self._encoder.encode, request)
        loop = asyncio.get_running_loop()
        encoding.add_done_callback(lambda _: loop.call_soon_threadsafe(self._leave_thread))
        return await asyncio.wrap_future(encoding)

    def _leave_thread(self) -> None:
        self._num_in_threads -= 1

    async def _ask(
        self, request: TokenizeRequest, hasher: RequestHasher | None, salt: str
    ) -> TokenizedPrompt:
        hash_params = None if hasher is None else hasher.hash_params
        reply = await self.batchers.ask(
            msgspec.structs.replace(request, hash_params=hash_params, salt=salt)
        )
        return TokenizedPrompt(reply.token_ids, reply.block_hashes)


def num_prompt_chars(request: TokenizeRequest) -> int:
    """Counts the characters of a prompt's text, or of its messages and what its template gets."""
    num_chars = len(request.text or "") + _num_chars(request.messages)
    return num_chars + _num_chars(request.chat_template_kwargs)


def _num_chars(value: object) -> int:
    """Counts the characters of all strings in a JSON value."""
    match value:
        case str():
            return len(value)
        case list():
            return sum(map(_num_chars, value))
        case dict():
            return sum(map(_num_chars, value.values()))
    return 0


def _param_of(request: TokenizeRequest) -> str:
    return "messages" if request.messages else "prompt"
