"""What a bench has started is ended with it, also where it is killed."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from load_tests.lab.server_process import ROOT

PATIENCE_S = 60


@contextmanager
def started(text: str) -> Iterator["subprocess.Popen[str]"]:
    """A program that has said that it is ready; nothing of its session is left afterwards."""
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            with suppress(ProcessLookupError):  # as it should be
                os.killpg(process.pid, signal.SIGKILL)


def test_a_sigterm_ends_a_program_as_an_exception_does_and_a_second_one_cuts_nothing_short(
    tmp_path: Path,
) -> None:
    text = f"""
        import os, signal, tempfile
        from load_tests.lab.child_processes import exit_on_sigterm
        exit_on_sigterm()
        with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):
            try:
                print("ready", flush=True)
                signal.pause()
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                print("ended all", flush=True)
    """
    with started(text) as program:
        program.terminate()
        printed, _ = program.communicate(timeout=PATIENCE_S)
    assert (printed, program.returncode) == ("ended all\n", 128 + signal.SIGTERM)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_is_killed_with_the_program_that_started_it() -> None:
    text = """
        import signal, subprocess, sys
        from load_tests.lab.child_processes import bound_to_parent
        program = "import signal; print('ready', flush=True); signal.pause()"
        child = [sys.executable, "-c", program]
        subprocess.run(bound_to_parent(child, signal.SIGKILL))
    """
    with started(text) as program:
        program.kill()
        program.communicate(timeout=PATIENCE_S)  # until nobody can write any more


def test_a_server_is_interrupted_when_the_program_that_started_it_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = """
        import pathlib, signal
        def note(*_):
            print("interrupted", flush=True)
            raise SystemExit
        signal.signal(signal.SIGINT, note)
        print("ready", flush=True)
        signal.pause()
    """
    text = f"""
        import pathlib, signal, sys
        from load_tests.lab.server_process import ServerCommand, ServerProcess
        words = [sys.executable, "-c", {textwrap.dedent(server)!r}]
        command = ServerCommand(name="it", words=words, port=1, ready_path="/health")
        ServerProcess(command, pathlib.Path({str(log)!r}))
        print("ready", flush=True)
        signal.pause()
    """
    with started(text) as program:
        wait_for(log, "ready\n")
        program.kill()
        wait_for(log, "ready\ninterrupted\n")


def wait_for(log: Path, text: str) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not log.exists() or log.read_text() != text:
        assert time.monotonic() < until_s, log.read_text()
        time.sleep(0.01)
