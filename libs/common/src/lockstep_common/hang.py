"""Finds the rank of a group that hangs, from the counters in shared memory.

The ranks meet in collectives, so the others wait for the rank with the least progress. On the CPU the host computes
itself, and its counter is the rank's progress. The host of a GPU only launches: it is steps ahead of its device, and
its counter does not show what the device does. So the device writes its progress itself (see the engine's
`device_marks`). The host's last launch then shows whether the host or the device stands still. The driver decides with
it, and so does `lockstep debug`, which has no engine.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Progress(NamedTuple):
    """How far a rank has come."""

    collectives: int
    """Collectives that its host has entered or launched."""
    launched: int = 0
    """The last mark that its host has launched; 0: its device writes none."""
    reached: int = 0
    """The last mark that its device has reached."""


class Hang(NamedTuple):
    """The rank that the others wait for, and what is known of it."""

    rank: int
    what: str
    """What stands still, as the end of a sentence; empty: not known."""


def find_hung(ranks: Sequence[Progress]) -> Hang:
    """The rank with the least progress; the first of them if there are several.

    Args:
        ranks: the progress of each rank. They must have begun with equal counters.
    """
    if not all(each.launched for each in ranks):
        return Hang(min(range(len(ranks)), key=lambda rank: ranks[rank].collectives), "")
    hung = min(range(len(ranks)), key=lambda rank: (ranks[rank].reached, ranks[rank].launched))
    own = ranks[hung]
    if own.reached >= own.launched:
        return Hang(hung, "its device has done all that was launched: its host stands still")
    if len(ranks) > 1 and all(each.reached == own.reached < each.launched for each in ranks):
        return Hang(hung, "the devices of all ranks stand at the same place: a collective between them does not end")
    return Hang(hung, "its device stands still")
