"""The peer's engine figures, of a vLLM that only counts, go where bench_engine reads them."""

import json
import os
import sys
from itertools import cycle
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from load_tests.lab import bench_engine_vllm, turns
from load_tests.lab.bench_engine_vllm import build_parser, llm_options, main, run
from load_tests.lab.comparison import compare, read_peer
from load_tests.lab.works import WARM_UPS, Kind, Work

TOKEN_S, STEP_S, OTHER_STEP_S = 1e-5, 5e-3, 3.0
PACES = (1, 2, 9)  # of rounds, in turn: the median is 2 wherever one begins
WORKS = (
    Work(Kind.PREFILL, 32, 1024),
    Work(Kind.SHORT_PREFILL, 8, 64),
    Work(Kind.DECODE, 16, 128),
    Work(Kind.DECODE, 256, 128),
)


class CountingVllm(ModuleType):
    """The module and its engine in one: a token takes TOKEN_S, a step of all rows STEP_S."""

    __version__ = "0.26.0"
    SamplingParams = SimpleNamespace

    def __init__(self) -> None:
        super().__init__("vllm")
        self.now_s, self.is_open = 0.0, True
        self.max_running = 256
        self.environ: dict[str, str] = {}
        self.options: dict[str, object] = {}
        self.config: dict[str, object] = {}
        self.rounds: list[tuple[int, int, int]] = []
        self._paces = cycle(PACES)
        self._pace = 1
        self._waiting: list[SimpleNamespace] = []
        self._running: list[SimpleNamespace] = []
        self.llm_engine = self
        self.engine_core = self

    def LLM(self, **options: object) -> "CountingVllm":
        self.options, self.environ = options, dict(os.environ)
        self.config = json.loads(Path(str(options["model"]), "config.json").read_text())
        return self

    def generate(
        self, prompts: list[dict[str, list[int]]], sampling: SimpleNamespace, *, use_tqdm: bool
    ) -> list[SimpleNamespace]:
        assert not use_tqdm
        num_tokens = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
        self.rounds.append((len(prompts), num_tokens // len(prompts), sampling.max_tokens))
        self.now_s += num_tokens * TOKEN_S * next(self._paces)
        return [_output(str(i), sampling.max_tokens) for i in range(len(prompts))]

    def add_request(
        self, row: str, prompt: dict[str, list[int]], sampling: SimpleNamespace
    ) -> None:
        if not self._waiting:
            self._pace = next(self._paces)
        length = len(prompt["prompt_token_ids"])
        request = SimpleNamespace(row=row, length=length, num=0, most=sampling.max_tokens)
        self._waiting.append(request)

    def step(self) -> list[SimpleNamespace]:
        """All running rows decode, and prompts begin as far as the token budget goes."""
        is_all = not self._waiting
        budget = 8192
        while self._waiting and budget and len(self._running) < self.max_running:
            self._running.append(self._waiting.pop(0))
            budget -= self._running[-1].length
        self.now_s += STEP_S * self._pace if is_all else OTHER_STEP_S
        for request in self._running:
            request.num += 1
        outputs = [_output(request.row, request.num) for request in self._running]
        self._running = [request for request in self._running if request.num < request.most]
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting or self._running)

    def abort_request(self, rows: list[str]) -> None:
        self._running = [request for request in self._running if request.row not in rows]

    def shutdown(self) -> None:
        self.is_open = False


def _output(row: str, num: int) -> SimpleNamespace:
    return SimpleNamespace(request_id=row, outputs=[SimpleNamespace(token_ids=range(num))])


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> CountingVllm:
    counting = CountingVllm()
    monkeypatch.setitem(sys.modules, "vllm", counting)
    monkeypatch.setattr(os, "environ", {"VLLM_USE_FLASHINFER_SAMPLER": "1"})
    clock = SimpleNamespace(perf_counter=lambda: counting.now_s)
    monkeypatch.setattr(bench_engine_vllm, "time", clock)
    return counting


def test_medians_of_the_rounds_are_what_bench_engine_reads(
    vllm: CountingVllm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = "--works prefill_32x1024 short_prefill_8x64 decode_bs16 decode_bs256 --kv-dtype fp8"
    turn = tmp_path / "turn"
    monkeypatch.setattr(sys, "argv", ["bench_engine_vllm", *asked.split(), "--turn", str(turn)])

    def let_others_measure(_: float) -> None:
        print("others measure")
        turn.touch()

    monkeypatch.setattr(turns, "time", SimpleNamespace(sleep=let_others_measure))
    main()
    printed = tmp_path / "vllm.txt"
    printed.write_text(capsys.readouterr().out)
    peer = read_peer(printed)
    assert list(peer) == [work.key for work in WORKS]
    assert list(peer.values()) == pytest.approx([50_000, 2 * 512 * 0.01, 10, 10])
    assert vllm.rounds == [
        *WARM_UPS * 2, *[(32, 1024, 1)] * 3, *[(8, 64, 1)] * 7,
    ]  # fmt: skip
    assert compare(WORKS[2], [8e-3], 1e-3, peer=peer, chain={}).ratio == pytest.approx(0.8)
    assert "ready and warm\nothers measure\nROW" in printed.read_text()
    about = next(line for line in printed.read_text().splitlines() if line.startswith("ABOUT "))
    assert json.loads(about.removeprefix("ABOUT "))["vllm"] == "0.26.0"
    assert vllm.options["kv_cache_dtype"] == "fp8"
    assert vllm.environ["NCCL_NVLS_ENABLE"] == "0"
    assert vllm.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "1", "what is set already stays"
    assert "VLLM_MOE_ROUTING_SIMULATION_STRATEGY" not in vllm.environ, "not a mixture"
    assert not vllm.is_open


def test_rows_that_never_decode_together_are_an_error(vllm: CountingVllm, tmp_path: Path) -> None:
    vllm.max_running = 8
    asked = "--shapes qwen3-30b-a3b --w4a16 --works decode_bs16 --kv-gib 0.5"
    with pytest.raises(ValueError, match=r"decode_bs16_ctx128.*--kv-gib"):
        run(build_parser().parse_args(asked.split()), tmp_path)
    assert vllm.options["kv_cache_memory_bytes"] == 2**29
    assert vllm.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] == "uniform_random"
    quantization = vllm.config["quantization_config"]
    assert isinstance(quantization, dict)
    assert quantization["format"] == "pack-quantized"
    assert not vllm.is_open


def test_several_gpus_sum_without_multicast() -> None:
    asked = "--tensor-parallel 2 --expert-parallel"
    options = llm_options(Path("model"), build_parser().parse_args(asked.split()))
    assert (options["tensor_parallel_size"], options["enable_expert_parallel"]) == (2, True)
    compilation = options["compilation_config"]
    assert isinstance(compilation, dict)
    assert compilation["pass_config"] == {"fuse_allreduce_rms": False}


@pytest.mark.parametrize("asked", ["--works decod_bs1", "--rounds 0"])
def test_nothing_to_measure_is_refused(asked: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to measure"):
        run(build_parser().parse_args(asked.split()), tmp_path)
