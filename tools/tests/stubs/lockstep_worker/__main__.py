"""A worker without an engine: listens on its socket, notes its starts, and ends according to STUB_PLAN.

STUB_PLAN is JSON: by worker id an object with `exits` (the exit code of each start, null: it stays), `deaf` (SIGTERM is
ignored), `child` (it leaves a process that outlives it) and `silent` (it never listens).
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from lockstep_common.lifecycle import obey_parent

obey_parent()
flags = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
worker = flags["worker-id"]
plan = json.loads(os.environ["STUB_PLAN"]).get(worker, {})
notes = Path(os.environ["STUB_NOTES"], f"{worker}.starts")
with notes.open("a") as file:
    file.write(f"{time.monotonic()} {os.getpid()}\n")
start = len(notes.read_text().splitlines()) - 1
exits = plan.get("exits", [])
if start < len(exits) and exits[start] is not None:
    print(f"stub {worker} cannot go on", file=sys.stderr)
    sys.exit(exits[start])
if plan.get("deaf"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if plan.get("child"):
    child = subprocess.Popen(["sleep", "1000"])
    notes.with_suffix(".child").write_text(str(child.pid))
while plan.get("silent"):
    signal.pause()
path = flags["listen"].removeprefix("unix:")
Path(path).unlink(missing_ok=True)
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen()
while True:
    listener.accept()[0].close()
