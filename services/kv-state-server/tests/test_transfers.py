"""Blocks that are moved have so many bytes at a time, whoever asks for how many of whatever size."""

import asyncio
import contextlib
import re
from pathlib import Path

import grpc
import pytest
import state_process
from backends import PATIENCE_S, eventually
from lockstep_api.v1 import state_pb2
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.telemetry import REGISTRY
from lockstep_state.services.transfers import Transfers
from state_serving import served
from test_kv_service import STORED, get, header, key, put

MIB = 1 << 20
LARGE = 8 * MIB
"""A block of 16 tokens of a model of 7B without grouped heads, in half precision."""
BLOCKS = 6
CALLERS = 16


def large(number):
    return bytes([number]) * LARGE


def memory_of(process, field):
    """Bytes of a process, from /proc: VmRSS now, VmHWM at most."""
    return int(re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text(), re.M)[1]) * 1024


def ask_for_all(client):
    keys = [key(number) for number in range(BLOCKS)]
    return client.kv.Get(state_pb2.GetBlocksRequest(tenant=client.tenant, keys=keys))


@contextlib.asynccontextmanager
async def slow_callers(client, count):
    """Calls that have asked for all blocks, and read nothing yet."""
    calls = [ask_for_all(client) for _ in range(count)]
    await asyncio.gather(*(call.initial_metadata() for call in calls))
    try:
        yield calls
    finally:
        for call in calls:
            call.cancel()


async def read_all(call):
    found = {}
    async for message in call:
        found.setdefault(message.index, bytearray()).extend(message.data)
    return found == {number: large(number) for number in range(BLOCKS)}


async def read_patiently(client, call):
    """Read all; ask again if others' blocks took so long, on a slow machine, that there was no room in time."""
    while True:
        try:
            return await read_all(call)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            call = ask_for_all(client)


@pytest.mark.slow
async def test_memory_of_large_blocks_is_bounded(tmp_path, store):
    """Sixteen callers that want 48 MiB each, eight that put: their blocks together would be more than 512 MiB."""
    listen = f"unix:{tmp_path}/state"
    flags = ("--store", store, "--max-transfer-bytes", str(32 * MIB), "--store-batch-timeout-s", "20")
    patience = ("--transfer-timeout-s", str(PATIENCE_S), "--max-transfers", str(2 * CALLERS))
    with state_process.running(listen, *flags, *patience) as process:
        async with state_process.dialled(listen) as client:
            for number in range(BLOCKS):
                assert await put(client, (header(number, large(number)), large(number))) == [STORED]
            before = memory_of(process, "VmRSS")
            async with slow_callers(client, CALLERS) as calls:
                await asyncio.sleep(0.5)
                assert all(await asyncio.gather(*(read_patiently(client, call) for call in calls)))
            again = [put(client, (header(number, large(number)), large(number))) for number in range(BLOCKS)]
            assert await asyncio.gather(*again) == [[STORED]] * BLOCKS
            grown = memory_of(process, "VmHWM") - before
            print(f"from {before / MIB:.0f} MiB by {grown / MIB:.0f} MiB")
    assert grown < 160 * MIB


async def test_the_bytes_that_are_moved_are_counted(tmp_path):
    async with served(tmp_path, max_transfer_bytes=20 * MIB, max_memory_bytes=128 * MIB) as client:
        for number in range(BLOCKS):
            assert await put(client, (header(number, large(number)), large(number))) == [STORED]
        async with slow_callers(client, 4) as calls:
            await eventually(async_(lambda: moved() > 2 * LARGE))
            assert moved() <= 20 * MIB
            assert all(await asyncio.gather(*(read_patiently(client, call) for call in calls)))
        await eventually(async_(lambda: moved() == 0))


async def test_who_waits_too_long_for_room_is_refused_and_a_block_that_is_larger_is_moved_alone(tmp_path):
    async with served(tmp_path, max_transfer_bytes=MIB, max_memory_bytes=128 * MIB) as client:
        for number in range(BLOCKS):
            assert await put(client, (header(number, large(number)), large(number))) == [STORED]
        async with slow_callers(client, 1):
            await eventually(async_(lambda: moved() == MIB))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await get(client, key(0))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "max_transfer_bytes" in refused.value.details()
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await read_all(
                    client.kv.Get(state_pb2.GetBlocksRequest(tenant=client.tenant, keys=[key(0)]), timeout=0.5)
                )
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await get(client, key(0)) == {0: large(0)}


def moved():
    return REGISTRY.get_sample_value("lockstep_state_transfer_bytes")


def async_(holds):
    async def asked():
        return holds()

    return asked


async def hold(transfers, size_bytes, order, name):
    async with transfers.room(size_bytes):
        order.append(name)
        await asyncio.sleep(0)


async def test_room_is_given_in_the_order_of_those_that_wait():
    transfers, order = Transfers(8, 100, PATIENCE_S), []
    async with transfers.room(60):
        waiting = [asyncio.create_task(hold(transfers, size, order, size)) for size in (80, 10, 500, 20)]
        await asyncio.sleep(0.05)
        assert order == [], "the small ones do not overtake"
    await asyncio.gather(*waiting)
    assert order == [80, 10, 500, 20]
    assert moved() == 0


async def test_those_that_give_up_leave_the_room_to_others():
    transfers, order = Transfers(8, 100, PATIENCE_S), []
    async with transfers.room(60):
        first = asyncio.create_task(hold(transfers, 80, order, "first"))
        second = asyncio.create_task(hold(transfers, 40, order, "second"))
        await asyncio.sleep(0.05)
        first.cancel()
        await second
        admitted = asyncio.create_task(hold(transfers, 80, order, "admitted"))
        await asyncio.sleep(0.05)
    admitted.cancel()  # in the moment in which there is room for it
    await asyncio.gather(first, admitted, return_exceptions=True)
    assert order == ["second"]
    assert moved() == 0


async def test_waiting_for_room_ends():
    transfers = Transfers(8, 100, 0.05)
    async with transfers.room(60):
        with pytest.raises(LockstepError) as refused:
            await hold(transfers, 80, [], "")
        assert refused.value.code is ErrorCode.OVERLOADED
        await hold(transfers, 40, [], "")
    assert moved() == 0
