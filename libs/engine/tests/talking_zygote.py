"""The zygote with ranks that log, write to stderr, stop, or crash, as the first token of a plan says. No torch."""

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import time

from lockstep_engine import zygote
from lockstep_engine.blocks import PoolSizes
from lockstep_engine.control import (
    MAX_CONTROL_BYTES,
    Loaded,
    Ready,
    SetLogLevel,
    decode_doorbell,
    decode_rank_message,
    encode_control,
)
from lockstep_engine.mailbox import Mailbox
from lockstep_engine.plan import Result, decode_plan, encode_result
from lockstep_engine.rank_log import send_logs

MESSAGE_BYTES = 4096
LOG, FLOOD, WRITE, CRASH, RAISE, HANG, STOP, POUR = range(1, 9)

logger = logging.getLogger("lockstep.engine")


def run_rank(spec, control, mailbox_fd, *_):
    faulthandler.enable()
    mailbox = Mailbox(mailbox_fd, spec.config.tp, MESSAGE_BYTES, MESSAGE_BYTES)
    send_logs(control, spec.log_level, lambda: int(mailbox.steps[spec.rank]))
    control.send(encode_control(Loaded(PoolSizes(8), {})))
    control.recv(MAX_CONTROL_BYTES)
    control.send(encode_control(Ready(deterministic=True, device="cpu", dtype="float32")))
    while message := control.recv(MAX_CONTROL_BYTES):
        step = decode_doorbell(message)
        if step is None:
            order = decode_rank_message(message)
            assert isinstance(order, SetLogLevel)
            logging.getLogger("lockstep").setLevel(order.level.upper())
            continue
        if spec.rank == 1:
            act(int(decode_plan(mailbox.get_plan(step)).token_ids[0]))
        mailbox.collectives[spec.rank] += 1
        mailbox.steps[spec.rank] += 1
        if spec.rank == 0:
            while mailbox.steps.min() < mailbox.steps[0]:
                time.sleep(0.001)
            mailbox.put_result(step, encode_result(Result(step, [step], [None], 0, 0)))
            control.send(message)


def act(what):
    if what == LOG:
        logger.debug("at debug")
        logger.warning("at warning", extra={"blocks": 3, "name_of": "n"})
    elif what == FLOOD:
        for index in range(5000):
            logger.warning("flood %d", index)
    elif what == WRITE:
        print("from a library", file=sys.stderr, flush=True)
        print("x" * 1_000_000, file=sys.stderr, flush=True)  # much more than a pipe takes: none of it may stop the rank
    elif what == POUR:
        pour()
    elif what == CRASH:
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == RAISE:
        quoted = "canary"[::-1]
        raise KeyError(quoted)
    elif what == HANG:
        hang_here()
    elif what == STOP:
        stop_here()


def pour():
    ends_at = time.monotonic() + 1.0
    while time.monotonic() < ends_at:
        with contextlib.suppress(BlockingIOError):
            os.write(2, b"line\n" * 100)


def hang_here():
    time.sleep(3600)


def stop_here():
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.01)  # it comes when the kernel is left, at the latest in here


if __name__ == "__main__":
    zygote.main(lambda: run_rank)
