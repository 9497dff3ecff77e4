"""A model of the inference worker: epochs, heartbeats, a queue, steps, drains and deaths, without an engine.

It follows `lockstep_worker.worker` in what it sends and when: Hello and Status on connection, Hello before the first
Status of a new epoch, rejections for what it cannot run, later attempts that replace earlier ones. On top, it can
misbehave as a script says: send what an old attempt or an old life sent, twice, too late or not at all.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from lockstep_api.v1 import worker_pb2
from lockstep_common.errors import ErrorCode
from lockstep_common.seniority import turn_at

from simulated import model
from simulated.kernel import Event, Kernel
from simulated.network import Connection

_HEARTBEAT_S = 0.1
_CHUNK = 64
"""Tokens of a prompt in one step."""

STEP_DEADLINE_S = 1.0
"""Longest step before the supervisor restarts the ranks."""

_AFTER_POISON = 2
"""Tokens of a poisonous stream's attempt after which the ranks die."""


@dataclass
class Mischief:
    """Frames that a worker should not send, each with a probability for each Tokens frame."""

    old_attempt: float = 0.0
    old_epoch: float = 0.0
    twice: float = 0.0
    gap: float = 0.0
    """One stream's tokens are left out, and later ones follow."""
    loss: float = 0.0
    """The worker forgets one stream."""
    malformed: float = 0.0
    preempts: float = 0.0


@dataclass(eq=False)
class Live:
    """One attempt of a stream on this worker."""

    connection: Connection
    submit: worker_pb2.Submit
    arrived_at: float
    number: int
    tokens: model.Tokens
    first: int
    position: int
    left_of_prompt: int
    began_at: float = 0.0
    deadline: Event | None = None

    @property
    def key(self) -> tuple[int, str]:
        return (id(self.connection), self.submit.stream_id)

    @property
    def turn(self) -> tuple[float, int]:
        """Waiting streams run in the order of real workers."""
        has_output = bool(self.submit.emitted_ids)
        return (turn_at(self.arrived_at, self.submit.priority, has_output=has_output), self.number)


@dataclass
class Plan:
    """What a worker is like."""

    max_seqs: int = 8
    step_s: float = 0.02
    most_per_step: int = 2
    """Tokens that one step may give a stream."""
    restart_s: float = 0.5
    """From the loss of the ranks until they are ready."""


@dataclass
class Worker:
    """One worker process."""

    kernel: Kernel
    rng: Random
    worker_id: str
    target: str
    incarnation: int
    plan: Plan = field(default_factory=Plan)
    mischief: Mischief = field(default_factory=Mischief)
    card: worker_pb2.ModelCard = field(default_factory=model.card)
    on_submit: Callable[[Live, "Worker"], None] = lambda _live, _worker: None
    on_struck: Callable[[Live, "Worker"], None] = lambda _live, _worker: None
    """Called for each stream that a fault takes away from it."""

    def __post_init__(self) -> None:
        self.epoch = 1
        self.state = worker_pb2.WORKER_STATE_READY
        self.is_listening = self.is_reachable = True
        self.is_stopped = self.is_hung = self.is_draining = False
        self.slowness = 1.0
        self.connections: dict[Connection, float] = {}
        """With the moment at which each RouterHello arrived."""
        self.received: dict[Connection, int] = {}
        """Submits that have arrived on each."""
        self.lost: worker_pb2.LostBatch | None = None
        """What the ranks ran when they were lost, while they are started again."""
        self.live: dict[tuple[int, str], Live] = {}
        self.running: list[Live] = []
        self.waiting: list[Live] = []
        self.accepts_several = self.rng.random() < 0.7  # the others are of an older version
        self.steps = 0
        self.thawed_at = 0.0
        self._numbers = 0
        self._mean_s = 0.5
        """Seconds that a stream takes, on average."""
        self._step: Event | None = None
        self._step_began_at = 0.0
        self._sent: list[tuple[Connection, worker_pb2.WorkerFrame]] = []
        """Some frames of the past, which mischief sends again."""
        self._beat()

    # The network's side.

    def on_hello(self, connection: Connection, _hello: worker_pb2.RouterHello) -> None:
        self.connections[connection] = self.kernel.now
        self.received[connection] = 0
        connection.send(self._hello())
        connection.send(self._status(connection))

    def on_frame(self, connection: Connection, frame: worker_pb2.RouterFrame) -> None:
        if connection not in self.connections:
            return
        match frame.WhichOneof("frame"):
            case "submit":
                self.received[connection] += 1
                self._submit(connection, frame.submit)
            case "cancel":
                live = self.live.get((id(connection), frame.cancel.stream_id))
                if live is not None and live.submit.attempt == frame.cancel.attempt:
                    self._remove(live)

    def on_end(self, connection: Connection) -> None:
        if self.connections.pop(connection, None) is not None:
            del self.received[connection]
            for live in [each for each in self.live.values() if each.connection is connection]:
                self.on_struck(live, self)
                self._remove(live)

    def tokenizer(self, _request: worker_pb2.TokenizerRequest) -> worker_pb2.TokenizerFiles:
        return model.tokenizer_files()

    # Its life.

    def die(self, *, silently: bool = False) -> None:
        """End the process: connections are reset, or, if its machine is lost, no peer hears anything."""
        self.is_listening = False
        self.is_reachable = not silently
        self._end_step()
        for live in list(self.live.values()):
            self.on_struck(live, self)
            self._remove(live)
        if not silently:
            self._hang_up()

    def lose_ranks(self, message: str, *, by_stream: bool = False) -> None:
        """The ranks die, by a fault or by a stream: every stream is rejected, and the next epoch begins."""
        if self.state != worker_pb2.WORKER_STATE_READY or not self.is_listening:
            return
        self.kernel.trace("ranks", self.worker_id, self.epoch, message)
        self.is_hung = False
        self._end_step()
        self.state = worker_pb2.WORKER_STATE_RESTARTING
        suspicions = [live.submit.suspicion for live in self.running]
        self.lost = worker_pb2.LostBatch(
            streams=len(suspicions),
            suspected=sum(each != worker_pb2.SUSPICION_NONE for each in suspicions),
            on_trial=suspicions.count(worker_pb2.SUSPICION_ON_TRIAL),
        )
        tells_first = self.rng.random() < 0.5  # the status and the rejections come in either order
        if tells_first:
            self._publish()
        for live in list(self.live.values()):
            if not by_stream:
                self.on_struck(live, self)
            self._end(live, ErrorCode.WORKER_LOST, message, retryable=True)
        if not tells_first:
            self._publish()
        self._later(self.plan.restart_s * 0.2, self._begin_epoch)
        self._later(self.plan.restart_s, self._be_ready)

    def hang(self) -> None:
        """A rank hangs; the supervisor finds it at the deadline of the step."""
        self.is_hung = True

    def stop(self, seconds: float) -> None:
        """Stop the whole process, as SIGSTOP does."""
        if self.is_stopped or not self.is_listening:
            return
        self.is_stopped = True
        for connection in self.connections:
            connection.watch()
        self.kernel.after(seconds, self._continue)

    def drain(self, seconds: float, on_end: Callable[[], None]) -> None:
        """Accept nothing, finish what it has, hand the rest over, and end the process."""
        self.is_draining = True
        self._publish()

        def end() -> None:
            if not self.is_listening:
                return
            for live in list(self.live.values()):
                self._end(live, ErrorCode.DRAINING, "the worker is going down", retryable=True)
            self.die()
            on_end()

        self._later(seconds, end)

    def _continue(self) -> None:
        self.is_stopped = False
        self.thawed_at = self.kernel.now
        for connection in list(self.connections):
            connection.flush()

    def _begin_epoch(self) -> None:
        self.epoch += 1
        for connection in list(self.connections):
            connection.send(self._hello())
        self._publish()

    def _be_ready(self) -> None:
        self.state, self.lost = worker_pb2.WORKER_STATE_READY, None
        self._publish()

    def _hang_up(self) -> None:
        for connection in list(self.connections):
            connection.end_by_worker()

    def _later(self, delay_s: float, action: Callable[[], None]) -> Event:
        def act() -> None:
            if self.is_stopped:
                self.kernel.again(event, 0.01)
            elif self.is_listening:
                action()

        event = self.kernel.after(delay_s, act)
        return event

    # Streams.

    def _submit(self, connection: Connection, submit: worker_pb2.Submit) -> None:
        key = (id(connection), submit.stream_id)
        live = self.live.get(key)
        if live is not None:
            if submit.attempt < live.submit.attempt:
                self._reject(connection, submit, ErrorCode.INVALID_REQUEST, "attempt is older than the live one")
                return
            self._remove(live)
            if submit.attempt == live.submit.attempt:
                self._reject(connection, submit, ErrorCode.INVALID_REQUEST, "attempt was submitted twice")
                return
        if self.is_draining:
            self._reject(connection, submit, ErrorCode.DRAINING, "the worker is going down", retryable=True)
        elif self.state != worker_pb2.WORKER_STATE_READY:
            self._reject(connection, submit, ErrorCode.UNAVAILABLE, "the ranks are not ready", retryable=True)
        else:
            self._admit(connection, submit)

    def _admit(self, connection: Connection, submit: worker_pb2.Submit) -> None:
        self._numbers += 1
        position = len(submit.emitted_ids)
        live = Live(
            connection,
            submit,
            self.connections[connection] + submit.arrived_s,
            self._numbers,
            model.Tokens(tuple(submit.prompt_ids), submit.sampling),
            position,
            position,
            len(submit.prompt_ids) + position,
        )
        if submit.deadline_s > 0:
            live.deadline = self._later(submit.deadline_s, lambda: self._expire(live))
        self.live[live.key] = live
        self.waiting.append(live)
        self.on_submit(live, self)
        self._ensure_step()

    def _expire(self, live: Live) -> None:
        if self.live.get(live.key) is live:
            self._end(live, ErrorCode.DEADLINE_EXCEEDED, "the deadline has passed")

    def _remove(self, live: Live) -> None:
        del self.live[live.key]
        if live.deadline is not None:
            live.deadline.cancel()
        if live in self.running:
            self.running.remove(live)
        if live in self.waiting:
            self.waiting.remove(live)

    def _end(self, live: Live, code: ErrorCode, message: str, *, retryable: bool = False) -> None:
        self._remove(live)
        self._reject(live.connection, live.submit, code, message, retryable=retryable)

    def _reject(
        self,
        connection: Connection,
        submit: worker_pb2.Submit,
        code: ErrorCode,
        message: str,
        *,
        retryable: bool = False,
    ) -> None:
        rejected = worker_pb2.Rejected(
            stream_id=submit.stream_id, attempt=submit.attempt, code=code, message=message, retryable=retryable
        )
        connection.send(worker_pb2.WorkerFrame(epoch=self.epoch, rejected=rejected))

    # Steps.

    def _ensure_step(self) -> None:
        if self._step is None and (self.running or self.waiting):
            self._start_waiting()
            self._step_began_at = self.kernel.now
            self._step = self._later(self.plan.step_s * self.slowness * self.rng.uniform(0.8, 1.2), self._finish_step)

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.cancel()
            self._step = None

    def _finish_step(self) -> None:
        if self.is_hung:
            if self.kernel.now - self._step_began_at >= STEP_DEADLINE_S:
                self._step = None
                self.lose_ranks("rank 1 hangs")
            else:
                self._step = self._later(0.05, self._finish_step)
            return
        self._step = None
        self.steps += 1
        updates: dict[Connection, list[worker_pb2.StreamTokens]] = {}
        phases: dict[Connection, list[worker_pb2.StreamPhaseChange]] = {}
        for live in list(self.running):
            self._compute(live, updates, phases)
            if self.state != worker_pb2.WORKER_STATE_READY:
                return  # the stream has killed the ranks
        self._send_phases(phases)
        for connection, streams in updates.items():
            self._send_tokens(connection, streams)
        self._ensure_step()

    def _start_waiting(self) -> None:
        if self.waiting and len(self.running) < self.plan.max_seqs:
            phases: dict[Connection, list[worker_pb2.StreamPhaseChange]] = {}
            self.waiting.sort(key=lambda live: live.turn)
            while self.waiting and len(self.running) < self.plan.max_seqs:
                live = self.waiting.pop(0)
                live.began_at = self.kernel.now
                self.running.append(live)
                self._note_phase(live, worker_pb2.STREAM_PHASE_RUNNING, phases)
            self._send_phases(phases)

    def _compute(
        self,
        live: Live,
        updates: dict[Connection, list[worker_pb2.StreamTokens]],
        phases: dict[Connection, list[worker_pb2.StreamPhaseChange]],
    ) -> None:
        if live.left_of_prompt > 0:
            live.left_of_prompt -= _CHUNK
            self._note_phase(live, worker_pb2.STREAM_PHASE_RUNNING, phases)
            return
        if self.rng.random() < self.mischief.preempts:
            self.running.remove(live)
            self.waiting.append(live)
            live.left_of_prompt = len(live.submit.prompt_ids) + live.position
            self._note_phase(live, worker_pb2.STREAM_PHASE_WAITING, phases)
            return
        if live.submit.prompt_ids[0] == model.POISON_ID and live.position - live.first >= _AFTER_POISON:
            self.lose_ranks("poison", by_stream=True)
            return
        ids, finish, first = [], 0, live.position
        for _ in range(self.rng.randint(1, self.plan.most_per_step)):
            ids.append(live.tokens.at(live.position))
            finish = live.tokens.finish_after(ids[-1], live.position)
            live.position += 1
            if finish:
                break
        updates.setdefault(live.connection, []).append(
            worker_pb2.StreamTokens(
                stream_id=live.submit.stream_id, attempt=live.submit.attempt, position=first, ids=ids, finish=finish
            )
        )
        if finish:
            self._mean_s += 0.1 * (self.kernel.now - live.began_at - self._mean_s)
            self._remove(live)

    @staticmethod
    def _note_phase(live: Live, phase: int, phases: dict[Connection, list[worker_pb2.StreamPhaseChange]]) -> None:
        phases.setdefault(live.connection, []).append(
            worker_pb2.StreamPhaseChange(stream_id=live.submit.stream_id, attempt=live.submit.attempt, phase=phase)
        )

    def _send_phases(self, phases: dict[Connection, list[worker_pb2.StreamPhaseChange]]) -> None:
        for connection, changes in phases.items():
            connection.send(worker_pb2.WorkerFrame(epoch=self.epoch, phases=worker_pb2.Phases(streams=changes)))

    def _send_tokens(self, connection: Connection, streams: list[worker_pb2.StreamTokens]) -> None:
        mischief, rng = self.mischief, self.rng
        frame = worker_pb2.WorkerFrame(epoch=self.epoch, tokens=worker_pb2.Tokens(streams=streams))
        victim = rng.choice(streams)
        live = self.live.get((id(connection), victim.stream_id))
        if rng.random() < mischief.gap and live is not None:
            self.kernel.trace("gap", self.worker_id, victim.stream_id, victim.position)
            frame.tokens.ClearField("streams")
            frame.tokens.streams.extend(each for each in streams if each is not victim)
        if rng.random() < mischief.loss and live is not None:
            self.kernel.trace("forgets", self.worker_id, victim.stream_id, victim.position)
            self._remove(live)
        if rng.random() < mischief.old_attempt:
            self._send_wrong(connection, victim, epoch=self.epoch, attempt=victim.attempt - 1)
        if rng.random() < mischief.old_epoch:
            self._send_wrong(connection, victim, epoch=self.epoch - 1, attempt=victim.attempt)
        if rng.random() < mischief.malformed and live is not None:
            self._send_wrong(connection, victim, epoch=self.epoch, attempt=victim.attempt, finish=77)
        if self.accepts_several:  # like columns, not known to older workers
            self._use_columns(connection, frame.tokens)
        connection.send(frame)
        if rng.random() < mischief.twice:
            self._sent = [*self._sent[-3:], (connection, frame)]
            # Handles name other attempts on other connections, and no network takes frames from one to another.
            connection.send(rng.choice([past for sent_on, past in self._sent if sent_on is connection]))

    def _use_columns(self, connection: Connection, tokens: worker_pb2.Tokens) -> None:
        """Write streams that have one new token and nothing else to say as columns."""
        others = []
        for each in tokens.streams:
            live = self.live.get((id(connection), each.stream_id))
            if live is None or each.finish or len(each.ids) != 1:
                others.append(each)
                continue
            tokens.handles.append(live.submit.handle)
            tokens.positions.append(each.position)
            tokens.ids.extend(each.ids)
        del tokens.streams[:]
        tokens.streams.extend(others)

    def _send_wrong(
        self, connection: Connection, like: worker_pb2.StreamTokens, *, epoch: int, attempt: int, finish: int = 0
    ) -> None:
        """Tokens that a router must not take, at a position where it would take tokens."""
        ids = [2] * len(like.ids)
        tokens = worker_pb2.StreamTokens(
            stream_id=like.stream_id, attempt=attempt, position=like.position, ids=ids, finish=finish
        )
        connection.send(worker_pb2.WorkerFrame(epoch=epoch, tokens=worker_pb2.Tokens(streams=[tokens])))

    # Frames about itself.

    def _beat(self) -> None:
        self._publish()
        self._later(_HEARTBEAT_S, self._beat)

    def _publish(self) -> None:
        if self.connections and not self.is_stopped:
            for connection in list(self.connections):
                connection.send(self._status(connection))

    def _hello(self) -> worker_pb2.WorkerFrame:
        hello = worker_pb2.Hello(worker_id=self.worker_id, incarnation=self.incarnation, model=self.card)
        hello.accepts_several = self.accepts_several
        return worker_pb2.WorkerFrame(epoch=self.epoch, hello=hello)

    def _status(self, connection: Connection) -> worker_pb2.WorkerFrame:
        per_request_s = self._mean_s / self.plan.max_seqs
        free = max(0, self.plan.max_seqs - len(self.running) - len(self.waiting))
        status = worker_pb2.Status(
            state=worker_pb2.WORKER_STATE_DRAINING if self.is_draining else self.state,
            queued=len(self.waiting),
            running=len(self.running),
            free_seqs=free,
            queue_wait_s=0.0 if free else math.ceil(1e3 * per_request_s * len(self.waiting)) / 1e3,
            queue_wait_per_request_s=per_request_s,
            step_deadline_s=STEP_DEADLINE_S if self._step is not None else 0.0,
            free_blocks=90,
            total_blocks=100,
            steps=self.steps,
            pid=1,
            received=self.received[connection],
            lost=self.lost,
        )
        return worker_pb2.WorkerFrame(epoch=self.epoch, status=status)
