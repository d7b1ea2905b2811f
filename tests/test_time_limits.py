"""Which tests a time limit ends with their process, and what a run that is cut short says."""

from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")


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


def test_a_run_that_is_cut_short_says_where_its_test_stood(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    def wait_for_a_compiler() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as cut:
        wait_for_a_compiler()
    request.config.pluginmanager.get_plugin(str(CONFTEST)).pytest_keyboard_interrupt(cut)
    assert "in wait_for_a_compiler" in capsys.readouterr().out


def test_what_compiles_for_minutes_on_a_gpu_comes_last(request: pytest.FixtureRequest) -> None:
    items = [
        pytest.Function.from_parent(request.node.parent, name=name, callobj=_method)
        for name in ("one[flashinfer-16]", "other[flashinfer-16]", "another[triton-16]")
    ]
    for item in items[1:]:
        item.add_marker(pytest.mark.gpu)
    config, session = request.config, request.session
    config.hook.pytest_collection_modifyitems(config=config, session=session, items=items)
    assert [item.name.partition("[")[0] for item in items] == ["one", "another", "other"]
