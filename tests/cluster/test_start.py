"""`serve run` as a user starts it: a process that serves, ends without remains, or says why not."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import yaml

from configs.errors import ConfigFileError
from engine.errors import ConfigError
from load_tests.testbed.deployed import MODEL, ROOT, START_S, free_port, wait_until
from serve_app import build

SERVE = Path(sys.executable).with_name("serve")
GONE_S = 60.0
NUM_STREAMS = 4


@dataclass(frozen=True)
class ServeRun:
    """`serve run ...` in a session of its own, with a Ray cluster of its own."""

    process: subprocess.Popen[bytes]
    output: Path

    @classmethod
    def start(cls, arguments: list[str], output: Path, ray_folder: Path) -> "ServeRun":
        environment = os.environ | {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(ray_folder),
            "OMP_NUM_THREADS": "1",
        }
        with output.open("wb") as stream:
            process = subprocess.Popen(
                [str(SERVE), "run", *arguments],
                cwd=ROOT,
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(process, output)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def left(self) -> list[psutil.Process]:
        """Living processes of the session, the first one included."""
        self.process.poll()
        return [p for p in psutil.process_iter() if _session(p) == self.process.pid]

    def end(self) -> None:
        for process in self.left():
            process.kill()
        self.process.wait()


def _session(process: psutil.Process) -> int | None:
    try:
        is_over = process.status() == psutil.STATUS_ZOMBIE
        return None if is_over else os.getsid(process.pid)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """Short, because Ray makes socket paths of it; of its own, so that no cluster is joined."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def serve_run(tmp_path: Path, ray_folder: Path) -> Iterator[Callable[..., ServeRun]]:
    started: list[ServeRun] = []

    def run(*arguments: str) -> ServeRun:
        started.append(ServeRun.start(list(arguments), tmp_path / "output", ray_folder))
        return started[-1]

    yield run
    for one in started:
        one.end()


@dataclass(frozen=True)
class Folders:
    """A config file and a model folder that a test spoils."""

    config: Path
    model: Path

    def write_config(self, **sections: dict[str, object]) -> None:
        self.config.write_text(yaml.safe_dump(sections))

    def change_model(self, **values: object) -> None:
        path = self.model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    def add_token(self, text: str) -> None:
        """A special token past the model's embeddings."""
        path = self.model / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        token = {"id": 3072, "content": text, "special": True, "single_word": False}
        token |= {"lstrip": False, "rstrip": False, "normalized": False}
        tokenizer["added_tokens"].append(token)
        path.write_text(json.dumps(tokenizer))

    @property
    def args(self) -> dict[str, str]:
        return {"config": str(self.config), "model": str(self.model)}


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    folders = Folders(tmp_path / "run.yaml", tmp_path / "model")
    folders.write_config(workers={"unified": 1})
    shutil.copytree(MODEL, folders.model)
    return folders


# ---- a good start, and its end -------------------------------------------------------------------


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def refuse_tokens_beyond_the_model(client: openai.OpenAI) -> None:
    """By text, in a conversation and by id: each is a 400, and the worker lives on."""
    for prompt in ("x<|pad|>", [5, 3072]):
        with pytest.raises(openai.BadRequestError, match="3072"):
            client.completions.create(model="model", prompt=prompt, max_tokens=2)
    with pytest.raises(openai.BadRequestError, match=r"<\|pad\|>"):
        client.chat.completions.create(
            model="model", messages=[{"role": "user", "content": "<|pad|>"}], max_tokens=2
        )
    with pytest.raises(openai.BadRequestError, match="3072"):
        client.completions.create(model="model", prompt="x", logit_bias={"3072": 1}, max_tokens=2)


@pytest.mark.ray
@pytest.mark.slow
def test_serve_run_serves_and_a_sigterm_ends_streams_with_a_word_and_leaves_no_process(
    folders: Folders, serve_run: Callable[..., ServeRun]
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    folders.add_token("<|pad|>")
    folders.write_config(workers={"unified": 1}, edge={"drain_s": 0.5})
    arguments = [f"{name}={value}" for name, value in folders.args.items()]
    run = serve_run("serve_app:build", "host=127.0.0.1", f"port={port}", *arguments)
    wait_until(
        lambda: is_ready(url) or run.process.poll() is not None,
        lambda: f"ready; it said\n{run.text()}",
        START_S,
    )
    assert run.process.poll() is None, run.text()

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(model="model", prompt="import ", max_tokens=5)
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 5
        refuse_tokens_beyond_the_model(client)
        children = psutil.Process(run.process.pid).children(recursive=True)
        assert any("UnifiedWorker" in child.name() for child in children), children
        streams = [
            client.completions.create(
                model="model",
                prompt="import ",
                max_tokens=1900,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for _ in range(NUM_STREAMS)
        ]
        for stream in streams:
            next(stream)  # it is in the middle of its tokens
        os.killpg(run.process.pid, signal.SIGTERM)  # as a terminal's Ctrl-C, and `kill %1`
        for stream in streams:  # none has come to its end in so short a time
            with pytest.raises(openai.APIError, match="the server is stopping"):
                deque(stream, maxlen=0)
        wait_until(lambda: not run.left(), lambda: f"nobody is left of {run.left()}", GONE_S)
        assert not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]
        assert run.process.wait() == 0


# ---- bad starts: build() says it before anything starts ------------------------------------------


def without_model(folders: Folders) -> str:
    shutil.rmtree(folders.model)
    return str(folders.model)


def unknown_architecture(folders: Folders) -> str:
    folders.change_model(architectures=["MambaForCausalLM"])
    return "MambaForCausalLM"


def without_tokenizer(folders: Folders) -> str:
    (folders.model / "tokenizer.json").unlink()
    return "tokenizer.json"


def without_weights(folders: Folders) -> str:
    (folders.model / "model.safetensors").unlink()
    return "model.safetensors"


def without_shard(folders: Folders) -> str:
    (folders.model / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folders.model / "model.safetensors.index.json").write_text(json.dumps(index))
    return "model-00001-of-00002.safetensors"


def truncated_weights(folders: Folders) -> str:
    path = folders.model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    return "model.safetensors: not a readable safetensors file, it is cut short"


def unknown_key(folders: Folders) -> str:
    folders.write_config(cache={"blocks": 12})
    return "cache.blocks"


def more_context_than_cache(folders: Folders) -> str:
    folders.write_config(model={"max_model_len": 1024}, cache={"num_blocks": 7, "block_size": 16})
    return "model.max_model_len"


def more_context_than_model(folders: Folders) -> str:
    folders.write_config(model={"max_model_len": 2049})
    return "model.max_model_len"


def prefill_without_decode(folders: Folders) -> str:
    folders.write_config(workers={"prefill": 2, "unified": 0})
    return "workers"


SPOILT = [
    without_model,
    unknown_architecture,
    without_tokenizer,
    without_weights,
    without_shard,
    truncated_weights,
    unknown_key,
    more_context_than_cache,
    more_context_than_model,
    prefill_without_decode,
]


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: str(spoil.__name__))
def test_build_names_the_file_or_key_that_is_wrong(
    folders: Folders, spoil: Callable[[Folders], str]
) -> None:
    named = spoil(folders)
    with pytest.raises((ConfigError, ConfigFileError)) as error:
        build(folders.args)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spoil",
    [unknown_key, pytest.param(truncated_weights, marks=pytest.mark.nightly)],
    ids=["key", "weights"],
)
def test_serve_run_ends_with_one_message_and_starts_no_process(
    folders: Folders, spoil: Callable[[Folders], str], serve_run: Callable[..., ServeRun]
) -> None:
    named = spoil(folders)
    arguments = [f"{key}={value}" for key, value in folders.args.items()]
    run = serve_run("serve_app:build", *arguments)
    assert run.process.wait(START_S) != 0
    assert named in run.text().splitlines()[-1]
    assert "Traceback" not in run.text()
    assert "Started a local Ray instance" not in run.text()
    assert not run.left()


# ---- where the config comes from -----------------------------------------------------------------


def deployed_config(args: dict[str, str]) -> tuple[str, int]:
    """Model folder and number of blocks that an application would be started with."""
    [spec] = build(args)._bound_deployment.init_args
    return spec.config.model.path, spec.config.cache.num_blocks


def test_arguments_and_the_environment_name_config_and_model(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders.write_config(cache={"num_blocks": 333})
    expected = (str(folders.model), 333)
    assert deployed_config(folders.args) == expected
    monkeypatch.setenv("LAPS_CONFIG", str(folders.config))
    monkeypatch.setenv("LAPS_MODEL", str(folders.model))
    assert deployed_config({}) == expected
    assert deployed_config({"model": str(MODEL)}) == (str(MODEL), 333)
