import asyncio

from lockstep_api.v1 import worker_pb2
from lockstep_worker.outbox import Outbox


def status(steps: int, epoch: int = 1) -> worker_pb2.WorkerFrame:
    return worker_pb2.WorkerFrame(epoch=epoch, status=worker_pb2.Status(steps=steps))


def tokens(position: int, epoch: int = 1) -> worker_pb2.WorkerFrame:
    update = worker_pb2.StreamTokens(position=position)
    return worker_pb2.WorkerFrame(epoch=epoch, tokens=worker_pb2.Tokens(streams=[update]))


def hello(epoch: int) -> worker_pb2.WorkerFrame:
    return worker_pb2.WorkerFrame(epoch=epoch, hello=worker_pb2.Hello())


async def drained(outbox: Outbox) -> list[worker_pb2.WorkerFrame]:
    outbox.close()
    return [frame async for frame in outbox.frames()]


async def test_frames_keep_their_order():
    outbox = Outbox(10)
    frames = [hello(1), tokens(1), tokens(2)]
    for frame in frames:
        outbox.put(frame)
    assert await drained(outbox) == frames


async def test_only_the_newest_status_waits_and_a_backlog_does_not_delay_it():
    outbox = Outbox(10)
    outbox.put(tokens(1))
    outbox.put_status(status(1))
    outbox.put(tokens(2))
    outbox.put_status(status(2))
    assert await drained(outbox) == [tokens(1), status(2), tokens(2)]


async def test_a_status_does_not_overtake_the_hello_of_its_epoch():
    outbox = Outbox(10)
    outbox.put_status(status(7, epoch=1))
    outbox.put(hello(2))
    outbox.put_status(status(0, epoch=2))
    assert await drained(outbox) == [status(7, epoch=1), hello(2), status(0, epoch=2)]


async def test_a_status_of_another_state_does_not_overtake_what_came_before():
    outbox = Outbox(10)
    ready, lost = status(7), status(7)
    lost.status.state = worker_pb2.WORKER_STATE_RESTARTING
    outbox.put_status(ready)
    outbox.put(tokens(1))
    outbox.put_status(lost)
    assert await drained(outbox) == [ready, tokens(1), lost]


async def test_a_status_that_was_taken_is_not_changed():
    outbox = Outbox(10)
    frames = outbox.frames()
    outbox.put_status(status(1))
    first = await anext(frames)
    outbox.put_status(status(2))
    assert (first, await anext(frames)) == (status(1), status(2))
    await frames.aclose()


async def test_a_reader_that_waits_is_woken():
    outbox = Outbox(10)
    frames = outbox.frames()
    waiting = asyncio.ensure_future(anext(frames))
    await asyncio.sleep(0.01)
    outbox.put(tokens(1))
    assert await asyncio.wait_for(waiting, 10) == tokens(1)
    await frames.aclose()


async def test_overflow_drops_everything_for_good():
    outbox = Outbox(2)
    for position in range(3):
        outbox.put(tokens(position))
    assert outbox.overflowed.is_set()
    outbox.put(tokens(4))
    assert await drained(outbox) == []


async def test_large_frames_overflow_by_their_bytes():
    """The widest ones, of log probabilities or embeddings, have megabytes."""
    size = tokens(1).ByteSize()
    outbox = Outbox(1000, max_bytes=2 * size)
    for position in range(1, 4):
        outbox.put(tokens(position))
    assert not outbox.overflowed.is_set()
    outbox.put(tokens(4))
    assert outbox.overflowed.is_set()
    assert await drained(outbox) == []


async def test_bytes_that_were_taken_count_no_longer():
    size = tokens(1).ByteSize()
    outbox = Outbox(1000, max_bytes=3 * size)
    frames = outbox.frames()
    for position in range(1, 50):
        outbox.put(tokens(position))
        assert not outbox.overflowed.is_set()
        if position > 2:
            await anext(frames)
    await frames.aclose()


async def test_a_frame_that_waits_for_no_other_is_never_too_large():
    outbox = Outbox(1000, max_bytes=1)
    outbox.put(tokens(1))
    assert await drained(outbox) == [tokens(1)]


async def test_statuses_of_one_epoch_never_overflow():
    outbox = Outbox(1)
    for step in range(100):
        outbox.put_status(status(step))
    assert not outbox.overflowed.is_set()
    assert await drained(outbox) == [status(99)]
