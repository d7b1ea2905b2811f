"""Encoding and detokenizing, judged by transformers and by the tokenizers library."""

import codecs
import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine.errors import ConfigError, RequestError
from engine.text.tokenizing import Tokenizing, load_tokenizer
from tests.harness.tokenizer_folders import (
    LINES,
    byte_level_folder,
    llama_like_folder,
    metaspace_folder,
)

FAMILIES: dict[str, Callable[[Path], Path]] = {
    "byte_level": byte_level_folder,
    "byte_level_bos": lambda folder: byte_level_folder(folder, adds_bos=True),
    "byte_level_eos": lambda folder: byte_level_folder(folder, adds_eos=True),
    "llama_like": llama_like_folder,
    "llama_like_without_bos": lambda folder: llama_like_folder(folder, adds_bos=False),
    "gemma_like": lambda folder: llama_like_folder(folder, strips=False),
    "metaspace": metaspace_folder,
}
TEXTS = [
    *LINES,
    "",
    " ",
    "  leading",
    "trailing  ",
    "emoji 👩‍👩‍👧‍👦🏳️‍🌈 family",
    "zero\x00byte",
    "<think>a b\uff5c工具\uff5c</s><|im_end|>",
    "e\u0301 \u200b \ufffd \ufeff",
    "\r\n\t",
]


class Family:
    """The same folder read by us, by transformers and by the bare library."""

    def __init__(self, folder: Path) -> None:
        self.ours = load_tokenizer(folder)
        self.theirs: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder))
        self.library = Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: Family(build(root / name)) for name, build in FAMILIES.items()}


def stream(tokenizing: Tokenizing, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = tokenizing.detokenizer(skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_equal_those_of_transformers(
    families: dict[str, Family], name: str, add_special_tokens: bool
) -> None:
    family = families[name]
    expected = [
        family.theirs(text, add_special_tokens=add_special_tokens)["input_ids"] for text in TEXTS
    ]
    assert family.ours.encode_batch(TEXTS, add_special_tokens=add_special_tokens) == expected


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("max_tokens", [1, 9, 500])
def test_a_text_that_is_cut_keeps_all_special_tokens(
    families: dict[str, Family], name: str, add_special_tokens: bool, side: str, max_tokens: int
) -> None:
    family = families[name]
    theirs = copy.deepcopy(family.theirs)
    theirs.truncation_side = side
    asked = {"add_special_tokens": add_special_tokens, "max_tokens": max_tokens}
    asked["cuts_end"] = side == "right"
    expected = [
        theirs(
            text,
            add_special_tokens=add_special_tokens,
            truncation=True,
            max_length=max_tokens,
        )["input_ids"]
        for text in TEXTS
    ]
    assert family.ours.encode_batch(TEXTS, **asked) == expected
    bad, good = family.ours.encode_batch(["\ud800", TEXTS[0]], **asked)
    assert isinstance(bad, RequestError)
    assert good == expected[0]


def test_the_families_differ_in_their_special_tokens(families: dict[str, Family]) -> None:
    starts = {
        name: [
            family.ours.encode_batch(["fox"], add_special_tokens=flag)[0] for flag in (True, False)
        ]
        for name, family in families.items()
    }
    adds_some = {name for name, (added, plain) in starts.items() if added != plain}
    assert adds_some == {"byte_level_bos", "byte_level_eos", "llama_like", "gemma_like"}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("skip", [True, False])
def test_streamed_text_equals_the_full_decode_of_transformers(
    families: dict[str, Family], name: str, skip: bool
) -> None:
    family = families[name]
    for text in TEXTS:
        ids = family.theirs(text)["input_ids"]
        expected = family.theirs.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
        assert "".join(stream(family.ours, ids, skip=skip)) == expected
        assert family.ours.decode(ids, skip_special_tokens=skip) == expected


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_byte_level_ids_stream_to_the_librarys_full_decode(
    families: dict[str, Family], data: st.DataObject
) -> None:
    family = families["byte_level"]
    beyond = family.ours.vocab_size + 5
    ids = data.draw(st.lists(st.integers(0, beyond), max_size=30))
    skip = data.draw(st.booleans())
    pieces = stream(family.ours, ids, skip=skip)
    assert "".join(pieces) == family.library.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=100)
@given(text=st.text(max_size=25), name=st.sampled_from(["llama_like", "gemma_like", "byte_level"]))
def test_any_text_survives_encoding_and_streaming(
    families: dict[str, Family], text: str, name: str
) -> None:
    family = families[name]
    (ids,) = family.ours.encode_batch([text], add_special_tokens=True)
    assert isinstance(ids, list)
    assert "".join(stream(family.ours, ids)) == family.library.decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "llama_like"])
def test_no_piece_ends_in_half_a_character(families: dict[str, Family], name: str) -> None:
    tokenizing = families[name].ours
    text = "👩‍👩‍👧‍👦 鬱 ß \U0001d518\U0001d52b 🏳️‍🌈"
    (ids,) = tokenizing.encode_batch([text], add_special_tokens=False)
    assert isinstance(ids, list)
    pieces = stream(tokenizing, ids)
    assert len(pieces) > len(text) / 2, "the text was meant to be cut inside characters"
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text
    # Every prefix of the tokens: flush shows the torn character as U+FFFD, nothing is lost before.
    for count in range(len(ids)):
        whole = "".join(stream(tokenizing, ids[:count]))
        assert text.startswith(whole.rstrip("\ufffd"))


def test_an_invalid_byte_run_keeps_the_characters_already_sent(
    families: dict[str, Family],
) -> None:
    family = families["llama_like"]
    table = family.library.get_vocab()
    ids = [table[f"<0x{value:02X}>"] for value in [*"你".encode(), 0xFF, *"好".encode()]]
    assert stream(family.ours, ids) == ["", "", "你", "\ufffd", "", "", "好", ""]


def test_special_tokens_are_skipped_without_eating_the_space_after_them(
    families: dict[str, Family],
) -> None:
    family = families["llama_like"]
    (ids,) = family.ours.encode_batch(["fox dog"], add_special_tokens=False)
    assert isinstance(ids, list)
    eos = family.library.get_vocab()["</s>"]
    spread = [eos] + [token for token_id in ids for token in (token_id, eos)]
    assert "".join(stream(family.ours, spread)) == "fox dog"
    assert "".join(stream(family.ours, spread, skip=False)).count("</s>") == len(ids) + 1


def test_output_that_continues_a_prompt_keeps_its_leading_space(
    families: dict[str, Family],
) -> None:
    for name in ("llama_like", "metaspace"):
        family = families[name]
        (ids,) = family.ours.encode_batch(["fox"], add_special_tokens=False)
        assert isinstance(ids, list)
        detokenizer = family.ours.detokenizer(continues_text=True)
        assert "".join(map(detokenizer.push, ids)) == " fox"
        assert family.ours.decode(ids) == "fox"


def test_ids_outside_the_vocabulary_add_nothing(families: dict[str, Family]) -> None:
    for family in families.values():
        assert family.ours.decode([family.ours.vocab_size + 3, -1, 10**12]) == ""
        assert family.ours.piece(family.ours.vocab_size) == b""


def test_pieces_are_the_bytes_of_each_token(families: dict[str, Family]) -> None:
    family = families["byte_level"]
    (ids,) = family.ours.encode_batch(["a鬱 <think>"], add_special_tokens=False)
    assert isinstance(ids, list)
    assert b"".join(map(family.ours.piece, ids)) == "a鬱 <think>".encode()
    assert family.ours.piece(family.library.get_vocab()["<|im_end|>"]) == b"<|im_end|>"
    llama = families["llama_like"]
    assert llama.ours.piece(llama.library.get_vocab()["<0xF0>"]) == b"\xf0"


def test_one_text_that_cannot_be_encoded_fails_alone(families: dict[str, Family]) -> None:
    tokenizing = families["byte_level"].ours
    good, bad, other = tokenizing.encode_batch(["fox", "\ud800", "dog"], add_special_tokens=True)
    assert isinstance(bad, RequestError)
    assert [good, other] == tokenizing.encode_batch(["fox", "dog"], add_special_tokens=True)


def test_truncation_and_padding_in_the_file_are_not_applied(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    path = folder / "tokenizer.json"
    library = Tokenizer.from_file(str(path))
    full = library.encode(LINES[0]).ids
    library.enable_truncation(3)
    library.enable_padding(length=64)
    library.save(str(path))
    assert len(library.encode(LINES[0]).ids) == 64
    assert load_tokenizer(folder).encode_batch([LINES[0]], add_special_tokens=True) == [full]


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file; supported"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Sequence([decoders.Replace("▁", "_"), decoders.Fuse()]),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteLevel(), decoders.ByteFallback()]),
    ],
    ids=["none", "word_piece", "other_replacement", "strip_before_fuse", "two_kinds"],
)
def test_a_decoder_of_another_kind_is_refused_at_start(
    tmp_path: Path, decoder: decoders.Decoder | None
) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="supported: ByteLevel"):
        load_tokenizer(tmp_path)


def test_the_byte_alphabet_is_the_librarys(families: dict[str, Family]) -> None:
    family = families["byte_level"]
    seen = {family.ours.piece(token_id) for token_id in range(family.ours.vocab_size)}
    assert {bytes([value]) for value in range(256)} <= seen


def test_torn_utf8_is_replaced_as_the_library_does(families: dict[str, Family]) -> None:
    family = families["byte_level"]
    of_byte = {family.ours.piece(token_id): token_id for token_id in range(family.ours.vocab_size)}
    for torn in (b"\xf0\x9f\x98", b"\xe2\x28\xa1", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0a"):
        ids = [of_byte[bytes([value])] for value in torn]
        assert family.ours.decode(ids) == family.library.decode(ids)
        assert family.ours.decode(ids) == codecs.decode(torn, "utf-8", "replace")


def test_a_folder_with_only_tokenizer_json_is_enough(tmp_path: Path) -> None:
    folder = llama_like_folder(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    assert json.loads((folder / "tokenizer.json").read_text())["model"]["type"] == "BPE"
    assert load_tokenizer(folder).decode([1, 2]) == ""


@pytest.mark.slow
def test_the_shipped_models_tokenizer_reads_and_writes_as_in_transformers() -> None:
    folder = Path(__file__).resolve().parents[3] / "demo_model" / "laps-demo"
    family = Family(folder)
    expected = [family.theirs(text)["input_ids"] for text in TEXTS]
    assert family.ours.encode_batch(TEXTS, add_special_tokens=True) == expected
    for ids in expected:
        assert "".join(stream(family.ours, ids)) == family.theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def test_a_token_that_the_model_has_no_embedding_for_fails_its_prompt_alone(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    whole = load_tokenizer(folder)
    vocab_size = whole.vocab_size
    beyond = vocab_size - 1
    text = whole.piece(beyond).decode()  # an added token: it has an id of its own in any text
    known = load_tokenizer(folder, beyond)
    first, second = known.encode_batch(["fox", f"fox{text}"], add_special_tokens=True)
    assert [first] == whole.encode_batch(["fox"], add_special_tokens=True)
    assert isinstance(second, RequestError)
    assert repr(text) in second.message
    assert f"id {beyond}" in second.message
    assert (known.vocab_size, known.piece(beyond)) == (beyond, b"")
    assert known.beyond_model == {beyond: text}
    padded = load_tokenizer(folder, vocab_size + 267)
    assert (padded.vocab_size, padded.beyond_model) == (vocab_size, {})
