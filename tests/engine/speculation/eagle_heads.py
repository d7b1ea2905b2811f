"""EAGLE-3 heads with random weights, and what an independent implementation makes of them."""

import random
from functools import lru_cache
from operator import eq
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from demo_model.eagle_head import EagleHead
from engine.engine import Engine
from engine.request import Request, SamplingParams
from engine.speculation.draft_model import DraftModel
from engine.turns import Turns
from tests.engine.speculation.guessed_engines import run
from tests.harness.tiny_models import VOCAB_SIZE

DRAFT_VOCAB_SIZE = 90
HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": DRAFT_VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "max_position_embeddings": 48,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
}
NUM_LAYERS = 4
# Settings of an engine that drafts for requests of any temperature.
DRAFTS: dict[str, object] = {"speculation__max_temperature": 9.0, "speculation__max_drafts": 4}


def save_head(folder: Path, *, seed: int, **settings: object) -> EagleHead:
    """A head with random weights in the public format."""
    torch.manual_seed(seed)
    head = EagleHead({**HEAD, **settings})
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    num_ids = len(head.d2t)
    ids = torch.randperm(VOCAB_SIZE)[:num_ids].sort().values
    head.d2t.copy_(ids - torch.arange(num_ids))
    head.save(folder, torch.float32)
    return head


def record_proposals(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """What is proposed from now on for which tokens: as many drafts as asked for, or none.

    None where what drafts has not caught up; one that ends the request is the last.
    """
    drafter = engine.core.scheduler.drafting.drafter
    assert isinstance(drafter, DraftModel)
    proposing, proposals = drafter.proposing, list[tuple[list[int], list[int]]]()

    def recorded(asked: list[tuple[Request, int]]) -> Turns[list[list[int]]]:
        found = yield from proposing(asked)
        for (request, num_asked), drafts in zip(asked, found, strict=True):
            is_whole = not drafts or len(drafts) == num_asked or drafts[-1] in request.stop_ids
            assert is_whole, f"{len(drafts)} drafts of {num_asked} after {request.tokens}"
            proposals.append((list(request.tokens), drafts))
        return found

    drafter.proposing = recorded  # type: ignore[method-assign]
    return proposals


def greedy_proposals(engine: Engine, seed: int) -> list[tuple[list[int], list[int]]]:
    """Tokens and drafts after them: in chunks, from a cached prefix, after accepted and rejected
    drafts, of several rows."""
    print("seed", seed)
    proposals = record_proposals(engine)
    draw = random.Random(seed)
    shared = draw.choices(range(3, VOCAB_SIZE), k=16)
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    asked = [(shared + draw.choices(range(3, VOCAB_SIZE), k=k), params) for k in (1, 7, 25)]
    run(engine, asked)
    run(engine, [([*shared, 5, 6, 7], params), (shared, params), ([9], params)])
    assert len(proposals) > 20
    return proposals


def _by_text(proposals: list[tuple[list[int], list[int]]]) -> dict[tuple[int, ...], list[int]]:
    """The most drafts after each text that has any. Nobody got others after the same text.

    A draft does not depend on how many follow it.
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for tokens, drafts in proposals:
        text = tuple(tokens)
        known = found.get(text, [])
        assert _agree(known, drafts), f"{known} and {drafts} after {text}"
        if len(drafts) > len(known):
            found[text] = drafts
    return found


def _agree(ones: list[int], others: list[int]) -> bool:
    """Whether those that both have are the same."""
    return all(map(eq, ones, others))


def assert_same_drafts(
    ones: list[tuple[list[int], list[int]]],
    others: list[tuple[list[int], list[int]]],
    *,
    num_at_least: int = 50,
) -> None:
    """After equal texts, as far as both have drafts.

    Whether and how many a row gets hangs on the step: on the room that its other rows leave, in the
    step and in the head's pass, on its graph, and on how long steps take. It is not judged.
    """
    first, second = _by_text(ones), _by_text(others)
    both = first.keys() & second.keys()
    assert len(both) > num_at_least
    differ = [text for text in both if not _agree(first[text], second[text])]
    if differ:
        text = differ[0]
        pytest.fail(
            f"{len(differ)} of {len(both)} drafts differ, first {first[text]} and {second[text]}"
            f" after {text}"
        )


@lru_cache(maxsize=1)
def _transformers(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


@torch.inference_mode()
def greedy_drafts(target: Path, head: EagleHead, tokens: list[int], num_drafts: int) -> list[int]:
    """Greedy drafts, each from the whole text, with the head's own states where none is true."""
    model = _transformers(target)
    known = torch.tensor([tokens])
    streams = model(known[:, :-1], output_hidden_states=True).hidden_states
    entering = torch.cat([streams[layer] for layer in (1, 2, 3)], dim=-1)
    features = head.features(entering)
    drafts: list[int] = []
    for _ in range(num_drafts):
        following = torch.tensor([[*tokens[1:], *drafts]])
        states = head(features, model.get_input_embeddings()(following))
        best = int(head.logits(states[0, -1]).argmax())
        drafts.append(int(head.target_ids[best]))
        features = torch.cat([features, states[:, -1:]], dim=1)
    return drafts
