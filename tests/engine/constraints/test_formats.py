"""String formats as regular expressions: what each allows, judged by others that read them."""

import ipaddress
import random
import re
import uuid
from collections.abc import Callable
from datetime import date, datetime, timedelta

import pytest

from engine.constraints.formats import FORMATS
from engine.constraints.json_schema import restrict


def allows(name: str, text: str) -> bool:
    return re.fullmatch(FORMATS[name], text) is not None


def is_read_by(read: Callable[[str], object], text: str) -> bool:
    try:
        read(text)
    except ValueError:
        return False
    return True


def test_every_day_that_exists_is_a_date_and_no_other() -> None:
    start = date(random.randrange(1, 9900), 1, 1)
    for number in range(3000):
        assert allows("date", (start + timedelta(days=number)).isoformat())
    for _ in range(5000):
        year, month, day = random.randrange(10_000), random.randrange(14), random.randrange(33)
        text = f"{year:04}-{month:02}-{day:02}"
        assert allows("date", text) == is_read_by(date.fromisoformat, text), text


def test_addresses_are_those_that_python_reads() -> None:
    for _ in range(3000):
        octets = ".".join(str(random.choice((0, 7, 10, 99, 255, 256, 300))) for _ in range(4))
        assert allows("ipv4", octets) == is_read_by(ipaddress.IPv4Address, octets), octets
        groups = random.choices(["", "", "0", "1f", "ABCD", "12345"], k=random.randrange(2, 10))
        text = ":".join(groups)
        if allows("ipv6", text):
            ipaddress.IPv6Address(text)
        number = ipaddress.IPv6Address(random.choice((random.getrandbits(128), 1 << 64, 0, 1)))
        assert allows("ipv6", number.compressed)
        assert allows("ipv6", number.exploded)


def test_a_uuid_is_a_uuid_of_its_version() -> None:
    for made in (uuid.uuid1(), uuid.uuid4(), uuid.uuid5(uuid.NAMESPACE_URL, "a")):
        assert allows("uuid", str(made))
        assert [number for number in range(1, 9) if allows(f"uuid{number}", str(made))] == [
            made.version
        ]
    assert not allows("uuid", uuid.uuid4().hex)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("time", ["23:59:59Z", "00:00:00.125+05:30"], ["24:00:00Z", "12:00:00", "12:00Z"]),
        ("date-time", ["2024-02-29T12:00:00Z"], ["2023-02-29T12:00:00Z", "2024-02-29 12:00:00Z"]),
        ("duration", ["P1Y2M3D", "PT36H", "P3W", "P1DT1M5S"], ["P", "PT", "P1Y1D", "1D", "P1W1D"]),
        ("email", ["a.b+c@host-1.example"], ["a@", "@b.c", ".a@b.c", "a..b@c.d", "a b@c.d"]),
        ("hostname", ["a", "a-b.c9"], ["-a", "a-", "a..b", "a_b", ""]),
        (
            "uri",
            ["https://a.b:80/c%20?d=e#f", "file:///a", "urn:a:b", "s3://b/k", "http://1.2.3.4"],
            ["a.b/c", "http://", "http://a b", "http://1.2.3.999", "https://a:99999/", "//a"],
        ),
        ("regex", ["^a+|[^b]?$", "(a|b){2,}\\d", "[a-z0-9_]*?"], ["(", "a**", "[", "a{", ")"]),
        ("base64", ["", "QUI=", "QQ==", "QUJD"], ["Q", "QQ=", "Q-==", "QQ== "]),
    ],
)
def test_what_a_format_means_is_kept(name: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not allows(name, text)] == []
    assert [text for text in bad if allows(name, text)] == []


def test_moments_are_read_back_as_moments() -> None:
    for _ in range(200):
        moment = datetime(2000, 1, 1) + timedelta(seconds=random.randrange(10**9))
        text = f"{moment.isoformat()}Z"
        assert allows("date-time", text)


def test_a_string_of_a_known_format_is_held_to_it_whether_it_says_its_type_or_not() -> None:
    held = {"type": "string", "pattern": f"^{FORMATS['date']}$"}
    assert restrict({"type": "string", "format": "date"}, "schema") == held
    assert restrict({"format": "date"}, "schema") == held
    either = restrict({"type": ["string", "null"], "format": "date"}, "schema")
    assert either == {"anyOf": [held, {"type": "null"}]}
    assert restrict({"type": "string", "format": "ours"}, "schema") == {"type": "string"}
    assert restrict({"type": "number", "format": "date"}, "schema") == {"type": "number"}


def test_a_format_may_stand_beside_a_length_and_a_pattern() -> None:
    schema = {"type": "string", "format": "email", "maxLength": 9, "pattern": "a.*"}
    restricted = restrict(schema, "schema")
    assert restricted["maxLength"] == 9
    assert restricted["pattern"] == f"^{FORMATS['email']}$"
    assert restricted["allOf"] == [{"pattern": "^(?:a[^\\n\\r\\x{2028}\\x{2029}]*)$"}]
