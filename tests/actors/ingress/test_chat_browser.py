"""The page at `/` in a real browser, asking the ingress's own routes; needs chromium, no Ray."""

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from threading import Event

import httpx
import pytest
from fastapi import FastAPI
from openai._streaming import SSEDecoder

from engine.errors import WorkerError
from engine.text.tokenizing import load_tokenizer
from tests.actors.ingress.browser_tab import Tab, open_tab, serving_app
from tests.actors.ingress.edge_app import MODEL_FOLDER, EdgeApp, edge_app

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
HOSTILE = (
    "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    "<style>*{display:none}</style><a href=javascript:document.title='taken'>x</a>&lt;b&gt;"
)
# Known ways past sanitisers: markup that changes its meaning when it is parsed again.
MUTATING = (
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1"
    " onerror=document.title=1&gt;'>"
    "<svg></p><style><a id='</style><img src=1 onerror=document.title=1>'>"
    "<form><math><mtext></form><form><mglyph><style></math><img src onerror=document.title=1>"
    "<p><iframe srcdoc='<script>top.document.title=1</script>'></iframe></p>"
)
HOSTILE_MARKDOWN = """[a](javascript:document.title='taken') <javascript:x>
[b](https://example.org/ "title")
[c](data:text/html,<script>document.title=1</script>) [d](vbscript:x) [e](//example.org) [f](?x=1)
![an image](http://127.0.0.1:9/seen.png?secret) ![x](x"onerror="document.title=1) [g][1]

[1]: JaVaScRiPt&#58;document.title=1 "x"

```html"onclick="x
<img src=x onerror=document.title=1>
```

| a | b |
|:-:|---|
| <b onclick=x> | `<i>` |

- [x] done <input autofocus onfocus=document.title=1>
"""
MARKDOWN = """# Title

Some **bold** and *slanted* words, `a < b`, https://example.org/x and
a second line.

3. one
4. two
   - deeper

```python
def __init__(self):
    self.a = '*'
```

| a | b |
|---|--:|
| 1 | 2 |

> said"""
MARKED_UP = (
    "<h1>Title</h1>",
    "<strong>bold</strong>",
    "<em>slanted</em>",
    "<code>a &lt; b</code>",
    '<a href="https://example.org/x" target="_blank" rel="noopener noreferrer">',
    '<ol start="3"><li>one</li><li>two<ul><li>deeper</li></ul></li></ol>',
    '<td align="right">2</td>',
    "<blockquote><p>said</p></blockquote>",
)
ENDED = "document.querySelector('.answer:last-child:not(.busy)')"
SAID = ".answer .said"
COMPLAINED = "!document.getElementById('wrong').hidden"
KEEP_BODIES = """{
  const real = fetch;
  window.bodies = [];
  window.fetch = (url, options) => {
    if (options.body) bodies.push(JSON.parse(options.body));
    return real(url, options);
  };
}"""
KEPT = "[{...localStorage}, {...sessionStorage}, document.cookie, location.href]"
# Where a cut makes the page's parser read another thing.
CUT = """(async () => {
  const stream = Uint8Array.from(%s), whole = JSON.stringify(%s), wrong = [];
  for (let cut = 0; cut <= stream.length; cut++) {
    const found = [], body = new ReadableStream({ start(controller) {
      for (const piece of [stream.slice(0, cut), stream.slice(cut)]) controller.enqueue(piece);
      controller.close();
    } });
    for await (const data of events(body)) found.push(data);
    if (JSON.stringify(found) !== whole) wrong.push(cut);
  }
  return wrong;
})()"""


def ids_of(text: str) -> Sequence[int]:
    (ids,) = load_tokenizer(MODEL_FOLDER).encode_batch([text], add_special_tokens=False)
    assert isinstance(ids, list), f"{ids!r}"
    return ids


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with open_tab(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def made() -> EdgeApp:
    """Whose model says what a test puts into `workers.token_ids`."""
    made = edge_app({"api.reasoning_parser": "think"})
    made.workers.waited_s = 0.0125
    return made


@pytest.fixture
def page(made: EdgeApp, tab: Tab) -> Iterator[Tab]:
    """Opened, and the model's name is there."""
    tab.resize(1000, 900)
    with serving_app(made.app) as url:
        tab.open(url)
        tab.wait("document.getElementById('model').textContent === 'tiny'")
        yield tab
        tab.open("about:blank")  # which ends every stream


def ask(page: Tab, text: str = "hi there") -> None:
    page.fill("#input", text)
    page.click("#send")


def ask_until_end(page: Tab, text: str = "hi there") -> None:
    num_answers = page.evaluate("document.querySelectorAll('.answer').length")
    ask(page, text)
    page.wait(f"document.querySelectorAll('.answer').length > {num_answers} && {ENDED}")


class Gate:
    """Holds the worker back before one token, and notices if it is sent away meanwhile."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened = asyncio.Event()
        self._come = Event()
        self.left = Event()

    async def pause(self, index: int) -> None:
        """Before token `index`, in the server's thread."""
        if index != self._index:
            return
        self._loop = asyncio.get_running_loop()
        self._come.set()
        try:
            await self._opened.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise

    def open(self) -> None:
        """Once somebody waits at it."""
        assert self._come.wait(30), "nobody has come to the gate"
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._opened.set)


def test_an_answer_appears_as_it_is_made_and_ends_with_its_figures(
    made: EdgeApp, page: Tab
) -> None:
    text = "def add(a, b):\n    return a + b  # ümläut 鬱 👩"
    made.workers.token_ids = ids_of(text)
    gate = Gate(len(made.workers.token_ids) - 3)
    made.workers.pause = gate.pause
    ask(page, "write\n  it")
    page.wait("document.querySelector('.said')?.textContent.includes('return')")
    assert page.is_shown("#stop")
    assert not page.is_shown("#send")
    assert not page.is_shown(".answer .stages")
    gate.open()
    page.wait(ENDED)
    assert page.text(SAID) == text
    assert page.text(".asked") == "write\n  it"
    figures = page.text(".figures")
    assert f"{len(made.workers.token_ids)} tokens" in figures
    assert "first token" in figures
    assert "tokens/s" in figures
    assert page.is_shown("#send")
    assert not page.is_shown("#stop")


def test_the_stages_of_a_request_are_a_bar_with_names(made: EdgeApp, page: Tab) -> None:
    made.workers.token_ids = ids_of("one two three four five")
    made.workers.joins_before = 1
    ask_until_end(page)
    legend = page.text(".legend")
    names = ["tokenize", "place", "queue", "prefill", "transfer", "first decode"]
    assert [name for name in names if name in legend] == names
    assert "total" in legend
    assert "further tokens" in legend
    shown = "[...document.querySelectorAll('.bar > *')].filter((e) => e.clientWidth > 0).length"
    assert page.evaluate(shown) == len(names)
    assert page.evaluate("document.querySelector('.bar').ariaLabel").startswith("tokenize ")


def test_settings_go_with_the_request_and_turns_follow_each_other(made: EdgeApp, page: Tab) -> None:
    page.evaluate(KEEP_BODIES)
    num_tokens = random.randint(2, 9)
    temperature = random.randrange(20) / 10
    page.fill("#system", "Be brief.")
    page.fill("#temperature", str(temperature))
    page.fill("#max-tokens", str(num_tokens))
    ask_until_end(page, "first")
    said = page.evaluate("answers[0].said")
    assert "Cut off at the largest number of tokens." in page.text(".answer .note")
    page.fill("#system", "")
    page.fill("#temperature", "")
    ask_until_end(page, "second")
    first, second = page.evaluate("bodies")
    assert (first["temperature"], first["max_tokens"]) == (temperature, num_tokens)
    assert first["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first"},
    ]
    assert second["temperature"] is None
    assert second["messages"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "second"},
    ]
    assert f"{num_tokens} tokens" in page.text(".figures")
    page.click("#again")
    ask_until_end(page, "third")
    assert page.evaluate("bodies.at(-1)")["messages"] == [{"role": "user", "content": "third"}]


def test_thinking_is_folded_and_apart_from_the_answer(made: EdgeApp, page: Tab) -> None:
    made.workers.token_ids = ids_of("<think>two and two</think>four")
    ask_until_end(page)
    assert page.text(SAID) == "four"
    assert page.is_shown(".thinking")
    assert not page.is_shown(".thought")
    page.click(".thinking summary")
    assert page.text(".thought") == "two and two"


def test_stop_ends_the_request_at_the_server_and_keeps_what_came(made: EdgeApp, page: Tab) -> None:
    made.workers.token_ids = ids_of("one two three four five six")
    gate = Gate(4)
    made.workers.pause = gate.pause
    ask(page)
    page.wait("document.querySelector('.said')?.textContent.includes('two')")
    page.click("#stop")
    page.wait(ENDED)
    assert gate.left.wait(PATIENCE_S), "the request goes on without anybody to read it"
    assert page.text(".answer .note") == "Stopped."
    assert page.text(SAID).startswith("one two")
    assert not page.is_shown(".answer .wrong")
    made.workers.pause = None
    ask_until_end(page, "and now")
    assert page.text(SAID) == "one two three four five six"


def test_what_the_server_refuses_is_said_beside_the_message_which_comes_back(
    made: EdgeApp, page: Tab
) -> None:
    page.fill("#max-tokens", "100000")
    ask(page, "a question")
    page.wait(COMPLAINED)
    assert page.text("#wrong").startswith("The server refused (400): ")
    assert "100000" in page.text("#wrong")
    assert page.evaluate("document.getElementById('input').value") == "a question", "it was lost"
    assert page.text("#turns") == "Nothing has been asked yet."
    below = "document.getElementById('%s').getBoundingClientRect().%s"
    gap = page.evaluate(f"{below % ('input', 'top')} - {below % ('wrong', 'bottom')}")
    assert 0 < gap < 40, "the message and what is wrong with it are apart"
    page.click("#settings summary")  # closed, so that the page has to open it
    page.click("#settings summary")
    page.fill("#max-tokens", "0.5")
    ask(page)
    page.wait("document.getElementById('wrong').textContent.startsWith('Max tokens: ')")
    assert page.is_shown("#max-tokens")
    page.fill("#max-tokens", "3")
    ask_until_end(page)
    assert not page.is_shown("#wrong")
    assert not page.is_shown(".answer .wrong")


def test_an_error_in_mid_answer_is_said_below_what_came(made: EdgeApp, page: Tab) -> None:
    async def fail(index: int) -> None:
        if index == 4:
            raise WorkerError("decode-0 died <b>suddenly</b>")

    made.workers.token_ids = ids_of("one two three four five six")
    made.workers.pause = fail
    ask_until_end(page)
    assert page.text(SAID).startswith("one two")
    wrong = "The server failed: decode-0 died <b>suddenly</b>"
    assert page.text(".answer .wrong") == wrong
    assert page.text(".answer .note") == "Later messages leave this turn out."


def test_a_server_that_has_gone_is_said_so(made: EdgeApp, tab: Tab) -> None:
    with serving_app(made.app) as url:
        tab.open(url)
        tab.wait("document.getElementById('model').textContent === 'tiny'")
    ask(tab)
    tab.wait(COMPLAINED)
    assert tab.text("#wrong").startswith("No connection to the server")


def test_an_answer_is_shown_as_markdown_with_its_code_as_it_is(made: EdgeApp, page: Tab) -> None:
    made.workers.token_ids = ids_of(MARKDOWN)
    ask_until_end(page)
    shown = page.evaluate(f"document.querySelector('{SAID}').innerHTML.replace(/\\n/g, '')")
    assert [word for word in MARKED_UP if word not in shown] == []
    assert page.text(f"{SAID} pre") == "def __init__(self):\n    self.a = '*'\n"
    font = page.evaluate(f"getComputedStyle(document.querySelector('{SAID} pre code')).fontFamily")
    assert font.endswith("monospace")
    assert page.evaluate(f"[...document.querySelectorAll('{SAID} a')].map((a) => a.rel)") == [
        "noopener noreferrer"
    ]
    page.click("#plain")
    assert page.text(SAID) == MARKDOWN
    page.click("#plain")
    assert page.text(f"{SAID} strong") == "bold"


def test_html_that_is_said_stays_text(made: EdgeApp, page: Tab) -> None:
    made.workers.token_ids = ids_of(f"<think>{HOSTILE}</think>{HOSTILE}")
    ask_until_end(page, HOSTILE)
    page.click(".thinking summary")
    for where in (".thought", ".asked"):
        assert page.text(where) == HOSTILE
    assert page.text(SAID) == HOSTILE.replace("&lt;b&gt;", "<b>")  # markdown has entities
    assert tags_in(page, ":is(.said, .thought, .asked)") == ["P"]
    assert page.evaluate("document.title") == "LAPS chat"


def test_the_sanitiser_takes_out_what_markdown_could_bring_in(made: EdgeApp, page: Tab) -> None:
    """Markdown that makes elements of its own, and HTML that got past the renderer."""
    made.workers.token_ids = ids_of(HOSTILE_MARKDOWN)
    ask_until_end(page)
    links = page.evaluate(f"[...document.querySelectorAll('{SAID} a')].map((a) => a.href)")
    assert [link for link in links if link and not link.startswith(("https:", "mailto:"))] == []
    assert "https://example.org/" in links
    attributes = f"[...document.querySelectorAll('{SAID} *')].flatMap((e) => e.getAttributeNames())"
    assert set(page.evaluate(attributes)) <= {"href", "target", "rel", "align", "start"}
    page.evaluate("{ markdown.parse = (text) => text }")  # as if it let everything through
    made.workers.token_ids = ids_of(f"{HOSTILE}{MUTATING}")
    ask_until_end(page)
    assert set(tags_in(page, ".answer:last-child .said")) <= {"A", "P"}
    assert set(page.evaluate(attributes)) <= {"href", "target", "rel", "align", "start"}
    assert page.evaluate("document.title") == "LAPS chat"


def tags_in(page: Tab, selector: str) -> list[str]:
    """The elements within, each kind once."""
    found = page.evaluate(f"[...document.querySelectorAll('{selector} *')].map((e) => e.tagName)")
    return sorted(set(found))


def test_the_policy_would_stop_markup_that_got_in(page: Tab) -> None:
    page.evaluate(
        "document.addEventListener('securitypolicyviolation',"
        " (event) => (window.violated ??= []).push(event.effectiveDirective))"
    )
    refused = page.evaluate(
        "(() => { try { document.body.innerHTML = '<b>x</b>'; return false; }"
        " catch (error) { return error instanceof TypeError; } })()"
    )
    assert refused
    page.evaluate(
        "(() => { const image = document.createElement('img'); image.setAttribute('src', 'http://127.0.0.1:9/x');"
        " document.body.append(image); const style = document.createElement('style');"
        " style.textContent = '* { display: none }'; document.body.append(style); })()"
    )
    page.wait("window.violated?.includes('img-src') && violated.includes('style-src-elem')")


def test_with_keys_the_page_asks_for_one_and_keeps_it_in_its_tab(tab: Tab) -> None:
    digest = sha256(b"s3cret-key").hexdigest()
    made = edge_app({"api.keys": {"someone": digest}})
    with serving_app(made.app) as url:
        tab.open(url)
        tab.wait("!document.getElementById('asking').hidden")
        assert not tab.is_shown("#wrong"), "nothing is wrong yet"
        tab.fill("#key", "wrong")
        tab.click("#use")
        tab.wait(COMPLAINED)
        assert tab.text("#wrong") == "The server refused (401): Incorrect API key provided."
        ask(tab, "a question")  # before there is a good one
        tab.wait("!document.getElementById('send').hidden")
        assert tab.evaluate("document.getElementById('input').value") == "a question"
        tab.fill("#key", "s3cret-key")
        tab.click("#use")
        tab.wait("document.getElementById('model').textContent === 'tiny'")
        assert not tab.is_shown("#asking")
        assert not tab.is_shown("#wrong")
        tab.fill("#max-tokens", "5")
        ask_until_end(tab)
        assert "5 tokens" in tab.text(".figures")
        assert tab.evaluate(KEPT) == [{}, {"laps.key": "s3cret-key"}, "", url]
        tab.open(f"{url}laps")
        tab.wait("document.getElementById('banner').textContent.includes('allocator')")
        tab.open(url)
        tab.wait("document.getElementById('model').textContent === 'tiny'")
        tab.click("#settings summary")
        tab.click("#forget")
        tab.wait("!document.getElementById('asking').hidden")
        assert "s3cret" not in json.dumps(tab.evaluate(KEPT))


def test_its_parser_reads_a_stream_that_is_cut_at_any_byte(made: EdgeApp, page: Tab) -> None:
    made.workers.token_ids = ids_of("é\n\n鬱")
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    url = f"{page.evaluate('location.href')}v1/chat/completions"
    stream = httpx.post(url, json=chat).content
    whole = [event.data for event in SSEDecoder().iter_bytes(iter([stream]))]
    assert whole[-1] == "[DONE]"
    assert page.evaluate(CUT % (list(stream), json.dumps(whole))) == []


def test_it_works_below_a_prefix(made: EdgeApp, tab: Tab) -> None:
    made.workers.token_ids = ids_of("hello")
    outer = FastAPI()
    outer.mount("/app", made.app)
    with serving_app(outer) as url:
        tab.open(f"{url}app/")
        tab.wait("document.getElementById('model').textContent === 'tiny'")
        ask_until_end(tab)
        assert tab.text(SAID) == "hello"
        assert tab.evaluate("document.getElementById('laps').href") == f"{url}app/laps"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 1200])
def test_nothing_sticks_out(
    width: int, dark: bool, made: EdgeApp, page: Tab, tmp_path: Path
) -> None:
    made.workers.token_ids = ids_of("x" * 120 + " and some words\n    more of them " + "wide " * 30)
    made.workers.joins_before = 1
    page.resize(width, 900, dark=dark)
    page.click("#settings summary")
    ask_until_end(page, "y" * 200)
    beyond = page.evaluate(
        "[...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right >"
        " document.documentElement.clientWidth + 1).map((e) => e.tagName + '.' + e.className)"
    )
    assert beyond == []
    back = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g)")
    assert (sum(map(int, back)) < 3 * 128) is dark
    picture = page.screenshot()
    (tmp_path / "picture.png").write_bytes(picture)
    assert int.from_bytes(picture[16:20]) == width
    assert len(picture) > 15_000, "an empty page compresses to less"


def test_the_document_names_the_page(made: EdgeApp) -> None:
    with serving_app(made.app) as url:
        assert "/" in json.loads(httpx.get(f"{url}openapi.json").content)["paths"]
