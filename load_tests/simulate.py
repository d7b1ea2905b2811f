"""A cluster that does not exist, on a virtual clock: policies compared, or devices counted.

    python -m load_tests.simulate --workers 8 --queue laps fcfs --routing laps round-robin \\
        least-tokens --load sharegpt --rates 40 60 80 --seeds 3 --out plots
    python -m load_tests.simulate --unified --workers 1 --load online --rates 8 16 24
    python -m load_tests.simulate --load azure:AzureLLMInferenceTrace_conv.csv --workers 8
    python -m load_tests.simulate --plan --rate 100 --load sharegpt --slo-ttft 0.4 --slo-tpot 0.05

The engine's own queues, placement and pools decide; step costs stand for the devices: those of an
8B model on one H200, or of `--costs`, fitted by an engine: `step_costs` of a running application's
`/laps_status`, or with `--costs-of VARIANT` those of a file of `bench_mixed --json`. How close that
comes is what `load_tests.lab.validate_simulation` tells.
Without decode workers and `--unified` requests end with their first token. Seeds are shared: all
policies get the same requests.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import msgspec

from engine.cost_model import StepCosts
from load_tests.simulation.cluster import ClusterSpec
from load_tests.simulation.measured import read_measured
from load_tests.simulation.metrics import Limits
from load_tests.simulation.planner import NoPlanError, Question, plan
from load_tests.simulation.plots import has_plotting, write_plots
from load_tests.simulation.routing import Policy
from load_tests.simulation.scenario import (
    LOADS,
    Load,
    build_laps,
    build_load,
    read_costs,
    with_policies,
)
from load_tests.simulation.sweep import SweepSpec, goodput_table, refine, sweep, table
from load_tests.simulation.worker import WorkerSpec
from load_tests.tables import render_rows

QUEUES = ("laps", "fcfs", "priority")


def positive(text: str) -> float:
    """A number above 0. Raises ArgumentTypeError for any other, ValueError for another word."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return number


def positive_count(text: str) -> int:
    """As `positive`, of whole numbers."""
    positive(text)
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=positive_count, default=8, help="that prefill")
    parser.add_argument("--decode-workers", type=int, default=0)
    parser.add_argument("--unified", action="store_true", help="who prefills decodes, too")
    parser.add_argument("--queue", nargs="+", choices=QUEUES, default=["laps"])
    routings = [policy.value for policy in Policy]
    parser.add_argument("--routing", nargs="+", choices=routings, default=[Policy.LAPS.value])
    parser.add_argument("--load", default="sharegpt", help=LOADS)
    parser.add_argument(
        "--rates", type=positive, nargs="+", help="requests/s; default: as recorded"
    )
    parser.add_argument("--cv", type=float, default=1.0, help="of drawn gaps; 1 = Poisson")
    parser.add_argument("--seconds", type=positive, default=60.0, help="of drawn arrivals")
    parser.add_argument("--requests", type=positive_count, help="at most so many")
    parser.add_argument("--seeds", type=positive_count, default=3, help="how many")
    parser.add_argument("--slo-ttft", type=float, default=0.4, help="seconds")
    parser.add_argument("--slo-tpot", type=float, help="seconds; default: no limit")
    parser.add_argument("--costs", type=Path, help="JSON of fitted step costs")
    parser.add_argument("--costs-of", metavar="VARIANT", help="--costs is of bench_mixed --json")
    parser.add_argument("--host-ms", type=float, default=0.0, help="before an idle device starts")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="laps section")
    parser.add_argument("--real", action="store_true", help="the whole scheduler in each worker")
    parser.add_argument("--refine", type=int, default=0, help="halvings towards the goodput")
    parser.add_argument("--processes", type=positive_count, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="a folder for plots")
    parser.add_argument("--plan", action="store_true", help="count devices instead")
    parser.add_argument("--rate", type=positive, help="of a plan; default: as recorded")
    return parser


def build_cluster(args: argparse.Namespace) -> ClusterSpec:
    """But for queue and routing.

    Raises OSError, ValueError or msgspec.MsgspecError for a bad setting or costs file.
    """
    worker = WorkerSpec(
        laps=build_laps(args.set),
        costs=_choose_costs(args),
        keeps_decodes=args.unified,
        overlap=not args.no_overlap,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_rows=args.max_rows,
        host_s=args.host_ms / 1e3,
    )
    return ClusterSpec(
        worker=worker,
        num_prefill=args.workers,
        num_decode=args.decode_workers,
        is_real=args.real,
    )


def _choose_costs(args: argparse.Namespace) -> StepCosts:
    if args.costs_of is None or args.costs is None:
        return read_costs(args.costs)
    return read_measured(args.costs).final_costs(args.costs_of)


def run_sweep(args: argparse.Namespace, cluster: ClusterSpec, load: Load) -> None:
    """Print the tables, write the plots."""
    spec = SweepSpec(
        cluster=cluster,
        load=load,
        choices=[(queue, Policy(name)) for queue in args.queue for name in args.routing],
        rates=args.rates or [None],
        seeds=range(args.seeds),
        limits=Limits(ttft_s=args.slo_ttft, tpot_s=args.slo_tpot),
        num_processes=args.processes,
    )
    curves = sweep(spec)
    if args.refine:
        curves = [refine(spec, curve, args.refine) for curve in curves]
    print("Times in ms, shares in %.\n")
    print(render_rows(table(curves)), end="\n\n")
    print(render_rows(goodput_table(curves)))
    for curve in curves:
        for point in curve.points:
            for move in point.moves:
                print(f"{curve.name}, {point.rate:.4g}/s, first seed: {move}")
    if args.out is None:
        return
    for path in write_plots(curves, spec.limits, args.out):
        print(path)


def run_plan(args: argparse.Namespace, cluster: ClusterSpec, load: Load) -> None:
    """Print how many devices the traffic takes. Exits with a line if no number is enough."""
    question = Question(
        cluster=with_policies(cluster, args.queue[0], Policy(args.routing[0])),
        load=load,
        rate=args.rate,
        seeds=tuple(range(args.seeds)),
        ttft_s=args.slo_ttft,
        tpot_s=args.slo_tpot,
        num_processes=args.processes,
    )
    try:
        answer = plan(question)
    except NoPlanError as error:
        sys.exit(f"error: {error}")
    print(f"prefill workers: {answer.num_prefill}, of these short: {answer.num_short:.1f}")
    print(f"decode workers: {answer.num_decode}")
    print(f"first tokens in time: {100 * answer.ttft_good_share:.2f} %")
    print(f"requests with all other tokens in time: {100 * answer.tpot_good_share:.2f} %")


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    try:
        load = build_load(
            args.load, cv=args.cv, duration_s=args.seconds, max_requests=args.requests
        )
        cluster = build_cluster(args)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        parser.error(str(error))
    if load.trace is None and not (args.rate if args.plan else args.rates):
        parser.error(f"{args.load} needs {'--rate' if args.plan else '--rates'}")
    if args.costs_of is not None and args.costs is None:
        parser.error("--costs-of needs --costs")
    if args.plan and args.slo_tpot is None:
        parser.error("--plan needs --slo-tpot")
    if args.out is not None and not has_plotting():
        parser.error("--out needs matplotlib: pip install matplotlib")
    start_s = time.perf_counter()
    (run_plan if args.plan else run_sweep)(args, cluster, load)
    print(f"simulated in {time.perf_counter() - start_s:.1f} s")


if __name__ == "__main__":
    main()
