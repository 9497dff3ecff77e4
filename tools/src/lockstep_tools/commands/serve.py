"""`lockstep serve`: runs routers, workers and a state server on this machine until Ctrl-C."""

import argparse
import json
import os
import shlex
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from types import FrameType

from lockstep_common.lifecycle import name_process
from rich.console import Console
from rich.text import Text

from lockstep_tools import console
from lockstep_tools.arguments import add_engine, add_model, integer, model_directory
from lockstep_tools.escaping import harmless
from lockstep_tools.failure import FAILED, UNUSABLE, CommandError
from lockstep_tools.interruption import stopping_signals
from lockstep_tools.serving.stack import Stack, StackSettings
from lockstep_tools.serving.status import READY

DESCRIPTION = """\
Run a router and workers on this machine. A worker that dies is started again; its streams go on at another one.
Ctrl-C lets running streams end for a few seconds, a second Ctrl-C does not. Traces are off by default. With
OTEL_TRACES_EXPORTER=memory in the environment it keeps them for `lockstep trace`, with OTEL_EXPORTER_OTLP_ENDPOINT it
sends them to a collector, those of a tenth of the requests, or of all with LOCKSTEP_TRACE_RATIO=1."""

EXAMPLES = """\
  lockstep serve models/reference
  lockstep serve /models/llama --workers 2 --tp 2 --port 9000
  OTEL_TRACES_EXPORTER=memory lockstep serve models/reference
  lockstep serve --routers 2 --state redis://localhost:6379/0
  lockstep serve /models/llama --workers 2 --host-cache 8Gi --remote-cache
  lockstep serve /models/llama --device cuda --dtype bfloat16 --kv-memory 20Gi"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_model(parser)
    parser.add_argument(
        "--workers", type=integer(1, 64), default=1, metavar="N", help="each with GPUs of its own (default: 1)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=integer(0, 65535), default=8000, help="0: any free one (default: %(default)s)")
    parser.add_argument(
        "--management-port",
        type=integer(0, 65535),
        help="of health, metrics, status, on 127.0.0.1; 0: any free one (default: the one after --port, if free)",
    )
    parser.add_argument(
        "--router-processes",
        type=integer(1, 64),
        default=1,
        metavar="N",
        help="processes of the router, which share its port (default: 1)",
    )
    parser.add_argument(
        "--routers",
        type=integer(1, 16),
        default=1,
        metavar="N",
        help="routers, on --port, --port + 2 and so on: clients continue their streams on any of them (default: 1)",
    )
    parser.add_argument(
        "--state",
        metavar="STORE",
        help="run a state server, which keeps streams and cached prefixes in its `memory` or in Redis: "
        "redis://host:port/0 (default: memory if there are several routers or --remote-cache, else none)",
    )
    parser.add_argument("--name", help="served model name (default: the directory's)")
    add_engine(parser)
    parser.add_argument("--kv-memory", metavar="SIZE", help="KV cache of a rank, e.g. 512Mi or 20Gi")
    parser.add_argument(
        "--host-cache", metavar="SIZE", help="host memory of a rank for cached prefixes, e.g. 4Gi (default: none)"
    )
    parser.add_argument(
        "--remote-cache",
        action="store_true",
        help="workers also keep cached prefixes in the state server, and fetch them where that is faster than "
        "computing; needs --host-cache",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="error",
        help="log level of router and workers, on stderr (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Start the stack, show how it comes up, and stay until a signal."""
    name_process("serve")
    if arguments.remote_cache and not arguments.host_cache:
        raise CommandError("--remote-cache needs --host-cache: prefixes come back into host memory", UNUSABLE)
    settings = StackSettings(
        model=model_directory(arguments.model),
        workers=arguments.workers,
        tp=arguments.tp,
        host=arguments.host,
        port=arguments.port,
        management_port=arguments.management_port,
        router_processes=arguments.router_processes,
        routers=arguments.routers,
        state=arguments.state,
        name=arguments.name,
        device=arguments.device,
        dtype=arguments.dtype,
        threads=arguments.threads,
        kv_memory=arguments.kv_memory,
        host_cache=arguments.host_cache,
        remote_cache=arguments.remote_cache,
        max_context=arguments.max_context,
        log_level=arguments.log_level,
    )
    notes = console.notes()
    stack = Stack(settings, on_event=lambda sentence: notes.print(sentence, style="yellow", markup=False))
    stopping = _stop_on_signals(stack)
    try:
        stack.start()
        _come_up(stack, notes)
        _introduce(stack)
        stack.wait()
        raise CommandError(stack.reason, stack.exit_code or FAILED)
    except (CommandError, KeyboardInterrupt):
        if stopping.is_set():
            return 0
        if stack.started and stack.exit_code == UNUSABLE:
            return UNUSABLE  # the service has printed the reason
        raise
    finally:
        stack.stop(0.0)


def _stop_on_signals(stack: Stack) -> threading.Event:
    """The first signal ends the stack gracefully, the second at once. The returned event is set by the first."""
    stopping = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        if not stack.started:
            stopping.set()
            raise KeyboardInterrupt
        if stopping.is_set():
            stack.terminate(0.0)
            return
        stopping.set()
        stack.terminate()
        with suppress(OSError):  # Ctrl-C also ends a program that reads stderr, such as `tee`
            os.write(2, b"\nstopping: running streams may end; the same again stops at once\n")

    for number in stopping_signals(signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return stopping


def _come_up(stack: Stack, notes: Console) -> None:
    """Show each process as it becomes ready, with a spinner on a terminal."""
    began_s = time.monotonic()
    ready: set[str] = set()
    spinner = notes.status("starting") if notes.is_terminal else None

    def show(states: Mapping[str, str]) -> None:
        for name in [name for name, state in states.items() if state == READY and name not in ready]:
            ready.add(name)
            notes.print(Text.assemble(("✓", "green"), f" {name} ready after {time.monotonic() - began_s:.1f} s"))
        if spinner is not None:
            waiting = ", ".join(f"{name} {state}" for name, state in states.items() if state != READY)
            spinner.update(Text(harmless(f"{waiting} ({time.monotonic() - began_s:.0f} s)")))

    with spinner or nullcontext():
        stack.wait_ready(on_status=show)


def _introduce(stack: Stack) -> None:
    """Print the address of the API and commands to try."""
    settings = stack.settings
    name = settings.name or os.path.basename(os.path.abspath(settings.model))
    workers = ", ".join(f"{worker} (pid {pid})" for worker, pid in stack.worker_pids.items())
    body = json.dumps({"model": name, "prompt": "It was a dark night, and", "max_tokens": 40})
    urls = [f"{url}/v1" for url in stack.urls]
    rows = {
        "API": f"{stack.url}/v1",
        "manage": f"{stack.management_url} (/status, /metrics, lockstep debug)",
        "console": stack.console_url,
        **({"routers": ", ".join(urls)} if len(urls) > 1 else {}),
        "model": f"{name} ({settings.model})",
        "workers": f"{workers}; {settings.tp} rank{'s' * (settings.tp > 1)} each",
        "try": f"curl {stack.url}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}",
        "": f"lockstep chat --url {','.join(urls)}",
        "stop": "Ctrl-C",
    }
    out = console.output()
    out.print()
    for label, value in rows.items():
        # Without line breaks of ours, so that the command can be copied.
        out.print(Text.assemble((f"{label:9}", "bold"), value), soft_wrap=True)
    out.print()
