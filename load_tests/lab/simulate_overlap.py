"""Simulates a step of a large mixture over 8 and 72 ranks, whole and as two batches, and plots it.

    python -m load_tests.lab.simulate_overlap --plot load_tests/results/two_batches_simulated.png

The engine's own schedules (`engine.layers.schedules`) order the operations of all layers; here they
only take time, in two streams: what is sent takes bytes / link rate and a latency, all else the
larger of bytes / memory rate and products / product rate, and a floor for its launches. Attention
is data parallel (every rank its own tokens), experts are parallel. Nothing is measured here but by
those who published the rates: see `LINKS`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from engine.layers.operations import Flow, Lane, Op
from engine.layers.schedules import DECODE, EXCHANGE_PROMPTS, Schedule, bind, drive
from engine.runner.overlap.tuning import adaptive_lag
from load_tests.tables import render_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """DeepSeek-V3: latent attention, three dense layers, then mixtures."""

    hidden: int = 7168
    num_dense: int = 3
    num_mixtures: int = 58
    dense_size: int = 18432
    num_experts: int = 256
    num_active: int = 8
    expert_size: int = 2048
    heads: int = 128
    q_rank: int = 1536
    latent: int = 512
    rope: int = 64
    nope: int = 128
    value: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    memory_bytes_s: float = 3.94e12  # an H200, as measured for this project
    flops_s: float = 805e12  # bf16 products, likewise
    fp8_flops_s: float = 1.2e15  # assumed: some 60 % of the data sheet
    weight_bytes: float = 1.0  # FP8
    op_floor_s: float = 6e-6  # of an operation of a few launches in a graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The exchange of tokens and their experts' outputs, per rank and direction."""

    name: str
    num_ranks: int
    bytes_s: float
    latency_s: float = 20e-6
    # A token goes once to each place that has experts of it: a rank, or a host, whose ranks share
    # it over NVLink. None = once for each of its experts.
    num_places: int | None
    max_places: int = 8  # of a token; routing limited to groups goes to few hosts


# DeepEP's published rates on H800 (docs/legacy.md): normal kernels of 8 ranks over NVLink and of
# 64 over RDMA, low-latency kernels of 64; and NCCL between two H200s, measured for this project.
NVLINK = Link(name="8 ranks, NVLink 155 GB/s", num_ranks=8, bytes_s=155e9, num_places=8)
FAST = Link(name="8 ranks, NVLink 394 GB/s", num_ranks=8, bytes_s=394e9, num_places=8)
RDMA = Link(name="72 ranks, RDMA 50 GB/s", num_ranks=72, bytes_s=50e9, num_places=9, max_places=4)
LOW_LATENCY = replace(RDMA, name="72 ranks, RDMA 45 GB/s", bytes_s=45e9, num_places=None)
LINKS = {True: (NVLINK, FAST, LOW_LATENCY), False: (NVLINK, FAST, RDMA)}  # decode -> links


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One rank's step: so many new tokens, each of which sees so many keys on average."""

    is_decode: bool
    num_keys: int


class Costs:
    """Seconds of each operation of a layer, for so many tokens of this rank."""

    def __init__(self, model: Model, device: Device, link: Link, work: Work) -> None:
        self._model, self._device, self._link, self._work = model, device, link, work

    def of(self, name: str, num_tokens: float) -> float:
        """name: as in the engine's schedules."""
        seconds: float = getattr(self, f"_{name}")(num_tokens)
        return seconds

    def _product(self, weights: float, rows: float, uses: float | None = None) -> float:
        """weights: numbers read; uses: numbers that a row is multiplied with (None: all)."""
        device = self._device
        flops = 2 * rows * (weights if uses is None else uses)
        return max(
            weights * device.weight_bytes / device.memory_bytes_s, flops / device.fp8_flops_s
        )

    def _op(self, seconds: float) -> float:
        return max(seconds, self._device.op_floor_s)

    def _prepare(self, num_tokens: float) -> float:
        m = self._model
        queries = m.heads * (m.nope + m.rope)
        down = m.hidden * (m.q_rank + m.latent + m.rope)
        return self._op(self._product(down + m.q_rank * queries, num_tokens))

    def _core(self, num_tokens: float) -> float:
        """Attention, absorbed where it decodes, and its output product."""
        m, device, keys = self._model, self._device, self._work.num_keys
        up = m.latent * m.heads * (m.nope + m.value)
        out = m.heads * m.value * m.hidden
        dims = 2 * m.latent + m.rope if self._work.is_decode else m.nope + m.rope + m.value
        flops = 2 * num_tokens * keys * m.heads * dims
        read = num_tokens * keys * 2 * (m.latent + m.rope) if self._work.is_decode else 0.0
        attention = max(flops / device.flops_s, read / device.memory_bytes_s)
        return self._op(attention + self._product(up + out, num_tokens))

    def _select_experts(self, num_tokens: float) -> float:
        return self._op(self._product(self._model.hidden * self._model.num_experts, num_tokens))

    def _mlp(self, num_tokens: float) -> float:
        return self._op(self._product(3 * self._model.hidden * self._model.dense_size, num_tokens))

    def _shared_experts(self, num_tokens: float) -> float:
        return self._op(self._product(3 * self._model.hidden * self._model.expert_size, num_tokens))

    def _experts(self, num_tokens: float) -> float:
        """The rank's experts that get a token of any rank; every rank sends as many."""
        m, num_ranks = self._model, self._link.num_ranks
        rows = num_tokens * m.num_active
        missed = (1 - 1 / m.num_experts) ** (rows * num_ranks)
        held = m.num_experts / num_ranks * (1 - missed)
        expert = 3 * m.hidden * m.expert_size
        return self._op(self._product(held * expert, rows, expert))

    def _dispatch_a(self, num_tokens: float) -> float:
        return self._sent(num_tokens, 1)  # FP8

    def _combine_a(self, num_tokens: float) -> float:
        return self._sent(num_tokens, 2)

    def _sent(self, num_tokens: float, element_bytes: int) -> float:
        link, k = self._link, self._model.num_active
        places = link.num_ranks if link.num_places is None else link.num_places
        copies = float(k)
        if link.num_places is not None:
            copies = min(places * (1 - (1 - 1 / places) ** k), link.max_places)
        remote = copies * (places - 1) / places
        sent = num_tokens * remote * self._model.hidden * element_bytes
        return self._link.latency_s + sent / self._link.bytes_s

    def _output(self, num_tokens: float) -> float:
        read = 3 * num_tokens * self._model.hidden * 2
        return self._op(read / self._device.memory_bytes_s)


ATTENTION = ("prepare", "core")
MIXTURE = ("select_experts", "dispatch_a", "shared_experts", "dispatch_b", "experts", "combine_a")
WAITS = {"dispatch_b", "combine_b"}
SENDS = {"dispatch_a", "combine_a"}


class Clocks:
    """Two streams' clocks: `Lanes` for the engine's driver, in which operations only take time."""

    def __init__(self, costs: Costs, num_tokens: Sequence[float], *, overlaps: bool) -> None:
        """num_tokens: of each flow. overlaps: what is sent has a stream of its own."""
        self.compute_s = self.sent_s = 0.0
        self.communication_s = 0.0  # in all
        self._costs, self._num_tokens, self._overlaps = costs, num_tokens, overlaps
        self._done_s = [0.0] * len(num_tokens)

    def issue(self, op: Op, flow: Flow) -> None:
        index = flow.ctx.lane
        if Lane.SEND in op.waits:
            self.compute_s = max(self.compute_s, self._done_s[index])
        if op.name in WAITS:
            return
        seconds = self._costs.of(op.name, self._num_tokens[index])
        if op.lane is not Lane.SEND:
            self.compute_s += seconds
            return
        self.communication_s += seconds
        self.sent_s = max(self.sent_s, self.compute_s) + seconds
        self._done_s[index] = self.sent_s
        if not self._overlaps:
            self.compute_s = self.sent_s


def layers_of(model: Model) -> list[tuple[Op, ...]]:
    def op(name: str) -> Op:
        lane = Lane.SEND if name in SENDS else Lane.COMPUTE
        return Op(name, lambda flow: None, lane, waits=(Lane.SEND,) if name in WAITS else ())

    dense = tuple(map(op, (*ATTENTION, "mlp", "output")))
    mixture = tuple(map(op, (*ATTENTION, *MIXTURE, "combine_b", "output")))
    return [dense] * model.num_dense + [mixture] * model.num_mixtures


def _flows(num_flows: int) -> list[Flow]:
    contexts = [SimpleNamespace(lane=lane) for lane in range(num_flows)]
    return [Flow(ctx=cast("Any", ctx), x=cast("Any", None)) for ctx in contexts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Seconds of one step."""

    whole_s: float
    split_s: float
    one_flow_s: float  # one batch whose shared experts compute beside what is sent
    communication_s: float  # of the whole one
    lag: int

    @property
    def speedup(self) -> float:
        return self.whole_s / self.split_s


def simulate(
    model: Model,
    device: Device,
    link: Link,
    work: Work,
    num_tokens: int,
    *,
    lag: int | None = None,
) -> Simulated:
    """num_tokens: new ones of each rank. lag: None = the schedule's own."""
    layers = layers_of(model)
    schedule: Schedule = DECODE if work.is_decode else EXCHANGE_PROMPTS
    lag = schedule.lag if lag is None else lag
    costs = Costs(model, device, link, work)
    whole = Clocks(costs, [num_tokens], overlaps=False)
    one = Clocks(costs, [num_tokens], overlaps=True)
    for clocks in (whole, one):
        drive(layers, _flows(1), clocks)
    halves = [num_tokens // 2, num_tokens - num_tokens // 2]
    two = Clocks(costs, halves, overlaps=True)
    drive(bind(layers, schedule), _flows(2), two, lag=lag)
    return Simulated(
        whole_s=whole.compute_s,
        split_s=two.compute_s,
        one_flow_s=one.compute_s,
        communication_s=whole.communication_s,
        lag=lag,
    )


DECODE_TOKENS = (8, 16, 32, 64, 96, 128, 192, 256, 512)
PROMPT_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
MANY_TOKENS = {True: (256, 512, 1024, 2048), False: (1024, 8192, 32768)}  # decode -> tokens


def sweep(
    model: Model, device: Device, decode_keys: int, prompt_keys: int
) -> list[tuple[Link, Work, list[tuple[int, Simulated]]]]:
    found = []
    for is_decode, sizes in ((True, DECODE_TOKENS), (False, PROMPT_TOKENS)):
        work = Work(is_decode=is_decode, num_keys=decode_keys if is_decode else prompt_keys)
        for link in LINKS[is_decode]:
            steps = [(n, simulate(model, device, link, work, n)) for n in sizes]
            found.append((link, work, steps))
    return found


def adapted_lags(model: Model, device: Device, decode_keys: int) -> list[list[str]]:
    """Speedups by lag, and the lag that the share of communication asks for."""
    lines = []
    work = Work(is_decode=True, num_keys=decode_keys)
    for link in LINKS[True]:
        for num_tokens in (64, 128, 256):
            steps = [simulate(model, device, link, work, num_tokens, lag=k) for k in range(4)]
            sent_s = steps[0].communication_s
            asked = adaptive_lag(sent_s, steps[0].whole_s - sent_s)
            by_lag = [f"{step.speedup:.2f}" for step in steps]
            lines.append([link.name, str(num_tokens), *by_lag, str(asked)])
    return lines


NUM_BATCHES = (2, 3, 4)


def more_batches(model: Model, device: Device, keys: Sequence[int]) -> list[list[str]]:
    """Speedups over a whole step of as many batches of equal size as `NUM_BATCHES` says.

    keys: of a token of a decode step, and of a prompt.
    """
    lines = []
    for (is_decode, sizes), num_keys in zip(MANY_TOKENS.items(), keys, strict=True):
        work = Work(is_decode=is_decode, num_keys=num_keys)
        schedule: Schedule = DECODE if is_decode else EXCHANGE_PROMPTS
        layers = layers_of(model)
        stages = bind(layers, schedule)
        for link in LINKS[is_decode]:
            costs = Costs(model, device, link, work)
            for num_tokens in sizes:
                whole = Clocks(costs, [num_tokens], overlaps=False)
                drive(layers, _flows(1), whole)
                speedups = []
                for count in NUM_BATCHES:
                    split = Clocks(costs, [num_tokens / count] * count, overlaps=True)
                    drive(stages, _flows(count), split, lag=schedule.lag)
                    speedups.append(f"{whole.compute_s / split.compute_s:.2f}")
                kind = "decode" if is_decode else "prompts"
                lines.append([kind, link.name, str(num_tokens), *speedups])
    return lines


def plot(found: Sequence[tuple[Link, Work, list[tuple[int, Simulated]]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, is_decode in zip(panels, (True, False), strict=True):
        for link, work, steps in found:
            if work.is_decode == is_decode:
                sizes = [n for n, _ in steps]
                panel.plot(sizes, [s.speedup for _, s in steps], marker="o", label=link.name)
                keys = work.num_keys
        panel.axhline(1.2, color="#c22f3d", linestyle="--", linewidth=1, label="1.2x")
        panel.axhline(1.0, color="#8a8a94", linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_title(f"{'decode' if is_decode else 'prompts'}, {keys:,} keys a token")
        panel.set_xlabel("new tokens a rank and step")
        panel.legend(frameon=False, fontsize=9)
    panels[0].set_ylabel("whole step / two batches")
    figure.savefig(path, dpi=130, metadata={"Software": None})


def main() -> None:
    device, model = Device(), Model()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path, help="PNG to write")
    parser.add_argument("--decode-keys", type=int, default=4096)
    parser.add_argument("--prompt-keys", type=int, default=2048, help="on average")
    for name in ("memory_bytes_s", "flops_s", "fp8_flops_s", "weight_bytes", "op_floor_s"):
        default = getattr(device, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=default)
    args = parser.parse_args()
    names = Device.__dataclass_fields__
    device = Device(**{name: getattr(args, name) for name in names})
    found = sweep(model, device, args.decode_keys, args.prompt_keys)
    lines = [
        [
            "decode" if work.is_decode else "prompts",
            link.name,
            str(num_tokens),
            f"{step.whole_s * 1e3:.1f}",
            f"{step.communication_s / step.whole_s:.0%}",
            f"{step.split_s * 1e3:.1f}",
            f"{step.speedup:.2f}",
            f"{step.whole_s / step.one_flow_s:.2f}",
        ]
        for link, work, steps in found
        for num_tokens, step in steps
    ]
    head = ["step", "link", "tokens", "whole ms", "sent", "split ms", "two batches", "one, beside"]
    print(render_rows([head, *lines]))
    head = ["link", "rows", *(f"lag {k}" for k in range(4)), "adaptive"]
    print("\n" + render_rows([head, *adapted_lags(model, device, args.decode_keys)]))
    head = ["step", "link", "tokens", *(f"{count} batches" for count in NUM_BATCHES)]
    batches = more_batches(model, device, (args.decode_keys, args.prompt_keys))
    print("\n" + render_rows([head, *batches]))
    if args.plot is not None:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
