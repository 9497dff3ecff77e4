"""The process that forks ranks."""

import os
import socket
import subprocess
import sys

from lockstep_engine.control import ZYGOTE_READY

_TIMEOUT_S = 120.0

# Tells whether the collector runs while ranks' modules are imported, and afterwards.
_PROBE = """
import gc
from lockstep_engine import zygote

def load():
    during.append(gc.isenabled())

def serve(control, run_rank):
    control.send(bytes([*during, gc.isenabled()]))

during = []
zygote.serve = serve
zygote.main(load)
"""


def test_imports_are_not_searched_for_garbage():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(_TIMEOUT_S)
        arguments = [sys.executable, "-c", _PROBE, str(theirs.fileno()), "test", str(os.getpid())]
        with subprocess.Popen(arguments, pass_fds=[theirs.fileno()]) as process:
            theirs.close()
            try:
                assert ours.recv(100) == ZYGOTE_READY
                assert ours.recv(100) == bytes([False, True])
                assert process.wait(_TIMEOUT_S) == 0
            finally:
                process.kill()
