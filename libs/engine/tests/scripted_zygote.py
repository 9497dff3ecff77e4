"""Stands in for the zygote: forks nothing, lets rank 0 of the first epoch die before rank 1 exists."""

import os
import socket
import sys
import time

from lockstep_engine import zygote

_FORK_S = 0.2


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.send(zygote.READY)
    held = []
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, zygote.MAX_MESSAGE_BYTES, 4)
        if not data:
            return
        message = zygote.decode(data)
        if isinstance(message, zygote.KillAll):
            for descriptor in held:
                os.close(descriptor)
            held.clear()
            control.send(zygote.encode(zygote.Killed({})))
            continue
        rank, epoch = message.spec.rank, message.spec.epoch
        time.sleep(_FORK_S * rank)
        for number, descriptor in enumerate(descriptors):
            if number == 0 and (epoch, rank) != (1, 0):
                held.append(descriptor)  # a rank lives as long as its control socket
            else:
                os.close(descriptor)
        control.send(zygote.encode(zygote.Forked(rank, 1_000_000 + 10 * epoch + rank)))


if __name__ == "__main__":
    main()
