"""Channels between two processes: two GPUs where there are two, and gloo between two CPUs."""

import pytest
import torch

from engine.messages import ChannelKind
from tests.actors.kv_transfer.two_processes import DEADLINE_S, two_processes

GPUS = (
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
)
KINDS = [
    pytest.param("cuda_ipc", "cuda", marks=GPUS),
    pytest.param("nccl_pair", "cuda", marks=GPUS),
    pytest.param("gloo_pair", "cuda", marks=GPUS, id="gloo_pair-from-gpus"),
    # By day test_channels_ray.py does the same over gloo.
    pytest.param("gloo_pair", "cpu", marks=pytest.mark.nightly),
]
SCENARIOS = "tests.actors.kv_transfer.channel_scenarios"

pytestmark = [pytest.mark.slow, pytest.mark.parametrize(("kind", "device"), KINDS)]


def test_random_blocks_arrive_bit_for_bit(kind: ChannelKind, device: str) -> None:
    with two_processes(device) as processes:
        processes.start_receiver()
        assert processes.start_sender(f"{SCENARIOS}:equal_bytes", kind, 5).wait() == 5


def test_a_byte_that_changed_after_its_digest_is_caught(kind: ChannelKind, device: str) -> None:
    with two_processes(device) as processes:
        processes.start_receiver()
        assert processes.start_sender(f"{SCENARIOS}:flipped_byte", kind).wait() == "wrong digests"


def test_a_killed_sender_leaves_a_receiver_that_serves_the_next(
    kind: ChannelKind, device: str
) -> None:
    with two_processes(device) as processes:
        processes.start_receiver()
        sender = processes.start_sender(f"{SCENARIOS}:endless", kind)
        assert sender.wait() == "moving"
        sender.process.kill()
        assert processes.start_sender(f"{SCENARIOS}:equal_bytes", kind, 3).wait() == 3


def test_a_killed_receiver_leaves_a_sender_that_serves_the_next(
    kind: ChannelKind, device: str
) -> None:
    with two_processes(device) as processes:
        receiver = processes.start_receiver()
        sender = processes.start_sender(f"{SCENARIOS}:endless", kind)
        assert sender.wait() == "moving"
        receiver.kill()
        assert sender.wait().startswith("failed")
        processes.start_receiver()
        assert sender.wait() == "survived"


def test_a_silent_receiver_ends_a_piece_at_the_deadline_and_a_new_epoch_works(
    kind: ChannelKind, device: str
) -> None:
    if device == "cpu":
        pytest.skip("gloo between CPUs buffers a small piece and carries no named blocks")
    with two_processes(device) as processes:
        processes.start_receiver()
        failed_s, works = processes.start_sender(f"{SCENARIOS}:deadline", kind).wait()
        assert failed_s + 0.1 >= DEADLINE_S
        assert failed_s < 3 * DEADLINE_S
        assert works
