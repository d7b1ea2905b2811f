"""Regular expressions for the JSON schema string formats that outputs must match.

Each matches a subset of what its format allows, except that lengths of names are not limited, and
only characters that need no escape in a JSON string. Other formats have no effect, as the standard
defines for unknown ones.

    date, time, date-time, duration    RFC 3339; every existing day, no leap seconds
    email                              RFC 5321 without quotes and address literals
    hostname                           RFC 1123
    idn-email, idn-hostname            the same, in ASCII
    ipv4, ipv6, ipvanyaddress          RFC 2673, RFC 4291 without dotted quads, either
    uuid, uuid1 to uuid8               RFC 9562
    uri, iri                           RFC 3986: with a host, or of some schemes that have none
    regex                              what ECMAScript, Python and Rust all read
    base64, byte, base64url            RFC 4648, with padding
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

_N = "[0-9]{1,6}"  # what readers still count: a million years are more than a timedelta holds
_DAYS = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_HOURS = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"

# Lengths of names are not limited: a grammar that counts to 63 in many places is large.
_ATOM = "[A-Za-z0-9_+-]+"
_LABEL = "[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"

_EMAIL = rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}"

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
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
_UUID = f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"
_UUID_OF = (
    f"{_HEX}{{{{8}}}}-{_HEX}{{{{4}}}}-{{}}{_HEX}{{{{3}}}}-[89abAB]{_HEX}{{{{3}}}}-{_HEX}{{{{12}}}}"
)

# Readers take a host whose last label begins with a digit for an address.
_WEB_HOST = rf"(?:(?:{_LABEL}\.)*[A-Za-z][A-Za-z0-9]*(?:-[A-Za-z0-9]+)*|{_IPV4})"
_PCHAR = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%{_HEX}{{2}})"
_AUTHORITY = rf"[a-z][a-z0-9+.-]*://{_WEB_HOST}(?::[1-5]?[0-9]{{1,4}})?"
_BEHIND = rf"(?:/{_PCHAR}*)*(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_URI = rf"(?:(?:{_AUTHORITY}|file://){_BEHIND}|(?:mailto|urn|tel|data):{_PCHAR}+)"

_CLASS_ITEM = r"(?:[A-Za-z0-9_ ]|a-z|A-Z|0-9|\\[dwsDWS]|\\[\^\].\\/-])"
_REGEX_ATOM = (
    r"(?:[A-Za-z0-9_ @#%&=:;,<>!~-]|\\[dwsDWS]|\\[.^$*+?()\[\]{}|\\/]|\."
    rf"|\[\^?{_CLASS_ITEM}+\])"
)
_REPEATED = r"(?:[*+?]\??|\{[0-9]{1,2},?\}\??)?"
_REGEX_PART = rf"(?:{_REGEX_ATOM}{_REPEATED})"
_REGEX_GROUP = rf"\((?:\?:)?{_REGEX_PART}*(?:\|{_REGEX_PART}*)*\){_REPEATED}"
_REGEX_ROW = rf"\^?(?:{_REGEX_PART}|{_REGEX_GROUP})*\$?"
_REGEX = rf"{_REGEX_ROW}(?:\|{_REGEX_ROW})*"

FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|{_N}W)",
    "email": _EMAIL,
    "hostname": _HOST,
    "idn-email": _EMAIL,
    "idn-hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "ipvanyaddress": f"(?:{_IPV4}|{_IPV6})",
    "uuid": _UUID,
    **{f"uuid{number}": _UUID_OF.format(number) for number in range(1, 9)},
    "uri": _URI,
    "iri": _URI,
    "regex": _REGEX,
    "base64": "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
    "byte": "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
    "base64url": "(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?",
}
