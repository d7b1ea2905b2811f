"""The string of faults on demand: what it means, and that nothing else is taken."""

import random

import pytest

from configs.errors import ConfigFileError
from configs.faults import Fault, FaultKind, parse_faults
from configs.load import load_config


def test_no_faults_are_the_default() -> None:
    assert parse_faults(load_config(None, {}).faults) == ()


def test_every_part_is_one_fault() -> None:
    number = random.randrange(1, 999)
    text = f"decode:step={number}:nan; prefill:piece=3:corrupt;prefill:piece=5:delay=0.25;"
    assert parse_faults(text) == (
        Fault(role="decode", place="step", number=number, kind=FaultKind.NAN),
        Fault(role="prefill", place="piece", number=3, kind=FaultKind.CORRUPT),
        Fault(role="prefill", place="piece", number=5, kind=FaultKind.DELAY, delay_s=0.25),
    )


def test_a_fault_may_be_meant_for_one_worker_alone() -> None:
    number = random.randrange(12)
    [one] = parse_faults(f"decode-{number}:step=9:hang")
    [every] = parse_faults("decode:step=9:hang")
    assert one.befalls("decode", f"decode-{number}.0a1b2c")
    assert not one.befalls("decode", f"decode-{number}.0a1b2c", 1)
    assert not one.befalls("decode", f"decode-{number + 1}.0a1b2c")
    assert not one.befalls("decode", f"decode-{number}0.0a1b2c")
    assert every.befalls("decode", f"decode-{number}.0a1b2c")
    assert not every.befalls("prefill", f"prefill-{number}.0a1b2c")


@pytest.mark.parametrize(
    "text",
    [
        "die",
        "decode-:step=1:die",
        "decode:step=0:die",
        "decode:step=1:drop",
        "decode:piece=1:drop",
        "prefill:piece=1:delay",
        "prefill:piece=1:die",
        "ingress:step=1:die",
        "decode:step=1:die,decode:step=2:die",
    ],
)
def test_what_cannot_be_read_is_named_with_what_can(text: str) -> None:
    with pytest.raises(ConfigFileError, match=r"is no fault; write ROLE:step=N"):
        parse_faults(text)
    with pytest.raises(ConfigFileError, match="faults: "):
        load_config(None, {"faults": text, "debug": True})


def test_faults_are_refused_unless_they_are_for_debugging() -> None:
    with pytest.raises(ConfigFileError, match="needs debug true"):
        load_config(None, {"faults": "decode:step=9:die"})
    assert load_config(None, {"faults": "decode:step=9:die", "debug": True}).debug


def test_a_fault_may_be_meant_for_one_rank_of_a_worker() -> None:
    number, rank = random.randrange(12), random.randrange(1, 8)
    [fault] = parse_faults(f"unified-{number}.rank-{rank}:step=9:raise")
    name = f"unified-{number}.0a1b2c"
    assert [fault.befalls("unified", name, other) for other in (0, rank, rank + 1)] == [
        False,
        True,
        False,
    ]
