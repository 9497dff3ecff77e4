"""The W3C trace context of a request.

It checks the form of the `traceparent` header. It never creates spans and exports nothing.
"""

import re

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?")
_VERSION_WITHOUT_EXTRAS = "00"
_INVALID_VERSION = "ff"
_MAX_CHARS = 128


def parse_traceparent(text: str) -> str:
    """Return the value if it is well formed, else an empty string.

    The form is that of W3C Trace Context level 1, section 3.2: version 00 has four parts, a later version may have
    more, and ids of zeros are invalid. The specification requires that a malformed value is ignored, so it is no error.
    """
    match = _TRACEPARENT.fullmatch(text) if len(text) <= _MAX_CHARS else None
    if match is None:
        return ""
    version, trace_id, parent_id, _, extras = match.groups()
    if version == _INVALID_VERSION or (version == _VERSION_WITHOUT_EXTRAS and extras is not None):
        return ""
    return text if trace_id.strip("0") and parent_id.strip("0") else ""
