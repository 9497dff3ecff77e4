"""The parent of a router's processes: reserves the ports, starts and restarts the processes, and ends them.

It serves nothing but the management port. The kernel kills the processes when it dies.
"""

import asyncio
import itertools
import logging
import os
import socket
import sys
import time
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import uvloop
from lockstep_common import telemetry
from lockstep_common.errors import LockstepError, cannot_listen, invalid
from lockstep_common.lifecycle import DIE_WITH_PARENT_VARIABLE, name_process, stop_event
from lockstep_common.management import served
from lockstep_common.settings import USAGE_EXIT_CODE, fail
from lockstep_common.termination import leave_message

from lockstep_router.console import files
from lockstep_router.processes.answers import JointAnswers
from lockstep_router.processes.channel import Asker
from lockstep_router.settings import MAX_ROUTER_ID_CHARS, RouterSettings
from lockstep_router.tls import RouterTls

logger = logging.getLogger("lockstep.router")

FIRST_DELAY_S = 0.1
LAST_DELAY_S = 5.0
STEADY_S = 10.0
"""A process that has run for this long starts again after the first delay."""
MAX_FIRST_STARTS = 6
"""Starts of a process, within about three seconds of pauses, while none has listened yet."""


class Process:
    """One of the router's processes, and its restarts.

    Args:
        number: 0, 1, …
        settings: of this process.
    """

    def __init__(self, number: int, settings: RouterSettings) -> None:
        self.number = number
        self.asker: Asker | None = None
        """Asks the process while it runs and listens."""
        self.restarts = 0
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The process's id; None while it does not run."""
        return None if self._process is None else self._process.pid

    def terminate(self) -> None:
        """Ask the process to drain and end."""
        if self._process is not None:
            with suppress(ProcessLookupError):  # it has ended, and was not waited for yet
                self._process.terminate()

    async def keep(self, stop: asyncio.Event, listening: asyncio.Event, serving: asyncio.Event) -> int:
        """Run it, and again whenever it ends, until `stop` is set or another start cannot help.

        Before any process has listened, exit code 2 ends it, and so do MAX_FIRST_STARTS of any: what runs the router
        has to see that it does not start. Later the settings are known to be usable: a file that they name has been
        damaged since, and may be mended.

        Args:
            stop: no more restarts.
            listening: is set as soon as the process listens.
            serving: is set as soon as any of the processes listens.

        Returns:
            Its last exit code.
        """
        delay_s = FIRST_DELAY_S
        for starts in itertools.count(1):
            began_s = time.monotonic()
            code = await self._run_once(stop, listening, serving)
            is_vain = not serving.is_set() and (code == USAGE_EXIT_CODE or starts >= MAX_FIRST_STARTS)
            if stop.is_set() or is_vain:
                return code
            if time.monotonic() - began_s >= STEADY_S:
                delay_s = FIRST_DELAY_S
            logger.error("process ended", extra={"number": self.number, "exit_code": code, "restart_in_s": delay_s})
            try:
                await asyncio.wait_for(stop.wait(), delay_s)
            except TimeoutError:
                self.restarts += 1
                delay_s = min(2 * delay_s, LAST_DELAY_S)
            else:
                return code
        raise AssertionError  # the loop has no end

    async def _run_once(self, stop: asyncio.Event, listening: asyncio.Event, serving: asyncio.Event) -> int:
        try:
            own, process = await self._start()
        except OSError as error:  # the machine has no memory, processes or files left
            logger.error("process not started", extra={"number": self.number, "problem": str(error)})
            return os.EX_OSERR
        self._process = process
        with own:
            if stop.is_set():
                self.terminate()
            try:
                own.send_bytes(self._settings.model_dump_json().encode())
                assert process.stdout is not None
                while line := await process.stdout.readline():
                    if line == b"listening\n":
                        self.asker = Asker(own)
                        listening.set()
                        serving.set()
                return await process.wait()
            except OSError:  # it ended before it read its settings
                return await process.wait()
            finally:
                self.asker = self._process = None

    async def _start(self) -> tuple["Connection[bytes, bytes]", asyncio.subprocess.Process]:
        """Start it: the parent's end of its connection, and the process."""
        own, given = Pipe()
        with given:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "lockstep_router.processes.child"),
                    stdin=given.fileno(),
                    stdout=asyncio.subprocess.PIPE,
                    env=os.environ | {DIE_WITH_PARENT_VARIABLE: str(os.getpid())},
                    start_new_session=True,  # Ctrl-C of a terminal reaches the parent alone
                )
            except BaseException:
                own.close()
                raise
        return own, process


def run_parent(settings: RouterSettings) -> None:
    """Run the processes until a signal, and end this process with their exit code."""
    name_process("router parent")
    telemetry.setup("router", level=settings.log_level, pod=settings.pod_name)
    try:
        code = uvloop.run(_supervise(settings))
    except LockstepError as error:
        fail(error.message, settings.termination_log)
    except Exception as error:
        leave_message(f"the router has a defect: {type(error).__name__}; its log has more", settings.termination_log)
        raise
    raise SystemExit(code)


async def _supervise(settings: RouterSettings) -> int:
    check_router_id(settings)
    stop = stop_event()
    tls = RouterTls.load(settings)
    with ExitStack() as held:
        ports = {"port": _port_of(held.enter_context(reserve(settings.host, settings.port, "port")))}
        if settings.grpc_port is not None:
            ports["grpc_port"] = _port_of(held.enter_context(reserve(settings.host, settings.grpc_port, "grpc_port")))
        processes = [
            Process(
                number,
                settings.model_copy(
                    update=ports
                    | {"router_id": f"{settings.router_id}-{number}"}
                    # One of them asks the other routers.
                    | {"console_routers": settings.console_routers if number == 0 else ()}
                ),
            )
            for number in range(settings.processes)
        ]
        answers = JointAnswers(
            settings.router_id,
            processes,
            files.of(settings.console),
            has_others=bool(settings.console_routers),
            has_native_histograms=settings.native_histograms,
        )
        managing = served(settings.management_host, settings.management_port, answers, tls=tls.management_context)
        async with managing as management_port, tls.watched():
            fields = {"host": settings.host, "management_port": management_port, "processes": settings.processes}
            code = await keep_all(processes, stop, fields | ports)
    logger.info("stopped")
    return code


def check_router_id(settings: RouterSettings) -> None:
    """Check that the name is short enough for the number that each process adds to it.

    Raises:
        LockstepError: INVALID_REQUEST, it is too long.
    """
    most = MAX_ROUTER_ID_CHARS - len(f"-{settings.processes - 1}")
    if len(settings.router_id) > most:
        raise invalid("router_id", f"must have at most {most} characters with {settings.processes} processes")


async def keep_all(processes: list[Process], stop: asyncio.Event, fields: dict[str, object]) -> int:
    """Run all processes until a signal, or until one cannot run at all; the exit code.

    When it returns or raises, all processes have drained and ended.
    """
    serving, listening = asyncio.Event(), [asyncio.Event() for _ in processes]
    kept = [
        asyncio.create_task(process.keep(stop, event, serving))
        for process, event in zip(processes, listening, strict=True)
    ]

    async def announce() -> None:
        await asyncio.gather(*(event.wait() for event in listening))
        logger.info("listening", extra=fields)

    announcing, stopping = asyncio.create_task(announce()), asyncio.create_task(stop.wait())
    await asyncio.wait({*kept, stopping}, return_when=asyncio.FIRST_COMPLETED)
    was_asked, ended = stop.is_set(), [task for task in kept if task.done()]
    stop.set()
    for process in processes:
        process.terminate()
    await asyncio.wait(kept)
    for task in (announcing, stopping):
        task.cancel()
    codes = {task: task.result() for task in kept}
    return 0 if was_asked else max(_exit_code(codes[task]) for task in ended)


def _exit_code(code: int) -> int:
    """As shells count: 128 and the signal for a process that one has ended."""
    return code if code >= 0 else 128 - code


def reserve(host: str, port: int, setting: str) -> socket.socket:
    """A socket that holds a port for the processes and never listens.

    Another router of the same user could share the port unnoticed, so it is bound alone first.

    Raises:
        LockstepError: INVALID_REQUEST, the port cannot be used.
    """
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, port))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        holder.close()
        raise cannot_listen(setting, f"{host}:{port}", error.strerror or str(error)) from None
    return holder


def _port_of(holder: socket.socket) -> int:
    """The port that a socket is bound to."""
    return int(holder.getsockname()[1])
