"""Sizes in bytes, written as Kubernetes writes quantities.

These are not all of its forms: none has an exponent, a `k`, an `m`, or a unit above Ti.
"""

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

_UNITS = {"": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("", 1000), ("i", 1024))
}


QUANTITY = r"^[ \t\r\n]*([0-9]+(?:\.[0-9]+)?)([KMGT]i?|)B?[ \t\r\n]*$"
"""What `parse_bytes` accepts as text. The chart's schema has it too, where it is a regular expression of Go."""


def parse_bytes(value: object) -> object:
    """The size in bytes of a quantity in Kubernetes' form: `512Mi`, `2Gi`, `1.5G` or a plain number.

    Values other than text are left to pydantic.
    """
    if not isinstance(value, str):
        return value
    match = re.match(QUANTITY, value)
    if match is None:
        raise ValueError("must be a number of bytes such as 536870912, 512Mi or 2Gi")
    return int(float(match[1]) * _UNITS[match[2]])


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
BytesOrNone = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
