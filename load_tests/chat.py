"""A conversation on a terminal with any server of OpenAI's protocol, and how fast each answer came.

    python -m load_tests.chat --url http://127.0.0.1:8000

Ctrl-C ends an answer, and on an empty line the program; /reset forgets what was said, /quit leaves.
"""

import argparse
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from load_tests.http_load.client import AskOptions, LoadError, Server, ask
from load_tests.http_load.dialogue import Message, PromptStyle
from load_tests.http_load.preflight import find_model

TIMEOUT_S = 600.0
FOREWORD = "/reset forgets what was said, /quit leaves, Ctrl-C ends an answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """An answer as far as it came, and its times."""

    text: str
    num_tokens: int
    ttft_s: float | None  # None = not a token came
    total_s: float  # from sending to the last token
    is_cut: bool = False  # by Ctrl-C

    def __str__(self) -> str:
        if self.ttft_s is None:
            return "no answer"
        after_s = self.total_s - self.ttft_s
        speed = f", {(self.num_tokens - 1) / after_s:.1f} tokens/s" if after_s > 0 else ""
        cut = ", cut" if self.is_cut else ""
        return f"first token {1e3 * self.ttft_s:.0f} ms, {self.num_tokens} tokens{speed}{cut}"


class Chat:
    """What was said so far, and asking on from there."""

    def __init__(
        self, server: Server, options: AskOptions, max_tokens: int, console: Console
    ) -> None:
        self._server = server
        self._options = options
        self._max_tokens = max_tokens
        self._console = console
        self.said: list[Message] = []

    def say(self, text: str) -> Spoken:
        """Prints the answer as it comes. Raises LoadError, and then forgets the question."""
        question = {"role": "user", "content": text}
        try:
            spoken = self._listen([*self.said, question])
        finally:
            self._console.print()
        if spoken.text:
            self.said += [question, {"role": "assistant", "content": spoken.text}]
        return spoken

    def _listen(self, messages: list[Message]) -> Spoken:
        texts: list[str] = []
        num_tokens, is_cut = 0, False
        started_s = time.perf_counter()
        first_s: float | None = None
        last_s = started_s
        answer = ask(self._server, self._options, messages, self._max_tokens, TIMEOUT_S)
        try:
            with closing(answer):
                for chunk in answer.chunks():
                    first_s = first_s or chunk.at_s
                    last_s = chunk.at_s
                    num_tokens += chunk.num_tokens
                    texts.append(chunk.text)
                    self._console.print(chunk.text, end="", markup=False, highlight=False)
        except KeyboardInterrupt:
            is_cut = True
        return Spoken(
            text="".join(texts),
            num_tokens=answer.usage.completion_tokens if answer.usage else num_tokens,
            ttft_s=None if first_s is None else first_s - started_s,
            total_s=last_s - started_s,
            is_cut=is_cut,
        )


def converse(chat: Chat, console: Console) -> None:
    """Until the user leaves."""
    while True:
        try:
            text = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if text == "/quit":
            return
        if text == "/reset":
            chat.said.clear()
        elif text:
            try:
                console.print(f"[dim]{chat.say(text)}[/dim]", highlight=False)
            except LoadError as error:
                console.print(f"error: {error}", style="red", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="its name [the first one that the server lists]")
    parser.add_argument("--max-tokens", type=int, default=512, help="of one answer")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--api-key-file", type=Path, help="a file with the server's key")
    args = parser.parse_args()
    console = Console()
    try:
        key = args.api_key_file.read_text(encoding="utf-8").strip() if args.api_key_file else ""
        server = Server(url=args.url, api_key=key)
        model = find_model(server, args.model).model
    except (LoadError, OSError) as error:
        sys.exit(f"error: {error}")
    options = AskOptions(
        model=model,
        style=PromptStyle.CHAT,
        takes_extensions=False,  # an answer ends where the model ends it
        temperature=args.temperature,
    )
    console.print(f"[dim]{model} at {args.url}. {FOREWORD}[/dim]", highlight=False)
    converse(Chat(server, options, args.max_tokens, console), console)


if __name__ == "__main__":
    main()
