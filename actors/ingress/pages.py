"""The two pages for people: `/`, a chat with the served model, and `/laps`, the scheduler at work.

The chat page is served as one file that loads nothing: chat.html with the two libraries of
`bundled/` in it, which are as their authors published them. marked makes HTML of the markdown that
the model writes, DOMPurify an allowed tree of that. Should both fail, the policy below lets no
script or style run but the page's own, known by their digests, and no string become HTML but
DOMPurify's.

`/laps` shows what `/laps_status` says as JSON: what the allocator knows (pools, queues, moves),
what workers report to this ingress (running requests, free blocks) and the times to the first token
that this ingress measured. Knows no HTTP.
"""

import base64
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from actors.observability.recent_ttft import ClassTtft
from actors.routing.worker_links import WorkerLink
from configs.schema import LapsConfig
from engine.length_class import LengthClass
from engine.messages import ExpertTotals, LapsStatus, OverlapLoad, Role, SpeculationLoad

LIBRARIES = ("marked.umd.js", "purify.min.js")
LIBRARIES_GO_HERE = b"<!-- libraries -->\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPage:
    """The page `/` as it is served."""

    html: bytes
    headers: Mapping[str, str]


@cache
def chat_page() -> ChatPage:
    """The page `/`, read once."""
    folder = Path(__file__).parent
    libraries = [(folder / "bundled" / name).read_bytes() for name in LIBRARIES]
    own = (folder / "chat.html").read_bytes()
    assert own.count(LIBRARIES_GO_HERE) == 1, "one place for the libraries"
    scripts = b"".join(b"<script>" + text + b"</script>\n" for text in libraries)
    html = own.replace(LIBRARIES_GO_HERE, scripts)
    return ChatPage(html=html, headers=_headers(html))


def _headers(html: bytes) -> dict[str, str]:
    policy = {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "script-src": _sources_of(html, b"script", 1 + len(LIBRARIES)),
        "style-src": _sources_of(html, b"style", 1),
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "dompurify",
    }
    return {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _sources_of(html: bytes, tag: bytes, num: int) -> str:
    """Returns the digests by which the policy allows the page's elements of that kind."""
    opening, closing = b"<" + tag + b">", b"</" + tag + b">"
    assert html.count(opening) == html.count(closing) == num, f"{num} of {tag!r} in the page"
    texts = [piece.partition(closing)[0] for piece in html.split(opening)[1:]]
    digests = [base64.b64encode(hashlib.sha256(text).digest()).decode() for text in texts]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


# The page may load nothing and ask nobody but the server it came from.
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
}


class ExpertBalance(msgspec.Struct, frozen=True, kw_only=True):
    """How evenly a worker's tokens fall on its experts, by layer with experts; `/metrics` has each.

    Imbalances are of late, as in `ExpertTotals`: 1 = all have equally many, 0 = there were none.
    """

    layers: tuple[int, ...]  # indices among all layers
    experts: tuple[float, ...]  # tokens of the fullest expert over the mean
    ranks: tuple[float, ...]  # likewise of the ranks; () = each has a part of every expert
    num_idle: tuple[int, ...]  # experts that no token had since the worker started


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's last report; zeros while it is not connected."""

    worker: str
    role: Role
    is_up: bool
    num_waiting: int = 0
    num_running: int = 0
    num_free_blocks: int = 0  # free or evictable
    num_blocks: int = 0
    speculation: SpeculationLoad | None = None  # None = it has no drafter
    two_batches: OverlapLoad | None = None  # None = it splits no step
    experts: ExpertBalance | None = None  # None = it counts no tokens of experts, or has not yet


class LapsView(msgspec.Struct, frozen=True, kw_only=True):
    """The part of `/laps_status` that is not the allocator's LapsStatus."""

    model: str
    ingress: str  # the ingress that these reports and first-token times come from
    queue: str  # the order inside a worker that prefills: laps, fcfs or priority
    length_threshold: int  # tokens; inside a worker, as `threshold` is for the choice of a pool
    rebalance_interval_s: float
    ttft: dict[LengthClass, ClassTtft]
    reports: list[WorkerReport]  # by name


def build_laps_view(
    *,
    model: str,
    ingress: str,
    laps: LapsConfig,
    ttft: Mapping[LengthClass, ClassTtft],
    links: Iterable[WorkerLink],
) -> LapsView:
    """Returns this ingress's share of the page, as of now."""
    return LapsView(
        model=model,
        ingress=ingress,
        queue=laps.queue,
        length_threshold=laps.laps_length_threshold,
        rebalance_interval_s=laps.laps_rebalance_interval_s,
        ttft=dict(ttft),
        reports=[_report(link) for link in sorted(links, key=lambda link: link.name)],
    )


def laps_json(status: LapsStatus, view: LapsView) -> bytes:
    """Encodes status and view as one JSON object."""
    return msgspec.json.encode(msgspec.structs.asdict(status) | msgspec.structs.asdict(view))


@cache
def laps_page() -> bytes:
    """The page `/laps`: one HTML file, read once."""
    return Path(__file__).with_name("laps.html").read_bytes()


def _report(link: WorkerLink) -> WorkerReport:
    load = link.load
    if load is None or not link.is_up:
        return WorkerReport(worker=link.name, role=link.role, is_up=False)
    return WorkerReport(
        worker=link.name,
        role=link.role,
        is_up=True,
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        num_free_blocks=load.num_free_blocks,
        num_blocks=load.num_blocks,
        speculation=load.speculation,
        two_batches=load.two_batches,
        experts=None if link.experts is None else _balance(link.experts),
    )


def _balance(totals: ExpertTotals) -> ExpertBalance:
    return ExpertBalance(
        layers=totals.layers,
        experts=totals.expert_imbalance,
        ranks=totals.rank_imbalance,
        num_idle=tuple(counts.count(0) for counts in totals.counts),
    )
