"""An EAGLE-3 head drafts: its guesses are an independent head's, and no answer changes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.errors import ConfigFileError
from configs.load import load_config
from demo_model.eagle_head import EagleHead
from engine.engine import Engine
from engine.errors import ConfigError
from engine.request import SamplingParams
from kernels.reference import TorchOps
from tests.engine.speculation.eagle_heads import (
    DRAFTS,
    HEAD,
    NUM_LAYERS,
    assert_same_drafts,
    greedy_drafts,
    greedy_proposals,
    record_proposals,
    save_head,
)
from tests.engine.speculation.exact_engines import exact_arithmetic, start_exact
from tests.engine.speculation.guessed_engines import (
    Asked,
    assert_same,
    run,
    save_exact_model,
    with_shared_prefix,
)
from tests.engine.speculation.verify_graphs import capture_verification
from tests.harness.drafters import RandomDrafts
from tests.harness.seeds import seed_of
from tests.harness.tiny_models import VOCAB_SIZE, edit_config, save_model

SEED = seed_of(__name__)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target with ordinary weights, and a head of it."""
    target, head = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("head")
    save_model(target, seed=SEED, num_hidden_layers=NUM_LAYERS)
    save_head(head, seed=SEED)
    return target, head


@pytest.fixture(scope="module")
def exact_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exact")
    save_exact_model(path, seed=SEED, num_hidden_layers=NUM_LAYERS)
    return path


def start(target: Path, head: Path, *, exact: bool = False, **overrides: object) -> Engine:
    """exact: of a model of whole numbers."""
    drafts = {**DRAFTS, "speculation__drafter": "eagle3", "speculation__model_path": str(head)}
    return start_exact(target, ops=None if exact else TorchOps(), **{**drafts, **overrides})


def test_greedy_drafts_are_those_of_an_independent_head(folders: tuple[Path, Path]) -> None:
    target, folder = folders
    head = EagleHead.load(folder)
    for tokens, drafts in greedy_proposals(start(target, folder), SEED)[::3]:
        assert drafts == greedy_drafts(target, head, tokens, len(drafts)), tokens


def test_drafts_do_not_depend_on_which_steps_a_row_sat_out(folders: tuple[Path, Path]) -> None:
    """Nor on how steps and the head's passes are composed."""
    target, folder = folders
    head = EagleHead.load(folder)
    one = start(target, folder, scheduler__overlap=False)
    other = start(target, folder, scheduler__overlap=False, scheduler__max_num_batched_tokens=20)
    other.core.scheduler.drafting.use_policy(RandomDrafts(4, seed=SEED))
    proposals = [greedy_proposals(engine, SEED) for engine in (one, other)]
    assert_same_drafts(*proposals, num_at_least=10)
    for tokens, drafts in proposals[1][::3]:
        assert drafts == greedy_drafts(target, head, tokens, len(drafts)), tokens


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    kinds = (
        {"temperature": 0.0},
        {"temperature": 1.2},
        {"temperature": 0.7, "top_k": 8, "logprobs": 2},
        {"temperature": 0.9, "frequency_penalty": 0.8, "repetition_penalty": 1.2},
        {"temperature": 1.0, "allowed_token_ids": (4, 8, 15, 16, 23, 42)},
        {"temperature": 1.5, "min_tokens": 6, "stop_token_ids": tuple(range(0, 99, 5))},
        {"temperature": 1.0, "logit_bias": {4: 9.0}},
        {"temperature": 0.0, "prompt_logprobs": 1},
    )
    return with_shared_prefix(SEED, kinds)


@pytest.mark.parametrize(
    "overlap", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["in turn", "overlapped"]
)
def test_no_answer_changes(
    folders: tuple[Path, Path], exact_folder: Path, asked: list[Asked], overlap: bool
) -> None:
    """Also preempted, and from cached prefixes."""
    _, head = folders
    with exact_arithmetic():
        expected = run(start_exact(exact_folder, speculation__drafter="none"), asked)
        engine = start(
            exact_folder,
            head,
            exact=True,
            cache__num_blocks=18,  # two prompts fit, their answers do not
            model__max_model_len=64,
            scheduler__overlap=overlap,
        )
        for _ in range(2):
            assert_same(run(engine, asked), expected)
    assert engine.core.scheduler.statistics().num_preemptions > 0
    counts = engine.core.scheduler.drafting.counts
    assert counts.num_accepted < counts.num_drafted
    assert counts.num_drafted > 100


def test_a_head_reads_vectors_beside_k_and_v_in_e4m3(
    folders: tuple[Path, Path], exact_folder: Path, asked: list[Asked]
) -> None:
    """They keep their own dtype: the head guesses what it would of the same hidden states."""
    target, folder = folders
    fp8 = {"cache__kv_dtype": "fp8_e4m3"}
    head = EagleHead.load(folder)
    proposals = greedy_proposals(start(target, folder, **fp8), SEED)[::3]
    firsts = [
        drafts[:1] == greedy_drafts(target, head, tokens, 1)
        for tokens, drafts in proposals
        if drafts
    ]
    # The model's K and V in e4m3 decide near ties otherwise; by chance one in a hundred is alike.
    assert sum(firsts) > 0.4 * len(firsts) > 1
    some = asked[:4]
    with exact_arithmetic():
        expected = run(start_exact(exact_folder, speculation__drafter="none", **fp8), some)
        engine = start(exact_folder, folder, exact=True, **fp8)
        for _ in range(2):  # from cached prefixes, too
            assert_same(run(engine, some), expected)
    assert engine.core.scheduler.drafting.counts.num_drafted > 40


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_a_head_drafts_alike_where_verify_graphs_export(
    folders: tuple[Path, Path], exact_folder: Path, asked: list[Asked], overlap: bool
) -> None:
    """Features of replayed steps, padded or not, are those of computed ones: so are the drafts."""
    _, head = folders
    some = [one for one in asked if one[1].prompt_logprobs is None][:4]
    proposals = []
    with exact_arithmetic():
        expected = run(start_exact(exact_folder, speculation__drafter="none"), some)
        for captures in (False, True):
            engine = start(
                exact_folder,
                head,
                exact=True,
                scheduler__overlap=overlap,
                speculation__attention_backend="decode",
            )
            recorder = capture_verification(engine, 24) if captures else None
            proposals.append(record_proposals(engine))
            assert_same(run(engine, some), expected)
    assert recorder is not None
    assert recorder.num_replays > 5
    computed, replayed = ({tuple(t): d[0] for t, d in each if d} for each in proposals)
    both = computed.keys() & replayed.keys()
    # Sums of other lengths round otherwise, so that few near ties may end otherwise.
    num_same = sum(computed[tokens] == replayed[tokens] for tokens in both)
    assert len(both) > 5
    assert num_same > 0.8 * len(both)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "not an EAGLE-3 head"),
        ({"vocab_size": VOCAB_SIZE + 1}, "vocab_size"),
        ({"target_hidden_size": 32}, "target_hidden_size"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, "streams that enter"),
        ({"intermediate_size": 80}, "mlp.*shape"),
        ({"draft_vocab_size": 91}, "has shape"),
    ],
)
def test_heads_that_do_not_fit(
    folders: tuple[Path, Path], tmp_path: Path, settings: dict[str, object], problem: str
) -> None:
    target, _ = folders
    save_head(tmp_path, seed=SEED)
    edit_config(tmp_path, **settings)
    with pytest.raises(ConfigError, match=problem):
        start(target, tmp_path)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {
                "workers.tensor_parallel_size": 2,
                "workers.expert_parallel": True,
                "workers.expert_exchange_min_tokens": 8,
                "execution.enable_two_batch_overlap": True,
                "execution.tbo_min_prompt_tokens": 8,
                "execution.tbo_min_decode_rows": 8,
            },
            "states of inner layers",
        ),
        (
            {
                "workers.tensor_parallel_size": 2,
                "workers.sequence_parallel_min_tokens": 8,
                "execution.enable_two_batch_overlap": True,
                "execution.tbo_min_prompt_tokens": 8,
            },
            "with workers.sequence_parallel_min_tokens .* keep no states of inner layers",
        ),
        ({"model.device": "cuda"}, "needs cache.num_blocks"),
        ({"execution.dual_stream_token_threshold": 64}, "two streams keep no hidden states"),
        ({"speculation.model_path": None}, "needs the folder"),
        ({"model.attention.mask": "masks:any"}, "not that of what drafts"),
    ],
)
def test_settings_that_a_head_does_not_go_with(settings: dict[str, object], problem: str) -> None:
    drafts = {"speculation.drafter": "eagle3", "speculation.model_path": "x"}
    with pytest.raises(ConfigFileError, match=problem):
        load_config(None, {**drafts, **settings})


@pytest.mark.parametrize("fault", ["missing", "unknown", "map", "pickled"])
def test_weights_that_do_not_fit(folders: tuple[Path, Path], tmp_path: Path, fault: str) -> None:
    target, _ = folders
    save_head(tmp_path, seed=SEED)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    if fault == "missing":
        del tensors["norm.weight"]
    elif fault == "unknown":
        tensors["fc_norm.weight"] = torch.ones(64)
    elif fault == "map":
        tensors["d2t"][3] = VOCAB_SIZE
    save_file(tensors, path)
    if fault == "pickled":
        path.rename(tmp_path / "pytorch_model.bin")
    problem = {"missing": "is missing", "unknown": "not known", "map": "d2t", "pickled": "pickled"}
    with pytest.raises(ConfigError, match=problem[fault]):
        start(target, tmp_path)


def test_a_head_without_a_map_has_the_whole_vocabulary(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """And may have an embedding of its own."""
    target, _ = folders
    head = EagleHead({**HEAD, "draft_vocab_size": VOCAB_SIZE})
    head.save(tmp_path, torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["d2t"], tensors["t2d"]
    tensors["embed_tokens.weight"] = load_file(target / "model.safetensors")[
        "model.embed_tokens.weight"
    ]
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["draft_vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = start(target, tmp_path)
    proposals = record_proposals(engine)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    run(engine, [([7, 8, 9, 10, 11], params)])
    tokens, drafts = proposals[0]
    assert drafts == greedy_drafts(target, head, tokens, len(drafts))
