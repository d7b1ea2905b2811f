"""The header in which a client says when it wants its first token."""

import pytest

from actors.openai.request_rules import read_ttft_deadline_s
from engine.errors import RequestError


@pytest.mark.parametrize(
    ("value", "seconds"), [(None, None), ("250", 0.25), ("0.5", 0.0005), (" 90 ", 0.09)]
)
def test_milliseconds_become_seconds(value: str | None, seconds: float | None) -> None:
    assert read_ttft_deadline_s(value) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("soon", "invalid_value"),
        ("", "invalid_value"),
        ("nan", "invalid_value"),
        ("1" * 5000 + "x", "invalid_value"),
        ("0", "decimal_below_min_value"),
        ("-3", "decimal_below_min_value"),
        ("inf", "decimal_above_max_value"),
        ("1e12", "decimal_above_max_value"),
    ],
)
def test_anything_else_is_refused_by_name(value: str, code: str) -> None:
    with pytest.raises(RequestError, match="x-ttft-deadline-ms") as refused:
        read_ttft_deadline_s(value)
    assert (refused.value.param, refused.value.code) == ("x-ttft-deadline-ms", code)
    assert len(refused.value.message) < 200
