"""The tokenizer's batches, judged by transformers; without Ray."""

import asyncio
import random
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from actors import tokenizer_batcher
from actors.lifecycle.deployment import describe_deployment
from actors.lifecycle.liveness import Lifeline
from actors.tokenizer_batcher import PromptTokenizer, TokenizerBatcher
from configs.load import load_config
from configs.schema import TokenizerConfig
from engine.errors import ConfigError
from engine.kv.hashes import BlockHashParams, RequestHasher
from engine.messages import TokenizeReply, TokenizeRequest
from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.text.chat_template import RESERVED_KWARGS, is_reserved_kwarg
from tests.harness.tokenizer_folders import LINES, byte_level_folder, llama_like_folder

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "敏捷的 fox?"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level_folder(tmp_path_factory.mktemp("model"), adds_bos=True)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PromptTokenizer:
    return PromptTokenizer(str(folder), TokenizerConfig())


def tokenize(
    tokenizer: PromptTokenizer, requests: Sequence[TokenizeRequest]
) -> list[TokenizeReply]:
    async def main() -> list[TokenizeReply]:
        async with asyncio.timeout(60):
            return await asyncio.gather(*(tokenizer.tokenize(request) for request in requests))

    return asyncio.run(main())


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_prompts_of_all_kinds_get_the_ids_of_transformers(
    tokenizer: PromptTokenizer, folder: Path, add_special_tokens: bool
) -> None:
    theirs = AutoTokenizer.from_pretrained(str(folder))
    texts = [
        TokenizeRequest(text=text, add_special_tokens=add_special_tokens) for text in [*LINES, ""]
    ]
    chat = TokenizeRequest(messages=[dict(m) for m in CHAT], add_special_tokens=False)
    replies = tokenize(tokenizer, [*texts, chat])
    expected = [
        theirs(line, add_special_tokens=add_special_tokens)["input_ids"] for line in [*LINES, ""]
    ]
    rendered = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert [reply.token_ids for reply in replies] == [*expected, rendered]
    assert {reply.error for reply in replies} == {None}


def test_chat_switches_reach_the_template(tokenizer: PromptTokenizer, folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(str(folder))
    turns = [*CHAT, {"role": "assistant", "content": "It is"}]
    messages: list[dict[str, object]] = [dict(m) for m in turns]
    closed, continued, prefixed = tokenize(
        tokenizer,
        [
            TokenizeRequest(
                messages=messages, add_special_tokens=False, add_generation_prompt=False
            ),
            TokenizeRequest(
                messages=messages,
                add_special_tokens=False,
                add_generation_prompt=False,
                continue_final_message=True,
            ),
            TokenizeRequest(
                messages=messages, add_special_tokens=False, chat_template_kwargs={"prefix": "Hm"}
            ),
        ],
    )

    def shown(reply: TokenizeReply) -> str:
        return str(theirs.decode(reply.token_ids))

    assert shown(closed).endswith("It is<|im_end|>\n")
    assert shown(continued).endswith("assistant\nIt is")
    assert shown(prefixed).endswith("assistant\nHm")


def test_one_bad_prompt_fails_alone(tokenizer: PromptTokenizer) -> None:
    good = TokenizeRequest(text="fox")
    before = tokenizer.statistics()
    first, torn, forbidden, last = tokenize(
        tokenizer,
        [
            good,
            TokenizeRequest(text="\ud800"),
            TokenizeRequest(messages=[{"role": "forbidden", "content": "x"}]),
            good,
        ],
    )
    assert first == last
    assert first.token_ids
    assert torn.error == "The prompt is not valid text and cannot be tokenized."
    assert forbidden.error is not None
    assert "This role is not for you." in forbidden.error
    after = tokenizer.statistics()
    assert (after.num_batches - before.num_batches, after.num_items - before.num_items) == (1, 4)
    assert after.largest_batch >= 4


def test_blocks_get_the_names_that_workers_give_them(tokenizer: PromptTokenizer) -> None:
    """As text, as messages or as ids, and under the salt of the request alone."""
    hash_params = BlockHashParams(
        key=secrets.token_bytes(32), model="m", dtype="float32", block_size=random.randint(1, 5)
    )
    text = TokenizeRequest(text=" ".join(LINES), hash_params=hash_params, salt="tenant é")
    chat = TokenizeRequest(
        messages=[dict(m) for m in CHAT], add_special_tokens=False, hash_params=hash_params
    )
    of_text, of_chat = tokenize(tokenizer, [text, chat])
    ids = TokenizeRequest(token_ids=of_text.token_ids, hash_params=hash_params, salt="tenant é")
    saltless = TokenizeRequest(token_ids=of_text.token_ids, hash_params=hash_params)
    unasked = TokenizeRequest(text=" ".join(LINES))
    torn = TokenizeRequest(text="\ud800", hash_params=hash_params)
    of_ids, of_saltless, of_unasked, of_torn = tokenize(tokenizer, [ids, saltless, unasked, torn])
    assert of_text.block_hashes == _worker_hashes(hash_params, of_text.token_ids, "tenant é")
    assert len(of_text.block_hashes) == len(of_text.token_ids) // hash_params.block_size > 0
    assert of_chat.block_hashes == _worker_hashes(hash_params, of_chat.token_ids, "")
    assert of_ids == TokenizeReply(block_hashes=of_text.block_hashes)
    assert of_saltless.block_hashes == _worker_hashes(hash_params, of_text.token_ids, "")
    assert set(of_saltless.block_hashes).isdisjoint(of_text.block_hashes)
    assert of_unasked == TokenizeReply(token_ids=of_text.token_ids)
    assert of_torn.block_hashes == []
    assert of_torn.error is not None


def _worker_hashes(hash_params: BlockHashParams, token_ids: list[int], salt: str) -> list[bytes]:
    """As a worker names the blocks of a request while it computes them."""
    request = Request(
        spec=RequestSpec(params=SamplingParams(max_tokens=1), salt=salt),
        key=RequestKey("request"),
        ingress_id="ingress",
        tokens=list(token_ids),
        num_prompt_tokens=len(token_ids),
        arrival_s=0.0,
    )
    RequestHasher(
        hash_params.key,
        model=hash_params.model,
        dtype=hash_params.dtype,
        block_size=hash_params.block_size,
    ).extend(request)
    return request.block_hashes


def test_a_template_cannot_reach_outside_its_sandbox(tmp_path: Path) -> None:
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = PromptTokenizer(
        str(byte_level_folder(tmp_path, chat_template=escape)), TokenizerConfig()
    )
    (reply,) = tokenize(tokenizer, [TokenizeRequest(messages=[dict(CHAT[1])])])
    assert reply.token_ids == []
    assert reply.error is not None
    assert "cannot render" in reply.error
    tokenizer.close()


def test_a_model_without_a_template_refuses_chats_and_takes_text(tmp_path: Path) -> None:
    tokenizer = PromptTokenizer(str(llama_like_folder(tmp_path)), TokenizerConfig())
    assert not tokenizer.has_chat_template
    text, chat = tokenize(
        tokenizer, [TokenizeRequest(text="fox"), TokenizeRequest(messages=[dict(CHAT[1])])]
    )
    assert text.token_ids
    assert chat.error == "This model has no chat template; use /v1/completions instead."
    tokenizer.close()


def test_the_event_loop_goes_on_while_text_is_encoded(folder: Path) -> None:
    tokenizer = PromptTokenizer(str(folder), TokenizerConfig())
    entered, may_go_on = threading.Event(), threading.Event()
    encode_batch = tokenizer.encode_batch

    def slow(requests: Sequence[TokenizeRequest]) -> list[TokenizeReply]:
        entered.set()
        assert may_go_on.wait(30)
        return encode_batch(requests)

    tokenizer.encode_batch = slow  # type: ignore[method-assign]

    async def main() -> None:
        async with asyncio.timeout(30):
            call = asyncio.ensure_future(tokenizer.tokenize(TokenizeRequest(text="fox")))
            assert await asyncio.to_thread(entered.wait, 30)
            assert not call.done(), "the loop runs although the encoder has not returned"
            may_go_on.set()
            assert (await call).token_ids

    asyncio.run(main())
    tokenizer.close()


def test_a_folder_without_a_tokenizer_is_a_start_up_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file"):
        PromptTokenizer(str(tmp_path), TokenizerConfig())


def test_everything_the_renderer_takes_by_name_is_reserved() -> None:
    import inspect

    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import render_jinja_template

    taken = {
        name
        for function in (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    assert taken <= RESERVED_KWARGS
    special = PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES
    assert all(is_reserved_kwarg(name) for name in special)
    assert not is_reserved_kwarg("enable_thinking")


def test_a_template_that_writes_a_token_the_model_lacks_fails_its_conversation_alone(
    tmp_path: Path,
) -> None:
    template = "{% if messages[0].role == 'tool' %}<|im_end|>{% endif %}{{ messages[0].content }}"
    folder = byte_level_folder(tmp_path, chat_template=template)
    beyond = PromptTokenizer(str(folder), TokenizerConfig()).vocab_size - 1  # it is "a b"
    tokenizer = PromptTokenizer(str(folder), TokenizerConfig(), beyond)
    requests = [
        TokenizeRequest(messages=[{"role": role, "content": content}], add_special_tokens=False)
        for role, content in [("user", "fox"), ("user", "a b"), ("tool", "fox")]
    ]
    good, refused, tool = tokenizer.encode_batch(requests)
    assert good.error is None
    assert tool.error is None
    assert tool.token_ids[1:] == good.token_ids
    assert refused.error is not None
    assert f"'a b' (id {beyond})" in refused.error


def test_silence_is_not_counted_while_the_tokenizer_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can be heard then: one that counted would end at each start where that is slow."""
    silences: list[str] = []
    load = tokenizer_batcher.PromptTokenizer

    def load_slowly(path: str, config: TokenizerConfig, num_embeddings: int) -> PromptTokenizer:
        assert num_embeddings == 3072, "those of the model are not what bounds its ids"
        silences.append("loading")
        return load(path, config, num_embeddings)

    def begin_counting(lifeline: Lifeline) -> Lifeline:
        silences.append("counting")
        return lifeline

    monkeypatch.setattr(tokenizer_batcher, "PromptTokenizer", load_slowly)
    monkeypatch.setattr(Lifeline, "start", begin_counting)
    TokenizerBatcher(describe_deployment(load_config(None, {})), "tokenizer-0")
    assert silences == ["loading", "counting"]
