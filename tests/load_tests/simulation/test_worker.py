"""The light worker gives the times that the engine's whole scheduler gives, decodes included."""

import math
import random
from dataclasses import replace

import pytest

from configs.schema import LapsConfig
from engine.cost_model import PRIOR, StepWork
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from load_tests.simulation.decode_run import build_run
from load_tests.simulation.real_worker import RealWorker
from load_tests.simulation.worker import LightWorker, Outcome, Worker, WorkerSpec

Arrival = tuple[float, int, int]  # seconds, prompt tokens, output tokens
Times = dict[str, tuple[float, float]]  # request -> first and last token


def make_request(index: int, arrival: Arrival) -> Request:
    at_s, num_prompt_tokens, num_output_tokens = arrival
    return Request(
        spec=RequestSpec(params=SamplingParams(max_tokens=num_output_tokens)),
        key=RequestKey(f"{index}"),
        ingress_id="ingress",
        tokens=[1] * num_prompt_tokens,
        num_prompt_tokens=num_prompt_tokens,
        arrival_s=at_s,
    )


def serve(worker: Worker, arrivals: list[Arrival]) -> tuple[Times, list[tuple[float, int, float]]]:
    """Times of all tokens, and what the worker told of its load, as (at, tokens, seconds)."""
    requests = [make_request(i, arrival) for i, arrival in enumerate(arrivals)]
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    loads = []
    index = 0
    while index < len(requests) or worker.next_plan_s < math.inf:
        if index < len(requests) and requests[index].arrival_s <= worker.next_plan_s:
            worker.add(requests[index], requests[index].arrival_s)
            index += 1
            continue
        now_s = worker.next_plan_s
        outcome: Outcome = worker.plan(now_s)
        first |= {r.key.request_id: at_s for r, at_s in outcome.first_tokens}
        last |= {r.key.request_id: at_s for r, at_s in outcome.finished}
        if outcome.load is not None:
            loads.append((now_s, outcome.load.num_tokens, outcome.load.queued.queued_s))
    return {name: (first[name], last[name]) for name in first}, loads


def draw_arrivals(num: int, rate: float, seed: int, max_output_tokens: int = 80) -> list[Arrival]:
    rng = random.Random(seed)
    now_s, arrivals = 0.0, []
    for _ in range(num):
        now_s += rng.expovariate(rate)
        num_tokens = rng.randint(8, 256) if rng.random() < 0.7 else rng.randint(1000, 6000)
        arrivals.append((now_s, num_tokens, rng.randint(1, max_output_tokens)))
    return arrivals


def approx(times: Times) -> dict[str, object]:
    return {name: pytest.approx(pair, rel=0, abs=1e-8) for name, pair in times.items()}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("keeps_decodes", [True, False])
@pytest.mark.parametrize(
    "laps",
    [
        LapsConfig(queue="fcfs"),
        LapsConfig(queue="priority"),
        LapsConfig(queue="laps"),
        LapsConfig(queue="laps", mix="fill", max_long_wait_s=0.2),
        LapsConfig(queue="laps", window="fixed"),
    ],
    ids=["fcfs", "priority", "exclusive", "fill", "window"],
)
def test_light_and_real_worker_give_equal_times(
    laps: LapsConfig, keeps_decodes: bool, overlap: bool
) -> None:
    spec = WorkerSpec(
        laps=laps,
        keeps_decodes=keeps_decodes,
        overlap=overlap,
        max_num_batched_tokens=1024,
        max_rows=64,
    )
    for seed, rate in enumerate((3.0, 15.0, 40.0)):
        arrivals = draw_arrivals(40, rate, seed)
        times, _ = serve(LightWorker(spec), arrivals)
        expected, _ = serve(RealWorker(spec), arrivals)
        assert len(expected) == 40
        assert times == approx(expected)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("queue", ["fcfs", "laps"])
def test_they_are_equal_when_rows_are_short_too(queue: str, overlap: bool) -> None:
    spec = WorkerSpec(
        keeps_decodes=True, overlap=overlap, max_rows=5, max_num_batched_tokens=512, host_s=0.001
    ).with_queue(queue)
    arrivals = draw_arrivals(60, 12.0, 7)
    times, _ = serve(LightWorker(spec), arrivals)
    expected, _ = serve(RealWorker(spec), arrivals)
    assert times == approx(expected)


@pytest.mark.parametrize("mix", ["exclusive", "fill"])
def test_they_are_equal_when_chunks_are_cut_to_captured_sizes(mix: str) -> None:
    laps = LapsConfig(queue="laps", mix="fill" if mix == "fill" else "exclusive")
    plain = WorkerSpec(laps=laps, keeps_decodes=True, max_num_batched_tokens=2048)
    spec = replace(plain, graph_token_sizes=(64, 300, 700, 1100))
    arrivals = draw_arrivals(60, 15.0, 11)
    times, _ = serve(LightWorker(spec), arrivals)
    expected, _ = serve(RealWorker(spec), arrivals)
    assert times == approx(expected)
    assert times != serve(LightWorker(plain), arrivals)[0]


def test_they_tell_the_same_load_after_steps_with_prompts() -> None:
    spec = WorkerSpec(max_num_batched_tokens=512).with_queue("laps")
    arrivals = draw_arrivals(80, 30.0, 3)
    _, loads = serve(LightWorker(spec), arrivals)
    _, expected = serve(RealWorker(spec), arrivals)
    assert len(loads) > 50
    assert loads == [pytest.approx(load, rel=0, abs=1e-8) for load in expected]


def test_a_run_of_decodes_takes_as_long_as_its_steps() -> None:
    run = build_run(PRIOR, start_s=2.0, num_rows=9, num_keys=5000, num_steps=400)
    now_s = 2.0
    for step in range(400):
        assert run.boundary_s(step) == pytest.approx(now_s, abs=1e-9)
        assert run.first_boundary_at(now_s - 1e-6) == step
        now_s += PRIOR.step_seconds(StepWork(num_decode_rows=9, num_decode_keys=5000 + 9 * step))
    assert run.end_s == pytest.approx(now_s, abs=1e-9)
    run.cut(7)
    run.cut(12)
    assert run.end_s == run.boundary_s(7)
