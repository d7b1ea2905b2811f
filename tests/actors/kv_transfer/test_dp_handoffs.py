"""Whole engines apart, one or both of two ranks with requests of their own: one rank's answers.

Books, pieces and stores are the real ones; a loop in place of calls and channels moves whole
prompts, as each channel does. With calls, channels and deaths:
tests/cluster/test_dp_attention_on_ray.py.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from actors.kv_transfer.channels.worker_channels import Pieces
from actors.kv_transfer.contracts import StagedPiece, StoredBlocks
from actors.kv_transfer.kv_pieces import KvPieces
from actors.kv_transfer.own_blocks import OwnBlockPieces, OwnBlockSources
from configs.load import load_config
from engine.build import build_engine
from engine.clock import MonotonicClock
from engine.engine import Engine
from engine.kv.cache import check_blocks
from engine.kv.transfer import HandoffReady, IncomingHandoffs, OutgoingEvent
from engine.layers.context import SINGLE_RANK, Comm
from engine.messages import PieceHeader, Reservation, ReserveRequest, Role, WorkerIdentity
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.scheduling.dp_scheduler import DpScheduler
from tests.harness.in_process import answer, start_engine
from tests.harness.led_ranks import LedRanks
from tests.harness.rank_processes import TIMEOUT_S, RankProcesses
from tests.harness.tiny_models import LATENT_ON_GPU, VOCAB_SIZE, save_model

SETTINGS: dict[str, Any] = {
    "scheduler.max_num_batched_tokens": 24,  # so that prompts are computed in chunks
    "scheduler.max_num_seqs": 4,
    "scheduler.overlap": True,
    "cache.num_blocks": 64,
    "cache.block_size": 8,
    "workers.unified": 0,
    "workers.prefill": 1,
    "workers.decode": 1,
    "workers.expert_parallel": True,
    "workers.enable_dp_attention": True,
}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, temperature=1.1, top_p=0.9, seed=3, ignore_eos=True)
ROLES: tuple[Role, Role] = ("prefill", "decode")
ON_GPUS: dict[str, object] = {
    "model.device": "cuda",
    "model.deterministic": True,  # so that answers do not depend on who computes beside whom
    "workers.num_gpus": 1,
    "cache.block_size": 16,
    "cache.num_blocks": 128,
}
Way = Literal["host", "pulled", "staged"]  # as gloo or the object store, CUDA IPC, NCCL move pieces


@pytest.fixture(scope="module")
def gangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Role, RankProcesses]]:
    """Two ranks for each side."""
    with ExitStack() as stack:
        yield {
            role: stack.enter_context(RankProcesses(2, tmp_path_factory.mktemp(role)))
            for role in ROLES
        }


def _ignore(_: OutgoingEvent) -> None:
    """Only rank 0 sends KV on."""


def _build(
    comm: Comm,
    folder: Path,
    sizes: tuple[int, int],
    role: Role,
    more: dict[str, object],
    notify: Any = _ignore,
) -> Engine:
    config = load_config(
        None,
        SETTINGS
        | more
        | {
            "model.path": str(folder),
            "workers.prefill_tensor_parallel_size": sizes[0],
            "workers.decode_tensor_parallel_size": sizes[1],
        },
    )
    return build_engine(config, "m", MonotonicClock(), notify, bytes(32), role=role, comm=comm)


class Pair:
    """A prefill and a decode engine, whose other ranks follow."""

    def __init__(
        self,
        stack: ExitStack,
        gangs: dict[Role, RankProcesses],
        folder: Path,
        sizes: tuple[int, int],
        more: dict[str, object] | None = None,
        way: Way = "host",
    ) -> None:
        self._way = way
        self.ready: list[HandoffReady] = []
        self.engines: dict[Role, Engine] = {}
        self.pieces: dict[Role, Pieces] = {}
        for role, size in zip(ROLES, sizes, strict=True):
            given = folder, sizes, role, more or {}
            if size == 1:
                self.engines[role] = engine = _build(SINGLE_RANK, *given, self._note)
                self.pieces[role] = KvPieces(engine.kv_store, num_threads=1)
                continue
            led = stack.enter_context(LedRanks(gangs[role], _build, *given))
            self.engines[role] = engine = _build(gangs[role].comm, *given, self._note)
            led.lead_engine(engine)
            stores = engine.rank_stores
            self.pieces[role] = OwnBlockPieces(stores, led.steps, TIMEOUT_S, num_threads=1)
        decode = self.engines["decode"]
        self.incoming = IncomingHandoffs(
            decode.joining_ranks,
            hasher=decode.hasher,
            identity=self._identity("decode"),
            clock=MonotonicClock(),
            lease_s=60.0,
            max_rows=decode.limits.scheduler.max_num_seqs,
        )

    def _note(self, event: OutgoingEvent) -> None:
        if isinstance(event, HandoffReady):
            self.ready.append(event)

    def _identity(self, role: Role) -> WorkerIdentity:
        engine = self.engines[role]
        return WorkerIdentity(
            name=role,
            incarnation=role,
            role=role,
            model="m",
            layout=engine.whole_layout,
            max_model_len=engine.max_model_len,
            pid=1,
        )

    def answer(self, asked: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
        """As many as fit the decode side at once."""
        found: dict[RequestKey, list[int]] = {}
        for number, (prompt, params) in enumerate(asked):
            key = RequestKey(f"{number + 1000 * self.incoming.statistics().num_reserved:032x}")
            found[key] = []
            request = Request(
                key=key,
                ingress_id="test",
                spec=RequestSpec(params=params),
                tokens=list(prompt),
                num_prompt_tokens=len(prompt),
                arrival_s=0.0,
                decode_worker="decode",
            )
            self.engines["prefill"].core.scheduler.add(request)
        asked_of = dict(zip(found, asked, strict=True))
        self._run("prefill", found)
        for event in self.ready:
            asyncio.run(self._hand_over(event, *asked_of[event.key]))
        self.ready.clear()
        self._run("decode", found)
        self._check_books()
        return list(found.values())

    def _run(self, role: Role, found: dict[RequestKey, list[int]]) -> None:
        core = self.engines[role].core
        while core.has_work:
            output = core.step()
            assert not output.failures
            for _, record in output.tokens:
                found[record.key].append(record.token_id)

    async def _hand_over(
        self, event: HandoffReady, prompt: list[int], params: SamplingParams
    ) -> None:
        reservation = self.incoming.reserve(
            ReserveRequest(
                key=event.key,
                sender=self._identity("prefill"),
                ingress_id="test",
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                spec=RequestSpec(params=params),
            )
        )
        assert isinstance(reservation, Reservation), reservation
        first, end = reservation.num_hit_blocks, reservation.num_blocks
        piece: StagedPiece[Any] = StagedPiece(data=b"", digests=[])
        if first < end:
            piece = await self.pieces["prefill"].read(event.block_ids[first:end])
        header = PieceHeader(
            transfer_id=reservation.transfer_id,
            key=event.key,
            sender="prefill",
            sender_incarnation="prefill",
            epoch=1,
            seq=0,
            first_block=first,
            num_blocks=end - first,
            digests=piece.digests,
            first_token_id=event.first_token_id,
        )
        write = self.incoming.begin_write(header)
        if write.block_ids:
            self.pieces["decode"].fence()
            assert await self._move(piece, write.block_ids)
        assert self.incoming.end_write(event.key, write, is_verified=True)
        self.incoming.commit(header)
        self.engines["prefill"].outgoing.release(event.key)

    async def _move(self, piece: StagedPiece[Any], to_ids: list[int]) -> bool:
        source, target = (self.pieces[role] for role in ROLES)
        if not isinstance(piece.data, StoredBlocks):
            return await target.write(to_ids, piece)
        if self._way == "host":
            data = await source.to_host(piece.data)
            return await target.write(to_ids, StagedPiece(data=data, digests=piece.digests))
        from_ids = list(piece.data.block_ids)
        assert isinstance(source, OwnBlockPieces)
        assert isinstance(target, OwnBlockPieces)
        if self._way == "pulled":
            stores = OwnBlockSources([one.store.tensor for one in source.stores], source.whole)
            return await target.pull(stores, from_ids, to_ids, piece.digests)
        slot = torch.empty(piece.data.nbytes, dtype=torch.uint8, device=source.device)
        loaded = source.queue_load(from_ids, slot)
        if loaded is not None:
            loaded.synchronize()
        taken = target.queue_take(slot, to_ids)
        taken.wait()
        return bool(taken.digests.tolist() == piece.digests)

    def _check_books(self) -> None:
        for role in ROLES:
            engine = self.engines[role]
            held = self.incoming if role == "decode" else engine.outgoing
            check_blocks(engine.cache, [*engine.core.scheduler.owners(), *held.owners()])
            assert engine.cache.num_held == 0


@pytest.mark.parametrize(
    ("architecture", "more", "sizes"),
    [
        ("DeepseekV3ForCausalLM", {}, (2, 2)),
        ("DeepseekV3ForCausalLM", {}, (1, 2)),
        ("DeepseekV3ForCausalLM", {}, (2, 1)),
        ("Qwen3MoeForCausalLM", {"num_experts": 8}, (2, 2)),
    ],
    ids=str,
)
def test_answers_are_those_of_one_rank(
    architecture: str,
    more: dict[str, object],
    sizes: tuple[int, int],
    gangs: dict[Role, RankProcesses],
    tmp_path: Path,
) -> None:
    """And again, when both sides have the prompts' blocks."""
    save_model(tmp_path, architecture, seed=7, max_position_embeddings=512, **more)
    prompts = [list(range(n, 2 * n + 5)) for n in (3, 9, 20, 31)]
    asked = [(prompt, params) for params in (GREEDY, DRAWN) for prompt in prompts]
    alone = start_engine(model__path=str(tmp_path))
    expected = [one.tokens for one in answer(alone, asked)]
    with ExitStack() as stack:
        pair = Pair(stack, gangs, tmp_path, sizes)
        at_once = 8 if sizes[1] == 2 else 4
        for _ in range(2):
            parts = [asked[i : i + at_once] for i in range(0, len(asked), at_once)]
            assert [one for part in parts for one in pair.answer(part)] == expected
        for role in ROLES:
            scheduler = pair.engines[role].core.scheduler
            if isinstance(scheduler, DpScheduler):
                numbers = [one.statistics().num_steps for one in scheduler.of_rank]
                assert all(numbers), "both ranks had requests"
        assert pair.incoming.statistics().num_hit_blocks > 0


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_answers_on_two_gpus_are_those_of_workers_that_do_both(tmp_path: Path) -> None:
    """Both gangs on the same GPUs; over what each channel uses."""
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = LATENT_ON_GPU["DeepseekV3ForCausalLM"] | {"max_position_embeddings": 1024}
    save_model(folder, "DeepseekV3ForCausalLM", seed=5, **sizes)
    prompts = [[i % VOCAB_SIZE for i in range(n, 2 * n + 5)] for n in (3, 9, 40, 71)]
    asked = [(prompt, params) for params in (GREEDY, DRAWN) for prompt in prompts]
    with ExitStack() as stack:
        gangs = {}
        for role in ROLES:
            (tmp_path / role).mkdir()
            gangs[role] = stack.enter_context(RankProcesses(2, tmp_path / role, "cuda"))
        given = folder, (2, 2), "unified", ON_GPUS
        with LedRanks(gangs["prefill"], _build, *given) as led:
            both = _build(gangs["prefill"].comm, *given)
            led.lead_engine(both)
            expected = [one.tokens for one in answer(both, asked)]
        ways: tuple[Way, ...] = ("host", "pulled", "staged")
        for way in ways:
            with ExitStack() as of_way:
                pair = Pair(of_way, gangs, folder, (2, 2), ON_GPUS, way)
                assert pair.answer(asked) == expected, way
                assert pair.answer(asked) == expected, way
