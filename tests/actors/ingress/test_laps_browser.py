"""The page at `/laps` in a real browser, fed with recorded answers; needs chromium and no Ray."""

import re
from collections.abc import Callable
from functools import partial
from html import unescape
from pathlib import Path

import pytest

from tests.actors.ingress import laps_states as states
from tests.actors.ingress.browser import Answer, run_browser, run_frames, serving

pytestmark = pytest.mark.slow

# The same system as another ingress sees it.
OTHER = (
    states.busy()
    .replace(b"ingress-0123456789abcdef", b"ingress-fedcba9876543210")
    .replace(b'"num":', b'"num":9')
)
UNAVAILABLE = b'{"error": {"message": "actor allocator.1 is not running"}}'
NARROW_PX = 320
NO_VALUE = "\N{EN DASH}"
# Told by the page itself, once it has been filled: is anything wider than the window, and so on.
PROBE = """
const narrow = %d;
setTimeout(() => {
  if (narrow) document.documentElement.style.width = narrow + "px";
  dispatchEvent(new Event("resize"));
  const beyond = [...document.querySelectorAll("body *")].filter(
    (e) => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1
      || (narrow && e.getBoundingClientRect().right > narrow + 1));
  const back = getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g);
  document.body.dataset.beyond = beyond.map((e) => e.tagName + "." + e.className).join(",");
  document.body.dataset.isDark = back.reduce((sum, c) => sum + Number(c), 0) < 3 * 128;
}, 2500);
"""


def always(body: bytes) -> Answer:
    return lambda _: (200, body)


class Dom:
    """What is in the page after some seconds."""

    def __init__(self, html: str) -> None:
        self.html = html.split("<script>")[0] + html.rpartition("</script>")[2]

    def text(self, pattern: str) -> str:
        """Text of the first element whose opening tag matches."""
        found = re.search(rf"<(\w+)[^>]*{pattern}[^>]*>(.*?)</\1>", self.html, re.DOTALL)
        assert found is not None, f"no element with {pattern}"
        return unescape(re.sub(r"<[^>]+>", " ", found[2])).strip()

    def card(self, name: str) -> dict[str, str]:
        """The figures of one card, by what they are."""
        [html] = re.findall(rf'<section[^>]*id="{name}"[^>]*>.*?</section>', self.html, re.DOTALL)
        return dict(re.findall(r'data-is="(\w+)">([^<]*)<', html))

    def rows(self, kind: str = "worker") -> dict[str, list[str]]:
        """The cells of each worker's row; "drafter": in the table of guesses."""
        rows = re.findall(rf'<tr data-{kind}="([^"]+)"[^>]*>(.*?)</tr>', self.html, re.DOTALL)
        return {
            name: [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td.*?</td>", row)]
            for name, row in rows
        }

    def is_hidden(self, name: str) -> bool:
        found = re.search(rf'<\w+[^>]*id="{name}"[^>]*>', self.html)
        assert found is not None, f"no element {name}"
        return ' hidden=""' in found[0]


def show(
    folder: Path, answer: Answer, page_s: float = 3.0, probe: str = "", dark: bool = False
) -> Dom:
    """What the page became after some seconds of its time; the browser's profile is in `folder`."""
    with serving(answer, probe) as url:
        profile = folder / "profile"
        return Dom(run_browser(url, profile, "--dump-dom", page_s=page_s, dark=dark))


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Dom]:
    return partial(show, tmp_path)


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Dom:
    """The page of a busy system, which several tests look at."""
    return show(tmp_path_factory.mktemp("busy"), always(states.busy()))


# Pages that every answer fills alike.
STILL: dict[str, Answer] = {
    "guessing": always(states.guessing()),
    "stopped": always(states.guessing(is_on=False)),
    "splitting": always(states.splitting()),
    "off": always(states.off()),
    "one_worker": always(states.one_worker()),
    "too_few": always(states.too_few()),
    "nobody": always(states.nobody()),
    "quiet": always(states.quiet()),
    "crowd": always(states.crowd()),
    "unavailable": lambda _: (503, UNAVAILABLE),
    "no_status": always(b"{}"),
}


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dom]:
    """By the names of STILL, of one browser: a start of it takes longer than a page."""
    pages = run_frames(STILL, tmp_path_factory.mktemp("still") / "profile")
    return {name: Dom(html) for name, html in pages.items()}


# Pages whose server changes what it answers.
CHANGING: dict[str, Answer] = {
    "silent": lambda n: (200, states.busy()) if n < 2 else (503, UNAVAILABLE),
    "back": lambda n: (503, UNAVAILABLE) if 1 <= n <= 4 else (200, states.busy(10 + n)),
    "no_status_at_first": lambda n: (200, b"{}" if n < 3 else states.busy()),
    "of_two": lambda n: (200, OTHER if n % 2 else states.busy()),
}


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dom]:
    """By the names of CHANGING, after ten seconds."""
    profile = tmp_path_factory.mktemp("changing") / "profile"
    return {name: Dom(html) for name, html in run_frames(CHANGING, profile, page_s=10.0).items()}


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Dom:
    """The page of a busy system, light and in the whole window, and what PROBE found."""
    folder = tmp_path_factory.mktemp("probed")
    return show(folder, always(states.busy()), page_s=4.0, probe=PROBE % 0)


def test_a_busy_system_is_readable(busy: Dom) -> None:
    dom = busy
    assert dom.is_hidden("banner")
    assert dom.is_hidden("notice")
    assert dom.text('id="pools"') == "pools on"
    assert dom.text('id="queue"') == "queue: short first"
    assert dom.text('id="threshold"') == "short: up to 256 tokens"
    assert dom.text('id="policy"') == "rebalance: pressure, every 5 s"
    short, long = dom.card("short"), dom.card("long")
    assert (short["waiting"], long["waiting"]) == ("20", "9")
    assert (short["p50"], short["p90"]) == ("23.1 ms", "50.4 ms")
    assert (long["p50"], long["p90"]) == ("682 ms", "1.49 s")
    assert (short["workers"], short["queued"]) == ("2 workers", "62.2 ms")
    assert dom.card("all")["running"] == "149"
    rows = dom.rows()
    assert [name.split(".")[0] for name in rows] == [
        *(f"prefill-{index}" for index in range(4)),
        "decode-0",
    ]
    row = rows["prefill-2.22997e1f"]
    assert row == ["prefill-2", "long", "1.73 s", "", "9", "2", "812 of 2,048", "1,180"]
    assert rows["prefill-3.22997e1f"][1] == "long, away"


def test_drafts_are_shown_by_worker_where_there_are_any(busy: Dom, still: dict[str, Dom]) -> None:
    assert busy.is_hidden("drafts")
    assert not still["guessing"].is_hidden("drafts")
    figures = ["on", "3.50", "91 · 70 · 50 · 39 %", "1,500 (38 %)", "1.62 x", "1.50 x"]
    found = still["guessing"].rows("drafter")
    assert found["unified-0.22997e1f"] == ["unified-0", *figures]
    stopped = still["stopped"].rows("drafter")
    assert stopped["unified-0.22997e1f"][1] == "off, as it lost time, stopped 1 time"


def test_two_batches_and_experts_are_shown_by_worker_where_there_are_any(
    still: dict[str, Dom],
) -> None:
    assert still["guessing"].is_hidden("overlaps")
    assert still["guessing"].is_hidden("balances")
    dom = still["splitting"]
    assert not dom.is_hidden("overlaps")
    found = dom.rows("splitter")
    assert found["unified-0.22997e1f"] == ["unified-0", "5,000", "1,200", "7", "30", "0"]
    assert not dom.is_hidden("balances")
    figures = ["2.25", "3.25 (layer 2)", "1.13", "1.25 (layer 1)", "1,204"]
    assert dom.rows("balancer")["unified-0.22997e1f"] == ["unified-0", *figures]


def test_moves_show_age_and_reason_and_a_name_is_never_markup(busy: Dom) -> None:
    moves = busy.text('id="moves"').split("  ")
    said = [part.strip() for part in moves if part.strip()]
    assert said[:3] == [
        "12 s ago",
        "prefill-1 → short",
        "seconds of queued work: short 0.913, long 0.021, ratio 2.0",
    ]
    assert said[-3:] == ["2 h 1 min ago", "prefill-2 → long", "<b>bold</b>"]


def test_the_curves_are_drawn_with_a_gap_where_nothing_came(busy: Dom) -> None:
    html = busy.html
    drawn = {
        name: re.findall(rf'<g class="{name}">(.*?)</g>', html, re.DOTALL)[0]
        for name in ("short", "long")
    }
    assert drawn["short"].count('class="p50"') == 1
    assert drawn["long"].count('class="p50"') == 2, "one line before and one after the gap"
    assert "NaN" not in html
    assert "Infinity" not in html


@pytest.mark.parametrize(
    ("name", "chip", "notice"),
    [
        ("off", "pools off", "Pools are off (laps.enable_laps_alloc)"),
        ("one_worker", "pools on, not split", "One worker computes all prompts"),
        ("too_few", "pools on, not split", "2 workers are too few to split"),
        ("nobody", "pools on, not split", "The allocator knows no worker"),
    ],
)
def test_without_pools_it_says_why(
    still: dict[str, Dom], name: str, chip: str, notice: str
) -> None:
    dom = still[name]
    assert dom.text('id="pools"') == chip
    assert not dom.is_hidden("notice")
    assert notice in dom.text('id="notice"')
    assert dom.text('id="no-moves"') == "Without pools nothing moves."


def test_nothing_yet_looks_empty_and_not_broken(still: dict[str, Dom]) -> None:
    dom = still["quiet"]
    assert "No first token in the last 5 minutes." in dom.html
    assert dom.text('id="no-moves"') == "No worker has changed pools."
    assert dom.card("short")["p50"] == NO_VALUE
    assert "NaN" not in dom.html


def test_of_very_many_workers_some_are_shown(still: dict[str, Dom]) -> None:
    dom = still["crowd"]
    assert len(dom.rows()) == 100
    assert dom.text('id="more-workers"') == "and 31 more"


def test_figures_follow_the_server(load: Callable[..., Dom]) -> None:
    num_asked = [0]

    def answer(index: int) -> tuple[int, bytes]:
        num_asked[0] = index + 1
        return 200, states.busy(num_short_waiting=100 + index)

    waiting = int(load(answer, page_s=6.0).card("short")["waiting"])
    assert num_asked[0] >= 4
    assert waiting - 3 - 100 in (num_asked[0] - 1, num_asked[0] - 2)  # the last may be under way


def test_a_silent_server_is_noticed_and_the_old_figures_stay(changing: dict[str, Dom]) -> None:
    dom = changing["silent"]
    assert not dom.is_hidden("banner")
    banner = dom.text('id="banner"')
    assert re.match(r"No answer for \d+ s, what is shown is old", banner), banner
    assert "status 503: actor allocator.1 is not running" in banner
    assert dom.card("short")["waiting"] == "20"
    assert re.search(r'<main[^>]*class="old"', dom.html)


def test_it_recovers_by_itself(changing: dict[str, Dom]) -> None:
    dom = changing["back"]
    assert dom.is_hidden("banner")
    assert int(dom.card("short")["waiting"]) > 10 + 4 + 3
    assert not re.search(r'<main[^>]*class="old"', dom.html)


def test_a_server_that_never_answered_is_said_so(still: dict[str, Dom]) -> None:
    dom = still["unavailable"]
    assert dom.text('id="banner"').startswith("No answer yet (status 503")
    assert dom.is_hidden("main")


def test_an_answer_that_is_no_status_is_said_so(still: dict[str, Dom]) -> None:
    assert "what came is no status" in still["no_status"].text('id="banner"')


def test_what_is_no_status_does_not_stop_it(changing: dict[str, Dom]) -> None:
    dom = changing["no_status_at_first"]
    assert dom.is_hidden("banner")
    assert dom.card("short")["waiting"] == "20"


def test_answers_of_two_ingresses_in_turn_keep_one_curve(changing: dict[str, Dom]) -> None:
    dom = changing["of_two"]
    assert dom.card("short")["num"] == "1,374"
    assert "ingress-01234567, one of several" in dom.text('id="footer"')


def test_light_and_dark(probed: Dom, load: Callable[..., Dom]) -> None:
    assert 'data-is-dark="false"' in probed.html
    dark = load(always(states.busy()), probe=PROBE % 0, dark=True, page_s=4.0)
    assert 'data-is-dark="true"' in dark.html


def test_nothing_sticks_out_of_a_window(probed: Dom) -> None:
    assert 'data-beyond=""' in probed.html, re.search(r'data-beyond="[^"]*"', probed.html)


def test_nothing_sticks_out_of_a_phone(tmp_path: Path) -> None:
    with serving(always(states.busy()), PROBE % NARROW_PX) as url:
        html = run_browser(url, tmp_path / "profile", "--dump-dom", size=(500, 1500), page_s=4.0)
    assert 'data-beyond=""' in html, re.search(r'data-beyond="[^"]*"', html)


def test_a_picture_can_be_taken(tmp_path: Path) -> None:
    picture, size = tmp_path / "page.png", (1200, 1300)
    with serving(always(states.busy())) as url:
        run_browser(url, tmp_path / "p", f"--screenshot={picture}", size=size)
    data = picture.read_bytes()
    width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    assert (width, height) == size
    assert len(data) > 20_000, "an empty page compresses to less"
