"""The bench of second tokens against a server that is slow on purpose, and what it prints."""

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from configs.load import config_from_environment
from engine.text.tokenizing import load_tokenizer
from load_tests.http_load.client import BrokenStreamError, LoadError, RefusedError
from load_tests.lab.bench_second_token import (
    Answer,
    Asker,
    Series,
    measure,
    parse,
    read_json,
    report,
)
from load_tests.lab.model_folder import parse_settings, write_model_folder


class FakeServer(ThreadingHTTPServer):
    """Says what it is told: a list of tokens an event, and how many prompt tokens were cached."""

    daemon_threads = True
    events: tuple[int, ...] = (1, 1, 1, 1)
    cached_tokens = 0
    status = 200
    prompts: list[list[int]]


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        models = {"data": [{"id": "fake", "max_model_len": 1000}]}
        self._send(200, json.dumps(models).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["x-laps-timings"] == "1"
        assert (body["ignore_eos"], body["temperature"], body["stream"]) == (True, 0, True)
        self.server.prompts.append(body["prompt"])
        usage = {"prompt_tokens_details": {"cached_tokens": self.server.cached_tokens}}
        events: list[dict[str, Any]] = [
            {"choices": [{"text": "", "token_ids": [7] * n}]} for n in self.server.events
        ]
        timings = {"prefill_ms": 3.0, "handoff_ms": None, "total_ms": 9.0}
        events.append({"choices": [], "usage": usage, "timings": timings})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._send(self.server.status, "".join([*lines, "data: [DONE]\n\n"]).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[tuple[FakeServer, str]]:
    server = FakeServer(("127.0.0.1", 0), FakeHandler)
    server.prompts = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def answer(gap_ms: float, *, is_merged: bool = False) -> Answer:
    stages = {"prefill_ms": 2.0, "handoff_ms": gap_ms}
    return Answer(ttft_ms=10.0, gap_ms=gap_ms, tpot_ms=5.0, is_merged=is_merged, stages=stages)


def series(server: str, *gaps_ms: float) -> Series:
    return Series(server=server, prompt_tokens=64, answers=[answer(gap) for gap in gaps_ms])


def test_each_round_asks_every_server_a_prompt_that_nobody_asked_before() -> None:
    seed = random.randrange(2**32)
    with serving() as (one, url), serving() as (two, other_url):
        args = parse(
            f"--url {url} --url {other_url} --prompt-tokens 5 9 --rounds 3 --warm-rounds 2"
            f" --max-tokens 4 --seed {seed}".split()
        )
        assert args.url == [url, other_url]
        measured = measure({"a": Asker(url, 4), "b": Asker(other_url, 4)}, args)
        asked = one.prompts + two.prompts
    places = [(found.server, found.prompt_tokens, len(found.answers)) for found in measured]
    assert places == [("a", 5, 3), ("b", 5, 3), ("a", 9, 3), ("b", 9, 3)]
    assert sorted(map(len, asked)) == [5] * 10 + [9] * 10
    assert len({tuple(prompt) for prompt in asked}) == 20
    assert measured[0].stage_ms("prefill_ms") == 3.0
    assert measured[0].stage_ms("handoff_ms") is None


def test_tokens_of_one_event_are_counted_as_merged() -> None:
    with serving() as (server, url):
        server.events = (3, 1)
        found = Asker(url, 4).ask([1, 2])
    assert found.is_merged
    assert found.gap_ms == 0


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"cached_tokens": 16}, LoadError),
        ({"events": (1, 1)}, BrokenStreamError),
        ({"status": 503}, RefusedError),
    ],
)
def test_what_cannot_be_measured_ends_the_run(
    change: dict[str, Any], error: type[LoadError]
) -> None:
    with serving() as (server, url):
        for name, value in change.items():
            setattr(server, name, value)
        with pytest.raises(error):
            Asker(url, 4).ask([1, 2])


def test_the_last_server_is_held_against_the_first() -> None:
    table = report([series("unified", 4.0, 5.0, 6.0), series("pair", 8.0, 8.5, 30.0)], 4.0)
    assert "4.00 / " not in table
    assert "5.00 / 5.00 / 6.00 ms" in table
    assert "+3.50 ms" in table
    assert "yes" in table
    assert "NO" not in table
    assert "NO" in report([series("unified", 1.0), series("pair", 5.1)], 4.0)


def test_an_earlier_run_is_read_back_and_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    written = {"server": "a", "prompt_tokens": 64, "answers": []}
    path.write_text(json.dumps({"about": {}, "series": [written]}))
    assert read_json(path) == [Series(server="a", prompt_tokens=64, answers=[])]
    path.write_text("{}")
    with pytest.raises(SystemExit, match="not what --json"):
        read_json(path)


def test_a_model_folder_has_a_text_for_every_id_of_its_vocabulary(tmp_path: Path) -> None:
    overrides = parse_settings(["vocab_size=3301", "num_hidden_layers=2"])
    folder = write_model_folder("qwen3-8b", tmp_path, overrides)
    written = json.loads((folder / "config.json").read_text())
    assert (written["vocab_size"], written["num_hidden_layers"]) == (3301, 2)
    assert written["transformers_version"].startswith("4.")  # else transformers warns of Mistral's
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == 3301
    assert all(tokenizer.piece(token_id) for token_id in range(3301))
    demo = load_tokenizer(Path("demo_model/laps-demo"))
    text = "def add(a, b):\n    return a ~3100~ b"
    encoded = [one.encode_batch([text], add_special_tokens=False) for one in (tokenizer, demo)]
    assert encoded[0] == encoded[1]
    assert config_from_environment({"model": str(folder)}, {}).model.path == str(folder.resolve())


def test_a_model_folder_that_cannot_be_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_layers: not in"):
        write_model_folder("qwen3-8b", tmp_path, {"num_layers": 2})
    with pytest.raises(ValueError, match="too small"):
        write_model_folder("qwen3-8b", tmp_path, {"vocab_size": 100})
    with pytest.raises(ValueError, match="key=value"):
        parse_settings(["vocab_size"])
    assert list(tmp_path.iterdir()) == []
