"""From a validated request to text deltas: tokenise, generate every choice, detokenise.

Knows no HTTP and no OpenAI objects; the ingress turns deltas into those.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import msgspec

from actors.ingress.generation import GenerationJob, Generations, new_request_id
from actors.ingress.prompt_tokens import PromptTokens
from actors.observability.metrics import IngressMetrics
from actors.observability.request_times import RequestTimes, WorkerPair
from actors.openai.bad_words import banned_sequences
from actors.openai.chat_text import hold_behind_thinking
from actors.openai.protocol import (
    ParsedRequest,
    check_totals,
    child_seed,
    replace_params,
    resolve_sampling,
)
from actors.openai.response_parts import read_records
from actors.openai.response_writers import build_output_text
from actors.openai.served_model import ServedModel
from engine.clock import Clock
from engine.length_class import LengthClass, LinearCost, classify
from engine.messages import Assign, TokenRecord
from engine.request import RequestSpec
from engine.text.output_text import OutputText, TextDelta
from engine.text.tokenizing import Tokenizing

MAX_PENDING_DELTAS = 256  # per request, if its client reads slowly


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
    """What the tokens of one or more steps add to one choice; choices are numbered prompt by
    prompt.
    """

    choice: int
    delta: TextDelta


class RequestPipeline:
    """Runs requests through batchers and workers for one ingress replica."""

    def __init__(
        self,
        *,
        model: ServedModel,
        tokenizing: Tokenizing,
        prompts: PromptTokens,
        generations: Generations,
        metrics: IngressMetrics,
        clock: Clock,
        timeout_s: float,
        max_short_tokens: int,
    ) -> None:
        """max_short_tokens: a prompt of at most so many uncached tokens counts as short."""
        self._model = model
        self._tokenizing = tokenizing
        self._prompts = prompts
        self._generations = generations
        self._metrics = metrics
        self._clock = clock
        self._timeout_s = timeout_s
        self._max_short_tokens = max_short_tokens

    async def prepare(self, parsed: ParsedRequest, times: RequestTimes) -> PreparedRequest:
        """Tokenises and checks lengths. Raises RequestError, CapacityError or TimeoutError."""
        async with asyncio.timeout(self._timeout_s):
            if parsed.sampling.constraint is not None:
                await self._prompts.batchers.check(parsed.sampling.constraint)
            hasher, salt = self._generations.hasher, parsed.spec.salt
            prompts = await self._prompts.tokenize(parsed.prompts, hasher, salt)
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
            async with aclosing(self._generate(choice)) as batches:
                async for records in batches:
                    yield choice.read(records)
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

    def _choice(self, request: PreparedRequest, index: int) -> "_Choice":
        output = build_output_text(request.parsed, self._tokenizing)
        return _Choice(request, index, output, self._metrics, self._clock, self._max_short_tokens)

    def _generate(self, choice: "_Choice") -> AsyncGenerator[list[TokenRecord], None]:
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
                async with aclosing(self._generate(choice)) as batches:
                    async for records in batches:
                        await queue.put(choice.read(records))
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
        max_short_tokens: int,
    ) -> None:
        """index: choices are numbered prompt by prompt."""
        self.is_finished = False
        self._is_placed = False
        self._request = request
        self._index = index
        self._prompt, self._child = divmod(index, request.parsed.n)
        self._output = output
        self._metrics = metrics
        self._clock = clock
        self._max_short_tokens = max_short_tokens
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
        """Notes the workers of an attempt, the first of which counts as the choice's placement."""
        times = self._request.times
        if self._index == 0:
            workers = WorkerPair(
                assign.prefill_worker, assign.decode_worker or assign.prefill_worker
            )
            times.attempts.append(workers)
        if self._is_placed:
            return
        self._is_placed = True
        if self._index == 0:
            times.placed_s = self._clock.now_s()
        self._metrics.classes.count_placed(assign)

    def on_joined(self) -> None:
        """Notes that the choice's KV has arrived at a decode worker."""
        if self._index == 0:
            self._request.times.moved_s = self._clock.now_s()

    def read(self, records: Sequence[TokenRecord]) -> ChoiceDelta:
        """Returns the text that the next tokens add. A stop string may end it before the last."""
        delta = read_records(records, self._output)
        self._count(records[0], len(delta.tokens))
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

    def _length_class(self, num_cached_tokens: int) -> LengthClass:
        """Returns the class of what was computed; placement may not have known what is cached."""
        num_new = self._num_prompt_tokens - num_cached_tokens
        return classify(num_new, num_cached_tokens, self._max_short_tokens, LinearCost())

    def _count(self, first: TokenRecord, num_tokens: int) -> None:
        """Counts tokens that came together, the first of which is `first`."""
        metrics, times, now_s = self._metrics, self._request.times, self._clock.now_s()
        num_gaps = num_tokens
        if first.index == 0:
            num_gaps -= 1
            self._first_s = now_s
            ttft_s = now_s - times.arrived_s
            metrics.latencies.observe_ttft(ttft_s)
            num_cached = first.num_cached_tokens or 0
            metrics.classes.observe_ttft(self._length_class(num_cached), ttft_s)
            metrics.count_cached(num_cached, self._num_prompt_tokens)
            self._last_s = now_s
        if num_gaps > 0:
            metrics.latencies.observe_gaps(now_s - self._last_s, num_gaps)
        if self._index == 0:
            times.see_tokens(first.index, max(num_tokens, 1), now_s, first.waited_s)
        metrics.count_tokens(num_tokens)
        self._num_tokens += num_tokens
        self._last_s = now_s
