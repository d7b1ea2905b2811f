"""A model's own layer drafts: its guesses are an independent one's, and no answer changes."""

import random
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from configs.errors import ConfigFileError
from configs.load import load_config
from engine.engine import Engine
from engine.errors import ConfigError
from engine.request import SamplingParams
from kernels.reference import TorchOps
from load_tests.testbed.quantised_folders import write_quantised
from tests.engine.ranks.exact_models import save_whole_numbers, snapped_mixtures
from tests.engine.speculation.eagle_heads import DRAFTS, greedy_proposals, record_proposals
from tests.engine.speculation.exact_engines import exact_arithmetic, start_exact
from tests.engine.speculation.guessed_engines import Kind, assert_same, run, with_shared_prefix
from tests.engine.speculation.mtp_models import NUM_LAYERS, plain_mtp, save_mtp_model
from tests.harness.seeds import seed_of
from tests.harness.tiny_models import VOCAB_SIZE, edit_config, save_model

SEED = seed_of(__name__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mtp")
    save_mtp_model(path, seed=SEED)
    return path


def start(folder: Path, *, exact: bool = False, **overrides: object) -> Engine:
    """exact: of a model of whole numbers."""
    drafts = {**DRAFTS, "speculation__drafter": "mtp"}
    return start_exact(folder, ops=None if exact else TorchOps(), **{**drafts, **overrides})


def test_greedy_drafts_are_those_of_an_independent_layer(folder: Path) -> None:
    for tokens, drafts in greedy_proposals(start(folder), SEED)[::3]:
        assert drafts == plain_mtp(folder).greedy_drafts(tokens, len(drafts)), tokens


def test_the_layer_of_glm_drafts_likewise(tmp_path: Path) -> None:
    save_mtp_model(tmp_path, seed=SEED, architecture="Glm4MoeLiteForCausalLM")
    for tokens, drafts in greedy_proposals(start(tmp_path), SEED)[::9]:
        assert drafts == plain_mtp(tmp_path).greedy_drafts(tokens, len(drafts)), tokens


def test_the_layer_of_a_quantised_model_drafts_likewise(folder: Path, tmp_path: Path) -> None:
    """DeepSeek-V3 is published in FP8, the layer too, but for its map of both streams."""
    stands_for = tmp_path / "stands_for"
    quantised = write_quantised(folder, "fp8-block", tmp_path / "q", stands_for=stands_for)
    engine = start(quantised)
    proposals = record_proposals(engine)
    prompt = random.Random(SEED).choices(range(3, VOCAB_SIZE), k=12)
    run(engine, [(prompt, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))])
    assert proposals
    for tokens, drafts in proposals:
        assert drafts == plain_mtp(stands_for).greedy_drafts(tokens, len(drafts)), tokens


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_no_answer_changes(tmp_path: Path, overlap: bool) -> None:
    """Also preempted, and from cached prefixes."""
    save_mtp_model(tmp_path, seed=SEED)
    save_whole_numbers(tmp_path, SEED)
    kinds: list[Kind] = [
        {"temperature": 0.0},
        {"temperature": 1.2},
        {"temperature": 0.7, "top_k": 8},
        {"temperature": 0.9, "frequency_penalty": 0.8, "prompt_logprobs": 1},
    ]
    asked = with_shared_prefix(SEED, kinds)
    with exact_arithmetic(), snapped_mixtures():
        expected = run(start_exact(tmp_path, speculation__drafter="none"), asked)
        engine = start(
            tmp_path,
            exact=True,
            cache__num_blocks=18,  # two prompts fit, their answers do not
            model__max_model_len=64,
            scheduler__overlap=overlap,
            # One of either: prompts' attention, and that which reads a row's latents once.
            speculation__attention_backend="decode" if overlap else "prefill",
        )
        for _ in range(2):
            assert_same(run(engine, asked), expected)
    assert engine.core.scheduler.statistics().num_preemptions > 0
    assert engine.core.scheduler.drafting.counts.num_drafted > 60


def test_a_model_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path)
    with pytest.raises(ConfigError, match=r"drafter: mtp, but .*config\.json has no layer"):
        start(tmp_path)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("eh_proj.weight", "1 tensors are missing"),
        ("self_attn.o_proj.weight", "1 tensors are missing"),
        ("enorm.weight", r"has shape \[128\]"),
    ],
)
def test_a_layer_that_is_not_whole_is_named(
    folder: Path, tmp_path: Path, name: str, problem: str
) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.pop(f"model.layers.{NUM_LAYERS}.{name}")
    if "shape" in problem:
        tensors[f"model.layers.{NUM_LAYERS}.{name}"] = tensor.repeat(2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=problem):
        start(tmp_path)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"model.device": "cuda"}, "needs cache.num_blocks"),
        ({"execution.dual_stream_token_threshold": 64}, "two streams keep no hidden states"),
        ({"speculation.model_path": "x"}, "nothing else reads it"),
        ({"model.weights": "random"}, "without the layer that guesses"),
    ],
)
def test_settings_that_it_does_not_go_with(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigFileError, match=problem):
        load_config(None, {"speculation.drafter": "mtp", **settings})


def test_of_several_layers_the_first_one_guesses(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    this, other = (f"model.layers.{NUM_LAYERS + i}." for i in (0, 1))
    tensors |= {n.replace(this, other): 0 * t for n, t in tensors.items() if n.startswith(this)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    edit_config(tmp_path, num_nextn_predict_layers=2)
    engine = start(tmp_path)
    proposals = record_proposals(engine)
    run(engine, [([7, 8, 9, 10], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))])
    tokens, drafts = proposals[0]
    assert drafts == plain_mtp(folder).greedy_drafts(tokens, len(drafts))
