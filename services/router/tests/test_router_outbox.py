"""Frames for a worker go out in order, together if they wait together and the worker understands that."""

import asyncio

import pytest
from lockstep_api.v1 import worker_pb2
from lockstep_router.workers.outbox import Outbox
from lockstep_router.workers.wire import cancel_frame, several_frames, submit_frame


def cancel(number, padding=0):
    return cancel_frame(worker_pb2.Cancel(stream_id=f"{number}{'x' * padding}", attempt=number))


async def taken(outbox, *, several):
    """Every message, as the attempts that it names."""
    messages = []
    while True:
        try:
            async with asyncio.timeout(0.01):
                message = worker_pb2.RouterFrame.FromString(await outbox.take(several=several))
        except TimeoutError:
            return messages
        frames = message.several.frames if message.HasField("several") else [message]
        messages.append([frame.cancel.attempt for frame in frames])


@pytest.mark.parametrize(
    ("several", "frames", "messages"),
    [
        (True, [], []),
        (True, [cancel(1)], [[1]]),
        (True, [cancel(1), cancel(2), cancel(3)], [[1, 2, 3]]),
        (False, [cancel(1), cancel(2)], [[1], [2]]),
        (True, [cancel(1, 200_000), cancel(2, 200_000), cancel(3)], [[1, 2], [3]]),
        (True, [cancel(number) for number in range(1, 100)], [list(range(1, 65)), list(range(65, 100))]),
    ],
)
async def test_messages(several, frames, messages):
    outbox = Outbox(1000)
    assert all(outbox.put(frame) for frame in frames)
    assert await taken(outbox, several=several) == messages


async def test_a_full_outbox_takes_nothing_until_it_is_cleared():
    outbox = Outbox(2)
    assert [outbox.put(cancel(number)) for number in range(3)] == [True, True, False]
    outbox.clear()
    assert outbox.put(cancel(4))
    assert await taken(outbox, several=True) == [[4]]


async def test_a_lone_frame_is_sent_as_it_is():
    outbox = Outbox(2)
    outbox.put(cancel(1))
    assert await outbox.take(several=True) == cancel(1)


async def test_a_cancelled_taker_takes_nothing():
    outbox = Outbox(2)
    taker = asyncio.create_task(outbox.take(several=True))
    await asyncio.sleep(0)
    outbox.put(cancel(1))
    taker.cancel()
    await asyncio.gather(taker, return_exceptions=True)
    outbox.put(cancel(2))
    assert await taken(outbox, several=True) == [[1, 2]]


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 20_000, 3_000_000])
def test_frames_are_those_of_protobuf(size):
    submit = worker_pb2.Submit(stream_id="s", attempt=1, prompt_ids=range(size), arrived_s=-0.5)
    request = worker_pb2.Cancel(stream_id="x" * size, attempt=2)
    frames = [worker_pb2.RouterFrame(submit=submit), worker_pb2.RouterFrame(cancel=request)]
    assert [submit_frame(submit), cancel_frame(request)] == [frame.SerializeToString() for frame in frames]
    several = worker_pb2.RouterFrame(several=worker_pb2.RouterFrames(frames=frames))
    assert several_frames([submit_frame(submit), cancel_frame(request)]) == several.SerializeToString()
