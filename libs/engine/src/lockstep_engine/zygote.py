"""The process that forks ranks. It imports torch and the models' code once, so that a new rank group starts in a
fraction of a second.

It has one thread and no CUDA context, so that forking is safe. Its only state is the list of its children. It ends when
the driver's socket closes; the kernel then kills its children, which have asked for that with `die_with_parent`.

Protocol on the socket, whose packets `control` defines: `Fork` is answered by `Forked`; `KillAll` by `Killed`, once all
children are reaped.
"""

import contextlib
import faulthandler
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from lockstep_common.garbage import spare_existing_objects, without_collections
from lockstep_common.lifecycle import die_with_parent, name_process, outlive_parent
from lockstep_common.tracebacks import traceback_text

from lockstep_engine import flight_record
from lockstep_engine.control import (
    ZYGOTE_READY,
    Fork,
    Forked,
    KillAll,
    Killed,
    RankDescriptors,
    RankSpec,
    encode_control,
    receive_order,
)

_GPU = Path("/dev/nvidiactl")
"""Is there where processes can use an NVIDIA GPU. To ask CUDA would keep it from the processes that are forked."""

RunRank = Callable[[RankSpec, socket.socket, int, int, str, int], None]
"""Runs a rank, as `rank_main.run_rank` does."""


def _load() -> RunRank:
    from lockstep_engine.rank_main import run_rank  # noqa: PLC0415 - slow: torch and transformers

    if _GPU.exists() and find_spec("triton") is not None:
        with contextlib.suppress(Exception):  # of Triton; a rank meets it again, and reports it
            importlib.import_module("lockstep_engine.gpu_calls")  # makes no CUDA context
            importlib.import_module("triton.runtime.cache").triton_key()  # hashes Triton, 0.4 s; ranks inherit it
    return run_rank


def main(load: Callable[[], RunRank] = _load) -> None:
    """Serve one driver. The process's arguments are the descriptor of the socket, the engine's label, and the driver's
    process id.

    Args:
        load: imports what ranks need, and returns the function that runs one. Tests load ranks that fail.
    """
    die_with_parent(int(sys.argv[3]))  # until it reads the socket, only this ends it when the driver dies
    control = socket.socket(fileno=int(sys.argv[1]))
    name_process(f"zygote {sys.argv[2]}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends when the driver says so, or is gone
    for number in (signal.SIGUSR1, flight_record.SIGNAL):
        signal.signal(number, signal.SIG_IGN)  # a new rank must not die of them before it can write what they ask for
    with without_collections():
        run_rank = load()
    spare_existing_objects()  # in the ranks too, and it leaves their memory shared with this process
    with contextlib.suppress(ConnectionError):  # the driver is gone
        control.send(ZYGOTE_READY)
        outlive_parent()  # the kernel watches the driver's thread; from here on the socket's end is enough
        serve(control, run_rank)
    os._exit(0)


def serve(control: socket.socket, run_rank: RunRank) -> None:
    """Fork ranks that run `run_rank`, until the driver closes the socket."""
    children: dict[int, int] = {}
    while (order := receive_order(control)) is not None:
        if isinstance(order, KillAll):
            control.send(encode_control(Killed(_kill(children))))
            children.clear()
            continue
        message, descriptors = order
        pid = os.fork()
        if pid == 0:
            _become_rank(run_rank, message, control, descriptors)
        descriptors.close()
        children[pid] = message.spec.rank
        control.send(encode_control(Forked(message.spec.rank, pid)))


def _become_rank(run_rank: RunRank, message: Fork, control: socket.socket, descriptors: RankDescriptors) -> None:
    control.close()
    code = 1
    os.dup2(descriptors.stderr, 2)
    faulthandler.register(signal.SIGUSR1, file=descriptors.stacks, all_threads=True)
    if message.flight_record:
        flight_record.write_on_signal(descriptors.flight)
    try:
        run_rank(
            message.spec,
            socket.socket(fileno=descriptors.control),
            descriptors.mailbox,
            descriptors.collectives if message.shared_collectives else -1,
            f"/proc/self/fd/{descriptors.rendezvous}",
            descriptors.host if message.shared_host else -1,
        )
        code = 0
    except ConnectionError:
        code = 0  # the driver is gone, which is no error of this rank
    except BaseException as error:
        print(traceback_text(error), file=sys.stderr, flush=True)  # os._exit does not
    finally:
        os._exit(code)


def _kill(children: dict[int, int]) -> dict[int, int]:
    for pid in children:  # one that has ended already keeps its pid until it is reaped below
        os.kill(pid, signal.SIGKILL)
    return {rank: os.waitpid(pid, 0)[1] for pid, rank in children.items()}
