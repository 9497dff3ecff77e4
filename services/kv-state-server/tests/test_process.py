"""The state server as a process: how it starts, drains and ends, and what it does while its Redis does not answer."""

import signal
import socket
import subprocess
import sys
import time

import grpc
import pytest
from backends import PATIENCE_S, eventually
from forged_logs import assert_only_own_lines, say_forged_goodbye
from lockstep_api.v1 import state_pb2
from lockstep_common.ports import free_port
from lockstep_state.settings import StateSettings
from redis_server import RedisServer
from state_process import dialled, ended, running, start
from test_journal_service import OK, append_one, piece, reading, record
from test_kv_service import get, header, key, put
from test_names_service import acquire, bind, worker_of

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
DEADLINE_S = 5.0
"""Of calls while Redis does not answer: ten times what the state server waits for it."""


@pytest.fixture
def listen(tmp_path):
    return f"unix:{tmp_path}/state"


async def test_sigterm_lets_calls_end_and_exits_with_0(listen):
    content = bytes(1000)
    with running(listen, "--drain-timeout-s", str(PATIENCE_S)) as process:
        async with dialled(listen) as client:
            call = client.kv.Put()
            await call.write(
                state_pb2.PutBlocksRequest(tenant=client.tenant, header=header("a", content), data=content[:10])
            )
            assert await worker_of(client) == ""  # the server has read what came before on this connection
            process.send_signal(signal.SIGTERM)

            async def is_refused():
                async with dialled(listen) as other:
                    try:
                        await worker_of(other)
                    except grpc.aio.AioRpcError as error:
                        return error.code() == UNAVAILABLE
                return False

            await eventually(is_refused)
            assert process.poll() is None
            await call.write(state_pb2.PutBlocksRequest(data=content[10:]))
            await call.done_writing()
            assert list((await call).outcomes) == [state_pb2.PUT_OUTCOME_STORED]
        assert process.wait(PATIENCE_S) == 0


def test_a_peer_cannot_write_lines_into_the_log(listen):
    with running(listen) as process:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(listen.removeprefix("unix:"))
            say_forged_goodbye(peer)
        process.terminate()
        code, said = ended(process)
    assert code == 0
    assert_only_own_lines(said)


async def test_calls_that_do_not_end_are_ended_after_the_drain(listen):
    with running(listen, "--drain-timeout-s", "0.3") as process:
        async with dialled(listen) as client:
            call = client.kv.Put()
            await call.write(state_pb2.PutBlocksRequest(tenant=client.tenant, header=header("a", b"ab"), data=b"a"))
            assert await worker_of(client) == ""
            process.send_signal(signal.SIGTERM)
            with pytest.raises((grpc.aio.AioRpcError, grpc.aio.UsageError)):
                await call
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("failure", ["killed", "frozen"])
async def test_without_redis_calls_fail_typed_and_in_time_and_work_again_after(listen, tmp_path, failure):
    redis = RedisServer(tmp_path / "redis")
    # Long enough for a busy machine while Redis answers, and well below the deadline.
    flags = ("--store", redis.address, "--store-timeout-s", "0.5", "--store-batch-timeout-s", "0.5")
    try:
        with running(listen, *flags) as process:
            async with dialled(listen) as client:
                await eventually(lambda: _works(client))
                redis.kill() if failure == "killed" else redis.freeze()
                began = time.monotonic()
                assert await _statuses(client) == {UNAVAILABLE}
                result = await append_one(client, record=record())
                assert result.outcome == state_pb2.WRITE_OUTCOME_UNAVAILABLE
                assert time.monotonic() - began < 6 * DEADLINE_S
                redis.start() if failure == "killed" else redis.thaw()
                await eventually(lambda: _works(client))
                assert process.poll() is None
    finally:
        redis.thaw()
        redis.kill()


async def _works(client):
    """Whether each service does its work."""
    content = b"content"
    try:
        opened = await append_one(client, record=record(), pieces=[piece(0, 0, 5)])
        bound = await bind(client, "w1")
        granted = await acquire(client, "a")
        stored = await put(client, (header("a", content), content))
        found = await get(client, key("a"))
        stream = await reading(client)
    except grpc.aio.AioRpcError as error:
        if error.code() not in (UNAVAILABLE, grpc.StatusCode.NOT_FOUND):
            raise
        return False
    done = opened.outcome == OK and bound.bound and granted.granted
    return done and stored == [state_pb2.PUT_OUTCOME_STORED] and found == {0: content} and stream.epoch == 1


async def _statuses(client):
    """How one call of each service ends, each with its deadline."""
    content = b"content"
    calls = (
        reading(client),
        worker_of(client),
        acquire(client, "a"),
        put(client, (header("a", content), content)),
        get(client, key("a")),
    )
    codes = set()
    for call in calls:
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        codes.add(caught.value.code())
        assert time.monotonic() - began < DEADLINE_S
    return codes


@pytest.mark.parametrize("kind", ["port", "socket"])
def test_a_taken_address_ends_with_2_and_a_sentence(tmp_path, kind):
    path = str(tmp_path / "taken")
    with socket.socket(socket.AF_UNIX if kind == "socket" else socket.AF_INET) as taken:
        taken.bind(path if kind == "socket" else ("127.0.0.1", 0))
        taken.listen()
        address = f"unix:{path}" if kind == "socket" else f"127.0.0.1:{taken.getsockname()[1]}"
        code, output = ended(start("--listen", address))
    assert code == 2
    assert "listen" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("flag", "content"),
    [("--store-password-file", None), ("--store-password-file", ""), ("--encryption-key-file", "secret-but-no-key")],
)
def test_a_file_that_cannot_be_used_ends_with_2_and_names_its_setting(tmp_path, listen, flag, content):
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    store = f"redis://127.0.0.1:{free_port()}/0"
    code, output = ended(start("--listen", listen, "--store", store, flag, str(path)))
    assert code == 2
    assert flag.removeprefix("--").replace("-", "_") in output
    assert "secret-but" not in output
    assert "Traceback" not in output


def test_the_reason_is_left_as_termination_message(tmp_path, listen):
    file = tmp_path / "message"
    file.touch()
    flags = ("--encryption-key-file", "/none", "--store", "redis://127.0.0.1:1/0", "--termination-log", str(file))
    assert ended(start("--listen", listen, *flags))[0] == 2
    assert "encryption_key_file" in file.read_text()


def test_help_describes_every_setting():
    help_text = subprocess.run(
        [sys.executable, "-m", "lockstep_state", "--help"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    for name in StateSettings.model_fields:
        assert f"--{name.replace('_', '-')} " in help_text or f"--{name.replace('_', '-')} |" in help_text, name


def test_it_listens_on_a_port():
    with running(f"127.0.0.1:{free_port()}") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_what_the_event_loop_waits_for_does_not_hold_up_the_end(listen):
    """Such as a look-up of Redis' name without a DNS server that answers."""
    code = (
        "import asyncio, sys, time; from lockstep_state import server; run = server.run\n"
        "async def busy(*given):\n"
        "    asyncio.get_running_loop().run_in_executor(None, time.sleep, 600); print('busy', flush=True)\n"
        "    await run(*given)\n"
        "server.run = busy; server.main(['--management-port', '0', '--listen', sys.argv[1]])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, listen], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "busy\n"
    process.send_signal(signal.SIGTERM)
    code, said = ended(process)
    assert (code, '"message":"stopped"' in said) == (0, True)
