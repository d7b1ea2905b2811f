"""From a validated request to text deltas: tokenise, generate every choice, detokenise.

Knows no HTTP and no OpenAI objects; the ingress turns deltas into those.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from actors.ingress.generation import GenerationJob, Generations, new_request_id
from actors.observability.metrics import IngressMetrics
from actors.observability.request_times import RequestTimes
from actors.openai.bad_words import banned_sequences
from actors.openai.chat_text import hold_behind_thinking
from actors.openai.protocol import (
    ParsedRequest,
    Prompt,
    ServedModel,
    check_totals,
    child_seed,
    replace_params,
    resolve_sampling,
)
from actors.openai.response_parts import read_record
from actors.openai.response_writers import build_output_text
from actors.rpc.handles import BatcherHandle
from engine.clock import Clock
from engine.errors import CapacityError, RequestError, WorkerError
from engine.messages import Assign, TokenizeReply, TokenizeRequest, TokenRecord
from engine.request import Constraint, RequestSpec
from engine.text.output_text import OutputText, TextDelta
from engine.text.tokenizing import Tokenizing

T = TypeVar("T")

TOKENIZER_TIMEOUT_S = 20.0  # far longer than the largest prompt takes
CHECK_TIMEOUT_S = 60.0  # a check limits itself, but others may be queued before it
CHECK_RETRY_S = 10.0
BATCHER_RETRY_S = 0.2  # then batchers that were away are asked again
# Hashing the blocks of so many ids takes 0.06 ms here, and asking a batcher some ms.
MAX_NAMED_HERE_TOKENS = 512
MAX_PENDING_DELTAS = 256  # per request, if its client reads slowly


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt's tokens, and the hashes of its full blocks; none while no worker is known."""

    ids: list[int]
    block_hashes: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request whose prompts are tokens and fit the context."""

    parsed: ParsedRequest
    request_ids: list[str]  # per prompt; its n choices share one
    prompt_ids: list[list[int]]  # per prompt
    block_hashes: list[list[bytes]]  # per prompt, for all its choices
    specs: list[RequestSpec]  # per prompt, with the request's own seed
    times: RequestTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDelta:
    """What one step adds to one choice; choices are numbered prompt by prompt."""

    choice: int
    delta: TextDelta


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

    async def tokenize(self, request: TokenizeRequest) -> list[int]:
        """Returns token ids; raises as `ask`."""
        return (await self.ask(request)).token_ids

    async def ask(self, request: TokenizeRequest) -> TokenizeReply:
        """Returns the ids and block hashes that are asked for.

        Raises RequestError for text that has no ids, CapacityError if no batcher answers.
        Tokenising is a pure function, so a batcher that dies is simply replaced by the next.
        """
        reply = await self._any(lambda handle: handle.tokenize(request), TOKENIZER_TIMEOUT_S)
        if reply.error is not None:
            param = "messages" if request.messages else "prompt"
            raise RequestError(reply.error, param=param)
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


class RequestPipeline:
    """Runs requests through batchers and workers for one ingress replica."""

    def __init__(
        self,
        *,
        model: ServedModel,
        tokenizing: Tokenizing,
        batchers: Batchers,
        generations: Generations,
        metrics: IngressMetrics,
        clock: Clock,
        timeout_s: float,
    ) -> None:
        self._model = model
        self._tokenizing = tokenizing
        self._batchers = batchers
        self._generations = generations
        self._metrics = metrics
        self._clock = clock
        self._timeout_s = timeout_s

    async def prepare(self, parsed: ParsedRequest, times: RequestTimes) -> PreparedRequest:
        """Tokenises and checks lengths. Raises RequestError, CapacityError or TimeoutError."""
        async with asyncio.timeout(self._timeout_s):
            if parsed.sampling.constraint is not None:
                await self._batchers.check(parsed.sampling.constraint)
            prompts = await asyncio.gather(
                *(self._tokenize(prompt, parsed.spec.salt) for prompt in parsed.prompts)
            )
        prompt_ids = [prompt.ids for prompt in prompts]
        check_totals(parsed, list(map(len, prompt_ids)))
        sampling = [
            hold_behind_thinking(
                resolve_sampling(parsed, len(ids), self._model.max_model_len),
                parsed,
                ids,
                self._tokenizing,
            )
            for ids in prompt_ids
        ]
        banned = banned_sequences(parsed.bad_words, self._tokenizing)
        sampling = [msgspec.structs.replace(s, banned_sequences=banned) for s in sampling]
        spec = msgspec.structs.replace(parsed.spec, deadline_s=self._timeout_s)
        times.tokenized_s = self._clock.now_s()
        self._metrics.count_prompt(sum(map(len, prompt_ids)))
        for params in sampling:
            self._metrics.latencies.observe_params(parsed.n, params.max_tokens)
        return PreparedRequest(
            parsed=parsed,
            request_ids=[new_request_id() for _ in prompt_ids],
            prompt_ids=prompt_ids,
            block_hashes=[prompt.block_hashes for prompt in prompts],
            specs=[replace_params(spec, params) for params in sampling],
            times=times,
        )

    async def run(self, request: PreparedRequest) -> AsyncGenerator[ChoiceDelta, None]:
        """Yields deltas of all choices as they come, each choice's in order.

        Ends when every choice has finished. Closing it early cancels all of them; the first
        error of any choice cancels the others and is raised.
        """
        num_choices = request.parsed.num_choices
        if num_choices == 1:  # no queue, no task
            choice = self._choice(request, 0)
            async with aclosing(self._generate(choice)) as records:
                async for record in records:
                    yield choice.read(record)
                    if choice.is_finished:
                        break
        else:
            async with self._merged(request, num_choices) as queue:
                num_running = num_choices
                while num_running > 0:
                    item = await queue.get()
                    if isinstance(item, Exception):
                        raise item
                    yield item
                    num_running -= item.delta.finish is not None
        self._metrics.latencies.observe_e2e(self._clock.now_s() - request.times.arrived_s)

    # ---- parts ----------------------------------------------------------------------------------

    async def _tokenize(self, prompt: Prompt, salt: str) -> TokenizedPrompt:
        """Tokenises a prompt and hashes its blocks, in one call of a batcher if any is needed."""
        hasher = self._generations.hasher
        hash_params = None if hasher is None else hasher.hash_params
        if not isinstance(prompt, list):
            asked = msgspec.structs.replace(prompt, hash_params=hash_params, salt=salt)
            reply = await self._batchers.ask(asked)
            return TokenizedPrompt(reply.token_ids, reply.block_hashes)
        if hasher is None or len(prompt) <= MAX_NAMED_HERE_TOKENS:
            return TokenizedPrompt(prompt, [] if hasher is None else hasher.chain(prompt, salt))
        asked = TokenizeRequest(token_ids=prompt, hash_params=hash_params, salt=salt)
        return TokenizedPrompt(prompt, (await self._batchers.ask(asked)).block_hashes)

    def _choice(self, request: PreparedRequest, index: int) -> "_Choice":
        output = build_output_text(request.parsed, self._tokenizing)
        return _Choice(request, index, output, self._metrics, self._clock)

    def _generate(self, choice: "_Choice") -> AsyncGenerator[TokenRecord, None]:
        return self._generations.run(choice.job(), choice.on_placed, choice.on_joined)

    @asynccontextmanager
    async def _merged(
        self, request: PreparedRequest, num_choices: int
    ) -> AsyncGenerator[asyncio.Queue[ChoiceDelta | Exception], None]:
        """Runs all choices at once; yields a queue of their deltas in order of arrival.

        Leaving the context cancels the choices that still run.
        """
        queue: asyncio.Queue[ChoiceDelta | Exception] = asyncio.Queue(MAX_PENDING_DELTAS)

        async def feed(index: int) -> None:
            choice = self._choice(request, index)
            try:
                async with aclosing(self._generate(choice)) as records:
                    async for record in records:
                        await queue.put(choice.read(record))
                        if choice.is_finished:
                            return
                # Without this the reader would wait for ever.
                assert choice.is_finished, f"choice {index} ended without a finish"
            except Exception as error:  # noqa: BLE001 - raised by the reader of the queue
                await queue.put(error)

        tasks = [asyncio.create_task(feed(index)) for index in range(num_choices)]
        try:
            yield queue
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Choice:
    """One choice from its first token to its finish: its text, and its times for the metrics."""

    def __init__(
        self,
        request: PreparedRequest,
        index: int,
        output: OutputText,
        metrics: IngressMetrics,
        clock: Clock,
    ) -> None:
        """index: choices are numbered prompt by prompt."""
        self.is_finished = False
        self._request = request
        self._index = index
        self._prompt, self._child = divmod(index, request.parsed.n)
        self._output = output
        self._metrics = metrics
        self._clock = clock
        self._assign: Assign | None = None  # set before the first token
        self._num_tokens = 0
        self._first_s = 0.0
        self._last_s = 0.0

    def job(self) -> GenerationJob:
        request, spec = self._request, self._request.specs[self._prompt]
        params = msgspec.structs.replace(
            spec.params, seed=child_seed(spec.params.seed, self._index)
        )
        # A prompt whose scores are wanted is computed whole, whatever is cached.
        is_cacheable = params.prompt_logprobs is None
        return GenerationJob(
            request_id=request.request_ids[self._prompt],
            child=self._child,
            prompt_ids=request.prompt_ids[self._prompt],
            block_hashes=request.block_hashes[self._prompt] if is_cacheable else [],
            spec=replace_params(spec, params),
            arrived_s=request.times.arrived_s,
        )

    def on_placed(self, assign: Assign) -> None:
        """Notes the workers of the choice's first attempt."""
        self._assign = assign
        if self._index == 0:
            self._request.times.placed_s = self._clock.now_s()
        self._metrics.classes.count_placed(assign)

    def on_joined(self) -> None:
        """Notes that the choice's KV has arrived at a decode worker."""
        if self._index == 0:
            self._request.times.moved_s = self._clock.now_s()

    def read(self, record: TokenRecord) -> ChoiceDelta:
        """Returns the text that the next token adds."""
        self._count(record)
        delta = read_record(record, self._output)
        if delta.finish is not None:
            self.is_finished = True
            self._metrics.count_finished(delta.finish.value)
            self._metrics.latencies.observe_choice(
                self._num_prompt_tokens, self._num_tokens, self._last_s - self._first_s
            )
        return ChoiceDelta(choice=self._index, delta=delta)

    @property
    def _num_prompt_tokens(self) -> int:
        return len(self._request.prompt_ids[self._prompt])

    def _count(self, record: TokenRecord) -> None:
        metrics, times, now_s = self._metrics, self._request.times, self._clock.now_s()
        if record.index == 0:
            assert self._assign is not None, "a token before its placement"
            self._first_s = now_s
            ttft_s = now_s - times.arrived_s
            metrics.latencies.observe_ttft(ttft_s)
            metrics.classes.observe_ttft(self._assign.length_class, ttft_s)
            metrics.count_cached(record.num_cached_tokens or 0, self._num_prompt_tokens)
        else:
            metrics.latencies.observe_gap(now_s - self._last_s)
        if self._index == 0:
            times.see_token(record.index, now_s, record.waited_s)
        metrics.count_tokens(int(record.is_output))
        self._num_tokens += record.is_output
        self._last_s = now_s
