"""Who computes what next, asked of every running request: the definition of `RunningRequests`."""

from engine.request import Request
from engine.scheduling.scheduler import Scheduler


def check_running(scheduler: Scheduler) -> None:
    """Every request is where its own numbers put it, and nobody else is anywhere."""
    running, block_size, rules = scheduler._running, scheduler._block_size, scheduler._finish_rules
    keys = [request.key for request in running]
    planned = set(running.prompts) | set(running.decodes)
    assert planned <= set(keys), f"one that has left is planned on: {planned - set(keys)}"
    both = set(running.prompts) & set(running.decodes)
    assert not both, f"{both} are prompts and decodes"
    in_order = [key for key in keys if key in running.prompts]
    assert list(running.prompts) == in_order, f"prompts out of order: {list(running.prompts)}"
    held = {request.key for step in scheduler._in_flight._steps for request in step.held}
    for request in running:
        place = (request.key in running.prompts, request.key in running.decodes)
        assert place in _places(request, is_held=request.key in held), (
            f"{request.key} is in (prompts, decodes): {place}"
        )
    decodes, columns = list(running.decodes.values()), running.decode_columns
    assert columns.requests == decodes, f"columns of {columns.requests}, decodes {decodes}"
    assert columns.rows == [request.row for request in decodes]
    assert columns.num_computed_tokens == [request.num_computed_tokens for request in decodes]
    assert columns.constrained == [r for r in decodes if r.params.constraint is not None]
    at_block_boundary = [r for r in decodes if r.num_computed_tokens % block_size == 0]
    assert columns.at_block_boundary(block_size) == at_block_boundary
    assert columns.at_last_token(rules) == rules.at_last_token(decodes)


def _places(request: Request, *, is_held: bool) -> list[tuple[bool, bool]]:
    """Whether it may be (in the prompts, in the decodes)."""
    num_without_kv = request.num_known_tokens - request.num_computed_tokens
    if num_without_kv > 1:
        return [(True, False)]
    if num_without_kv == 1:  # the last of a prompt, or the token that came back from the last step
        return [(True, False), (False, True)]
    if num_without_kv < 0:  # planned ahead: perhaps its last token is in flight, who knows
        return [(False, not is_held)]
    # Its newest token is in flight: is there another one to compute here?
    has_next = request.num_computed_tokens + 1 < request.max_known_tokens
    return [(False, has_next and request.decode_worker is None and not is_held)]
