"""The whole engine on a GPU: exact tokens, graphs and overlap on and off, nothing compiled late."""

import random
from pathlib import Path

import msgspec
import pytest
import torch

from configs.load import PROJECT_ROOT, load_config
from engine.engine import Engine
from engine.errors import ConfigError
from engine.request import SamplingParams
from engine.runner.graphs import CudaRecorder
from engine.runner.kv_memory import held_again
from engine.text.tokenizing import Tokenizing, load_tokenizer
from tests.harness.in_process import GREEDY, answer, start_engine
from tests.harness.tiny_models import VOCAB_SIZE, save_model

pytestmark = pytest.mark.gpu

DEMO_MODEL = Path("demo_model/laps-demo")
# The shipped model is sure of these (its second choices are at least 1.6 nats behind), so bf16 and
# any backend must agree with fp32 on a CPU.
DECISIVE = {
    "def add(a, b):\n    return ": "a + b\n\n\ndef",
    "try:\n    import json\nexcept ": "ImportError:\n",
    "with open(path) as f:\n    return ": "f.read()\n\n",
}
BASE = {"model__device": "cuda", "cache__num_blocks": 600, "scheduler__max_num_seqs": 24}

Work = list[tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_model(
        made,
        "Qwen3ForCausalLM",
        seed=5,
        hidden_size=256,
        intermediate_size=208,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        dtype=torch.bfloat16,
    )
    return made


def mixed_work(seed: int, count: int = 40) -> Work:
    """Prompts of 1 to 400 tokens with every kind of sampling, more of them than rows."""
    rng = random.Random(seed)
    work: Work = []
    for number in range(count):
        length = rng.choice((1, 2, 5, 17, 64, 130, 400))
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
        params = rng.choice(
            (
                GREEDY,
                SamplingParams(max_tokens=rng.randrange(1, 40), temperature=0.0),
                SamplingParams(max_tokens=30, temperature=0.8, seed=number),
                SamplingParams(max_tokens=20, temperature=1.2, top_k=7, top_p=0.9, seed=number),
                SamplingParams(max_tokens=20, temperature=1.0, min_p=0.1, logprobs=3, seed=number),
                SamplingParams(
                    max_tokens=25,
                    temperature=0.9,
                    repetition_penalty=1.3,
                    presence_penalty=0.4,
                    frequency_penalty=0.2,
                    logit_bias={7: 2.0},
                    min_tokens=4,
                    stop_token_ids=(9, 11),
                    seed=number,
                ),
            )
        )
        work.append((prompt, params))
    return work


def encode(tokenizer: Tokenizing, text: str) -> list[int]:
    (ids,) = tokenizer.encode_batch([text], add_special_tokens=False)
    assert isinstance(ids, list), ids
    return ids


def tokens_of(engine: Engine, work: Work) -> list[tuple[list[int], str | None]]:
    return [(found.tokens, found.finish) for found in answer(engine, work)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_shipped_model_answers_exactly(dtype: str) -> None:
    attention = "auto" if dtype == "bfloat16" else "reference"
    engine = start_engine(
        **BASE,
        model__dtype=dtype,
        model__attention__prefill=attention,
        model__attention__decode=attention,
    )
    tokenizer = load_tokenizer(DEMO_MODEL)
    work = [
        (encode(tokenizer, prompt), SamplingParams(max_tokens=8, temperature=0.0))
        for prompt in DECISIVE
    ]
    for found, expected in zip(answer(engine, work), DECISIVE.values(), strict=True):
        text = tokenizer.decode(found.tokens)
        assert text.startswith(expected), text


def test_graphs_and_overlap_change_no_token(folder: Path) -> None:
    """Bit-identical logits make the comparison exact, whatever each mode batches together."""
    work = mixed_work(seed=1)
    outcomes = {}
    for graphs in (True, False):
        for overlap in (True, False):
            engine = start_engine(
                **BASE,
                model__path=str(folder),
                model__deterministic=True,
                execution__cuda_graphs=graphs,
                scheduler__overlap=overlap,
                scheduler__max_num_batched_tokens=192,
            )
            outcomes[graphs, overlap] = tokens_of(engine, work)
    plain = outcomes[False, False]
    assert all(tokens for tokens, _ in plain)
    for mode, outcome in outcomes.items():
        assert outcome == plain, mode


PROMPT_GRAPHS: dict[str, dict[str, object]] = {
    "none": {"laps__enable_batch_prefill_cuda_graph": False},
    "ragged": {"laps__enable_batch_prefill_cuda_graph": True},
    "grid": {
        "laps__batch_prefill_form": "grid",
        "laps__batch_prefill_max_seq_len": 130,
        "laps__batch_prefill_batch_sizes": [1, 3, 24],
        "laps__batch_prefill_seq_lengths": [7, 130],
    },
}


def test_graphs_of_prompts_change_no_token_and_compile_nothing(folder: Path) -> None:
    work = mixed_work(seed=9)
    outcomes = {}
    for form, keys in PROMPT_GRAPHS.items():
        engine = start_engine(
            **BASE,
            **keys,
            model__path=str(folder),
            model__deterministic=True,
            scheduler__max_num_batched_tokens=192,
        )
        outcomes[form] = tokens_of(engine, work)
        assert engine.compilations.names == [], form
    assert all(tokens for tokens, _ in outcomes["none"])
    assert outcomes["ragged"] == outcomes["none"]
    assert outcomes["grid"] == outcomes["none"]


@pytest.mark.parametrize("decode", ["triton", "flash_attn", "flashinfer"])
@pytest.mark.parametrize("prefill", ["triton", "flash_attn", "flashinfer"])
def test_every_pair_of_backends_gives_the_decisive_tokens(prefill: str, decode: str) -> None:
    engine = start_engine(
        **BASE, model__attention__prefill=prefill, model__attention__decode=decode
    )
    tokenizer = load_tokenizer(DEMO_MODEL)
    for prompt, expected in DECISIVE.items():
        work = [(encode(tokenizer, prompt), SamplingParams(max_tokens=8, temperature=0.0))]
        assert tokenizer.decode(answer(engine, work)[0].tokens).startswith(expected)


@pytest.mark.parametrize("max_num_batched_tokens", [768, 2300])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_nothing_compiles_once_the_engine_is_ready(
    folder: Path, is_deterministic: bool, max_num_batched_tokens: int
) -> None:
    engine = start_engine(
        **BASE,
        model__path=str(folder),
        model__deterministic=is_deterministic,
        scheduler__max_num_batched_tokens=max_num_batched_tokens,
    )
    for seed in range(2, 5):
        answer(engine, mixed_work(seed))
    for length in (1, 3, 31, 33, 100, 255, 511, 700):
        answer(engine, [([5] * length, GREEDY)])
    for count in (3, 5, 11):
        answer(engine, [([7] * 470, GREEDY)] * count)
    assert engine.compilations.names == []


@pytest.mark.parametrize("host_gib", [0.0, 0.25])
def test_the_kv_store_takes_what_the_share_leaves(folder: Path, host_gib: float) -> None:
    torch.cuda.empty_cache()
    free_before, total = torch.cuda.mem_get_info()
    share = 1 - free_before / total + 0.1
    engine = start_engine(
        **(BASE | {"cache__num_blocks": None}),
        model__path=str(folder),
        cache__gpu_memory_utilization=share,
        cache__host_gib=host_gib,
    )
    free_after, _ = torch.cuda.mem_get_info()
    assert engine.cache.num_blocks * engine.layout.block_bytes > 0.05 * total
    assert (1 - share) * total < free_after + 2**30
    assert tokens_of(engine, mixed_work(7, count=6))
    engine.close()


def test_captures_leave_what_steps_gave_back() -> None:
    device, num_bytes, recorder = torch.device("cuda"), 2**28, CudaRecorder()
    number = torch.zeros(num_bytes // 4, device=device)
    replay = recorder.record(lambda: (number + 1)[:1].clone())  # its pool is not given back
    torch.cuda.empty_cache()
    step = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    del step
    kept = held_again(device)
    assert kept.nbytes == num_bytes
    recorder.record(lambda: number[:1] + 1)
    before = torch.cuda.memory_reserved()
    del kept
    torch.cuda.empty_cache()
    assert before - torch.cuda.memory_reserved() >= num_bytes
    assert float(replay()) == 1


def test_a_share_that_leaves_nothing_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        start_engine(
            **(BASE | {"cache__num_blocks": None}),
            model__path=str(folder),
            cache__gpu_memory_utilization=0.0001,
        )


def test_random_weights_need_no_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    engine = start_engine(**BASE, model__path=str(tmp_path), model__weights="random")
    assert all(len(tokens) == 24 for tokens, _ in tokens_of(engine, [([3, 4, 5], GREEDY)] * 3))


def test_an_engine_chooses_for_its_gpu_and_compiles_nothing_afterwards(folder: Path) -> None:
    auto = msgspec.to_builtins(load_config(PROJECT_ROOT / "configs" / "gpu.yaml", {}))
    keys = {
        f"{section}__{key}": value
        for section in ("scheduler", "laps", "edge")
        for key, value in auto[section].items()
    }
    same = {"model__path": str(folder), "model__deterministic": True}
    engine = start_engine(**BASE | keys | same)
    calibration, limits = engine.calibration, engine.limits
    assert calibration is not None
    assert [num_tokens for num_tokens, _ in calibration.chunks][:3] == [16, 64, 128]
    laps = limits.laps
    assert laps.max_mixed_step_ms is not None
    assert laps.max_mixed_step_ms < laps.max_step_ms
    assert limits.scheduler.max_num_seqs == 8  # 600 blocks of 16 tokens, 1,024 tokens a row
    assert engine.core.scheduler.costs.is_fitted
    work = mixed_work(seed=9)
    found = tokens_of(engine, work)
    assert engine.compilations.names == []  # the next engine's are counted from its start on
    assert found == tokens_of(start_engine(**BASE, **same), work)
