"""The tokenizer actor: prompts that arrive together are rendered and encoded in one call.

It also hashes a prompt's blocks if asked to: that takes time in proportion to the prompt, and an
ingress has one event loop for all its clients. All of it runs in one worker thread, so the event
loop here stays free for messages. It also checks constraints, in processes of their own. Knows
nothing of sampling, placement or HTTP.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from actors.dynamic_batcher import BatchStatistics, DynamicBatcher
from actors.lifecycle.deployment import DeploymentSpec
from actors.lifecycle.liveness import Lifeline
from actors.observability.logs import set_up_logging
from actors.rpc.server import CallServer, listen_address
from configs.schema import TokenizerConfig
from engine.constraints.checks import ConstraintChecks
from engine.errors import RequestError
from engine.kv.hashes import RequestHasher
from engine.messages import (
    ConstraintVerdict,
    TokenizeReply,
    TokenizeRequest,
    decode,
    encode,
)
from engine.models.spec import load_spec
from engine.request import Constraint
from engine.text.prompt_encoder import load_prompt_encoder

MAX_NAMINGS = 8  # hashers kept at once; a redeploy brings another key


class PromptTokenizer:
    """Turns text or chat messages into ids, and ids into block hashes, in batches, for one model.

    Raises ConfigError when the folder's tokenizer cannot be used.
    """

    def __init__(
        self, model_path: str, config: TokenizerConfig, num_embeddings: int | None = None
    ) -> None:
        """num_embeddings: of the model; see `Tokenizing`."""
        self._encoder = load_prompt_encoder(Path(model_path), num_embeddings)
        self._hasher_of = lru_cache(MAX_NAMINGS)(RequestHasher.of)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._batcher: DynamicBatcher[TokenizeRequest, TokenizeReply] = DynamicBatcher(
            self._run_in_thread,
            max_batch_size=config.max_batch_size,
            wait_timeout_s=config.batch_wait_timeout_s,
        )

    @property
    def has_chat_template(self) -> bool:
        return self._encoder.has_chat_template

    @property
    def vocab_size(self) -> int:
        return self._encoder.tokenizing.vocab_size

    def statistics(self) -> BatchStatistics:
        return self._batcher.statistics()

    async def tokenize(self, request: TokenizeRequest) -> TokenizeReply:
        """Returns ids, or the error of this prompt alone."""
        return await self._batcher.submit(request)

    def close(self) -> None:
        """Ends the worker thread once its batch is done."""
        self._thread.shutdown(wait=True)

    async def _run_in_thread(self, requests: Sequence[TokenizeRequest]) -> list[TokenizeReply]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self.encode_batch, requests)

    def encode_batch(self, requests: Sequence[TokenizeRequest]) -> list[TokenizeReply]:
        """Returns replies in order; blocks."""
        encoded = self._encoder.encode_batch(requests)
        return [self._reply(*pair) for pair in zip(requests, encoded, strict=True)]

    def _reply(self, request: TokenizeRequest, ids: list[int] | RequestError) -> TokenizeReply:
        if isinstance(ids, RequestError):
            return TokenizeReply(error=ids.message)
        hashes = []
        if request.hash_params is not None:
            hashes = self._hasher_of(request.hash_params).chain(ids, request.salt)
        return TokenizeReply(
            token_ids=ids if request.token_ids is None else [], block_hashes=hashes
        )


class TokenizerBatcher:
    """The actor around a `PromptTokenizer`."""

    def __init__(self, spec: DeploymentSpec, name: str) -> None:
        set_up_logging(spec.config.log_level)
        self._name = name
        self._model_path = spec.config.model.path
        num_embeddings = load_spec(Path(self._model_path)).vocab_size
        self._tokenizer = PromptTokenizer(self._model_path, spec.config.tokenizer, num_embeddings)
        self._checks = ConstraintChecks(self._model_path)
        self._server = CallServer(listen_address(spec.config), {"tokenize": self._tokenize})
        # Started only now: while the tokenizer loads no heartbeat is heard, and loading may take
        # longer than the allowed silence, after every restart again.
        self._lifeline = Lifeline.of(spec)

    def __repr__(self) -> str:
        """What Ray prints before this actor's log lines."""
        return self._name

    async def ping(self) -> None:
        """Heartbeat of a supervisor or an ingress."""
        self._lifeline.beat()

    async def address(self) -> bytes:
        """Returns the address at which a connection may call `tokenize`; see `CallServer`."""
        return await self._server.address()

    async def _tokenize(self, data: bytes) -> bytes:
        """TokenizeRequest -> TokenizeReply, encoded."""
        return encode(await self._tokenizer.tokenize(decode(data, TokenizeRequest)))

    async def check(self, data: bytes) -> bytes:
        """Constraint -> ConstraintVerdict, encoded. Raises CapacityError when too many wait."""
        check = self._checks.check(decode(data, Constraint))
        # Several callers may share a check, and none may cancel it for the others.
        verdict = await asyncio.shield(asyncio.wrap_future(check))
        return encode(ConstraintVerdict(error=verdict or None))

    async def describe(self) -> dict[str, object]:
        """Returns what process listings and the dashboard show."""
        statistics = self._tokenizer.statistics()
        return {
            "name": self._name,
            "model": self._model_path,
            "vocab_size": self._tokenizer.vocab_size,
            "has_chat_template": self._tokenizer.has_chat_template,
            "num_batches": statistics.num_batches,
            "num_prompts": statistics.num_items,
            "largest_batch": statistics.largest_batch,
            "num_queued": statistics.num_queued,
        }
