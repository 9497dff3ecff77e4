"""The management port of several processes: one health, one readiness, their metrics and states together."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from lockstep_common.answers import Answer, as_json, needs_certificate, not_found
from lockstep_common.protobuf_metrics import CONTENT_TYPE as PROTOBUF
from lockstep_common.protobuf_metrics import WrittenFamily, protobuf_metrics, read_families
from lockstep_common.telemetry import OPENMETRICS, REGISTRY, exposition_for, prefers_protobuf
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from lockstep_router.console import files
from lockstep_router.console.joined import joined, joined_router
from lockstep_router.processes.channel import Asker, NoAnswerError

_PARENT = "parent"
_OF_ROUTERS = "lockstep_router_"
_ADDED = ("streams", "failovers")
"""What is added up over the processes in the state of the router."""


def process_metrics(registry: CollectorRegistry) -> tuple[Gauge, Counter]:
    """What the supervisor adds to the processes' own metrics: whether each serves, and how often it was restarted."""
    up = Gauge("lockstep_router_process_up", "1 while a process of the router serves.", ["process"], registry=registry)
    restarts = Counter(
        "lockstep_router_process_restarts",
        "Times that a process of the router ended and was started again.",
        ["process"],
        registry=registry,
    )
    return up, restarts


class ProcessFacts(Protocol):
    """What is known of a process."""

    number: int
    restarts: int
    asker: Asker | None

    @property
    def pid(self) -> int | None:
        """Its id; None while it does not run."""


class JointAnswers:
    """Answers for all processes. Each call asks all of them at the same time.

    Args:
        router_id: the router's name, without a process's number.
        processes: of the router.
        pages: of the console, by their paths; None: there is no console.
        has_others: whether process 0 asks other routers for the console.
        has_native_histograms: whether `/metrics` has them for a scraper that asks.
    """

    def __init__(
        self,
        router_id: str,
        processes: Sequence[ProcessFacts],
        pages: Mapping[str, Answer] | None = None,
        *,
        has_others: bool = False,
        has_native_histograms: bool = True,
    ) -> None:
        self._has_others = has_others
        self._has_native_histograms = has_native_histograms
        self._router_id = router_id
        self._pages = pages or {}
        self._processes = processes
        self._threads = ThreadPoolExecutor(2 * len(processes), thread_name_prefix="ask")

    def of(self, path: str, *, is_stranger: bool, accept: str = "") -> Answer:
        """The answer to a GET."""
        match path.partition("?")[0]:
            case "/healthz":
                return self._health("/healthz", "alive", self._processes)
            case "/readyz":
                # A process that is being started again takes no connections, and the others do.
                listening = [process for process in self._processes if process.asker is not None]
                return self._health("/readyz", "ready", listening)
            case _ if is_stranger:
                return needs_certificate()
        return self._to_known(path.partition("?")[0], accept)

    def _to_known(self, name: str, accept: str) -> Answer:
        match name:
            case "/metrics":
                body, content_type = self._metrics(accept)
                return Answer(200, content_type, body)
            case "/status":
                return self._status()
            case files.STATE | files.ROUTER if self._pages:
                return self._console(name)
            case _ if name in self._pages:
                return self._pages[name]
        return not_found()

    def to_operator(self, method: str, path: str) -> Answer:
        """The answers of all processes to an operator, by their numbers; null: it does not answer. Log lines come one
        after the other.
        """
        asked = {process.number: answer for process, answer in self._ask(path, self._processes, method)}
        answers = {number: answer for number, answer in asked.items() if answer is not None}
        if not answers:
            return as_json(503, {"error": "no process answers"})
        first = next(iter(answers.values()))
        if first.status != 200:
            return first
        if first.content_type != "application/json":
            return Answer(200, first.content_type, b"".join(answer.body for answer in answers.values()))
        bodies = {number: json.loads(answer.body) if answer else None for number, answer in asked.items()}
        return as_json(200, {"processes": bodies})

    def _ask(
        self, path: str, processes: Iterable[ProcessFacts], operation: str = "", accept: str = ""
    ) -> Iterator[tuple[ProcessFacts, Answer | None]]:
        """Each process with its answer; None if there is none. `operation`: the method of an operator's question."""
        asked = [(process, self._threads.submit(_answer, process, path, operation, accept)) for process in processes]
        for process, future in asked:
            yield process, future.result()

    def _health(self, path: str, good: str, processes: Sequence[ProcessFacts]) -> Answer:
        if not processes:
            return as_json(503, {"status": "starting"})
        for process, answer in self._ask(path, processes):
            if answer is None:
                return as_json(503, {"status": f"process {process.number} does not answer"})
            if answer.status != 200:
                reason = json.loads(answer.body)["status"]
                return as_json(503, {"status": reason, "process": process.number})
        return as_json(200, {"status": good})

    def _metrics(self, accept: str) -> tuple[bytes, str]:
        """Their metrics with the label `process`.

        They are not added up: the sum would fall when a process is started again, which would look as if all had been.
        """
        if self._has_native_histograms and prefers_protobuf(accept):
            written = {_PARENT: protobuf_metrics(REGISTRY)} | self._written(PROTOBUF)
            return protobuf_metrics(self._own(written)) + _joined(written), PROTOBUF
        texts = {_PARENT: exposition_for(OPENMETRICS)[0]} | self._written(OPENMETRICS)
        own = self._own(texts)
        own.register(_Labelled({process: text.decode() for process, text in texts.items()}))
        return exposition_for(accept, own, has_native=False)

    def _written(self, content_type: str) -> dict[str, bytes]:
        """The metrics of the processes that answer, by their numbers."""
        return {
            str(process.number): answer.body
            for process, answer in self._ask("/metrics", self._processes, accept=content_type)
            if answer is not None and answer.status == 200
        }

    def _own(self, written: Collection[str]) -> CollectorRegistry:
        """What the supervisor knows of the processes, when these have answered."""
        own = CollectorRegistry()
        up, restarts = process_metrics(own)
        for process in self._processes:
            up.labels(str(process.number)).set(str(process.number) in written)
            restarts.labels(str(process.number)).inc(process.restarts)
        return own

    def _console(self, path: str) -> Answer:
        """What the console shows, or what other routers get, of all processes together."""
        answers = {process.number: answer for process, answer in self._ask(path, self._processes)}
        bodies = {
            number: json.loads(answer.body)
            for number, answer in answers.items()
            if answer is not None and answer.status == 200
        }
        if not bodies:
            return as_json(503, {"error": "no process answers"})
        if path == files.ROUTER:
            return as_json(200, joined_router(list(bodies.values()), self._router_id))
        return as_json(200, joined(bodies, self._router_id, len(answers), has_others=self._has_others))

    def _status(self) -> Answer:
        """The state as the first process that answers sees it, with the counts of all."""
        bodies: dict[int, dict[str, Any]] = {}
        for process, answer in self._ask("/status", self._processes):
            if answer is not None and answer.status == 200:
                bodies[process.number] = json.loads(answer.body)
        if not bodies:
            return as_json(503, {"error": "no process answers"})
        routers = {number: body["router"] for number, body in bodies.items()}
        first = next(iter(routers))
        together = routers[first] | {"id": self._router_id}
        together |= {name: sum(router[name] for router in routers.values()) for name in _ADDED}
        together["draining"] = any(router["draining"] for router in routers.values())
        together["resumable"] = {
            name: sum(router["resumable"][name] for router in routers.values()) for name in together["resumable"]
        }
        processes = [
            {"process": process.number, "pid": process.pid, "restarts": process.restarts}
            | {"router": routers.get(process.number)}
            for process in self._processes
        ]
        return as_json(200, bodies[first] | {"router": together, "processes": processes})


def _answer(process: ProcessFacts, path: str, operation: str, accept: str) -> Answer | None:
    asker = process.asker
    if asker is None:
        return None
    try:
        return asker.ask(path, operation, accept)
    except NoAnswerError:
        return None


def _joined(written: Mapping[str, bytes]) -> bytes:
    """Metrics of several processes, in protobuf, each with the label of its own."""
    families: dict[str, WrittenFamily] = {}
    for process, body in written.items():
        for name, family in read_families(body):
            if process == _PARENT and name.startswith(_OF_ROUTERS):
                continue  # as of the text below
            families.setdefault(name, WrittenFamily(family.head, [])).add(family, "process", process)
    return b"".join([family.encoded for family in families.values()])


class _Labelled(Collector):
    """Metrics of several processes, in OpenMetrics, each with the label of its own."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        """Each metric once, with the samples of all."""
        families: dict[str, Metric] = {}
        for process, text in self._texts.items():
            for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
                if process == _PARENT and family.name.startswith(_OF_ROUTERS):
                    continue  # it serves no client: its zeros would count as a router's
                known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                known.samples += [
                    sample._replace(labels=sample.labels | {"process": process}) for sample in family.samples
                ]
        yield from families.values()
