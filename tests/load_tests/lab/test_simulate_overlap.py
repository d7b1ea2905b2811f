"""The simulation of two batches: its clocks by hand, and what must hold whatever the rates are."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.layers.operations import Lane, Op
from engine.layers.schedules import DECODE, bind, drive
from load_tests.lab.simulate_overlap import (
    FAST,
    LOW_LATENCY,
    NVLINK,
    RDMA,
    Clocks,
    Costs,
    Device,
    Link,
    Model,
    Simulated,
    Work,
    _flows,
    layers_of,
    more_batches,
    plot,
    simulate,
)

PROMPTS = Work(is_decode=False, num_keys=2048)
DECODES = Work(is_decode=True, num_keys=4096)


class _Seconds(Costs):
    """Every operation takes as long as its table says, for any number of tokens."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    def of(self, name: str, num_tokens: float) -> float:
        return self._seconds[name]


def test_what_is_sent_takes_its_stream_and_waits_take_the_rest() -> None:
    send = Op("dispatch_a", lambda flow: None, Lane.SEND)
    ops = (
        Op("prepare", lambda flow: None),
        send,
        Op("shared_experts", lambda flow: None),
        Op("dispatch_b", lambda flow: None, waits=(Lane.SEND,)),
        Op("experts", lambda flow: None),
    )
    costs = _Seconds({"prepare": 1, "dispatch_a": 5, "shared_experts": 2, "experts": 3})
    for overlaps, total in ((True, 1 + 5 + 3), (False, 1 + 5 + 2 + 3)):
        clocks = Clocks(costs, [1], overlaps=overlaps)
        drive([ops], _flows(1), clocks)
        assert clocks.compute_s == total
        assert clocks.communication_s == 5
    two = Clocks(costs, [1, 1], overlaps=True)
    drive(bind([ops], DECODE), _flows(2), two, lag=2)
    # A prepares until 1, sends until 6, shares until 3. B prepares until 4. A's experts wait, 6 to
    # 9. B, a stage later, sends from 9 to 14 and shares until 11; its experts take 14 to 17.
    assert two.compute_s == 17


@pytest.mark.parametrize("work", [PROMPTS, DECODES])
@pytest.mark.parametrize("link", [NVLINK, FAST, RDMA, LOW_LATENCY])
def test_a_split_step_is_never_faster_than_its_longer_stream(link: Link, work: Work) -> None:
    model, device = Model(), Device()
    for num_tokens in (16, 300, 5000):
        step = simulate(model, device, link, work, num_tokens)
        computed = step.whole_s - step.communication_s
        assert step.split_s >= max(computed, step.communication_s) * 0.999
        assert step.split_s <= 2 * step.whole_s
        assert step.one_flow_s <= step.whole_s


def test_without_communication_nothing_is_gained() -> None:
    free = replace(NVLINK, bytes_s=1e18, latency_s=0.0)
    for num_tokens in (64, 8192):
        assert simulate(Model(), Device(), free, PROMPTS, num_tokens).speedup <= 1.0 + 1e-6


def test_few_rows_read_every_expert_twice_and_lose() -> None:
    assert simulate(Model(), Device(), FAST, DECODES, 64).speedup < 1
    assert simulate(Model(), Device(), RDMA, PROMPTS, 8192).speedup > 1.2


def test_batches_beyond_two_start_from_the_same_whole_step() -> None:
    model, device = Model(), Device()
    lines = more_batches(model, device, (DECODES.num_keys, PROMPTS.num_keys))
    assert len(lines) == 3 * 4 + 3 * 3
    two = simulate(model, device, RDMA, PROMPTS, 8192)
    (line,) = (line for line in lines if line[1:3] == [RDMA.name, "8192"])
    assert line[3] == f"{two.speedup:.2f}"


def test_layers_are_the_models() -> None:
    layers = layers_of(Model(num_dense=1, num_mixtures=2))
    assert [any(op.name == "mlp" for op in ops) for ops in layers] == [True, False, False]
    bind(layers, DECODE)  # every operation has its place


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    step = Simulated(whole_s=1.2, split_s=1.0, one_flow_s=1.1, communication_s=0.4, lag=2)
    found = [
        (link, work, [(64, step), (128, step)])
        for link, work in ((RDMA, DECODES), (NVLINK, PROMPTS))
    ]
    plot(found, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
