"""What quantised weights change in what the shipped model predicts, format by format.

    python -m load_tests.lab.quant_accuracy
    python -m load_tests.lab.quant_accuracy --device cuda --windows 64    # with the GPU's products
    python -m load_tests.lab.quant_accuracy --forms --kv                  # K and V in FP8 alone
    python -m load_tests.lab.quant_accuracy --forms --rounded             # rounded inputs alone

Writes the model in each format (rounded to the nearest, without calibration), loads it as the
engine does, and compares its predictions of held-out text with those of the model as published: the
files of the standard library that `demo_model/corpus.py` keeps out of training. On a GPU windows
are prompts, so inputs are rounded where the engine rounds them. With `--rounded` also of what that
changes, by transformers in float64 (rounded_reference.py). With `--kv` also of the published
weights with K and V in e4m3: with all scales 1, and calibrated on other windows.

    KL          mean over tokens of sum p log(p / q), nats; p of the model as published
    top 1       share of tokens whose most likely successor is the same
    perplexity  exp of the mean loss
"""

import argparse
import hashlib
import logging
import math
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  (the field's own spelling)
from torch import Tensor

from configs.load import PROJECT_ROOT
from engine.kv.layout import KvDtype
from engine.kv_calibration import largest_numbers, scales_for
from engine.models.llama import CausalLM, attention_shape
from engine.models.registry import WeightSource, build_model
from engine.plan import RowAdmission, StepPlan
from engine.request import SamplingParams
from engine.runner.executor import Executor
from engine.runner.executor_options import ExecutorOptions
from engine.runner.warm_up import release_step
from engine.sampling.sampler import Sampler
from engine.text.tokenizing import load_tokenizer
from kernels.attention.names import AttentionNames
from kernels.attention.select import build_attention
from kernels.kv.scales import KvScales
from load_tests.lab.rounded_reference import ROUNDED_FORMS, Float64Scorer
from load_tests.tables import render_rows
from load_tests.testbed.quantised_folders import DECODED_FORMS, FORMS, write_quantised

logger = logging.getLogger(__name__)

MODEL = PROJECT_ROOT / "demo_model" / "laps-demo"
ONLINE = "model.quantization: fp8"
ALL_FORMS = [*FORMS, *DECODED_FORMS, ONLINE]
WINDOW = 512  # tokens
BLOCK_SIZE = 16
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """A format's predictions beside the published model's."""

    name: str
    kl: float
    top_1: float
    perplexity: float
    num_tokens: int


class Scores(Protocol):
    def log_probabilities(self, token_ids: Sequence[int]) -> Tensor:
        """[T, vocab] fp32, of what follows each token."""
        ...


class Scorer:
    """All logits of one prompt at a time."""

    def __init__(self, model: CausalLM, kv_scales: Tensor | None = None) -> None:
        """kv_scales: fp32 [layers, 2, KV heads]; None = K and V are kept as they are computed."""
        dtype: KvDtype = "bfloat16" if model.device.type == "cuda" else "float32"
        self._num_blocks = -(-WINDOW // BLOCK_SIZE)
        spec, is_fp8 = model.spec, kv_scales is not None
        shape = attention_shape(spec)
        self._executor = Executor(
            model,
            layout=spec.kv_layout(block_size=BLOCK_SIZE, dtype="fp8_e4m3" if is_fp8 else dtype),
            num_blocks=self._num_blocks,
            max_rows=1,
            max_model_len=spec.max_model_len,
            max_num_batched_tokens=WINDOW,
            sampler=Sampler(spec.vocab_size, 1, spec.eos_token_ids, model.device),
            attention=build_attention(
                AttentionNames(prefill="auto", decode="auto"),
                shape,
                block_size=BLOCK_SIZE,
                dtype=model.dtype,
                device=model.device,
                fixed_tile=False,
                is_fp8=is_fp8,
            ),
            options=ExecutorOptions(
                kv_scales=None if kv_scales is None else KvScales.of(kv_scales.to(model.device))
            ),
        )

    def log_probabilities(self, token_ids: Sequence[int]) -> Tensor:
        """[T, vocab] fp32, of what follows each token."""
        admission = RowAdmission(
            row=0,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            params=_PARAMS,
            block_ids=list(range(self._num_blocks)),
        )
        plan = StepPlan(
            step=0,
            admissions=[admission],
            rows=[0],
            num_new_tokens=[len(token_ids)],
            num_computed_tokens=[0],
            num_samples=[0],
            new_block_ids=[[]],
        )
        logits = self._executor.forward_logits(plan, of_all_tokens=True)
        self._executor.launch(release_step(1)).wait()
        return F.log_softmax(logits.float(), dim=-1)


def held_out_windows(number: int) -> list[list[int]]:
    """The first tokens of held-out files, WINDOW each."""
    tokenizer = load_tokenizer(MODEL)
    texts = list(_held_out_texts(Path(sysconfig.get_paths()["stdlib"])))
    windows: list[list[int]] = []
    for ids in tokenizer.encode_batch(texts, add_special_tokens=True):
        assert isinstance(ids, list)
        windows += [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)]
    return windows[:: max(1, len(windows) // number)][:number]


def _held_out_texts(stdlib: Path) -> Iterator[str]:
    for file in sorted(stdlib.rglob("*.py")):
        path = file.relative_to(stdlib).as_posix()
        skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
        is_held_out = hashlib.sha256(path.encode()).digest()[0] % 20 == 0
        if is_held_out and not skipped & set(path.split("/")):
            yield file.read_text(encoding="utf-8", errors="replace")


def compare(
    name: str,
    scorer: Scores,
    windows: Sequence[list[int]],
    published: Sequence[Tensor],
) -> Accuracy:
    """published: the published model's log-probabilities of each window."""
    kl, same, loss, num_tokens = 0.0, 0, 0.0, 0
    for window, theirs in zip(windows, published, strict=True):
        ours = scorer.log_probabilities(window).cpu()
        kl += float((theirs.exp() * (theirs - ours)).sum())
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        targets = torch.tensor(window[1:])
        loss += float(F.nll_loss(ours[:-1], targets, reduction="sum"))
        num_tokens += len(window)
    return Accuracy(
        name=name,
        kl=kl / num_tokens,
        top_1=same / num_tokens,
        perplexity=math.exp(loss / (num_tokens - len(windows))),
        num_tokens=num_tokens,
    )


def measure(
    names: Sequence[str], windows: Sequence[list[int]], device: torch.device, scratch: Path
) -> Iterator[Accuracy]:
    """The published model in the device's dtype, then each format."""
    cpu = torch.device("cpu")
    exact = Scorer(build_model(MODEL, dtype=torch.float32, device=cpu))
    published = [exact.log_probabilities(window) for window in windows]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    label = str(dtype).removeprefix("torch.")
    yield compare(
        f"as published, {label}",
        Scorer(build_model(MODEL, dtype=dtype, device=device)),
        windows,
        published,
    )
    for name in names:
        if name == ONLINE:
            model = build_model(
                MODEL, dtype=dtype, device=device, source=WeightSource(quantization="fp8")
            )
        else:
            folder = write_quantised(MODEL, name, scratch / name)
            model = build_model(folder, dtype=dtype, device=device)
        yield compare(name, Scorer(model), windows, published)


def measure_rounded(
    names: Sequence[str], windows: Sequence[list[int]], scratch: Path
) -> Iterator[Accuracy]:
    """Formats in float64: with inputs as they are, and rounded."""
    exact = Float64Scorer(MODEL)
    published = [exact.log_probabilities(window) for window in windows]
    yield compare("as published, float64", exact, windows, published)
    for name in names:
        matrices = scratch / f"{name}-matrices"
        write_quantised(MODEL, name, scratch / name, stands_for=matrices)
        scorer = Float64Scorer(matrices)
        yield compare(f"{name}, inputs as they are", scorer, windows, published)
        scorer.round_inputs(ROUNDED_FORMS[name])
        yield compare(f"{name}, inputs rounded", scorer, windows, published)


def measure_kv(
    windows: Sequence[list[int]], others: Sequence[list[int]], device: torch.device
) -> Iterator[Accuracy]:
    """The published weights, then with K and V in e4m3; others: windows to calibrate on."""
    exact = Scorer(build_model(MODEL, dtype=torch.float32, device=torch.device("cpu")))
    published = [exact.log_probabilities(window) for window in windows]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build_model(MODEL, dtype=dtype, device=device)
    largest = largest_numbers(MODEL, others, device.type)
    yield compare("K and V as computed", Scorer(model), windows, published)
    for name, scales in (
        ("K and V in e4m3, scales 1", torch.ones_like(largest)),
        ("K and V in e4m3, calibrated", scales_for(largest, 2.0)),
        ("the same, one scale a tensor", scales_for(largest, 2.0).amax(2, keepdim=True)),
    ):
        scorer = Scorer(model, scales.expand_as(largest))
        yield compare(name, scorer, windows, published)


def render(found: Sequence[Accuracy]) -> str:
    header = ("weights", "KL, nats", "top 1 the same", "perplexity", "more")
    first = found[0].perplexity
    rows = [
        (
            accuracy.name,
            f"{accuracy.kl:.5f}",
            f"{accuracy.top_1:.2%}",
            f"{accuracy.perplexity:.3f}",
            f"{accuracy.perplexity / first - 1:+.2%}",
        )
        for accuracy in found
    ]
    return render_rows([header, *rows])


def _told(found: Iterator[Accuracy]) -> Iterator[Accuracy]:
    """Passes rows on; logs each, so that a run that is cut has shown what it found."""
    for accuracy in found:
        logger.info(
            "%s: KL %.5f nats, perplexity %.3f", accuracy.name, accuracy.kl, accuracy.perplexity
        )
        yield accuracy


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(message)s")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--windows", type=int, default=32, help=f"of {WINDOW} tokens each")
    parser.add_argument("--rounded", action="store_true", help="rounded inputs in float64, too")
    parser.add_argument("--kv", action="store_true", help="K and V in e4m3, too")
    parser.add_argument("--forms", nargs="*", choices=ALL_FORMS, default=ALL_FORMS)
    args = parser.parse_args()
    windows, device = held_out_windows(args.windows), torch.device(args.device)
    with tempfile.TemporaryDirectory() as scratch:
        found = list(_told(measure(args.forms, windows, device, Path(scratch))))
    print(f"{found[0].num_tokens} tokens of held-out text, {args.device}\n")
    print(render(found))
    if args.rounded:
        with tempfile.TemporaryDirectory() as scratch:
            rounded = measure_rounded(list(ROUNDED_FORMS), windows, Path(scratch))
            print(f"\n{render(list(_told(rounded)))}")
    if args.kv:
        drawn = held_out_windows(2 * args.windows + 1)
        others = [window for window in drawn if window not in windows]
        print(f"\n{render(list(_told(measure_kv(windows, others, device))))}")


if __name__ == "__main__":
    main()
