"""Which prompts a draft model reads beside the target, on a worker that hands them over."""

from engine.request import Request, RequestKey, RequestSpec, SamplingParams
from engine.scheduling.drafter_prompts import DrafterPrompts
from engine.speculation.drafter import FixedDrafts

BLOCK_SIZE = 4
MAX_MODEL_LEN = 40


def _request(num_tokens: int, block_ids: list[int], num_cached: int = 0, **spec: int) -> Request:
    request = Request(
        key=RequestKey("0" * 32),
        ingress_id="test",
        spec=RequestSpec(params=SamplingParams(max_tokens=9, temperature=0.5), **spec),
        tokens=[1] * num_tokens,
        num_prompt_tokens=num_tokens,
        arrival_s=0.0,
        decode_worker="decode",
    )
    request.block_ids, request.num_computed_tokens = block_ids, num_cached
    return request


def _prompts() -> DrafterPrompts:
    return DrafterPrompts(
        FixedDrafts(3, max_temperature=0.7),
        num_blocks=32,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
    )


def _compute(prompts: DrafterPrompts, request: Request, *chunks: int) -> list[bool]:
    """Whether the draft model computes each chunk, too."""
    found = []
    for num_tokens in chunks:
        found.append(prompts.plan([(request, num_tokens)]) == [0])
        request.num_computed_tokens += num_tokens
    return found


def test_all_chunks_are_computed_and_full_blocks_found_by_the_next_request() -> None:
    prompts = _prompts()
    first = _request(15, [5, 6, 7, 8])
    assert _compute(prompts, first, 3, 5, 7) == [True] * 3
    assert first.num_drafter_tokens == 15
    second = _request(20, [5, 6, 7, 9, 10], num_cached=12)
    assert _compute(prompts, second, 8) == [True]
    assert second.num_drafter_tokens == 20


def test_behind_a_gap_nothing_is_computed() -> None:
    """A cached block in which another content was meanwhile has nothing of the draft model."""
    prompts = _prompts()
    _compute(prompts, _request(16, [5, 6, 7, 8]), 16)
    prompts.forget_blocks([7])
    later = _request(21, [5, 6, 7, 8, 9, 10], num_cached=16)
    assert _compute(prompts, later, 2, 3) == [False, False]
    assert later.num_drafter_tokens == 8
    again = _request(23, [5, 6, 7, 8, 9, 11], num_cached=20)
    assert _compute(prompts, again, 3) == [False]
    assert again.num_drafter_tokens == 8


def test_a_preempted_prompt_is_computed_again() -> None:
    prompts = _prompts()
    request = _request(12, [5, 6, 7])
    assert _compute(prompts, request, 8) == [True]
    request.start_over()
    prompts.forget_blocks([6, 7])
    request.block_ids, request.num_computed_tokens = [5, 6, 7], 4  # the first was found
    assert _compute(prompts, request, 8) == [True]
    assert request.num_drafter_tokens == 12 < request.max_drafter_tokens


def test_blocks_sent_before_a_preemption_are_not_said_to_have_more_than_they_had() -> None:
    prompts = _prompts()
    _compute(prompts, _request(8, [5, 6]), 8)
    prompts.forget_blocks([6])
    request = _request(15, [5, 6, 7, 8], num_cached=8)
    assert _compute(prompts, request, 4) == [False]  # and its three full blocks are sent
    request.start_over()
    request.block_ids = [9, 10, 11, 12]
    assert _compute(prompts, request, 15) == [True]
    assert (request.num_drafter_tokens, request.max_drafter_tokens) == (15, 4)


def test_requests_without_drafts_are_left_out_and_so_are_their_blocks() -> None:
    prompts = _prompts()
    stays = _request(8, [5, 6])
    stays.decode_worker = None
    for request in (
        stays,
        _request(8, [5, 6], max_drafts=0),
        _request(MAX_MODEL_LEN - 1, list(range(10))),
    ):
        assert _compute(prompts, request, 8) == [False]
        assert request.num_drafter_tokens == 0
    assert _compute(prompts, _request(12, [5, 6, 9], num_cached=8), 4) == [False]
    longest = _request(MAX_MODEL_LEN - 2, list(range(10)))
    assert _compute(prompts, longest, 8) == [True]
