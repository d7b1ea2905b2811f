"""The unified engine in this process, without Ray and without HTTP: prompts in, tokens out."""

import gc
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from configs.schema import AppConfig
from engine.build import build_engine
from engine.clock import MonotonicClock
from engine.engine import Engine
from engine.layers.context import SINGLE_RANK, Comm
from engine.models.llama import CausalLM
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.scheduling.contracts import StepOutput


class EngineInProcess:
    """Steps on the calling thread; nothing is left of a request when its last token is out."""

    def __init__(
        self, config: AppConfig, model: CausalLM | None = None, comm: Comm = SINGLE_RANK
    ) -> None:
        """Loads the model, if none is given, and warms up. Raises ConfigError if it cannot.

        comm: to other ranks, which build at the same time; `engine.core` has to lead them then.
        """
        self.engine: Engine = _build(config, model, comm)
        self.config = config  # of the engine
        self.num_ranks = comm.rank.size
        self._num_requests = 0

    def restart(self, config: AppConfig) -> None:
        """Go on as `config` says with the same weights and as many KV blocks. Raises ConfigError.

        Nothing may be running. The old engine's KV memory is free before the new one takes any.
        """
        assert not self.engine.core.has_work, "requests are running"
        assert config.model == self.config.model, "other weights need another engine"
        model = self.engine.executor.model
        cache = msgspec.structs.replace(config.cache, num_blocks=self.engine.cache.num_blocks)
        del self.engine
        gc.collect()
        torch.cuda.empty_cache()  # or pieces of the old KV store would be in the new one's way
        self.config = msgspec.structs.replace(config, cache=cache)
        self.engine = _build(self.config, model)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        on_step: Callable[[StepOutput], None] = lambda _: None,
    ) -> list[list[int]]:
        """`num_tokens` greedy tokens for each prompt, all of them running together.

        `on_step` is called with each step's output.
        """
        keys = [self.add(prompt, num_tokens) for prompt in prompts]
        tokens: dict[RequestKey, list[int]] = {key: [] for key in keys}

        def keep(output: StepOutput) -> None:
            for _, record in output.tokens:
                tokens[record.key].append(record.token_id)
            on_step(output)

        self.run_until_idle(keep)
        return [tokens[key] for key in keys]

    def first_token_s(self, prompt: Sequence[int]) -> float:
        """Seconds from adding a prompt to its first token."""
        started_s = time.perf_counter()
        self.generate([prompt], 1)
        return time.perf_counter() - started_s

    def add(self, prompt: Sequence[int], num_tokens: int, *, ingress: str = "bench") -> RequestKey:
        """Queue a prompt, greedy and without an end of sequence, as `submit` does."""
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        return self.submit(prompt, params, ingress=ingress)

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, ingress: str = "bench"
    ) -> RequestKey:
        """Queue a prompt; its tokens appear in the outputs of the steps that follow."""
        self._num_requests += 1
        key = RequestKey(f"{self._num_requests:032x}")
        self.engine.core.scheduler.add(
            Request(
                spec=RequestSpec(params=params),
                key=key,
                ingress_id=ingress,
                tokens=list(prompt),
                num_prompt_tokens=len(prompt),
                arrival_s=time.monotonic(),
            )
        )
        return key

    def step(self) -> StepOutput:
        """One step. Raises AssertionError when a request failed: then a figure means nothing."""
        output = self.engine.core.step()
        assert not output.failures, f"failed: {output.failures}"
        return output

    def run_until_idle(self, on_step: Callable[[StepOutput], None]) -> None:
        """Step until every request has left."""
        while self.engine.core.has_work:
            on_step(self.step())


def _build(config: AppConfig, model: CausalLM | None = None, comm: Comm = SINGLE_RANK) -> Engine:
    return build_engine(config, "bench", MonotonicClock(), _no_handoff, model=model, comm=comm)


def _no_handoff(event: object) -> None:
    raise AssertionError(f"{event} in a unified engine")
