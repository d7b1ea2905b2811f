"""Milliseconds a token where so many drafts are accepted, whatever the model would have said.

    python -m load_tests.lab.bench_accepted --shapes qwen3-8b --drafts 3:2.5 1:1.75
    python -m load_tests.lab.bench_accepted --drafts 3:2.5 --attention-backend prefill
    python -m load_tests.lab.bench_accepted --drafts 3:2.5 --draft-shapes qwen3-draft
    python -m load_tests.lab.bench_accepted --drafts 3:2.5 --ngrams host device
    python -m load_tests.lab.bench_accepted --sweep 0 0.25 0.5 0.75 1 --ngrams device --repeat

3:2.5 = three drafts a row in every step, of which a row gets 2.5 tokens on average. Acceptance is
synthetic: drafts are arbitrary ids that cost nothing, each step computes and samples as any other,
and then as many drafts count as are drawn here, each with one probability after those before it. So
the figures hold for any model of these shapes and say nothing of how good drafts are. --sweep: a
controller that knows nothing yet decides how many drafts there are, for each such probability.
--draft-shapes: a model of such shapes makes the drafts, by passes that are part of the time; they
count as is drawn here, decided on the device where steps overlap. --ngrams device: the device looks
up each row's drafts in its text (`speculation.ngrams_on_device`) and takes whatever it finds, so
rows are in every step.

In this process, weights at random, greedy, no prefix cache, but with --repeat, where each number of
rows has the same prompts again: computing these takes most of the time of long ones. Milliseconds a
token = 128th part of the median for 129 tokens less that for one, of all rows together, as
`bench_engine` times decode steps: rows with luck end early and leave the others to smaller steps.
"all rows": only from when each row has its first token until one has its last. Rows a step: of
those with drafts; fewer than there are means that rows take turns. The device's time is that of
steps with the most rows; where no step is in flight meanwhile, it begins with the launch, and so
has the host's part of that. The host's is from when it has one step's tokens until it has launched
the next: with drafts from the host nothing hides it. Beside it, the processor's part: where that is
less, others kept it from running, and where both are more than another time, the host was slower or
did more. Plain steps run on the same weights in the same process. Knows no Ray and no HTTP.
"""

import argparse
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import torch
from safetensors.torch import save_file

from configs.load import load_config
from configs.schema import AppConfig
from engine.build_drafting import build_policy
from engine.core import Executor, PendingStep
from engine.models.llama_weights import layer_tensors, outer_tensors
from engine.models.spec import load_spec
from engine.plan import StepPlan, StepResult, given
from engine.request import Request
from engine.runner.executor import Executor as DeviceExecutor
from engine.scheduling.contracts import StepOutput
from engine.speculation.drafter import HostDrafter, RequestNgrams
from load_tests.lab.devices import describe_device
from load_tests.lab.in_process import EngineInProcess
from load_tests.lab.overruled_samples import OverruledSamples
from load_tests.lab.shapes import SHAPES, WEIGHT_FORMATS, write_shapes
from load_tests.lab.works import DECODES
from load_tests.prompts import RandomPrompts
from load_tests.tables import render_rows

NUM_NEW = 128  # timed tokens of every row, after its first
DRAFT_ID = 7  # any token that ends no request


class ArbitraryDrafts(HostDrafter):
    """A drafter whose guesses cost nothing; how many count is said elsewhere."""

    @property
    def pass_s(self) -> float:
        return 0.0

    @property
    def spent_s(self) -> float:
        return 0.0

    def propose(self, asked: Sequence[tuple[Request, int]]) -> list[list[int]]:
        return [[DRAFT_ID] * num_drafts for _, num_drafts in asked]

    def add_finished(self, request: Request) -> None:
        """Does nothing."""

    def forget(self, request: Request) -> None:
        """Does nothing."""


class LookedUpDrafts(ArbitraryDrafts):
    """The same of rows whose drafts the device looks up, behind tokens in flight."""

    def __init__(self) -> None:
        self._told = RequestNgrams()

    @property
    def can_propose_ahead(self) -> bool:
        return True

    def propose_ahead(self, asked: Sequence[tuple[Request, int, int]]) -> list[list[int]]:
        return [
            [given(place) for place in range(num_drafts)]
            if num_in_flight
            else [DRAFT_ID] * num_drafts
            for _, num_drafts, num_in_flight in asked
        ]

    def tell(self, request: Request) -> list[tuple[int, list[int]]]:
        return self._told.tell(request)

    def forget(self, request: Request) -> None:
        self._told.forget(request)


class HostTimes(NamedTuple):
    """Seconds of the host, and of these its processor's for this thread."""

    wall_s: float
    processor_s: float

    @classmethod
    def now(cls) -> Self:
        return cls(time.perf_counter(), time.thread_time())

    def __sub__(self, earlier: "HostTimes") -> "HostTimes":
        wall_s = self.wall_s - earlier.wall_s
        # A part at most: two clocks, read one after the other, differ by microseconds.
        return HostTimes(wall_s, min(wall_s, self.processor_s - earlier.processor_s))


class DraftedStep(NamedTuple):
    """What a step with drafts took."""

    num_rows: int  # that have some
    device_s: float
    host: HostTimes | None  # before it, since the last tokens; None = there were none meanwhile


class SyntheticAcceptance:
    """An executor whose rows with drafts get as many of them as are drawn here.

    Each draft counts with one probability if those before it count. The last token of such a row is
    its first sample, as if it were the one that belongs there.
    """

    def __init__(self, executor: Executor, *, seed: int) -> None:
        """Where the device decides which drafts count, samples are changed there."""
        self._executor = executor
        self._draw = random.Random(seed)
        self.guesses = executor.guesses if isinstance(executor, DeviceExecutor) else None
        self._overruled: OverruledSamples | None = None
        if self.guesses is not None and isinstance(executor, DeviceExecutor):
            self._overruled = OverruledSamples(executor.model.device)
            self.guesses.rows.overrule = self._overruled.overrule
        self.set_probability(0.0)
        self.steps: list[DraftedStep] = []
        self.had_tokens: HostTimes | None = None  # when; None = a step was launched since

    def launch(self, plan: StepPlan) -> PendingStep:
        pending, before = self._executor.launch(plan), self.had_tokens
        self.had_tokens = None
        host = None if before is None else HostTimes.now() - before
        return _Accepting(plan, pending, self, host)

    def set_probability(self, probability: float) -> None:
        """That a draft counts if those before it do, from now on."""
        self._probability = probability
        if self._overruled is not None:
            self._overruled.draw(self._num_accepted)

    def accept(self, plan: StepPlan, result: StepResult, host: HostTimes | None) -> StepResult:
        """`result` of a step with drafts, with other tokens for the rows that have them."""
        if result.duration_s is not None:
            self.steps.append(DraftedStep(len(plan.drafts), result.duration_s, host))
        if self.guesses is not None:
            return result  # changed already
        tokens = list(result.tokens)
        for index, drafts in plan.drafts:
            if drafts and tokens[index]:
                tokens[index] = drafts[: self._num_accepted(len(drafts))] + tokens[index][:1]
        return msgspec.structs.replace(result, tokens=tokens)

    def _num_accepted(self, num_drafts: int) -> int:
        for number in range(num_drafts):
            if self._draw.random() >= self._probability:
                return number
        return num_drafts


class _Accepting:
    """A step of that executor."""

    def __init__(
        self, plan: StepPlan, pending: PendingStep, by: SyntheticAcceptance, host: HostTimes | None
    ) -> None:
        self._plan = plan
        self._pending = pending
        self._by = by
        self._host = host

    @property
    def is_done(self) -> bool:
        return self._pending.is_done

    def wait(self) -> StepResult:
        result = self._pending.wait()
        if self._plan.drafts:
            result = self._by.accept(self._plan, result, self._host)
        self._by.had_tokens = HostTimes.now()
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """So many drafts a row, and how many tokens a row gets of a step with them."""

    num_drafts: int
    accepted_length: float

    @classmethod
    def parse(cls, text: str) -> "Drafts":
        num_drafts, _, length = text.partition(":")
        drafts = cls(num_drafts=int(num_drafts), accepted_length=float(length))
        if not 1 <= drafts.accepted_length <= 1 + drafts.num_drafts:
            raise ValueError(f"{text}: a row gets 1 to {1 + drafts.num_drafts} tokens of a step")
        return drafts

    @property
    def probability(self) -> float:
        """Of a draft after accepted ones: 1 + p + ... + p^k is the accepted length."""
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            length = sum(middle**i for i in range(self.num_drafts + 1))
            low, high = (middle, high) if length < self.accepted_length else (low, middle)
        return high


@dataclass(slots=True, kw_only=True)
class Found:
    """What one number of rows took."""

    firsts_s: list[float] = field(default_factory=list)  # until each row has its first token
    alls_s: list[float] = field(default_factory=list)  # until each has all
    together_s: list[float] = field(default_factory=list)  # a token of each, while all run
    accepted_length: float | None = None
    steps: list[DraftedStep] = field(default_factory=list)

    @property
    def token_ms(self) -> float:
        took_s = statistics.median(self.alls_s) - statistics.median(self.firsts_s)
        return 1e3 * took_s / NUM_NEW

    @property
    def together_ms(self) -> float:
        return 1e3 * statistics.median(self.together_s)

    @property
    def rows_a_step(self) -> float:
        return statistics.mean(step.num_rows for step in self.steps)

    @property
    def step_ms(self) -> float:
        """Of the device, a step with drafts of as many rows as there were in one."""
        return 1e3 * statistics.median(step.device_s for step in self._largest)

    @property
    def host_ms(self) -> HostTimes:
        """Before such steps; NaN where none followed on tokens."""
        hosts = [step.host for step in self._largest if step.host is not None]
        if not hosts:
            return HostTimes(math.nan, math.nan)
        return HostTimes(*(1e3 * statistics.median(column) for column in zip(*hosts, strict=True)))

    @property
    def _largest(self) -> list[DraftedStep]:
        most = max(step.num_rows for step in self.steps)
        return [step for step in self.steps if step.num_rows == most]


def accept_synthetically(ours: EngineInProcess, probability: float = 0.0) -> SyntheticAcceptance:
    """From now on each draft counts with the probability. Call it before the first step.

    Drafts are a model's, if one drafts, else arbitrary ids in place of n-grams.
    """
    core, made = ours.engine.core, list[SyntheticAcceptance]()
    drafter = core.scheduler.drafting.drafter
    if isinstance(drafter, RequestNgrams):
        arbitrary = LookedUpDrafts() if drafter.can_propose_ahead else ArbitraryDrafts()
        core.scheduler.drafting.drafter = arbitrary

    def wrap(executor: Executor) -> SyntheticAcceptance:
        made.append(SyntheticAcceptance(executor, seed=0))
        return made[0]

    core.wrap_executor(wrap)
    made[0].set_probability(probability)
    return made[0]


class Bench:
    """Times numbers of rows on one engine."""

    def __init__(self, ours: EngineInProcess, *, seed: int, repeats: bool = False) -> None:
        """repeats: each number of rows has one set of prompts."""
        self._ours = ours
        self._prompts = RandomPrompts(ours.engine.spec.vocab_size, seed=seed)
        self._repeats = repeats
        self._drawn: dict[tuple[int, int], list[list[int]]] = {}
        drafts = ours.engine.core.scheduler.drafting.drafter is not None
        self.acceptance = accept_synthetically(ours) if drafts else None

    def measure(self, work: tuple[int, int], num_rounds: int) -> Found:
        """work: rows, and tokens of each before the first. A short round that is left is first."""
        num_rows, num_keys = work
        counts = self._ours.engine.core.scheduler.drafting.counts
        self._seconds(num_rows, num_keys, NUM_NEW // 4)
        before = counts.num_accepted, counts.num_verified
        if self.acceptance is not None:
            self.acceptance.steps.clear()
        found = Found()
        for _ in range(num_rounds):
            found.firsts_s.append(self._seconds(num_rows, num_keys, 1))
            found.alls_s.append(self._seconds(num_rows, num_keys, 1 + NUM_NEW, found))
        num_verified = counts.num_verified - before[1]
        if num_verified:
            found.accepted_length = 1 + (counts.num_accepted - before[0]) / num_verified
        if self.acceptance is not None:
            found.steps = list(self.acceptance.steps)
        return found

    def _seconds(
        self, num_rows: int, num_keys: int, num_new: int, found: Found | None = None
    ) -> float:
        """From adding the prompts until each row has all; `found` gets what is in `together_s`."""
        prompts = self._draw(num_rows, num_keys)
        started_s = time.perf_counter()
        nums = {self._ours.add(prompt, num_new): 0 for prompt in prompts}
        marks: list[tuple[float, int]] = []  # while all run: when, and tokens so far

        def count(output: StepOutput) -> None:
            for _, record in output.tokens:
                nums[record.key] += 1
            if min(nums.values()) > 0 and max(nums.values()) < num_new:
                marks.append((time.perf_counter(), sum(nums.values())))

        self._ours.run_until_idle(count)
        took_s = time.perf_counter() - started_s
        assert set(nums.values()) == {num_new}, "not every token was generated"
        if found is not None:
            (begin_s, before), (end_s, after) = marks[0], marks[-1]
            found.together_s.append((end_s - begin_s) * num_rows / (after - before))
        return took_s

    def forget_acceptance(self) -> None:
        """What decides how many drafts there are begins anew."""
        config = self._ours.config.speculation
        self._ours.engine.core.scheduler.drafting.use_policy(build_policy(config))

    def _draw(self, num_rows: int, num_keys: int) -> list[list[int]]:
        if not self._repeats:
            return self._prompts.draw(num_rows, num_keys)
        work = num_rows, num_keys
        if work not in self._drawn:
            self._drawn[work] = self._prompts.draw(num_rows, num_keys)
        return self._drawn[work]


def save_random_weights(folder: Path) -> None:
    """All tensors that the folder's config.json says, in bf16."""
    spec = load_spec(folder)
    layers = [layer_tensors(spec, layer) for layer in range(spec.num_layers)]
    tensors = {
        name: torch.randn(shape, dtype=torch.bfloat16) * 0.02
        for fields in (outer_tensors(spec), *layers)
        for tensor in fields.values()
        for name, shape in tensor.part_shapes()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What is measured beside plain steps."""

    num_drafts: int  # of a row, at most
    probabilities: Sequence[float]  # in turn
    is_adaptive: bool = False
    on_device: bool = False

    @property
    def name(self) -> str:
        where = ", device" if self.on_device else ""
        return f"controller{where}" if self.is_adaptive else f"always {self.num_drafts}{where}"


def sides_of(args: argparse.Namespace) -> list[Side]:
    sides: list[Side] = []
    for where in args.ngrams:
        on_device = where == "device"
        for drafts in map(Drafts.parse, args.drafts):
            chosen = [drafts.probability]
            sides.append(
                Side(num_drafts=drafts.num_drafts, probabilities=chosen, on_device=on_device)
            )
        if args.sweep:
            given = {"num_drafts": args.max_drafts, "probabilities": args.sweep}
            sides.append(Side(**given, is_adaptive=True, on_device=on_device))
    return sides


def build_config(folder: Path, args: argparse.Namespace, side: Side | None) -> AppConfig:
    """side: None = no drafts."""
    settings: dict[str, object] = {
        "model.path": str(folder),
        "model.device": args.device,
        "model.dtype": "bfloat16" if args.device == "cuda" else "auto",
        "model.weights": args.weights,
        "model.max_model_len": args.max_model_len,
        "cache.enable_prefix_caching": args.repeat,
        "cache.num_blocks": args.num_blocks,
        "cache.kv_dtype": args.kv_dtype,
        "scheduler.max_num_batched_tokens": args.max_num_batched_tokens,
        "scheduler.max_num_seqs": max(rows for rows, _ in args.works),
    }
    if not args.prompt_graphs:
        settings["laps.enable_batch_prefill_cuda_graph"] = False
    if side is not None:
        settings |= {
            "speculation.drafter": "draft_model" if args.draft_model else "ngram",
            "speculation.model_path": args.draft_model,
            "speculation.ngrams_on_device": side.on_device,
            "scheduler.overlap": False if args.in_turn else side.on_device or None,
            "speculation.max_drafts": side.num_drafts,
            "speculation.max_temperature": 9.0,
            "speculation.adaptive": side.is_adaptive,
            "speculation.attention_backend": args.attention_backend,
        }
        if args.graph_tokens is not None:
            settings["speculation.max_graph_tokens"] = args.graph_tokens
    return load_config(None, settings)


def measure(folder: Path, args: argparse.Namespace) -> list[list[str]]:
    """The lines of the table: plain steps of every work, then those with drafts."""
    ours = EngineInProcess(build_config(folder, args, None))
    given = {"seed": args.seed, "repeats": args.repeat}
    bench = Bench(ours, **given)
    plains: dict[tuple[int, int], Found] = {}
    lines: list[list[str]] = []
    for work in args.works:
        plains[work] = bench.measure(work, args.rounds)
        lines.append(_line(work, "none", plains[work], plains[work]))
        _show(lines[-1:])
    for side in sides_of(args):
        ours.restart(build_config(folder, args, side))
        print("graphs with drafts:", ours.engine.executor.statistics().verify_graphs, flush=True)
        bench = Bench(ours, **given)
        acceptance = bench.acceptance
        assert acceptance is not None
        for probability in side.probabilities:
            acceptance.set_probability(probability)
            bench.forget_acceptance()
            name = side.name + (f", p {probability:g}" if side.is_adaptive else "")
            for work in args.works:
                lines.append(_line(work, name, bench.measure(work, args.rounds), plains[work]))
                _show(lines[-1:])
    return lines


def _line(work: tuple[int, int], name: str, found: Found, plain: Found) -> list[str]:
    length = found.accepted_length
    return [
        str(work[0]),
        str(work[1]),
        name,
        "" if length is None else f"{length:.2f}",
        f"{found.token_ms:.3f}",
        f"{plain.token_ms / found.token_ms:.2f}",
        f"{found.together_ms:.3f}",
        f"{plain.together_ms / found.together_ms:.2f}",
        f"{found.rows_a_step:.1f}" if found.steps else "",
        f"{found.step_ms:.2f}" if found.steps else "",
        *([f"{ms:.2f}" for ms in found.host_ms] if found.steps else ["", ""]),
    ]


def _show(lines: Sequence[Sequence[str]]) -> None:
    for line in lines:
        print(*line, sep="\t", flush=True)


def parse_work(text: str) -> tuple[int, int]:
    rows, _, keys = text.partition("x")
    return int(rows), int(keys)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shapes", choices=sorted(SHAPES), default="qwen3-8b")
    model.add_argument("--model", type=Path, help="a folder with config.json instead of --shapes")
    parser.add_argument("--weights", choices=("random", "safetensors"), default="random")
    parser.add_argument("--weight-format", choices=sorted(WEIGHT_FORMATS), default="dense")
    parser.add_argument("--kv-dtype", choices=("auto", "fp8_e4m3"), default="auto")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    works = [(work.num_rows, work.num_tokens) for work in DECODES]
    parser.add_argument("--works", nargs="+", type=parse_work, default=works, metavar="ROWSxTOKENS")
    parser.add_argument("--drafts", nargs="*", default=[], metavar="DRAFTS:LENGTH")
    parser.add_argument("--draft-shapes", choices=sorted(SHAPES), help="of a model that drafts")
    parser.set_defaults(draft_model=None)  # its folder
    parser.add_argument("--in-turn", action="store_true", help="steps with drafts do not overlap")
    where = ("host", "device")
    parser.add_argument("--ngrams", nargs="+", choices=where, default=["host"], help="in turn")
    parser.add_argument("--sweep", nargs="*", type=float, default=[], metavar="PROBABILITY")
    parser.add_argument("--max-drafts", type=int, default=8, help="with --sweep")
    parser.add_argument("--attention-backend", choices=("prefill", "decode"), default="decode")
    # 256 rows of four drafts have 1,280. Larger steps are launched kernel by kernel.
    parser.add_argument("--graph-tokens", type=int, help="0 = no graphs with drafts; default: auto")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--num-blocks", type=int, help="default: as many as fit")
    parser.add_argument("--repeat", action="store_true", help="the same prompts, kept in the cache")
    parser.add_argument(
        "--no-prompt-graphs", dest="prompt_graphs", action="store_false", help="starts sooner"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    print(describe_device(args.device), flush=True)
    header = ["rows", "keys", "drafts", "accepted length", "ms a token", "x", "all rows", "x"]
    header += ["rows a step", "device ms", "host ms", "of these, processor"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or write_shapes(args.shapes, Path(scratch), args.weight_format)
        if args.draft_shapes is not None:
            args.draft_model = str(write_shapes(args.draft_shapes, Path(scratch) / "drafts"))
            save_random_weights(Path(args.draft_model))
        print("\n" + render_rows([header, *measure(folder, args)]))


if __name__ == "__main__":
    main()
