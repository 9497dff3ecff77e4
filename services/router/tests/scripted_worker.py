"""A worker that follows a script: a real gRPC server with the real protocol, and scripted tokens and faults."""

import asyncio
import bisect
import contextlib
import itertools
import math
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from lockstep_api.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from lockstep_common.prefix_keys import prefix_keys
from lockstep_common.seniority import turn_at
from xxhash import xxh64_intdigest

REPOSITORY = Path(__file__).parents[3]
REFERENCE_MODEL = REPOSITORY / "models" / "reference"
VOCAB_SIZE = 4096
SPECIAL_IDS = 4
_STEP_S = 0.002  # for which the first token of a step waits for the others'
UNKNOWN_FINISH_REASON = 77
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant]"


def token_at(prompt_ids, seed, position):
    """The token that every scripted worker gives at a position: like a real one's, it depends on nothing else."""
    return SPECIAL_IDS + xxh64_intdigest(f"{list(prompt_ids)} {seed} {position}".encode()) % (VOCAB_SIZE - SPECIAL_IDS)


def tokenizer_files(template=TEMPLATE, model=REFERENCE_MODEL):
    return worker_pb2.TokenizerFiles(
        digest="tokenizer-1",
        tokenizer_json=(model / "tokenizer.json").read_bytes(),
        tokenizer_config_json=(model / "tokenizer_config.json").read_bytes(),
        chat_template=template,
    )


def model_card(**changes):
    card = {
        "name": "reference",
        "digest": "model-1",
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "context_length": 256,
        "vocab_size": VOCAB_SIZE,
        "tp": 2,
        "tokenizer_digest": "tokenizer-1",
        "deterministic": True,
        "fingerprint": "numerics-1",
        "created": 1_700_000_000,
    }
    return worker_pb2.ModelCard(**(card | changes))


@dataclass
class Script:
    """What a worker does to the streams that it gets from now on. Numbers count tokens of one attempt."""

    delay_s: float = 0.0
    in_steps: bool = False  # all streams' tokens come at the same times, in one frame, as a real worker's
    die_after: int | None = None
    hang_after: int | None = None
    reject_after: int | None = None
    rejection: worker_pb2.Rejected | None = None
    unknown_finish_after: int | None = None
    stop_after: int | None = None  # positions of the stream, not of the attempt
    skip_at: int | None = None
    noise: bool = False
    batch: int = 1
    columns: bool = True
    token: Callable = token_at
    cached_tokens: int = 0
    caches: bool = False  # prompts, and reports the blocks
    poison: Callable = lambda submit: False
    poison_after: int = 3  # tokens of a poisonous stream's attempt after which the ranks die
    end_position: int | None = None  # of an end without ids
    says_phase: bool = False
    logprob: Callable = lambda token_id: -0.5
    vector: Callable = lambda content: content


class Seats:
    """At most `max_seqs` streams run at a time; the others wait in the order of real workers."""

    def __init__(self, max_seqs):
        self.max_seqs = max_seqs
        self.running = 0
        self.waiting = []
        self._numbers = itertools.count()

    async def enter(self, submit, greeted_at):
        if self.running < self.max_seqs and not self.waiting:
            self.running += 1
            return
        turn = asyncio.get_running_loop().create_future()
        entry = (
            turn_at(greeted_at + submit.arrived_s, submit.priority, has_output=bool(submit.emitted_ids)),
            next(self._numbers),
            turn,
            submit,
        )
        bisect.insort(self.waiting, entry)
        try:
            await turn
        except asyncio.CancelledError:
            if entry in self.waiting:
                self.waiting.remove(entry)
            if turn.done() and not turn.cancelled():
                self.leave()
            raise

    def leave(self):
        self.running -= 1
        while self.waiting and self.running < self.max_seqs:
            *_, turn, _ = self.waiting.pop(0)
            if not turn.done():  # cancelled, and its task does not know yet
                self.running += 1
                turn.set_result(None)


@dataclass
class ScriptedWorker:
    worker_id: str
    path: Path | str  # or host:port
    card: worker_pb2.ModelCard = field(default_factory=model_card)
    files: worker_pb2.TokenizerFiles = field(default_factory=tokenizer_files)
    script: Script = field(default_factory=Script)
    heartbeat_s: float = 0.02
    epoch: int = 1
    state: int = worker_pb2.WORKER_STATE_READY
    queued: int = 0
    max_seqs: int = 1 << 20
    queue_wait_s: float = 0.0
    queue_waits_s: dict = field(default_factory=dict)
    paces: tuple = ((0.0, 0.0), (0.0, 0.0))  # of each rank: what a step computes, and its collectives, in s
    works: dict = field(default_factory=dict)  # of each phase: what each rank does in it, reported at an attempt's end
    queue_wait_per_request_s: float = 0.0
    step_deadline_s: float = 0.0
    on_start: Callable = lambda submit, waiting: None
    deaths: int = 0
    steps: int = 0
    steps_advance: bool = True
    credentials: grpc.ServerCredentials | None = None
    silent: bool = False
    deaf: bool = False
    accepts_several: bool = True
    reports_prefixes: bool = True
    counts_received: bool = True
    watches: list = field(default_factory=list)
    submits: list = field(default_factory=list)
    cancels: list = field(default_factory=list)
    tokenizer_calls: int = 0
    messages: int = 0
    ended_streams: int = 0
    hung_streams: int = 0

    def __post_init__(self):
        self.incarnation = time.time_ns()
        self.seats = Seats(self.max_seqs)
        self._server = None
        self.connections = set()
        self.lost = None
        self.cached = {}  # keys of blocks, in the order in which they came

    @property
    def connected(self):
        """Whether a router has opened a stream."""
        return bool(self.connections)

    @property
    def target(self):
        return f"unix:{self.path}" if isinstance(self.path, Path) else self.path

    async def start(self):
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        worker_pb2_grpc.add_WorkerServicer_to_server(_Servicer(self), self._server)
        if self.credentials is None:
            self._server.add_insecure_port(self.target)
        else:
            self._server.add_secure_port(self.target, self.credentials)
        await self._server.start()
        return self

    def limit(self, max_seqs):
        """Run so many streams at a time from now on."""
        self.max_seqs, self.seats = max_seqs, Seats(max_seqs)

    async def kill(self):
        """As SIGKILL looks from outside: every connection is reset and no process listens."""
        server, self._server = self._server, None
        if server is not None:
            self.break_connections()
            await server.stop(0)

    async def restart(self):
        await self.kill()
        self.incarnation = time.time_ns()
        self.epoch = 1
        self.cached.clear()
        return await self.start()

    def break_connections(self):
        for connection in list(self.connections):
            connection.broken.set()

    def broadcast(self, frame):
        for connection in self.connections:
            connection.outbox.put_nowait(frame)

    def announce(self, state=None, epoch=None):
        """Change state or epoch as the supervisor does: at once, with a new Hello for a new epoch."""
        if epoch is not None:
            self.epoch = epoch
            self.cached.clear()
            self.broadcast(self.hello())
            for connection in self.connections:
                if connection.watches:
                    connection.report(snapshot=True)
        if state is not None:
            self.state = state
        for connection in self.connections:
            connection.outbox.put_nowait(self.status(connection.received))

    def change_prefixes(self, added=(), removed=()):
        """Gain and lose cached blocks, and report it to the routers that ask."""
        for key in removed:
            self.cached.pop(key, None)
        self.cached |= dict.fromkeys(added)
        for connection in self.connections:
            if connection.watches:
                connection.report(added=added, removed=removed)

    def cached_tokens(self, submit):
        """How much of a prompt is cached."""
        keys = prefix_keys(submit.tenant, submit.prompt_ids, len(submit.prompt_ids))
        return 16 * next((count for count, key in enumerate(keys) if key not in self.cached), len(keys))

    def lose_ranks(self, message="rank 1 died"):
        """As the supervisor does: restarting, every live stream rejected, then the next epoch."""
        self.lost = self.batch() if self.script.says_phase else None
        self.announce(state=worker_pb2.WORKER_STATE_RESTARTING)
        for connection in self.connections:
            connection.reject_all(worker_pb2.Rejected(code="worker_lost", message=message, retryable=True))
        self.announce(epoch=self.epoch + 1)
        self.deaths += 1

    def restart_ranks(self):
        """Lose the ranks and have them back soon."""
        self.lose_ranks()
        asyncio.get_running_loop().call_later(0.01, self.announce, worker_pb2.WORKER_STATE_READY)

    def hello(self):
        hello = worker_pb2.Hello(worker_id=self.worker_id, incarnation=self.incarnation, model=self.card)
        hello.accepts_several = self.accepts_several
        return worker_pb2.WorkerFrame(epoch=self.epoch, hello=hello)

    def batch(self):
        """What the ranks run now."""
        suspicions = [submit.suspicion for connection in self.connections for submit in connection.running.values()]
        return worker_pb2.LostBatch(
            streams=len(suspicions),
            suspected=sum(each != worker_pb2.SUSPICION_NONE for each in suspicions),
            on_trial=suspicions.count(worker_pb2.SUSPICION_ON_TRIAL),
        )

    def status(self, received=0):
        ranks = [
            worker_pb2.RankHealth(
                rank=rank,
                pid=1000 + rank,
                state=worker_pb2.RANK_STATE_READY,
                steps=self.steps,
                compute_s=compute_s,
                collective_s=collective_s,
            )
            for rank, (compute_s, collective_s) in enumerate(self.paces)
        ]
        status = worker_pb2.Status(
            state=self.state,
            queued=self.queued + len(self.seats.waiting),
            running=self.seats.running,
            free_seqs=max(0, self.max_seqs - self.seats.running),
            queue_wait_s=self.queue_wait_s,
            queue_waits_s=self.queue_waits_s,
            queue_wait_per_request_s=self.queue_wait_per_request_s,
            step_deadline_s=self.step_deadline_s,
            free_blocks=90,
            total_blocks=100,
            steps=self.steps,
            ranks=ranks,
            pid=999,
            received=received if self.counts_received else None,
            lost=self.lost if self.state == worker_pb2.WORKER_STATE_RESTARTING else None,
        )
        return worker_pb2.WorkerFrame(epoch=self.epoch, status=status)


class _Connection:
    def __init__(self, worker):
        self.worker = worker
        self.greeted_at = time.monotonic()
        self.outbox = asyncio.Queue()
        self.step = None
        self.broken = asyncio.Event()
        self.tasks = {}
        self.attempts = {}
        self.received = 0
        self.running = {}
        self.watches = False
        self.reports = 0

    def report(self, **fields):
        """Send a report about cached blocks."""
        self.reports += 1
        report = worker_pb2.PrefixReport(number=self.reports, **fields)
        self.put(worker_pb2.WorkerFrame(epoch=self.worker.epoch, prefix_report=report))

    def watch(self, watch):
        self.worker.watches.append(watch)
        if self.worker.reports_prefixes:
            self.watches = True
            newest = list(self.worker.cached)[-watch.max_blocks :]
            self.report(snapshot=True, added=newest)

    def put(self, frame):
        if not self.worker.silent:
            self.outbox.put_nowait(frame)

    async def heartbeat(self):
        while True:
            self.worker.steps += self.worker.steps_advance
            self.put(self.worker.status(self.received))
            await asyncio.sleep(self.worker.heartbeat_s)

    async def read(self, requests):
        while self.worker.deaf:
            await asyncio.sleep(0.01)
        async for message in requests:
            while self.worker.deaf:
                await asyncio.sleep(0.01)
            self.worker.messages += 1
            if message.HasField("several"):
                assert self.worker.accepts_several
            for frame in message.several.frames or (message,):
                self.take(frame)

    def take(self, frame):
        match frame.WhichOneof("frame"):
            case "submit":
                self.worker.submits.append(frame.submit)
                self.received += 1
                task = asyncio.create_task(self.stream(frame.submit))
                task.add_done_callback(_complain)
                self.tasks[frame.submit.stream_id] = task
                self.attempts[frame.submit.stream_id] = frame.submit.attempt
            case "prefix_watch":
                self.watch(frame.prefix_watch)
            case "cancel":
                self.worker.cancels.append(frame.cancel)
                if task := self.tasks.pop(frame.cancel.stream_id, None):
                    task.cancel()

    def reject(self, rejection, stream_id, attempt):
        rejected = worker_pb2.Rejected()
        rejected.CopyFrom(rejection)
        rejected.stream_id, rejected.attempt = stream_id, attempt
        self.put(worker_pb2.WorkerFrame(epoch=self.worker.epoch, rejected=rejected))

    def reject_all(self, rejection):
        for stream_id, task in self.tasks.items():
            if not task.done():
                task.cancel()
                self.reject(rejection, stream_id, self.attempts[stream_id])

    def phase(self, submit, phase):
        change = worker_pb2.StreamPhaseChange(stream_id=submit.stream_id, attempt=submit.attempt, phase=phase)
        self.put(worker_pb2.WorkerFrame(epoch=self.worker.epoch, phases=worker_pb2.Phases(streams=[change])))

    def tokens(self, submit, position, ids, finish=0, *, epoch=None, attempt=None, cached_tokens=0):
        wants = submit.sampling.HasField("logprobs")
        logprobs = (
            [_logprobs(token_id, submit.sampling.logprobs, self.worker.script.logprob) for token_id in ids]
            if wants
            else []
        )
        frame = worker_pb2.StreamTokens(
            stream_id=submit.stream_id,
            attempt=submit.attempt if attempt is None else attempt,
            position=position,
            ids=ids,
            logprobs=logprobs,
            finish=finish,
            cached_tokens=cached_tokens,
        )
        tokens = worker_pb2.Tokens()
        says_more = len(ids) != 1 or finish or logprobs or cached_tokens
        if self.worker.script.columns and submit.handle and attempt is None and not says_more:
            tokens.handles.append(submit.handle)
            tokens.positions.append(position)
            tokens.ids.extend(ids)
        else:
            tokens.streams.append(frame)
        frame = worker_pb2.WorkerFrame(epoch=self.worker.epoch if epoch is None else epoch, tokens=tokens)
        if not self.worker.script.in_steps:
            self.put(frame)
        elif self.step is None:
            self.step = frame
            asyncio.get_running_loop().call_later(_STEP_S, self.end_step)
        else:
            self.step.MergeFrom(frame)

    def end_step(self):
        self.put(self.step)
        self.step = None

    def tell_ended(self, submit):
        works = {phase: [worker_pb2.RankWork(**each) for each in ranks] for phase, ranks in self.worker.works.items()}
        ended = worker_pb2.EndedAttempt(stream_id=submit.stream_id, attempt=submit.attempt, **works)
        ended_attempts = worker_pb2.EndedAttempts(attempts=[ended])
        self.put(worker_pb2.WorkerFrame(epoch=self.worker.epoch, ended_attempts=ended_attempts))

    async def stream(self, submit):
        seats = self.worker.seats
        await seats.enter(submit, self.greeted_at)
        try:
            self.worker.on_start(submit, [entry[-1] for entry in seats.waiting])
            if self.worker.script.says_phase:
                self.phase(submit, worker_pb2.STREAM_PHASE_RUNNING)
            self.running[submit.stream_id] = submit
            await self.generate(submit)
        finally:
            if self.running.get(submit.stream_id) is submit:
                del self.running[submit.stream_id]
            seats.leave()
            if self.worker.works:
                self.tell_ended(submit)

    def embed(self, submit):
        """A vector that depends on the text alone."""
        size = self.worker.card.embedding.size
        numbers = [token_at(submit.prompt_ids, 0, position) - 2048.0 for position in range(size)]
        length = math.hypot(*numbers)
        vector = struct.pack(f"<{size}f", *(number / length for number in numbers))
        frame = worker_pb2.StreamTokens(
            stream_id=submit.stream_id,
            attempt=submit.attempt,
            finish=inference_pb2.FINISH_REASON_STOP,
            embedding=self.worker.script.vector(vector),
        )
        self.put(worker_pb2.WorkerFrame(epoch=self.worker.epoch, tokens=worker_pb2.Tokens(streams=[frame])))

    async def generate(self, submit):
        script = self.worker.script
        if submit.embed:
            if not await self.misbehave(submit, 0, 0):
                await asyncio.sleep(script.delay_s)
                self.embed(submit)
            return
        prompt_ids, seed = list(submit.prompt_ids), submit.sampling.seed
        position = first = len(submit.emitted_ids)
        cached_tokens = self.worker.cached_tokens(submit) if script.caches else script.cached_tokens
        limit = submit.sampling.max_tokens
        end = limit if script.stop_after is None else min(limit, script.stop_after)
        finish = inference_pb2.FINISH_REASON_LENGTH if end == limit else inference_pb2.FINISH_REASON_STOP
        while position < end:
            given = position - first
            if await self.misbehave(submit, position, given):
                return
            if script.delay_s:
                await asyncio.sleep(script.delay_s - (time.monotonic() % script.delay_s if script.in_steps else 0))
            if script.noise:
                self.make_noise(submit, position)
            count = min(script.batch, end - position)
            ids = [script.token(prompt_ids, seed, at) for at in range(position, position + count)]
            if script.skip_at == given:
                position += count
                continue
            self.tokens(submit, position, ids, finish if position + count == end else 0, cached_tokens=cached_tokens)
            if script.caches and not given:
                keys = prefix_keys(submit.tenant, submit.prompt_ids, len(submit.prompt_ids))
                self.worker.change_prefixes([key for key in keys if key not in self.worker.cached])
                cached_tokens = 0
            position += count
            await asyncio.sleep(0)
        self.worker.ended_streams += 1

    async def misbehave(self, submit, position, given):
        """Do what the script wants after `given` tokens of the attempt; True if the attempt ends with that."""
        script = self.worker.script
        if script.die_after is not None and given >= script.die_after:
            self.broken.set()
            return True
        if script.hang_after is not None and given >= script.hang_after:
            self.worker.hung_streams += 1
            await asyncio.Event().wait()
        if script.poison(submit) and given >= script.poison_after:
            self.worker.restart_ranks()
            return True
        if script.end_position is not None and given:
            self.tokens(submit, script.end_position, [], inference_pb2.FINISH_REASON_STOP)
            return True
        if script.unknown_finish_after is not None and given >= script.unknown_finish_after:
            self.tokens(submit, position, [], UNKNOWN_FINISH_REASON)
            return True
        if script.rejection is not None and given >= (script.reject_after or 0):
            self.reject(script.rejection, submit.stream_id, submit.attempt)
            return True
        return False

    def make_noise(self, submit, position):
        """Frames that a router must not take."""
        wrong = [5, 6, 7]
        self.tokens(submit, position, wrong, attempt=submit.attempt - 1)
        self.tokens(submit, position, wrong, epoch=self.worker.epoch - 1)
        if position:
            self.tokens(submit, position - 1, wrong[:1])
        stranger = worker_pb2.Submit(stream_id="nobody", attempt=1)
        self.tokens(stranger, position, wrong)


def _complain(task):
    if not task.cancelled() and task.exception() is not None:
        print(f"the script of a worker failed: {task.exception()!r}", file=sys.stderr)


def _logprobs(token_id, top, logprob):
    alternatives = [inference_pb2.TokenLogprob(id=SPECIAL_IDS + n, logprob=-1.5 - n) for n in range(top)]
    return inference_pb2.Logprobs(
        chosen=inference_pb2.TokenLogprob(id=token_id, logprob=logprob(token_id)), top=alternatives
    )


class _Servicer(worker_pb2_grpc.WorkerServicer):
    def __init__(self, worker):
        self.worker = worker

    async def Tokenizer(self, request, context):
        self.worker.tokenizer_calls += 1
        return self.worker.files

    async def Serve(self, requests, context) -> AsyncIterator:
        hello = await anext(aiter(requests))
        assert hello.WhichOneof("frame") == "hello"
        connection = _Connection(self.worker)
        yield self.worker.hello()
        self.worker.connections.add(connection)
        tasks = [asyncio.create_task(connection.read(requests)), asyncio.create_task(connection.heartbeat())]
        broken = asyncio.create_task(connection.broken.wait())
        getting = asyncio.create_task(connection.outbox.get())
        try:
            while True:
                await asyncio.wait({getting, broken}, return_when=asyncio.FIRST_COMPLETED)
                if getting.done():
                    yield getting.result()
                    getting = asyncio.create_task(connection.outbox.get())
                elif broken.done():
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
        finally:
            self.worker.connections.discard(connection)
            for task in [*tasks, broken, getting, *connection.tasks.values()]:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, broken, *connection.tasks.values(), return_exceptions=True)
