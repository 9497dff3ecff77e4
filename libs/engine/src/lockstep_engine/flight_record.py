"""The flight record of torch.distributed: a rank's newest collectives, and which of them have not ended.

Torch keeps it in the rank's memory. A thread of the rank writes it to a file, as JSON, when the driver sends a signal:
in a hang the main thread waits in a collective and would not take an order. It is never written as a pickle.
"""

import os
import signal
import threading
from collections.abc import Callable

MAX_RECORD_BYTES = 512 << 10
"""Of a rank, so that the records of all ranks fit into one part of a bundle."""
SIGNAL = signal.SIGUSR2
_TORCHS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Names of torch's function. A build with NCCL keeps the record of NCCL apart from that of other backends."""

Dump = Callable[[bool, bool], bytes]
"""As torch's: whether to include collectives, and whether those only that have not ended; JSON."""


def torch_record(include_collectives: bool, only_active: bool) -> bytes:
    """The record of this process; see `Dump`."""
    from torch._C import _distributed_c10d as c10d  # noqa: PLC0415 - slow, and the rank has imported it

    dump: Dump = next(getattr(c10d, name) for name in _TORCHS if hasattr(c10d, name))
    return dump(include_collectives, only_active)


def write_on_signal(file: int, dump: Dump = torch_record) -> None:
    """Begin to write the record whenever the signal comes. The process has no other thread yet: it blocks the signal
    for all that follow.

    Args:
        file: descriptor of the file. It is emptied by whoever sends the signal.
        dump: makes the record.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
    threading.Thread(target=_serve, args=(file, dump), name="flight record", daemon=True).start()


def _serve(file: int, dump: Dump) -> None:
    while True:
        signal.sigwait({SIGNAL})
        os.write(file, bounded_record(dump))


def bounded_record(dump: Dump) -> bytes:
    """The largest part of the record that is small enough: all, what has not ended, or the state of the groups."""
    for arguments in ((True, False), (True, True), (False, True)):
        try:
            record = dump(*arguments)
        except Exception as error:  # whatever torch raises: a hang is looked into, and the thread must go on
            return b'{"error": "%b"}' % type(error).__name__.encode()
        if len(record) <= MAX_RECORD_BYTES:
            return record
    return b'{"error": "too large"}'
