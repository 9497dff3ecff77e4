"""Attacks on a router's public ports. Each runs for a given time on connections of its own, and reads what it must.

`python -m lockstep_tools.hostile.attacks NAME HOST PORT SECONDS` runs one: in a process of its own, so that it does not
slow down those who measure. It fails if it could not connect, or not as often as the attack wants: then nothing was
attacked. The port is that of the attack's door.
"""

from lockstep_tools.hostile.attacks import grpc, websocket  # noqa: F401 -- these register their attacks
from lockstep_tools.hostile.attacks.http import request
from lockstep_tools.hostile.attacks.registry import LEAST_S, MODEL, Address, Door, door_of, longest_s, names, run

__all__ = ["LEAST_S", "MODEL", "Address", "Door", "door_of", "longest_s", "names", "request", "run"]
