"""Which tests a time limit ends with their process."""

import pytest


def _method(request: pytest.FixtureRequest, *markers: pytest.MarkDecorator) -> object:
    """The seconds, and how a test with these markers is ended; None = as the configuration says."""
    item = pytest.Function.from_parent(request.node.parent, name="of_a_gpu", callobj=_method)
    for marker in markers:
        item.add_marker(marker)
    config, session = request.config, request.session
    config.hook.pytest_collection_modifyitems(config=config, session=session, items=[item])
    found = item.get_closest_marker("timeout")
    return None if found is None else (found.args, found.kwargs.get("method"))


def test_a_test_that_waits_for_a_gpu_for_ever_ends_with_its_process(
    request: pytest.FixtureRequest,
) -> None:
    assert _method(request) is None
    assert _method(request, pytest.mark.gpu) == ((), "thread")
    assert _method(request, pytest.mark.multi_gpu) == ((), "thread")
    assert _method(request, pytest.mark.multi_gpu, pytest.mark.timeout(900)) == ((900,), "thread")
