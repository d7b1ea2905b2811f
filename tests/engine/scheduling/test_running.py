"""Running requests are in the order of their admission, and nobody who left is planned."""

from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.scheduling.finish import FinishRules
from engine.scheduling.running import RunningRequests


def _request(name: str, num_tokens: int = 5) -> Request:
    return Request(
        spec=RequestSpec(params=SamplingParams(max_tokens=4)),
        key=RequestKey(name),
        ingress_id="ingress",
        tokens=[1] * num_tokens,
        num_prompt_tokens=num_tokens,
        arrival_s=0.0,
    )


def _names(requests: dict[RequestKey, Request]) -> list[str]:
    return [key.request_id for key in requests]


def test_each_place_has_its_own_order() -> None:
    running = RunningRequests()
    a, b, c, d = requests = [_request(name) for name in "abcd"]
    for request in requests:
        running.add(request)
    for request in (c, a, d):
        running.begin_decode(request)
    running.pause([a])
    assert (_names(running.prompts), _names(running.decodes)) == (["b"], ["c", "d"])
    assert (list(running), len(running), running.newest) == ([a, b, c, d], 4, d)
    running.remove(d)
    running.remove(a)
    running.remove(b)
    assert (_names(running.prompts), _names(running.decodes)) == ([], ["c"])
    assert (list(running), running.newest, running.get(a.key)) == ([c], c, None)
    assert c.key in running
    assert a.key not in running


def test_who_comes_back_is_the_newest_and_begins_with_its_prompt() -> None:
    running = RunningRequests()
    a, b = _request("a"), _request("b")
    for request in (a, b):
        running.add(request)
        running.begin_decode(request)
    running.remove(a)
    running.add(a)
    assert (list(running), running.newest) == ([b, a], a)
    assert (_names(running.prompts), _names(running.decodes)) == (["a"], ["b"])


def test_queued_are_the_rest_of_prompts_and_a_token_of_every_decode() -> None:
    running = RunningRequests()
    prompt, decode, paused = _request("a", 7), _request("b"), _request("c")
    for request in (prompt, decode, paused):
        running.add(request)
    prompt.num_computed_tokens = 3
    for request in (decode, paused):
        request.num_computed_tokens = 5
        running.begin_decode(request)
    running.pause([paused])
    assert running.num_queued_tokens == 4 + 1


def test_the_last_token_is_known_by_its_length_and_by_who_waits_for_it_elsewhere() -> None:
    rules = FinishRules((0,), 100)
    requests = []
    for num_computed_tokens in (7, 8, 9):  # of 5 + 4 tokens that it may get
        requests.append(_request(str(num_computed_tokens)))
        requests[-1].num_computed_tokens = num_computed_tokens
    moves = _request("moves")
    moves.num_computed_tokens = 5
    moves.decode_worker = "decode-0"
    assert rules.at_last_token([*requests, moves]) == [*requests[1:], moves]
    assert [rules.last_count(request) for request in (*requests, moves)] == [8, 8, 8, 0]
