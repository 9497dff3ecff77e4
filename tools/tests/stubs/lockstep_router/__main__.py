"""A router without streams: in its /status a worker is ready when its socket takes connections."""

import json
import os
import signal
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from lockstep_common.lifecycle import obey_parent

obey_parent()
flags = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
if "router" in json.loads(os.environ["STUB_PLAN"]):
    print("stub router cannot go on", file=sys.stderr)
    sys.exit(json.loads(os.environ["STUB_PLAN"])["router"])
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


def state(target: str) -> str:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(target.removeprefix("unix:"))
        except OSError:
            return "connecting"
    return "ready"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        workers = [
            {"id": f"w{number}", "target": target, "state": state(target), "ranks": []}
            for number, target in enumerate(flags["workers"].split(","))
        ]
        body = json.dumps({"router": {"id": "stub", "pid": os.getpid()}, "models": [], "workers": workers}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


ThreadingHTTPServer(("127.0.0.1", int(flags["management-port"])), Handler).serve_forever()
