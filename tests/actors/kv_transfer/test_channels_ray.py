"""The real channels between real Ray actors."""

import os
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import psutil
import pytest
import ray

from actors.kv_transfer.rendezvous import Rendezvous
from actors.lifecycle.deployment import DeploymentSpec
from configs.schema import AppConfig, HandoffConfig, LifetimesConfig
from engine.messages import ChannelKind
from load_tests.testbed.deployed import wait_until
from tests.actors.kv_transfer.channel_actors import (
    LAYOUT,
    NAMESPACE,
    Host,
    random_bytes,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PATIENCE_S = 60.0
KINDS: list[ChannelKind] = ["gloo_pair", "object_store"]
# No test waits for these limits, and a process that stands still for seconds must not meet them.
CONFIG = HandoffConfig(
    piece_bytes=7 * LAYOUT.block_bytes, transfer_deadline_s=30.0, reserve_timeout_s=30.0
)


@pytest.fixture(scope="module")
def board(local_ray: None) -> Iterator[str]:
    """Name of a rendezvous actor."""
    yield new_board("board")
    ray.kill(boards.pop("board"))


def new_board(name: str) -> str:
    config = AppConfig(lifetimes=LifetimesConfig(supervisor_silence_s=600.0))
    spec = DeploymentSpec(
        config=config, model="", hash="", block_key=b"k" * 16, namespace=NAMESPACE
    )
    options = {"name": name, "namespace": NAMESPACE, "num_cpus": 0}
    actor = ray.remote(Rendezvous).options(**options).remote(spec, name)
    ray.get(actor.num_keys.remote(), timeout=PATIENCE_S)
    boards[name] = actor
    return name


boards: dict[str, Any] = {}


class Pair:
    """A sending and a receiving process."""

    def __init__(self, board: str) -> None:
        self.board = board
        self.sender = new_host()
        self.receiver = new_host()

    def open(self, kind: ChannelKind, epoch: int, deadline_s: float = 30.0) -> None:
        """deadline_s: also of the other process's start."""
        opening = [
            self.sender.open.remote(self.board, deadline_s, kind, epoch, sends=True),
            self.receiver.open.remote(self.board, deadline_s, kind, epoch, sends=False),
        ]
        assert ray.get(opening, timeout=PATIENCE_S) == ["open", "open"]

    def send(self, seed: int, num_bytes: int) -> Any:
        return self.sender.send.remote(self.receiver, seed, num_bytes)

    def listening(self) -> set[tuple[str, int]]:
        """Address and port of each TCP socket on which either process listens."""
        pids = [actor.__ray_call__.remote(lambda _: os.getpid()) for actor in self._both()]
        return {
            tuple(connection.laddr)
            for pid in ray.get(pids, timeout=PATIENCE_S)
            for connection in psutil.Process(pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }

    def _both(self) -> tuple[Any, Any]:
        return self.sender, self.receiver

    def close(self) -> None:
        """Close the channels; nothing of them may stay in either process."""
        for actor in self._both():
            ray.get(actor.close.remote(), timeout=PATIENCE_S)
            assert ray.get(actor.threads.remote(), timeout=PATIENCE_S) == []


def new_host() -> Any:
    return ray.remote(Host).options(num_cpus=0).remote()


def epoch() -> int:
    """Every channel of a test has keys of its own."""
    return time.monotonic_ns()


@pytest.fixture(scope="module")
def processes(board: str) -> Iterator[Pair]:
    pair = Pair(board)
    yield pair
    for host in (pair.sender, pair.receiver):
        ray.kill(host)


@pytest.fixture
def pair(processes: Pair, board: str) -> Iterator[Pair]:
    """Two processes with no channel open, and none left open afterwards."""
    processes.board = board
    yield processes
    processes.close()


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_arrive_as_they_were_sent(pair: Pair, kind: ChannelKind) -> None:
    pair.open(kind, epoch())
    sizes = [3_000_001, 0, 1, 70_003, 3_000_001]
    sending = [pair.send(seed, size) for seed, size in enumerate(sizes)]  # all at once
    assert ray.get(sending, timeout=PATIENCE_S) == ["accepted"] * len(sizes)
    received = ray.get([pair.receiver.take.remote(seq) for seq in range(len(sizes))])
    expected = [random_bytes(seed, size).tobytes() for seed, size in enumerate(sizes)]
    assert sorted(received) == sorted(expected)


def test_keys_are_gone_once_a_pair_is_open(pair: Pair, board: str) -> None:
    pair.open("gloo_pair", epoch())
    assert ray.get(boards[board].num_keys.remote()) == 0


def test_gloo_listens_on_the_given_address_only(pair: Pair) -> None:
    before = pair.listening()
    pair.open("gloo_pair", epoch())
    new = pair.listening() - before
    assert new
    assert {address for address, _ in new} == {"127.0.0.1"}


def test_a_receive_nobody_answers_ends_at_its_deadline_and_a_new_epoch_works(pair: Pair) -> None:
    pair.open("gloo_pair", epoch())
    ray.get(pair.receiver.hasten.remote(0.5), timeout=PATIENCE_S)
    outcome = ray.get(pair.receiver.receive.remote(0, 1000, []), timeout=PATIENCE_S)
    assert outcome.startswith("HandoffError")
    assert "500ms" in outcome, "it ended by another limit"
    outcome = ray.get(pair.send(1, 1000), timeout=PATIENCE_S)
    assert outcome != "accepted", "a poisoned pair was used"
    pair.close()
    pair.open("gloo_pair", epoch())
    assert ray.get(pair.send(2, 1000), timeout=PATIENCE_S) == "accepted"


def test_opening_alone_ends_at_the_deadline(pair: Pair) -> None:
    opening = pair.sender.open.remote(pair.board, 1.0, "gloo_pair", 1, sends=True)
    assert ray.get(opening, timeout=PATIENCE_S).startswith("HandoffError")


@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_a_peer_killed_in_a_transfer_is_noticed_and_survived(pair: Pair, victim: str) -> None:
    pair.open("gloo_pair", epoch(), deadline_s=2 * PATIENCE_S)  # it ends by the connection
    if victim == "sender":
        survivor = pair.receiver
        waiting = survivor.receive.remote(0, 1000, [])
    else:
        survivor = pair.sender
        waiting = survivor.send.remote(None, 1, 20_000_000)  # its header reaches nobody
    assert ray.get(survivor.ping.remote(), timeout=PATIENCE_S) == "here"
    ray.kill(getattr(pair, victim))
    assert ray.get(waiting, timeout=PATIENCE_S).startswith("HandoffError")
    assert ray.get(survivor.ping.remote(), timeout=PATIENCE_S) == "here"
    ray.get(survivor.close.remote(), timeout=PATIENCE_S)
    setattr(pair, victim, new_host())
    pair.open("gloo_pair", epoch())
    assert ray.get(pair.send(2, 1000), timeout=PATIENCE_S) == "accepted"


def test_an_object_that_is_not_the_announced_bytes_is_refused(pair: Pair) -> None:
    pair.open("object_store", epoch())
    wrong = [ray.put(random_bytes(1, 999)), ray.put("text"), ray.put(b"x" * 1000)]
    for seq, reference in enumerate(wrong):
        outcome = ray.get(pair.receiver.receive.remote(seq, 1000, [reference]), timeout=PATIENCE_S)
        assert outcome.startswith("HandoffError"), outcome
    again = ray.get(pair.receiver.receive.remote(0, 1000, [wrong[0]]), timeout=PATIENCE_S)
    assert again == "twice"


def test_an_object_whose_owner_died_is_either_whole_or_a_failed_piece(pair: Pair) -> None:
    pair.open("object_store", epoch())
    reference = ray.get(pair.sender.put.remote(5, 200_000), timeout=PATIENCE_S)
    ray.kill(pair.sender)
    pair.sender = new_host()
    outcome = ray.get(pair.receiver.receive.remote(0, 200_000, reference), timeout=PATIENCE_S)
    if outcome == "ok":  # its copy was still in shared memory
        assert ray.get(pair.receiver.take.remote(0)) == random_bytes(5, 200_000).tobytes()
    else:
        assert outcome.startswith("HandoffError"), outcome


def test_an_open_pair_outlives_the_rendezvous(pair: Pair) -> None:
    pair.board = new_board("short-lived")
    pair.open("gloo_pair", 1)
    ray.kill(boards.pop("short-lived"))
    assert ray.get(pair.send(3, 50_001), timeout=PATIENCE_S) == "accepted"
    pair.close()
    opening = pair.sender.open.remote(pair.board, 1.0, "gloo_pair", 2, sends=True)
    assert ray.get(opening, timeout=PATIENCE_S).startswith("WorkerError")


class Workers:
    """A prefill and a decode worker with the real sender, receiver and KV stores."""

    def __init__(self, pair: Pair, board: str, config: HandoffConfig = CONFIG) -> None:
        self._pair = pair
        ray.get(pair.receiver.start_decode.remote(board, config), timeout=PATIENCE_S)
        ray.get(pair.sender.start_prefill.remote(board, pair.receiver, config), timeout=PATIENCE_S)

    def prefill(self, verb: str, *arguments: object) -> Any:
        return ray.get(self._pair.sender.prefill.remote(verb, *arguments), timeout=PATIENCE_S)

    def decode(self, verb: str, *arguments: object) -> Any:
        return ray.get(self._pair.receiver.decode.remote(verb, *arguments), timeout=PATIENCE_S)

    def close(self) -> None:
        self.prefill("close")
        self.decode("close")
        assert self.prefill("statistics")["held"] == 0
        assert self.decode("statistics")["held"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_move_between_workers_block_for_block(
    pair: Pair, board: str, kind: ChannelKind
) -> None:
    workers = Workers(pair, board, msgspec.structs.replace(CONFIG, channel=kind))
    num_references = ray.get(pair.sender.num_references.remote())
    lengths = {"a": 1601, "b": 16, "c": 1, "d": 3333}
    expected = {n: workers.prefill("hand_over", n, length) for n, length in lengths.items()}
    for name, digests in expected.items():
        assert workers.prefill("settled", name) == "sent"
        assert workers.decode("digests", name) == digests
    prefill, decode = workers.prefill("statistics"), workers.decode("statistics")
    num_blocks = sum(LAYOUT.num_blocks_for(length) for length in lengths.values())
    assert prefill["bytes"] == decode["bytes"] == num_blocks * LAYOUT.block_bytes
    assert (prefill["retries"], prefill["fallbacks"], decode["epochs"]) == (0, 0, 1)
    is_called = decode["calls"] > 0  # else its pieces went by the connection
    assert is_called == (kind == "object_store")
    wait_until(
        lambda: ray.get(pair.sender.num_references.remote()) <= num_references + 1,
        "no reference is kept",
    )
    workers.close()


def test_a_corrupted_payload_is_refused_and_later_prompts_are_fine(pair: Pair, board: str) -> None:
    workers = Workers(pair, board)
    workers.prefill("set_corrupting", True)
    workers.prefill("hand_over", "bad", 200)
    assert "wrong bytes" in workers.prefill("settled", "bad")
    assert workers.decode("digests", "bad") is None
    workers.prefill("set_corrupting", False)
    expected = workers.prefill("hand_over", "good", 200)
    assert workers.prefill("settled", "good") == "sent"
    assert workers.decode("digests", "good") == expected
    assert workers.decode("statistics")["failures"] == {"digest": 2}
    workers.close()


def test_a_connection_that_is_cut_under_prompts_loses_none_of_them(pair: Pair, board: str) -> None:
    workers = Workers(pair, board)
    names = [f"p{number}" for number in range(24)]
    for number, name in enumerate(names):
        expected = workers.prefill("hand_over", name, 300)
        if number % 8 == 3:
            workers.decode("hang_up")
        assert workers.prefill("settled", name) == "sent"
        assert workers.decode("digests", name) == expected
    workers.close()


def test_without_a_rendezvous_kv_goes_through_the_object_store(pair: Pair) -> None:
    workers = Workers(pair, "nowhere")
    expected = workers.prefill("hand_over", "a", 100)
    assert workers.prefill("settled", "a") == "sent"
    assert workers.decode("digests", "a") == expected
    assert workers.prefill("statistics")["fallbacks"] == 1
    workers.close()


def test_a_killed_decode_worker_fails_its_requests_and_frees_their_blocks(
    pair: Pair, board: str
) -> None:
    workers = Workers(pair, board)
    expected = workers.prefill("hand_over", "a", 50)
    assert workers.prefill("settled", "a") == "sent"
    assert workers.decode("digests", "a") == expected
    ray.kill(pair.receiver)
    pair.receiver = new_host()
    workers.prefill("hand_over", "b", 500)
    assert "decode-0 died" in workers.prefill("settled", "b"), "it ended by a deadline"
    assert workers.prefill("statistics")["held"] == 0
    workers.prefill("close")
