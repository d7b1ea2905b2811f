"""Models by their names: fetched with the real huggingface_hub from a Hub on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.lifecycle.hub import fetch_model
from actors.openai.served_model import served_names
from configs.errors import ConfigFileError
from configs.load import PROJECT_ROOT, config_from_environment, load_config
from tests.actors.lifecycle.fake_hub import COMMIT, FakeHub, running

MODEL = PROJECT_ROOT / "demo_model" / "laps-demo"
SUBFOLDERS = {"1_Pooling/config.json": b"{}", "additional_chat_templates/rag.jinja": b"x"}
WHOLE = {path.name: path.read_bytes() for path in MODEL.iterdir() if path.suffix != ".md"}
TEXTS = {name: content for name, content in WHOLE.items() if name.endswith(".json")}
# What repositories hold besides, and nobody is to wait for.
BESIDES = {
    "README.md": b"#",
    "consolidated.safetensors": b"x",
    "original/model.safetensors": b"x",
    "pytorch_model.bin": b"x",
    "tiny.Q4_K_M.gguf": b"x",
}
HUB = {
    "org/tiny": WHOLE | SUBFOLDERS | BESIDES,
    "org/pickled": TEXTS | {"pytorch_model.bin": b"x"},
    "org/tiny-GGUF": {"README.md": b"#", "tiny.Q4_K_M.gguf": b"x"},
    "org/gated": None,
}
# In a process of its own, because huggingface_hub reads its settings when it is imported.
FETCH = """
import json, sys
from actors.lifecycle.hub import fetch_model
from actors.lifecycle.preflight import check_startable
from configs.load import config_from_environment
from engine.errors import ConfigError
for name in sys.argv[1:]:
    try:
        config = fetch_model(config_from_environment({"model": name}, {}))
        check_startable(config)
        print(json.dumps([config.model.path, config.model.served_name]))
    except ConfigError as error:
        print(json.dumps(str(error)))
"""


def fetched(home: Path, *names: str, **environ: str) -> list[Any]:
    """Of each name the folder and the name it is served under, or what the start ends with."""
    done = subprocess.run(
        [sys.executable, "-c", FETCH, *names],
        cwd=PROJECT_ROOT,
        env=os.environ | {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"} | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_model_is_fetched_by_its_name_and_later_used_without_a_network(tmp_path: Path) -> None:
    with running(FakeHub(HUB)) as hub:
        settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret"}
        [[folder, name], tagged, gated, gguf, pickled, nobody, untagged] = fetched(
            tmp_path,
            "org/tiny",
            "org/tiny@v2",
            "org/gated",
            "org/tiny-GGUF",
            "org/pickled",
            "org/nobody",
            "org/tiny@v3",
            **settings,
        )
    assert name == "org/tiny"
    assert Path(folder).parts[-2:] == ("snapshots", COMMIT)
    files = {path for path in Path(folder).rglob("*") if path.is_file()}
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    assert found == WHOLE | SUBFOLDERS
    assert tagged == [folder, "org/tiny"]
    asked = [(path, token) for _, path, token in hub.asked if "tiny/revision" in path]
    assert asked[0] == ("/api/models/org/tiny/revision/main", "Bearer hf_secret")
    assert "/revision/v2" in asked[1][0]
    assert gated.startswith("org/gated: its owner wants its terms accepted")
    assert gguf.startswith("org/tiny-GGUF: has weights as GGUF only; GGUF is not read")
    assert pickled.startswith("org/pickled: has pickled weights only")
    assert nobody.startswith("org/nobody: there is no such folder here and no such model")
    assert untagged.startswith("org/tiny@v3: the model has no such revision")
    assert not [line for line in (gated, gguf, pickled, nobody, untagged) if "\n" in line]

    again, absent = fetched(tmp_path, "org/tiny", "org/absent", HF_HUB_OFFLINE="1")
    assert again == [folder, "org/tiny"]
    assert absent.startswith("org/absent: there is no such folder here, it is not in the cache")
    assert "(HF_HUB_OFFLINE is set)" in absent
    assert "hf download org/absent" in absent
    assert "\n" not in absent
    cut_off = fetched(tmp_path / "empty", "org/tiny", HF_ENDPOINT=hub.url)  # nobody listens there
    assert "cannot be asked" in cut_off[0]
    assert "\n" not in cut_off[0]


def test_a_folder_of_that_name_comes_before_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org/tiny").mkdir(parents=True)
    config = config_from_environment({"model": "org/tiny"}, {})
    assert config.model.path == str(tmp_path / "org" / "tiny")
    assert fetch_model(config) == config
    assert served_names(config) == ("tiny",)
    file = tmp_path / "run.yaml"
    file.write_text("model: {revision: v2}")
    with pytest.raises(ConfigFileError, match=r"model\.revision: 'v2'.*is a folder"):
        config_from_environment({"config": str(file), "model": "org/tiny"}, {})


@pytest.mark.parametrize(
    ("named", "revision", "expected"),
    [
        ("Qwen/Qwen3-0.6B", None, ("Qwen/Qwen3-0.6B", None)),
        ("Qwen/Qwen3-0.6B@main", None, ("Qwen/Qwen3-0.6B", "main")),
        ("org/x@refs/pr/1", None, ("org/x", "refs/pr/1")),
        ("org/x", "v2", ("org/x", "v2")),
        ("org/x@v2", "v2", ("org/x", "v2")),
        ("org/x@v1", "v2", None),
        ("org/x/y", None, None),
        ("/org/x", None, None),
        ("../x", None, None),
        ("./x", None, None),
        ("org/x@", None, None),
        ("x", None, None),
        ("org/x.gguf", None, None),
    ],
)
def test_what_is_typed_is_a_name_of_the_hub_or_an_error(
    named: str, revision: str | None, expected: tuple[str, str | None] | None, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"model": {"revision": revision}}))
    if expected is None:
        with pytest.raises(ConfigFileError, match=r"model\.(path|revision)"):
            config_from_environment({"config": str(file), "model": named}, {})
        return
    model = config_from_environment({"config": str(file), "model": named}, {}).model
    assert (model.path, model.revision) == expected


def test_a_gguf_file_is_named_for_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "Qwen3-0.6B-Q8_0.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ConfigFileError, match=r"Q8_0\.gguf: GGUF is not read; set LAPS_MODEL"):
        config_from_environment({"model": str(path)}, {})


def test_names_that_were_given_stay() -> None:
    config = load_config(None, {"model.path": str(MODEL), "model.served_name": "mine"})
    assert fetch_model(config) == config
