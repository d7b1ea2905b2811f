"""Overload: refused before tokenising, with the time after which to come back."""

from typing import cast

import msgspec
import pytest

from actors.ingress.admission import Admission, estimate_tokens
from actors.ingress.queue_limit import QueueLimit
from actors.routing.worker_links import WorkerLink
from actors.rpc.handles import WorkerHandle
from engine.errors import CapacityError
from engine.messages import Role, TokenizeRequest
from tests.actors.ingress.edge_app import busy, edge_app


def test_prompts_are_estimated_by_their_characters() -> None:
    message: dict[str, object] = {"role": "user", "content": [{"type": "text", "text": "x" * 31}]}
    assert estimate_tokens([TokenizeRequest(text="x" * 9)]) == 3
    assert estimate_tokens([TokenizeRequest(messages=[message])]) == 10  # 39 characters
    assert estimate_tokens([[7, 8], [9], TokenizeRequest(text="")]) == 3


def test_what_is_being_tokenised_counts_until_it_is_placed() -> None:
    admission = Admission(list, QueueLimit(10))
    with admission.admitted(99) as leave:  # nothing is before it
        assert admission.num_tokens == 99
        with pytest.raises(CapacityError), admission.admitted(1):
            pass
    leave()
    with pytest.raises(RuntimeError), admission.admitted(7):
        raise RuntimeError
    assert admission.num_tokens == 0


def test_who_waits_for_a_first_token_counts_although_no_worker_has_said_so() -> None:
    links = [WorkerLink(name="prefill-0", role="prefill", load=busy(0))]  # it has not reported yet
    admission = Admission(lambda: links, QueueLimit(10))
    with admission.admitted(6) as leave:
        pass
    assert admission.num_tokens == 0
    with admission.admitted(4):
        pass  # both fit
    with pytest.raises(CapacityError), admission.admitted(1):
        pass
    leave()
    leave()  # a second time changes nothing
    with admission.admitted(6):
        pass


def test_a_request_that_may_grow_long_is_refused_when_every_cache_is_full_for_too_long() -> None:
    app = edge_app({"edge.max_predicted_wait_s": 5.0, "laps.laps_length_threshold": 40})
    app.workers.load = msgspec.structs.replace(busy(0), room_s=7.2)
    calls = app.encoder.num_calls
    for body in ({"prompt": [1] * 9, "max_tokens": 32}, {"prompt": [1] * 9}):
        refused = app.post(body)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "8"
        assert refused.json()["error"]["code"] == "overloaded"
    assert app.encoder.num_calls == calls
    assert app.post({"prompt": [1] * 8, "max_tokens": 32}).status_code == 200  # stays short
    app.workers.load = msgspec.structs.replace(busy(0), room_s=4.9)
    assert app.post({"prompt": [1] * 9, "max_tokens": 32}).status_code == 200


def test_the_worker_with_the_shortest_wait_counts_and_those_that_prefill_do_not() -> None:
    def link(name: str, role: Role, room_s: float) -> WorkerLink:
        load = msgspec.structs.replace(busy(0), room_s=room_s)
        return WorkerLink(name=name, role=role, load=load, handle=cast("WorkerHandle", object()))

    links = [link("p", "prefill", 0.0), link("d-0", "decode", 9.0), link("d-1", "decode", 6.0)]
    admission = Admission(lambda: links, QueueLimit(10), max_wait_s=5.0)
    with pytest.raises(CapacityError, match="full for 6 s"), admission.admitted(1):
        pass
    links.append(link("u", "unified", 4.0))
    with admission.admitted(1):
        pass
    with Admission(lambda: links[:3], QueueLimit(10)).admitted(1):
        pass  # no limit


@pytest.mark.parametrize("stream", [False, True])
def test_an_answered_request_waits_no_longer(stream: bool) -> None:
    app = edge_app({"edge.max_queued_tokens": 100})
    for _ in range(3):  # each but the first would be refused behind another that waits
        body = {"prompt": [1] * 90, "max_tokens": 2, "stream": stream}
        assert app.post(body).status_code == 200
    assert app.post({"prompt": [1] * 600, "max_tokens": 2}).status_code == 400
    assert app.post({"prompt": [1] * 90, "max_tokens": 1}).status_code == 200


def test_workers_that_decode_or_are_away_have_no_queue() -> None:
    links = [
        WorkerLink(name="decode-0", role="decode", load=busy(90)),
        WorkerLink(name="prefill-0", role="prefill", load=busy(90)),  # not connected
    ]
    with Admission(lambda: links, QueueLimit(10)).admitted(50):
        pass


@pytest.mark.parametrize(("queued_s", "retry_after"), [(None, "1"), (7.2, "8"), (500.0, "30")])
def test_a_full_system_refuses_before_it_tokenises(
    queued_s: float | None, retry_after: str
) -> None:
    app = edge_app({"edge.max_queued_tokens": 100})
    app.workers.load = busy(95, queued_s)
    refused = app.post({"prompt": "twenty-one characters"})
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == retry_after
    assert refused.json()["error"]["code"] == "overloaded"
    assert app.encoder.num_calls == 0
    assert app.post({"prompt": "x" * 20, "max_tokens": 1}).status_code == 200
    app.workers.load = busy(0)
    assert app.post({"prompt": [1] * 300, "max_tokens": 1}).status_code == 200
    assert app.edge.admission.num_tokens == 0
