"""The link to a worker: dialled until it answers, dialled again when it breaks, and strict about the protocol."""

import asyncio
import contextlib
import json
import logging
import math

import grpc
import pytest
from lockstep_api.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from lockstep_router.router import Router
from lockstep_router.settings import RouterSettings
from lockstep_router.status import status_body
from lockstep_router.streams.attempt import Attempt, Deadlines
from lockstep_router.streams.journal import Journal
from lockstep_router.text.tokenizer import Tokenizer
from lockstep_router.workers import LinkState
from lockstep_router.workers import link as link_module
from lockstep_router.workers.losses import Loss, Lost
from router_cluster import eventually
from scripted_worker import ScriptedWorker, tokenizer_files

FAST = {"backoff_initial_s": 0.02, "backoff_max_s": 0.1}


@pytest.fixture
async def worker(tmp_path):
    made = ScriptedWorker("w0", tmp_path / "w0.sock")
    yield made
    await made.kill()


class Ignoring:
    """A stream that nothing matters to."""

    def deliver(self, update):
        pass

    def note_start(self):
        pass

    def note_wait(self):
        pass


def new_attempt(journal):
    """An attempt that nothing comes of."""
    return Attempt(
        journal,
        asyncio.get_running_loop().create_future(),
        now=0.0,
        deadlines=Deadlines(first_token_s=30, inter_token_s=30, next_wait_s=30),
        first_wait_s=30,
        events=Ignoring(),
    )


def start_stream(link, stream_id):
    sampling = inference_pb2.Sampling(max_tokens=1)
    journal = Journal(stream_id, "reference", "model-1", [1], sampling, "session")
    submit = journal.next_submit("w0")
    link.start(new_attempt(journal), submit)


@contextlib.asynccontextmanager
async def linked(worker, **settings):
    async with Router(RouterSettings(workers=[worker.target], **(FAST | settings))) as router:
        await eventually(lambda: router.workers.links)
        yield router, router.workers.links[0]


async def test_worker_may_start_after_the_router(worker):
    async with linked(worker) as (_, link):
        await eventually(lambda: link.problem)
        assert link.state is LinkState.CONNECTING
        await worker.start()
        await eventually(lambda: link.state is LinkState.READY)
        assert link.problem == ""


async def test_worker_is_found_again_after_a_restart(worker):
    await worker.start()
    async with linked(worker) as (_, link):
        await eventually(lambda: link.state is LinkState.READY)
        before = link.life
        await worker.kill()
        await eventually(lambda: link.state is LinkState.CONNECTING)
        await worker.restart()
        await eventually(lambda: link.state is LinkState.READY)
        assert link.life > before
        assert worker.tokenizer_calls == 1, "the tokenizer is kept"


@pytest.mark.parametrize(
    ("state", "seen"),
    [
        (worker_pb2.WORKER_STATE_STARTING, LinkState.STARTING),
        (worker_pb2.WORKER_STATE_RESTARTING, LinkState.RESTARTING),
        (worker_pb2.WORKER_STATE_DRAINING, LinkState.DRAINING),
        (worker_pb2.WORKER_STATE_FAILED, LinkState.FAILED),
        (99, LinkState.STARTING),
    ],
)
async def test_state_of_the_worker_is_seen(worker, state, seen):
    await worker.start()
    async with linked(worker) as (router, link):
        await eventually(lambda: link.state is LinkState.READY)
        worker.announce(state=state)
        await eventually(lambda: link.state is seen)
        assert router.unready == "no worker is ready"
        assert not router.workers.ready()


async def test_worker_without_a_readable_tokenizer_gets_no_streams(worker):
    worker.files = worker_pb2.TokenizerFiles(digest="tokenizer-1", tokenizer_json=b"no json")
    await worker.start()
    async with linked(worker) as (_, link):
        await eventually(lambda: worker.tokenizer_calls >= 2)
        assert link.state is LinkState.LOADING
        assert "tokenizer" in link.problem
        worker.files = tokenizer_files()
        await eventually(lambda: link.state is LinkState.READY)


async def test_tokenizer_with_another_digest_is_not_taken(worker):
    worker.files.digest = "another"
    await worker.start()
    async with linked(worker) as (_, link):
        await eventually(lambda: "another" in link.problem)
        assert link.state is LinkState.LOADING


async def test_worker_that_does_not_know_its_model_yet_gets_no_streams(worker):
    known, worker.card = worker.card, worker_pb2.ModelCard()
    await worker.start()
    async with linked(worker) as (router, link):
        await eventually(lambda: link.state is LinkState.LOADING)
        assert not router.workers.models
        worker.card = known
        worker.announce(epoch=2)
        await eventually(lambda: link.state is LinkState.READY)


class Rude(worker_pb2_grpc.WorkerServicer):
    """A peer that opens the stream and then breaks the protocol."""

    def __init__(self, frames):
        self.frames = frames
        self.calls = 0

    async def Serve(self, requests, context):
        self.calls += 1
        for frame in self.frames:
            yield frame


@pytest.mark.parametrize(
    "frames",
    [[], [worker_pb2.WorkerFrame(epoch=1, status=worker_pb2.Status())], [worker_pb2.WorkerFrame()]],
    ids=["nothing", "status first", "empty"],
)
async def test_peer_that_does_not_say_hello_is_left_and_dialled_again(tmp_path, frames):
    rude = Rude(frames)
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(rude, server)
    server.add_insecure_port(f"unix:{tmp_path}/rude.sock")
    await server.start()
    settings = RouterSettings(workers=[f"unix:{tmp_path}/rude.sock"], **FAST)
    async with Router(settings) as router:
        await eventually(lambda: rude.calls >= 2)
        assert router.workers.links[0].state is LinkState.CONNECTING
    await server.stop(0)


def bad_status(**fields):
    return worker_pb2.WorkerFrame(epoch=1, status=worker_pb2.Status(state=worker_pb2.WORKER_STATE_READY, **fields))


def bad_work(**fields):
    ended = worker_pb2.EndedAttempt(stream_id="s", attempt=1, decode=[worker_pb2.RankWork(steps=1, **fields)])
    return worker_pb2.WorkerFrame(epoch=1, ended_attempts=worker_pb2.EndedAttempts(attempts=[ended]))


UNUSABLE = [
    (bad_status(tokens_per_s=math.nan), "tokens_per_s"),
    (bad_status(queue_wait_s=math.inf), "queue_wait_s"),
    (bad_status(queue_wait_per_request_s=1e300), "queue_wait_per_request_s"),
    (bad_status(queue_waits_s={1: -math.inf}), "queue_waits_s"),
    (bad_status(ranks=[worker_pb2.RankHealth(rank=1, compute_s=math.nan)]), "compute_s"),
    (bad_work(idle_s=math.nan), "idle_s"),
    (
        worker_pb2.WorkerFrame(epoch=1, rejected=worker_pb2.Rejected(stream_id="s", retry_after_s=math.nan)),
        "retry_after_s",
    ),
]


@pytest.mark.parametrize(("frame", "field"), UNUSABLE, ids=[field for _, field in UNUSABLE])
async def test_a_number_that_cannot_be_used_counts_as_0_and_disturbs_no_stream(worker, frame, field, caplog):
    caplog.set_level(logging.WARNING, logger="lockstep.router")
    await worker.start()
    async with linked(worker) as (router, link):
        await eventually(lambda: link.is_ready)
        (connection,) = worker.connections
        if frame.HasField("status"):
            worker.status = lambda received: frame  # in each heartbeat
        else:
            connection.put(frame)
            connection.put(frame)
        message = "worker reports a number that cannot be used"
        await eventually(lambda: [each.field for each in caplog.records if each.getMessage() == message] == [field])
        assert link.is_ready
        assert link.queue_wait_s == link.queue_wait_of(1) == 0.0
        json.dumps(status_body(router), allow_nan=False)
        assert set(worker.connections) == {connection}, "it is not dialled again"


async def test_peer_that_never_answers_is_given_up(tmp_path):
    async def swallow(reader, writer):
        await reader.read()
        writer.close()

    calls = []
    server = await asyncio.start_unix_server(lambda r, w: (calls.append(1), swallow(r, w))[1], f"{tmp_path}/mute.sock")
    settings = RouterSettings(workers=[f"unix:{tmp_path}/mute.sock"], connect_timeout_s=0.1, **FAST)
    async with Router(settings) as router:
        await eventually(lambda: len(calls) >= 2)
        assert router.workers.links[0].problem == "no answer in time"
    server.close()


async def test_worker_that_does_not_read_gets_no_more(worker):
    worker.deaf = True
    await worker.start()
    async with linked(worker, max_streams=1) as (_, link):
        await eventually(lambda: link.state is LinkState.READY)
        sampling = inference_pb2.Sampling(max_tokens=1)
        journal = Journal("s", "reference", "model-1", list(range(1 << 20)), sampling, "session")
        sent, lost = 0, []
        while not lost:
            submit = journal.next_submit("w0")
            attempt = new_attempt(journal)
            link.start(attempt, submit)
            sent += 1
            await asyncio.sleep(0.001)
            lost = [attempt.over.result()] if attempt.is_over else []
            link.end(attempt, cancel=False)
            assert sent < 100
        assert lost == [Lost(Loss.UNAVAILABLE)]
        assert link.state is LinkState.READY


async def test_stopping_the_router_hangs_up(worker):
    await worker.start()
    async with linked(worker) as (_, link):
        await eventually(lambda: link.state is LinkState.READY)
    await eventually(lambda: not worker.connections)


async def test_silence_is_measured_in_time_that_the_router_lived(worker):
    await worker.start()
    async with linked(worker, heartbeat_timeout_s=1.0) as (router, link):
        await eventually(lambda: link.state is LinkState.READY)
        # As after a SIGSTOP of the router: a long tick, and no frame was read meanwhile.
        router.workers.clock.advance(3600)
        link.check()
        assert link.state is LinkState.READY


class Unreadable(worker_pb2_grpc.WorkerServicer):
    """A worker whose tokenizer makes the library fail in ways that are no ValueError."""

    def __init__(self, worker):
        self.worker = worker
        self.calls = 0

    async def Tokenizer(self, request, context):
        self.calls += 1
        if self.calls == 1:
            return worker_pb2.TokenizerFiles(digest="tokenizer-1", tokenizer_json=b"[]", tokenizer_config_json=b"[]")
        if self.calls == 2:
            raise RuntimeError("unforeseen")
        return self.worker.files

    async def Serve(self, requests, context):
        await anext(aiter(requests))
        yield self.worker.hello()
        while True:
            yield self.worker.status()
            await asyncio.sleep(0.02)


async def test_tokenizer_is_fetched_again_whatever_went_wrong(tmp_path):
    double = ScriptedWorker("w0", tmp_path / "w0.sock")
    servicer = Unreadable(double)
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    server.add_insecure_port(double.target)
    await server.start()
    async with linked(double) as (_, link):
        await eventually(lambda: link.problem.startswith("tokenizer: "))
        assert link.state is LinkState.LOADING
        await eventually(lambda: link.state is LinkState.READY)
        assert servicer.calls == 3
        assert link.problem == ""
    await server.stop(0)


class Panic(BaseException):
    """What Rust libraries raise when they have a defect: no `Exception`."""


async def test_tokenizer_is_fetched_again_after_a_panic_of_its_library(worker, monkeypatch):
    made = []

    def make(files):
        made.append(files)
        if len(made) == 1:
            raise Panic("index out of bounds")
        return Tokenizer(files)

    monkeypatch.setattr(link_module, "Tokenizer", make)
    await worker.start()
    async with linked(worker) as (_, link):
        await eventually(lambda: link.state is LinkState.READY)
        assert len(made) == 2


@pytest.mark.parametrize("accepts_several", [True, False])
async def test_streams_that_begin_together_are_sent_together_to_a_worker_that_understands_it(worker, accepts_several):
    worker.accepts_several = accepts_several
    await worker.start()
    async with linked(worker) as (_, link):
        await eventually(lambda: link.state is LinkState.READY)
        before = worker.messages
        for number in range(10):
            start_stream(link, f"s{number}")
        await eventually(lambda: len(worker.submits) == 10)
        assert [submit.stream_id for submit in worker.submits] == [f"s{number}" for number in range(10)]
        assert worker.messages - before == (1 if accepts_several else 10)


@pytest.mark.parametrize("counts_received", [True, False])
async def test_status_that_crosses_requests_does_not_make_them_look_known(worker, counts_received):
    worker.counts_received = counts_received
    await worker.start()
    async with linked(worker) as (_, link):
        await eventually(lambda: link.state is LinkState.READY)
        start_stream(link, "s0")
        await eventually(lambda: len(worker.submits) == 1)
        await eventually(lambda: link.facts.sent == 0)
        worker.deaf = True  # its statuses go on
        for number in (1, 2):
            start_stream(link, f"s{number}")
        assert link.facts.sent == 2
        steps = link.status.steps
        await eventually(lambda: link.status.steps > steps + 2)
        # A worker that does not count is believed to have got everything.
        assert link.facts.sent == (2 if counts_received else 0)
        worker.deaf = False
        await eventually(lambda: len(worker.submits) == 3)
        await eventually(lambda: link.facts.sent == 0)
