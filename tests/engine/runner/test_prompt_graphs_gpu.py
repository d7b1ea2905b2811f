"""Captured prompt steps of both forms against steps launched kernel by kernel, on a GPU."""

import random

import pytest
import torch

from configs.schema import LapsConfig
from engine.models.llama import CausalLM
from engine.models.registry import build_model
from engine.plan import StepResult
from engine.runner.graph_sizes import PromptSizes, ragged_sizes
from engine.runner.graphs import CudaRecorder
from engine.runner.grid_sizes import grid_sizes
from kernels.attention.names import AttentionName, AttentionNames
from tests.engine.runner.graph_story import LogitSampler, tell
from tests.engine.runner.step_driver import StepDriver
from tests.harness.seeds import fresh_seed
from tests.harness.tiny_models import save_model

pytestmark = pytest.mark.gpu

MAX_ROWS = 8
NUM_BLOCKS = 8 * 64
LENGTHS = (1, 2, 15, 16, 17, 63, 130, 256, 400, 900)
MAX_ERROR = 2e-2  # norm of the difference by norm, bf16 and other tiles in three layers
_LAPS = LapsConfig()
FORMS = {
    "grid": grid_sizes(
        _LAPS.batch_prefill_batch_sizes,
        _LAPS.batch_prefill_seq_lengths,
        max_row_tokens=_LAPS.batch_prefill_max_seq_len,
    ),
    "odd_grid": grid_sizes((3, 5), (7, 100), max_row_tokens=150),
    "ragged": ragged_sizes(MAX_ROWS, 1024),
}


@pytest.fixture(scope="module", params=[False, True], ids=["fast", "deterministic"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[CausalLM, bool]:
    """A model, and whether it gives the same bits in any batch."""
    folder = tmp_path_factory.mktemp("model")
    save_model(
        folder,
        "Qwen3ForCausalLM",
        seed=8,
        hidden_size=512,
        intermediate_size=720,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=1024,
        dtype=torch.bfloat16,
    )
    built = build_model(
        folder,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        is_deterministic=request.param,
    )
    return built, request.param


def _driver(
    model: CausalLM, attention: AttentionNames, *, fixed_tile: bool, prompts: PromptSizes | None
) -> StepDriver:
    driver = StepDriver(
        model,
        seed=5,
        block_size=16,
        num_blocks=NUM_BLOCKS,
        max_rows=MAX_ROWS,
        sampler=LogitSampler(model, MAX_ROWS),
        attention=attention,
        fixed_tile=fixed_tile,
    )
    if prompts:
        driver.executor.capture_graphs(CudaRecorder(), lambda _: None, prompts=prompts)
    return driver


def _logits(driver: StepDriver) -> torch.Tensor:
    """[S, vocab], by growing row."""
    sampler = driver.executor._rows.sampler
    assert isinstance(sampler, LogitSampler)
    return torch.stack([sampler.logits[row] for row in sorted(sampler.logits)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("prefill", ["flash_attn", "triton"])
def test_a_replayed_step_gives_what_the_ordinary_path_gives(
    model: tuple[CausalLM, bool], prefill: AttentionName, form: str
) -> None:
    built, is_deterministic = model
    if is_deterministic and prefill != "triton":
        pytest.skip("only triton has the same bits in any batch")
    attention = AttentionNames(prefill=prefill, decode="triton")
    plain = _driver(built, attention, fixed_tile=is_deterministic, prompts=None)
    graphs = _driver(built, attention, fixed_tile=is_deterministic, prompts=FORMS[form])
    num_compared = 0

    def check(num_new: dict[int, int], results: list[StepResult]) -> None:
        nonlocal num_compared
        assert results[0].is_finite == results[1].is_finite == [True] * len(num_new)
        samples = [bool(tokens) for tokens in results[0].tokens]
        assert [bool(tokens) for tokens in results[1].tokens] == samples
        if not any(samples):
            return
        expected, found = _logits(plain), _logits(graphs)
        num_compared += 1
        if is_deterministic:
            assert results[0].tokens == results[1].tokens
            assert torch.equal(found, expected)
        else:
            assert float((found - expected).norm() / expected.norm()) < MAX_ERROR

    seed = fresh_seed()
    tell(
        [plain, graphs],
        random.Random(seed),
        num_steps=40,
        lengths=LENGTHS,
        # Other bits may give other tokens, and then nothing after them could be compared.
        decodes=is_deterministic,
        check=check,
    )
    assert num_compared
    statistics = graphs.executor.statistics()
    assert statistics.prompt_graphs is not None
    assert statistics.prompt_graphs.num_graphs == len(FORMS[form].sizes)
    assert statistics.prompt_steps is not None
    assert statistics.prompt_steps.num_replayed > 0
