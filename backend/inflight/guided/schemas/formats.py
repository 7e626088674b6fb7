"""The supported formats of JSON schemas, each as a Rust regular expression for the whole text.

Every text that an expression matches has the format. If an expression cannot describe a format completely,
it matches only some of the format's texts (for instance, a hostname has at most ten labels). All other
formats, such as password, path or cuid2, are ignored as annotations.
"""

from __future__ import annotations

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURS = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{_FOURS}|{_FOURS}00)-02-29)"
)
_TIME = (
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,6})?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_CLOCK = "T(?:[0-9]+S|[0-9]+M(?:[0-9]+S)?|[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?)"
_DAYS = "(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"

_LABEL = "[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,20}){0,2}"
_SHORT_LABEL = "[A-Za-z0-9]{1,10}(?:-[A-Za-z0-9]{1,10})?"
_HOST = f"(?:{_LABEL}(?:\\.{_LABEL}){{0,2}}|{_SHORT_LABEL}(?:\\.{_SHORT_LABEL}){{0,9}})"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
_EMAIL = f"{_ATOM}(?:\\.{_ATOM}){{0,2}}@{_HOST}"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"(?:{_BYTE}\\.){{3}}{_BYTE}"
_H = "[0-9A-Fa-f]{1,4}"
_LAST = f"(?:{_H}:{_H}|{_IPV4})"
_IPV6_FORMS = (
    f"(?:{_H}:){{6}}{_LAST}",
    f"::(?:{_H}:){{5}}{_LAST}",
    f"(?:{_H})?::(?:{_H}:){{4}}{_LAST}",
    *(f"(?:(?:{_H}:){{0,{n}}}{_H})?::(?:{_H}:){{{4 - n}}}{_LAST}" for n in range(1, 5)),
    f"(?:(?:{_H}:){{0,5}}{_H})?::{_H}",
    f"(?:(?:{_H}:){{0,6}}{_H})?::",
)
_IPV6 = f"(?:{'|'.join(_IPV6_FORMS)})"

_PERCENT = "%[0-9A-Fa-f]{2}"
_CHAR = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_PERCENT})"
_USER = f"(?:(?:[A-Za-z0-9._~!$&'()*+,;=:-]|{_PERCENT})*@)?"
_NAME = f"(?:[A-Za-z0-9._~!$&'()*+,;=-]|{_PERCENT})+"
_AUTHORITY = f"//{_USER}(?:\\[{_IPV6}\\]|{_NAME})(?::[0-9]{{1,4}})?(?:/{_CHAR}*)*"
_ABSOLUTE = f"/(?:{_CHAR}+(?:/{_CHAR}*)*)?"
_TAIL = f"(?:\\?(?:{_CHAR}|[/?])*)?(?:#(?:{_CHAR}|[/?])*)?"
_URI = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}|{_ABSOLUTE}|{_CHAR}+(?:/{_CHAR}*)*){_TAIL}"
_FIRST_SEGMENT = f"(?:[A-Za-z0-9._~!$&'()*+,;=@-]|{_PERCENT})+"
_RELATIVE = f"(?:{_AUTHORITY}|{_ABSOLUTE}|{_FIRST_SEGMENT}(?:/{_CHAR}*)*)?{_TAIL}"
_VARIABLE = "[A-Za-z0-9_]+(?:\\.[A-Za-z0-9_]+)*(?::[1-9][0-9]{0,3}|\\*)?"
_TEMPLATE = (
    f"(?:[A-Za-z0-9._~!$&()*+,;=:@/?#\\[\\]-]|{_PERCENT}|\\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\\}})*"
)
_POINTER = "(?:/(?:[^/~]|~[01])*)*"
_UUID = "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"

# Regular expressions that all dialects interpret equally: their groups have no nested groups.
_CLASS = "\\[\\^?(?:[A-Za-z0-9_ ]|a-z|A-Z|0-9|\\\\[dws])+\\]"
_ESCAPE = "\\\\[dDwWsS.\\\\/+*?()\\[\\]{}|^$-]"
_TIMES = "(?:[*+?]|\\{[0-9]{1,2}\\})?"
_PIECE = f"(?:[A-Za-z0-9 _,:;@#%&=!<>~'\"/.-]|{_ESCAPE}|{_CLASS}){_TIMES}"
_GROUP = f"\\((?:\\?:)?(?:{_PIECE}|\\|)*\\){_TIMES}"
_REGEX = f"\\^?(?:{_PIECE}|{_GROUP}|\\|)*\\$?"

FORMATS = {
    name: f"^(?:{expression})$"
    for name, expression in {
        "date": _DATE,
        "date-time": f"{_DATE}[Tt]{_TIME}",
        "time": _TIME,
        "duration": f"P(?:[0-9]+W|{_DAYS}(?:{_CLOCK})?|{_CLOCK})",
        "hostname": _HOST,
        "host-name": _HOST,
        "idn-hostname": _HOST,
        "email": _EMAIL,
        "idn-email": _EMAIL,
        "ipv4": _IPV4,
        "ip-address": _IPV4,
        "ipv6": _IPV6,
        "uri": _URI,
        "iri": _URI,
        "uri-reference": f"{_URI}|{_RELATIVE}",
        "iri-reference": f"{_URI}|{_RELATIVE}",
        "uri-template": _TEMPLATE,
        "json-pointer": _POINTER,
        "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
        "uuid": _UUID,
        "regex": _REGEX,
    }.items()
}
"""By format name: the names of drafts 3 to 2020-12."""
