"""The page at `/` as it is sent: nothing from elsewhere, and a policy that knows its scripts."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

from actors.ingress import pages
from actors.ingress.pages import LIBRARIES, chat_page

FOLDER = Path(pages.__file__).parent
BUNDLED = FOLDER / "bundled"
# SHA-256 of the files in the npm packages marked 18.2.1 and dompurify 3.4.18.
PUBLISHED = {
    "marked.umd.js": "bb95d4c15f1289f78486eaacebf3bb18688475ed58a040ef762ed49337090542",
    "purify.min.js": "8053ee2a6a09f9d50f7fcd6fb7f07072f52c7f3fa9aa12147cab4feaf65ee970",
}


class Elements(HTMLParser):
    """What a parser that nobody here wrote sees: every tag, and the text of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        last = self.tags[-1][0] if self.tags else ""
        if self.cdata_elem == last:
            self.texts[last].append(data)


def parsed() -> Elements:
    elements = Elements()
    elements.feed(chat_page().html.decode())
    elements.close()
    return elements


def policy() -> dict[str, list[str]]:
    value = chat_page().headers["Content-Security-Policy"]
    return {name: words for name, *words in (part.split() for part in value.split("; "))}


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_policy_allows_the_scripts_and_styles_of_the_page_by_digest_and_no_others() -> None:
    texts = parsed().texts
    assert len(texts["script"]) == 1 + len(LIBRARIES)
    assert policy()["script-src"] == [digest(text) for text in texts["script"]]
    assert policy()["style-src"] == [digest(text) for text in texts["style"]]
    assert policy()["default-src"] == ["'none'"]
    assert policy()["connect-src"] == ["'self'"]
    assert policy()["require-trusted-types-for"] == ["'script'"]
    assert policy()["trusted-types"] == ["dompurify"]  # the name that the sanitiser gives its own


def test_the_page_loads_nothing_and_names_no_other_server() -> None:
    elements = parsed()
    loading = {"src", "srcset", "data", "action", "poster", "ping", "background", "style"}
    for tag, attributes in elements.tags:
        assert not loading & attributes.keys(), f"{tag} {attributes}"
        assert tag != "link" or attributes["href"] == "data:,"
    own = (FOLDER / "chat.html").read_text()
    assert re.findall(r"https?://|url\(|@import|import\(|(?<!:)//[\w.-]+\.\w", own) == []


def test_the_libraries_are_as_published_and_cannot_end_their_script_element() -> None:
    assert set(LIBRARIES) == set(PUBLISHED)
    for name, expected in PUBLISHED.items():
        text = (BUNDLED / name).read_bytes()
        assert hashlib.sha256(text).hexdigest() == expected
        assert not re.search(rb"</?script", text, re.IGNORECASE)
        assert not set(b"\r\0") & set(text), "a browser would hash another text"
        licence = BUNDLED / f"{name.partition('.')[0]}.LICENSE"
        assert "License" in licence.read_text()
