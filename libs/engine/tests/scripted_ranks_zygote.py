"""Stands in for the zygote: real processes with real sockets and a real mailbox, scripted ranks in them. No torch."""

import socket
import sys
import time

from lockstep_engine import zygote
from lockstep_engine.mailbox import Mailbox
from lockstep_engine.plan import (
    Loaded,
    PoolSizes,
    Ready,
    decode_control,
    decode_plan,
    encode_control,
    encode_result,
)
from lockstep_engine.sizes import message_sizes
from scripted_ranks import ScriptedRanks

BLOCKS = PoolSizes(12, 12)


def run_rank(spec, control, mailbox_fd, *_):
    mailbox = Mailbox(mailbox_fd, spec.tp, *message_sizes(spec))
    control.send(encode_control(Loaded(BLOCKS, {})))
    sizes = decode_control(control.recv(zygote.MAX_MESSAGE_BYTES)).blocks
    ranks = ScriptedRanks(sizes, spec.hot_window, spec.max_batch_tokens, spec.max_seqs)
    control.send(encode_control(Ready(True, "cpu", "float32")))
    while bell := control.recv(zygote.MAX_MESSAGE_BYTES):
        step = int.from_bytes(bell, "little")
        result = ranks.execute(decode_plan(mailbox.get_plan(step)))
        mailbox.steps[spec.rank] += 1
        if spec.rank == 0:
            while mailbox.steps.min() < mailbox.steps[0]:  # the collectives of real ranks keep them together
                time.sleep(0.0002)
            mailbox.put_result(step, encode_result(result))
            control.send(bell)


if __name__ == "__main__":
    driver = socket.socket(fileno=int(sys.argv[1]))
    driver.send(zygote.READY)
    zygote._serve(driver, run_rank)
