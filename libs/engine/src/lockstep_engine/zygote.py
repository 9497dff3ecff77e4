"""Forks ranks. It has imported torch and the models' code once, so that a rank group is back in a fraction of a second.

One thread, no CUDA context (so that forking is safe), no state but its children. It ends when the driver's socket
closes; the kernel then kills its children (they asked for it).

Protocol on the socket: `Fork` with four file descriptors → `Forked`; `KillAll` → `Killed` when all children are reaped.
"""

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable

import msgspec
from lockstep_common.lifecycle import die_with_parent, name_process, outlive_parent

from lockstep_engine.plan import RankSpec

MAX_MESSAGE_BYTES = 64 * 1024


class Fork(msgspec.Struct, tag=True):
    """Start a rank. Descriptors that come along: control socket, mailbox, collectives segment, rendezvous file."""

    spec: RankSpec
    shared_collectives: bool


class Forked(msgspec.Struct, tag=True):
    """A rank has started."""

    rank: int
    pid: int


class KillAll(msgspec.Struct, tag=True):
    """SIGKILL every rank and wait for their ends."""


class Killed(msgspec.Struct, tag=True):
    """How each rank ended: its wait status by rank."""

    statuses: dict[int, int]


Message = Fork | Forked | KillAll | Killed
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode

READY = b"ready"


def main() -> None:
    """Serve one driver over the socket whose descriptor is the first argument; its name and process id follow."""
    die_with_parent(int(sys.argv[3]))  # until the socket is read, nothing else would end it
    control = socket.socket(fileno=int(sys.argv[1]))
    name_process(f"zygote {sys.argv[2]}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # only the driver ends it
    from lockstep_engine.rank import run_rank  # noqa: PLC0415 - the slow part: torch and transformers

    with contextlib.suppress(ConnectionError):  # the driver is gone
        control.send(READY)
        outlive_parent()  # the kernel means the driver's thread; from here on the socket tells
        _serve(control, run_rank)
    os._exit(0)


def _serve(control: socket.socket, run_rank: Callable[..., None]) -> None:
    children: dict[int, int] = {}
    while True:
        data, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 4)
        if not data:
            return
        message = decode(data)
        if isinstance(message, Fork):
            pid = os.fork()
            if pid == 0:
                _become_rank(run_rank, message, control, fds)
            for fd in fds:
                os.close(fd)
            children[pid] = message.spec.rank
            control.send(encode(Forked(message.spec.rank, pid)))
        elif isinstance(message, KillAll):
            control.send(encode(Killed(_kill(children))))
            children.clear()


def _become_rank(run_rank: Callable[..., None], message: Fork, control: socket.socket, fds: list[int]) -> None:
    control.close()
    rank_socket, mailbox, collectives, store = fds
    code = 1
    try:
        run_rank(
            message.spec,
            socket.socket(fileno=rank_socket),
            mailbox,
            collectives if message.shared_collectives else -1,
            f"/proc/self/fd/{store}",
        )
        code = 0
    except ConnectionError:
        code = 0  # the driver is gone: nobody wants to know
    except BaseException:
        traceback.print_exc()  # `_exit` would not
    finally:
        os._exit(code)


def _kill(children: dict[int, int]) -> dict[int, int]:
    for pid in children:
        os.kill(
            pid, signal.SIGKILL
        )  # one that has ended is a zombie until it is reaped below: its pid is still its own
    return {rank: os.waitpid(pid, 0)[1] for pid, rank in children.items()}
