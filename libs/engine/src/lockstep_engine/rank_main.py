"""The life of a rank's process: makes the rank, lets it serve, and reports to the driver why it ends."""

import logging
import os
import re
import signal
import socket

from lockstep_common.errors import LockstepError
from lockstep_common.lifecycle import die_with_parent, name_process
from lockstep_common.tracebacks import sentence

from lockstep_engine.control import RankSpec, StartFailed, encode_control
from lockstep_engine.device_failures import is_out_of_memory
from lockstep_engine.mailbox import Mailbox
from lockstep_engine.plan import message_sizes
from lockstep_engine.rank import Rank
from lockstep_engine.rank_log import send_logs

logger = logging.getLogger("lockstep.engine")

_MAX_QUOTED_CHARS = 400
_MANY_NUMBERS = re.compile(r"-?\d+(?:\s*,\s*-?\d+){8,}")
"""More than the dimensions of a tensor: they could be token ids."""


def run_rank(
    spec: RankSpec,
    control: socket.socket,
    mailbox_fd: int,
    collectives_fd: int,
    store_path: str,
    host_fd: int = -1,
    kind: type[Rank] = Rank,
) -> None:
    """Run a rank until the driver is gone. Returns only if the start fails, after it has sent the driver the reason.

    Args:
        spec: the rank's specification.
        control: socket to the driver.
        mailbox_fd: shared segment of plans and results.
        collectives_fd: shared segment of collectives; -1: none.
        store_path: file through which ranks meet if there is no such segment.
        host_fd: segment of its tier in host memory that the driver shares; -1: it is not shared.
        kind: class of the rank. Tests run subclasses.
    """
    name_process(f"rank {spec.config.label}/{spec.rank}")
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C
    progress = Mailbox(mailbox_fd, spec.config.tp, *message_sizes(spec)).steps
    log = send_logs(control, spec.log_level, lambda: int(progress[spec.rank]))
    try:
        rank = kind(spec, control, mailbox_fd, collectives_fd, store_path, host_fd)
    except LockstepError as error:
        control.send(encode_control(StartFailed(error.message, permanent=True)))
        return
    except Exception as error:  # there is no request yet that it could quote
        control.send(encode_control(StartFailed(f"rank {spec.rank}: {type(error).__name__}: {error}", permanent=False)))
        return
    try:
        rank.serve()
    except ConnectionError:
        raise  # the driver is gone
    except Exception as error:  # other ranks may be in a collective already, so all are restarted
        logger.exception("rank failed in a step")
        log.close()
        control.send(encode_control(StartFailed(_describe_failure(spec.rank, error), permanent=False)))
        os._exit(1)


def _describe_failure(rank: int, error: BaseException) -> str:
    """What the driver says about it. The libraries' errors are quoted; others may be about values of a request."""
    what = "has no memory for a step" if is_out_of_memory(error) else "failed in a step"
    if not isinstance(error, MemoryError | RuntimeError | OSError):
        return f"rank {rank} {what}: {sentence(error)}"
    quoted = _MANY_NUMBERS.sub("…", str(error).partition("\n")[0])[:_MAX_QUOTED_CHARS]
    return f"rank {rank} {what}: {type(error).__name__}: {quoted}"
