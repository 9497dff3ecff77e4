"""Runs in a pod with Python: the TCP ports at which anything in the pod listens, on any address but loopback.

Takes no arguments. Prints a list. The kernel's tables have every socket of the pod's network, whichever container it
is of.
"""

import json
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

LISTENS = "0A"


def address_of(digits: str) -> IPv4Address | IPv6Address:
    """An address as the kernel writes it: words of four bytes, each with its lowest byte first."""
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    packed = b"".join(words)
    if len(packed) == 4:
        return IPv4Address(packed)
    address = IPv6Address(packed)
    return address.ipv4_mapped or address


ports = set()
for table in ("tcp", "tcp6"):
    path = Path("/proc/net") / table
    for line in path.read_text().splitlines()[1:] if path.exists() else ():
        fields = line.split()
        digits, port = fields[1].split(":")
        if fields[3] == LISTENS and not address_of(digits).is_loopback:
            ports.add(int(port, 16))
print(json.dumps(sorted(ports)))
