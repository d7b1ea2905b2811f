"""API keys at the start: where they come from, what is kept of them, and what ends the start."""

import hashlib
import secrets
from pathlib import Path

import msgspec
import pytest

from configs.errors import ConfigFileError
from configs.load import config_from_environment, load_config


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    return str(folder)


def keys_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_bytes(text.encode("latin-1"))
    path.chmod(mode)
    return path


def config_file(folder: Path, api: str) -> str:
    path = folder / "run.yaml"
    path.write_text(f"api: {api}\n")
    return str(path)


def test_keys_of_all_sources_are_kept_as_digests_by_name(tmp_path: Path, model: str) -> None:
    plain, hashed, by_variable, also, in_config = (secrets.token_urlsafe(20) for _ in range(5))
    path = keys_file(
        tmp_path, f"# of the team\n\n  {plain}  \nalice:{digest(hashed).upper()}\n", 0o640
    )
    config = config_file(tmp_path, f"{{keys_file: {path}, keys: {{carol: {digest(in_config)}}}}}")
    environ = {"LAPS_API_KEYS": f"{by_variable}, bob:{digest(also)}\n"}
    api = config_from_environment({"config": config, "model": model}, environ).api
    assert api.keys == {
        f"key-{digest(plain)[:8]}": digest(plain),
        "alice": digest(hashed),
        "carol": digest(in_config),
        f"key-{digest(by_variable)[:8]}": digest(by_variable),
        "bob": digest(also),
    }
    text = msgspec.json.encode(api).decode()
    assert not any(key in text for key in (plain, hashed, by_variable, also, in_config))


def test_without_any_source_there_are_no_keys(model: str) -> None:
    assert config_from_environment({"model": model}, {}).api.keys == {}


@pytest.mark.parametrize(
    ("text", "mode", "fragments"),
    [
        ("", 0o600, ["holds no key", "openssl rand"]),
        ("# nothing\n\n", 0o600, ["holds no key"]),
        ("abcdef\n", 0o604, ["everybody may read it", "chmod 600"]),
        ("abcdef\n", 0o644, ["everybody may read it"]),
        ("ok\ntwo words\n", 0o600, ["entry 2", "printable ASCII"]),
        ("caf\xe9\n", 0o600, ["not UTF-8"]),
        ("same\nother\nsame\n", 0o600, ["entry 3", "given before"]),
        (f"a:{'0' * 64}\na:{'1' * 64}\n", 0o600, ["entry 2", "name a"]),
        (f"a:{'0' * 64}\nb:{'0' * 64}\n", 0o600, ["entry 2"]),
    ],
)
def test_a_bad_key_file_ends_the_start_and_is_not_quoted(
    tmp_path: Path, model: str, text: str, mode: int, fragments: list[str]
) -> None:
    path = keys_file(tmp_path, text, mode)
    config = config_file(tmp_path, f"{{keys_file: {path}}}")
    with pytest.raises(ConfigFileError) as caught:
        config_from_environment({"config": config, "model": model}, {})
    for fragment in ["api.keys_file", str(path), *fragments]:
        assert fragment in str(caught.value)
    for entry in ("abcdef", "two words", "same"):
        assert entry not in str(caught.value)


def test_a_key_file_that_is_not_there_or_no_file_ends_the_start(tmp_path: Path, model: str) -> None:
    config = config_file(tmp_path, "{keys_file: nowhere/keys}")
    with pytest.raises(ConfigFileError, match="nowhere/keys: there is no such file"):
        config_from_environment({"config": config, "model": model}, {})
    config = config_file(tmp_path, f"{{keys_file: {tmp_path}}}")
    with pytest.raises(ConfigFileError, match="cannot be read"):
        config_from_environment({"config": config, "model": model}, {})


@pytest.mark.parametrize("value", ["", " ", ",", "\n, "])
def test_an_empty_variable_opens_nothing(model: str, value: str) -> None:
    with pytest.raises(ConfigFileError, match="LAPS_API_KEYS: holds no key"):
        config_from_environment({"model": model}, {"LAPS_API_KEYS": value})


def test_limits_are_of_keys_that_exist(tmp_path: Path, model: str) -> None:
    limits = "{'*': {requests_per_minute: 9}, alice: {tokens_per_minute: 70}}"
    config = config_file(tmp_path, f"{{limits: {limits}}}")
    environ = {"LAPS_API_KEYS": f"alice:{'a' * 64}"}
    api = config_from_environment({"config": config, "model": model}, environ).api
    assert api.limits["alice"].tokens_per_minute == 70
    assert api.limits["*"].requests_per_minute == 9
    with pytest.raises(ConfigFileError, match=r"api.limits: alice: .* allowed: \*$"):
        config_from_environment({"config": config, "model": model}, {})


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("api: {limits: {a: {per_hour: 1}}}", ["api.limits[].per_hour", "requests_per_minute"]),
        ("api: {limits: {a: {tokens_per_minute: 0}}}", ["tokens_per_minute", "integer >= 1"]),
        ("api: {limits: {'a b': {}}}", ["api.limits"]),
        ("api: {keys: {a: plain}}", ["api.keys[]", "[0-9a-f]{64}"]),
        ("tracing: {otlp_endpoint: 'collector:4318'}", ["tracing.otlp_endpoint", "https?://"]),
        ("edge: {max_headers: 0}", ["edge.max_headers", ">= 1"]),
    ],
)
def test_what_a_value_of_a_mapping_may_be_is_said(
    tmp_path: Path, text: str, fragments: list[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigFileError) as caught:
        load_config(path, {})
    for fragment in [str(path), *fragments]:
        assert fragment in str(caught.value)
