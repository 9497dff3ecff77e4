"""A real rank in a thread of this process, and a driver that runs requests through its socket and mailbox, as the
supervisor does.
"""

import itertools
import socket
import threading
from collections import deque

from lockstep_engine.config import EngineConfig
from lockstep_engine.control import (
    MAX_CONTROL_BYTES,
    AllocateBlocks,
    Loaded,
    Ready,
    decode_doorbell,
    decode_rank_message,
    encode_control,
    encode_doorbell,
)
from lockstep_engine.group_settings import group_settings
from lockstep_engine.limits import Limits
from lockstep_engine.mailbox import MAX_IN_FLIGHT, Mailbox
from lockstep_engine.model_config import inspect_model
from lockstep_engine.plan import decode_result, encode_plan
from lockstep_engine.rank import Rank
from lockstep_engine.request import Request
from lockstep_engine.scheduler import Scheduler

_WAIT_S = 300
"""More than any start takes: a rank that fails closes its socket, and one that hangs is ended by the test run."""


class InProcessRank:
    """The only rank of an engine. `model`: what is known of it, None: it is inspected; `orders`: what the
    driver sends before the blocks; `settings`: `EngineConfig`'s.
    """

    def __init__(self, path, *, model=None, orders=(), **settings):
        config = EngineConfig(model=str(path), **settings)
        info = model or inspect_model(config)
        spec, plan_bytes, result_bytes = (
            getattr(group_settings(config, info), name) for name in ("spec", "plan_bytes", "result_bytes")
        )
        fd = Mailbox.create(Mailbox.segment_bytes(1, plan_bytes, result_bytes), "test")
        self.mailbox = Mailbox(fd, 1, plan_bytes, result_bytes)
        self._depth = MAX_IN_FLIGHT if config.overlap else 1
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_WAIT_S)
        self.rank = None
        self._error = None
        self._made = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(spec, theirs, fd), daemon=True)
        self._thread.start()
        self.loaded = self._await(Loaded)
        for order in orders:
            self._control.send(encode_control(order))
        self._control.send(encode_control(AllocateBlocks(self.loaded.blocks)))
        self.ready = self._await(Ready)
        assert self._made.wait(_WAIT_S)  # it is told before the constructor returns
        limits = Limits(
            max_seqs=config.max_seqs,
            max_batch_tokens=config.step_tokens,
            max_queue=config.max_queue,
            context_length=info.context_length,
            prefix_cache=config.prefix_cache,
            hot_window=config.hot_window_with(info.windowed),
            copies=info.windowed is not None and config.hot_window is None,
        )
        self.scheduler = Scheduler(limits, [], self.loaded.blocks)
        self._numbers = itertools.count()
        self.plans = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._control.close()
        self._thread.join(_WAIT_S)
        if self.rank is not None:
            self.rank.builds.remove()

    def run(self, *requests):
        """Outputs of requests, each (prompt, sampling), that run together. One list of ids for each."""
        ids = {}
        for prompt, params in requests:
            name = str(next(self._numbers))
            ids[name] = []
            self.scheduler.submit(Request(name, tuple(prompt), params))
        in_flight = deque()
        while True:
            while len(in_flight) < self._depth and (plan := self.scheduler.schedule()) is not None:
                self.plans.append(plan)
                self.mailbox.put_plan(plan.step, encode_plan(plan))
                self._control.send(encode_doorbell(plan.step))
                in_flight.append(plan.step)
            if not in_flight:
                return list(ids.values())
            step = in_flight.popleft()
            assert decode_doorbell(self._receive()) == step
            for output in self.scheduler.update(decode_result(self.mailbox.get_result(step))):
                ids[output.request_id] += output.ids

    def _run(self, spec, control, fd):
        try:
            self.rank = Rank(spec, control, fd, -1, "")
            self._made.set()
            self.rank.serve()
        except BaseException as error:
            self._error = error
        finally:
            control.close()

    def _receive(self):
        message = self._control.recv(MAX_CONTROL_BYTES)
        if not message:
            self._thread.join(_WAIT_S)
            raise AssertionError("the rank has ended") from self._error
        return message

    def _await(self, kind):
        while not isinstance(message := decode_rank_message(self._receive()), kind):
            pass
        return message
