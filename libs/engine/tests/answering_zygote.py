"""Stands in for the zygote and its ranks: they are threads here, have no model, and take for a step as many
milliseconds as the plan's first token says.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from lockstep_engine import flight_record
from lockstep_engine.blocks import PoolSizes
from lockstep_engine.control import (
    ZYGOTE_READY,
    Forked,
    KillAll,
    Killed,
    Loaded,
    Ready,
    decode_doorbell,
    encode_control,
    receive_order,
)
from lockstep_engine.mailbox import Mailbox
from lockstep_engine.plan import Result, decode_plan, encode_result

MESSAGE_BYTES = 4096
HANGS = -1
"""The step of a plan with this first token never ends."""
HANGS_ON_DEVICE = -2
"""Nor does this one's: all hosts launch it, and the device of rank 1 stands still."""


def start(rank: int, control: socket.socket, mailbox: Mailbox) -> None:
    threading.Thread(target=serve, args=(rank, control, mailbox), daemon=True).start()


def main(start: Callable[[int, socket.socket, Mailbox], None] = start) -> None:
    """`start` is called with each rank, its control socket and the mailbox, before the rank is told to be there."""
    for number in (signal.SIGUSR1, flight_record.SIGNAL):
        signal.signal(number, signal.SIG_IGN)  # ranks would write their stacks and flight records
    control = socket.socket(fileno=int(sys.argv[1]))
    control.send(ZYGOTE_READY)
    while (order := receive_order(control)) is not None:
        if isinstance(order, KillAll):
            control.send(encode_control(Killed({})))
            continue
        message, descriptors = order
        ours = socket.socket(fileno=os.dup(descriptors.control))
        mailbox = Mailbox(descriptors.mailbox, message.spec.config.tp, MESSAGE_BYTES, MESSAGE_BYTES)
        start(message.spec.rank, ours, mailbox)
        descriptors.close()
        control.send(encode_control(Forked(message.spec.rank, os.getpid())))


def serve(rank: int, control: socket.socket, mailbox: Mailbox) -> None:
    control.send(encode_control(Loaded(PoolSizes(8), {})))
    control.recv(MESSAGE_BYTES)
    pace = {"step_s": 1.0 + rank, "token_s": 0.5}
    control.send(encode_control(Ready(deterministic=True, device="cpu", dtype="float32", **pace)))
    while doorbell := control.recv(MESSAGE_BYTES):
        plan = decode_plan(mailbox.get_plan(decode_doorbell(doorbell)))
        if plan.token_ids[0] == HANGS_ON_DEVICE:
            mailbox.collectives[rank] = mailbox.launched[rank] = 9
            mailbox.reached[rank] = 9 - 2 * rank
            threading.Event().wait()
        if plan.token_ids[0] == HANGS:
            threading.Event().wait()
        time.sleep(int(plan.token_ids[0]) / 1000)
        mailbox.steps[rank] += 1
        if rank == 0:
            mailbox.put_result(plan.step, encode_result(Result(plan.step, [plan.step], [None], 0, 0)))
            control.send(doorbell)


if __name__ == "__main__":
    main()
