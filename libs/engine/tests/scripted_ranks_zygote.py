"""Stands in for the zygote: real processes with real sockets and a real mailbox, scripted ranks in them. No torch."""

import socket
import sys
import time
from functools import partial

from lockstep_engine import zygote
from lockstep_engine.blocks import PoolSizes
from lockstep_engine.control import (
    MAX_CONTROL_BYTES,
    ZYGOTE_READY,
    Loaded,
    Ready,
    decode_doorbell,
    decode_rank_message,
    encode_control,
)
from lockstep_engine.mailbox import Mailbox
from lockstep_engine.plan import decode_plan, encode_result, message_sizes
from scripted_ranks import ScriptedRanks

BLOCKS = PoolSizes(12, 12)


def run_rank(spec, control, mailbox_fd, *_, step_s=0.0, token_s=0.0, holds=False):
    """A rank that reports this pace; with `holds` it never ends a step."""
    mailbox = Mailbox(mailbox_fd, spec.config.tp, *message_sizes(spec))
    control.send(encode_control(Loaded(BLOCKS, {"load": 0.5})))
    sizes = decode_rank_message(control.recv(MAX_CONTROL_BYTES)).blocks
    ranks = ScriptedRanks(sizes, spec.config.hot_window, spec.config.step_tokens, spec.config.max_seqs)
    control.send(
        encode_control(
            Ready(True, "cpu", "float32", step_s=step_s, token_s=token_s, phases_s={"load": 0.5, "record": 0.25})
        )
    )
    while doorbell := control.recv(MAX_CONTROL_BYTES):
        if holds:
            time.sleep(3600)
        step = decode_doorbell(doorbell)
        result = ranks.execute(decode_plan(mailbox.get_plan(step)))
        mailbox.steps[spec.rank] += 1
        if spec.rank == 0:
            while mailbox.steps.min() < mailbox.steps[0]:  # the collectives of real ranks keep them together
                time.sleep(0.0002)
            mailbox.put_result(step, encode_result(result))
            control.send(doorbell)


def main(**ranks):
    driver = socket.socket(fileno=int(sys.argv[1]))
    driver.send(ZYGOTE_READY)
    zygote.serve(driver, partial(run_rank, **ranks))


if __name__ == "__main__":
    main()
