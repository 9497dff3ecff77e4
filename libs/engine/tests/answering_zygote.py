"""Stands in for the zygote and its ranks: they are threads here, have no model, and take `STEP_S` for a step."""

import os
import signal
import socket
import sys
import threading
import time

from lockstep_engine import zygote
from lockstep_engine.mailbox import Mailbox
from lockstep_engine.plan import (
    Loaded,
    PoolSizes,
    Ready,
    Result,
    decode_plan,
    encode_control,
    encode_result,
)

STEP_S = 1.0
MESSAGE_BYTES = 4096
HANGS = -1
"""A plan with this first token is never answered."""


def main() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # ranks would write their stacks
    control = socket.socket(fileno=int(sys.argv[1]))
    control.send(zygote.READY)
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, zygote.MAX_MESSAGE_BYTES, 4)
        if not data:
            return
        message = zygote.decode(data)
        if isinstance(message, zygote.KillAll):
            control.send(zygote.encode(zygote.Killed({})))
            continue
        ours = socket.socket(fileno=descriptors[0])
        mailbox = Mailbox(descriptors[1], message.spec.tp, MESSAGE_BYTES, MESSAGE_BYTES)
        threading.Thread(target=serve, args=(message.spec.rank, ours, mailbox), daemon=True).start()
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        control.send(zygote.encode(zygote.Forked(message.spec.rank, os.getpid())))


def serve(rank: int, control: socket.socket, mailbox: Mailbox) -> None:
    control.send(encode_control(Loaded(PoolSizes(8), {})))
    control.recv(MESSAGE_BYTES)
    control.send(encode_control(Ready(deterministic=True, device="cpu", dtype="float32")))
    while bell := control.recv(MESSAGE_BYTES):
        plan = decode_plan(mailbox.get_plan(int.from_bytes(bell, "little")))
        time.sleep(STEP_S)
        if int.from_bytes(plan.token_ids[:4], "little", signed=True) == HANGS:
            continue
        mailbox.steps[rank] += 1
        if rank == 0:
            mailbox.put_result(plan.step, encode_result(Result(plan.step, [plan.step], [None], 0, 0)))
            control.send(bell)


if __name__ == "__main__":
    main()
