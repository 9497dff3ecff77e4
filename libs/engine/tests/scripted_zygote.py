"""Stands in for the zygote: forks nothing, lets rank 0 of the first epoch die before rank 1 exists."""

import os
import socket
import sys
import time

from lockstep_engine.control import ZYGOTE_READY, Forked, KillAll, Killed, encode_control, receive_order

_FORK_S = 0.2


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.send(ZYGOTE_READY)
    held = []
    while (order := receive_order(control)) is not None:
        if isinstance(order, KillAll):
            for descriptor in held:
                os.close(descriptor)
            held.clear()
            control.send(encode_control(Killed({})))
            continue
        message, descriptors = order
        rank, epoch = message.spec.rank, message.spec.epoch
        time.sleep(_FORK_S * rank)
        if (epoch, rank) != (1, 0):
            held.append(os.dup(descriptors.control))  # a rank lives as long as its control socket
        descriptors.close()
        control.send(encode_control(Forked(rank, 1_000_000 + 10 * epoch + rank)))


if __name__ == "__main__":
    main()
