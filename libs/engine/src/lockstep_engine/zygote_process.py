"""The supervisor's end of the zygote: starts it, and has it fork, kill and reap ranks."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys

from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_engine.control import (
    MAX_CONTROL_BYTES,
    Fork,
    Forked,
    KillAll,
    Killed,
    RankDescriptors,
    decode_zygote_message,
    encode_control,
    send_fork,
)
from lockstep_engine.group_settings import GroupSettings

FORK_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 15.0


class ZygoteProcess:
    """One zygote at a time. Its methods must not be awaited at once: each reads the next answer."""

    def __init__(self, settings: GroupSettings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        """Set once the zygote is ready."""
        self._has_ranks = False
        """Whether there are ranks that have not been reaped."""

    async def ensure(self) -> None:
        """Start one if none runs.

        Raises:
            LockstepError: it has died.
            TimeoutError: it did not become ready; the error says what was waited for, and what to look at.
        """
        if self._socket is None or self._process is None or self._process.poll() is not None:
            await self._start()  # also if it did not become ready: that one is killed first

    async def fork(self, message: Fork, descriptors: RankDescriptors) -> int:
        """Start a rank; returns its pid. The descriptors stay the caller's to close. Raises as `ensure` does."""
        assert self._socket is not None
        self._has_ranks = True  # already: after a timeout, too, there may be one
        send_fork(self._socket, message, descriptors)
        rank = message.spec.rank
        late = (
            f"did not start rank {rank} within {FORK_TIMEOUT_S:g} s; see whether the machine has memory and CPU for it"
        )
        answer = decode_zygote_message(await self._receive(self._socket, FORK_TIMEOUT_S, late))
        assert isinstance(answer, Forked)
        return answer.pid

    async def reap(self) -> dict[int, str] | None:
        """Kill and reap all ranks, and the zygote if it does not answer.

        Returns:
            How each ended: a signal's name or an exit code. None: there were no ranks, or it is not known.
        """
        if not self._has_ranks:
            return None
        self._has_ranks = False
        if self._socket is None or self._process is None or self._process.poll() is not None:
            return None
        with contextlib.suppress(OSError, LockstepError, TimeoutError):
            await self._loop.sock_sendall(self._socket, encode_control(KillAll()))
            while True:
                data = await self._receive(self._socket, _KILL_TIMEOUT_S, "did not end its ranks")
                answer = decode_zygote_message(data)
                if isinstance(answer, Killed):
                    return {rank: _describe(status) for rank, status in answer.statuses.items()}
        await self.end()  # it did not answer
        return None

    async def end(self) -> None:
        """Kill the zygote, if there is one. The kernel then kills its ranks."""
        if self._process is None:
            return
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._process.kill()
        await self._loop.run_in_executor(None, self._process.wait)
        self._process = None

    async def _start(self) -> None:
        await self.end()
        config = self._settings.spec.config
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - returns when the process exists
                [sys.executable, "-c", self._settings.zygote, str(theirs.fileno()), config.label, str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **self._settings.environment},
                stdin=subprocess.DEVNULL,
            )
        ours.setblocking(False)
        late = f"was not ready within start_timeout_s = {config.start_timeout_s:g} s; see what keeps CPU and disk busy"
        await self._receive(ours, config.start_timeout_s, late)
        self._socket = ours

    async def _receive(self, sock: socket.socket, timeout_s: float, late: str) -> bytes:
        """The zygote's next answer. `late`: what to say of it if none comes in time."""
        try:
            async with asyncio.timeout(timeout_s):
                data = await self._loop.sock_recv(sock, MAX_CONTROL_BYTES)
        except TimeoutError:
            raise TimeoutError(f"the process that forks ranks {late}") from None
        if not data:
            raise LockstepError(ErrorCode.INTERNAL, "the process that forks ranks has died; its error is on stderr")
        return data


def _describe(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit code {os.WEXITSTATUS(status)}"
