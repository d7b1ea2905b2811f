"""A draft model's K and V in the target's blocks on a GPU: they move, and no answer changes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.load import load_config
from load_tests.testbed.local_handoff import LocalPair
from tests.engine.speculation.drafting_stories import nums_missing
from tests.engine.speculation.eagle_heads import assert_same_drafts, record_proposals
from tests.engine.speculation.gpu_work import mixed_work
from tests.harness.in_process import GREEDY, answer, start_engine
from tests.harness.tiny_models import save_model

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 208,
    "num_attention_heads": 8,
    "max_position_embeddings": 1024,
    "dtype": torch.bfloat16,
}
HEADS = {"target": (2, 64), "the same": (2, 64), "half as many": (1, 64), "wider": (1, 128)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for seed, (name, (num_heads, head_dim)) in enumerate(HEADS.items()):
        found[name] = tmp_path_factory.mktemp("model")
        heads = {"num_key_value_heads": num_heads, "head_dim": head_dim}
        save_model(
            found[name], "Qwen3ForCausalLM", seed=seed, num_hidden_layers=3, **heads, **SIZES
        )
    return found


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("heads", ["the same", "half as many", "wider"])
@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_what_moves_is_not_computed_again_and_changes_nothing(
    folders: dict[str, Path], dtype: str, heads: str, overlap: bool
) -> None:
    plain: dict[str, Any] = {
        "model__device": "cuda",
        "model__path": str(folders["target"]),
        "model__deterministic": True,
        "cache__num_blocks": 600,
        "cache__kv_dtype": dtype,
        "scheduler__max_num_seqs": 24,
        "scheduler__overlap": overlap,
    }
    work = [(prompt, GREEDY) for prompt, _ in mixed_work(12)]
    expected = [found.tokens for found in answer(start_engine(**plain), work)]
    settings = {
        **plain,
        "speculation__drafter": "draft_model",
        "speculation__model_path": str(folders[heads]),
        "speculation__adaptive": False,
        "speculation__max_drafts": 3,
        "speculation__prompts_on_prefill": True,
    }
    apart = {"workers.unified": 0, "workers.prefill": 1, "workers.decode": 1}
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    pair = LocalPair(load_config(None, dotted | apart))
    drafting = pair.decode.core.scheduler.drafting
    missing, proposals = nums_missing(drafting), [record_proposals(pair.decode)]
    for _ in range(2):  # the second time with prefixes that are on the prefill side
        assert [found.tokens for found in pair.answer(work)] == expected
    assert missing == [0] * len(missing)
    assert len(missing) >= 2 * len(work)
    assert drafting.counts.num_drafted > 50
    if not overlap:
        one = start_engine(**settings)
        proposals.append(record_proposals(one))
        answer(one, work)
        assert_same_drafts(*proposals)
