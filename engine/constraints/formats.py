"""Regular expressions for the JSON schema string formats that outputs must match.

Each matches a subset of what its format allows, except that lengths of names are not limited, and
only characters that need no escape in a JSON string. Other formats have no effect, as the standard
defines for unknown ones.

    date, time, date-time, duration    RFC 3339; every existing day, no leap seconds
    email                              RFC 5321 without quotes and address literals
    hostname                           RFC 1123
    ipv4, ipv6, uuid                   RFC 2673, RFC 4291 without dotted quads, RFC 4122
"""

from collections.abc import Mapping

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_BY_FOUR = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"
    "|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
    f"|{_LEAP_YEAR}-02-29)"
)
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR_MINUTE})"

_N = "[0-9]+"
_DAYS = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_HOURS = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"

# Lengths of names are not limited: a grammar that counts to 63 in many places is large.
_ATOM = "[A-Za-z0-9_+-]+"
_LABEL = "[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = "[0-9a-fA-F]{1,4}"
_IPV6 = (
    f"(?:(?:{_GROUP}:){{7}}{_GROUP}"
    f"|(?:{_GROUP}:){{1,7}}:"
    + "".join(
        f"|(?:{_GROUP}:){{1,{7 - num_last}}}(?::{_GROUP}){{1,{num_last}}}"
        for num_last in range(1, 7)
    )
    + f"|:(?:(?::{_GROUP}){{1,7}}|:))"
)
_HEX = "[0-9a-fA-F]"

FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|{_N}W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "ipv6": _IPV6,
    "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
}
