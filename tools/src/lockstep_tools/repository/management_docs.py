"""The part of `docs/api.md` about a router's management port: its paths, their callers, and what they answer."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep_api.v1 import worker_pb2
from lockstep_common.answers import Answer, needs_certificate, not_found
from lockstep_common.management import Answers, Reports, reporting
from lockstep_common.operations import is_for_operators
from lockstep_router.console import files
from lockstep_router.console.others import OtherRouters
from lockstep_router.console.state import ConsoleState
from lockstep_router.discovery import WorkerAddress
from lockstep_router.router import Router
from lockstep_router.status import status_body, worker_body
from lockstep_router.workers import Link

from lockstep_tools.repository.answer_samples import MODEL, SampleRouter
from lockstep_tools.repository.field_tables import As, Data, Of, Shape, heading, slug, table

_EVERYONE, _SCRAPERS, _OPERATORS = "everyone", "a client with a certificate", "operators"


@dataclass(frozen=True)
class Page:
    """A path of the management port."""

    method: str
    path: str
    who: str
    about: str
    shape: str = ""
    """The name of its answer's section; empty: its answer has none."""
    asked: str = ""
    """The path of which a sample is taken; empty: the path itself."""


PAGES = (
    Page("GET", "/healthz", _EVERYONE, "503 when the event loop has not run for `liveness_timeout_s`.", "Health"),
    Page("GET", "/readyz", _EVERYONE, "503 when requests for tokens are not served now.", "Health"),
    Page("GET", "/metrics", _SCRAPERS, "The [metrics](metrics.md), for Prometheus."),
    Page("GET", "/status", _SCRAPERS, "The router, its models, its workers and their ranks.", "Status"),
    Page("GET", "/console", _SCRAPERS, "308 to `/console/`."),
    Page(
        "GET", "/console/", _SCRAPERS, "The [web console](console.md), unless `console` is `off`; its files are below."
    ),
    Page("GET", "/console/state", _SCRAPERS, "What the console shows.", "Console state"),
    Page("GET", "/console/router", _SCRAPERS, "What other routers' consoles get.", "Console router"),
    Page("GET", "/debug/stacks", _OPERATORS, "Where threads and tasks are in the code.", "Debug stacks"),
    Page("GET", "/debug/logs", _OPERATORS, "The newest 1,000 log lines, each a JSON object."),
    Page(
        "GET",
        "/debug/trace/{id}",
        _OPERATORS,
        "The newest spans of a trace, by its id or by that of a request.",
        "Debug trace",
        "/debug/trace/a",
    ),
    Page("GET", "/debug/settings", _OPERATORS, "The settings without secrets, and versions.", "Debug settings"),
    Page("GET", "/loglevel", _OPERATORS, "The level of the log.", "Log level"),
    Page(
        "POST",
        "/loglevel",
        _OPERATORS,
        "Sets another `level` (`debug`, `info`, `warning`, `error`) for `for_s` seconds (default 600, at most 86400), "
        "both in the query.",
        "Log level",
    ),
    Page(
        "POST",
        "/debug/profile",
        _OPERATORS,
        "Of a worker: a tar archive of what its ranks do in the next `steps` (in the query; default 20). A router says "
        "404.",
    ),
)

_SHAPES = (
    Shape(
        "Status",
        "The answer of `/status`. With several `processes` of a router, `router` is that of all together, and "
        "`processes` has each one's `process`, `pid`, `restarts` and `router`.",
        {
            "router": "This router.",
            "router.id": "Its name.",
            "router.pid": "Its process.",
            "router.uptime_s": "Seconds since it began.",
            "router.streams": "Streams in progress.",
            "router.failovers": "Times that a stream moved to another worker.",
            "router.draining": "Whether it refuses new requests, as it shuts down.",
            "router.exact_failover": "The setting.",
            "router.resumable": "Resumable requests.",
            "router.resumable.running": "Those in progress.",
            "router.resumable.detached": "Those in progress without a client.",
            "router.resumable.kept": "Those that are kept, running or ended.",
            "router.resumable.bytes": "Memory of their journals, about.",
            "router.state": "The state server; null: there is none.",
            "router.state.server": "Its address.",
            "router.state.reachable": "Whether journals are written to it.",
            "router.state.used_by_requests": "Whether requests wait for it.",
            "router.state.streams": "Streams that are mirrored there.",
            "router.state.lag_s": "Age of the oldest tokens that it does not have.",
            "router.suspects": "Requests that may be what kills workers.",
            "router.suspects.suspected": "Streams that ran on a worker that died.",
            "router.suspects.tried": "Streams on trial, apart from each other.",
            "router.suspects.quarantined": "Requests that are refused for some minutes.",
            "discovery": "How workers are found.",
            "discovery.kind": "The setting `discovery`.",
            "discovery.workers": "Workers that were found.",
            "discovery.age_s": "Seconds since discovery last succeeded.",
            "discovery.problem": "Why it does not work now; empty: it does.",
            "models": "Every model that a worker has reported.",
            "models[].name": "Its name.",
            "models[].digest": "Hash of its configuration, tokenizer and weights.",
            "models[].architecture": "Its architecture.",
            "models[].dtype": "The type of its numbers.",
            "models[].context_length": "Tokens of its context.",
            "models[].ready_workers": "Workers that serve it now.",
            "models[].policy": "How a worker is chosen for its streams.",
            "models[].load_imbalance": "Most requests on a ready worker over the average.",
            "workers": "The workers.",
            "workers[].id": "The worker's name; empty: it has not connected yet.",
            "workers[].target": "Its address.",
            "workers[].state": "Its state as this router knows it.",
            "workers[].reason": "Why it is in that state.",
            "workers[].epoch": "Number of the life of its ranks.",
            "workers[].incarnation": "Number of the life of its process.",
            "workers[].fingerprint": "Hash of its numerics.",
            "workers[].pid": "Its process.",
            "workers[].streams": "Streams of this router on it.",
            "workers[].queued": "Requests of all routers that wait there.",
            "workers[].running": "Requests of all routers that run there.",
            "workers[].free_blocks": "Free KV blocks.",
            "workers[].total_blocks": "All KV blocks.",
            "workers[].queue_wait_s": "Estimated wait of one more request.",
            "workers[].tokens_per_s": "Tokens a second, of all requests.",
            "workers[].steps": "Steps since its ranks began.",
            "workers[].last_seen_s": "Seconds since it was last heard; null: it never was.",
            "workers[].model": "Its model.",
            "workers[].tp": "Number of its ranks.",
            "workers[].health": "What this router's detectors say of it.",
            "workers[].health.problems": As(
                "array of string", "`suspected`, `ejected`, `slow`, `hotspot`: those that it has."
            ),
            "workers[].health.phi": "Suspicion by late heartbeats (phi accrual).",
            "workers[].health.faults_in_a_row": "Faults in a row.",
            "workers[].health.fault_share": "Share of streams that failed.",
            "workers[].health.breaker": "State of the ejection.",
            "workers[].health.ejected_for_s": "Seconds until it is probed.",
            "workers[].health.ejected_because": "Why it is ejected.",
            "workers[].health.slowness": "Its time over that of the others for work of the same size; null: not known.",
            "workers[].prefixes": "The index of its cached blocks, with `prefix_aware`.",
            "workers[].prefixes.reported": "Whether it reports its blocks.",
            "workers[].prefixes.blocks": "Blocks in the index.",
            "workers[].prefixes.max_blocks": "Most blocks in the index.",
            "workers[].prefixes.reports": "Reports so far.",
            "workers[].prefixes.predicted_tokens": "Tokens of prompts that were expected in its cache.",
            "workers[].prefixes.cached_tokens": "Those that were there.",
            "workers[].prefixes.wrong_tokens": "Sum of the differences.",
            "workers[].ranks": "Its ranks.",
            "workers[].ranks[].rank": "The rank's number.",
            "workers[].ranks[].pid": "Its process.",
            "workers[].ranks[].state": "`starting`, `ready` or `dead`.",
            "workers[].ranks[].steps": "Steps so far.",
            "workers[].ranks[].compute_s": "Time of a step that it computed, over the last seconds.",
            "workers[].ranks[].collective_s": "Time of a step in collectives, over the last seconds.",
            "workers[].slow_rank": "The rank that the others wait for; null: none.",
        },
    ),
    Shape(
        "Console state",
        "The answer of `/console/state`, which the page reads; [console.md](console.md) says what it shows. On the "
        "public port it has what the key's tenant may see.",
        {
            "format": "Number of this form; it grows when a field changes its meaning.",
            "now": "Seconds since 1970.",
            "port": "The port that was asked: `management` or `public`.",
            "chat": "Whether the page can chat.",
            "router": Of("Console router", "This router."),
            "processes": "Number of its processes.",
            "others": Data("The other routers, with `console_routers`; null on the public port."),
            "state_server": Data("`reachable`, `streams` and `lag_s` as in [status](#status); null: there is none."),
            "models": Data("The models: `name`, `context_length`, `ready_workers`, `policy`."),
            "workers": As(
                "array of object",
                "The workers, as in [status](#status); without addresses and processes on the public port.",
            ),
            "moves": As("array of object", "The newest moves of streams to another worker."),
            "streams": As("array of object", "The newest streams and their attempts."),
            "tenants": Data("The tenants, their limits and what they use."),
            "links": As("array of object", "Links that the page shows: `name` and `url`."),
        },
    ),
    Shape(
        "Console router",
        "The answer of `/console/router`.",
        {
            "id": "The router's name.",
            "version": "Its version.",
            "uptime_s": "Seconds since it began.",
            "state": "`serving`, `leaving` or `draining`.",
            "unready": "Why it serves no requests for tokens now; empty: it does.",
            "requests": "Requests in progress.",
            "streams": "Streams in progress.",
            "max_streams": "The setting.",
            "failovers": "Times that a stream moved to another worker.",
            "sessions": "Sessions with streams in progress.",
            "exact_failover": "The setting.",
            "resumable": "Resumable requests.",
            "resumable.running": "Those in progress.",
            "resumable.detached": "Those in progress without a client.",
            "resumable.kept": "Those that are kept, running or ended.",
        },
    ),
    Shape(
        "Debug stacks",
        "The answer of `/debug/stacks`. A worker adds `ranks`.",
        {
            "pid": "The process.",
            "threads": "The threads.",
            "threads[].thread": "The thread's name.",
            "threads[].stack": "Where it is in the code, the innermost place last.",
            "tasks": "The places where tasks of the event loop wait.",
            "tasks[].tasks": "How many wait there.",
            "tasks[].awaits": "The coroutines, each awaiting the next one.",
        },
    ),
    Shape(
        "Debug trace",
        "The answer of `/debug/trace/{id}`.",
        {
            "tracing": "Whether this process makes traces.",
            "resource": Data("What names the process in traces."),
            "spans": As(
                "array of object",
                "The spans, the oldest first: ids, `name`, `begin_ns`, `end_ns`, `error`, `attributes`, `events`, "
                "`links`.",
            ),
        },
    ),
    Shape(
        "Debug settings",
        "The answer of `/debug/settings`.",
        {
            "settings": Data("The settings by name; secrets are left out."),
            "versions": Data("Versions of Python, the kernel and the packages that matter."),
        },
    ),
    Shape(
        "Log level",
        "The answer of `/loglevel`.",
        {
            "level": "The level now.",
            "left_s": As("number or null", "Seconds until the level of the settings is back; null: it is in force."),
        },
    ),
    Shape(
        "Management error",
        "What the management port answers with an error.",
        {"error": "What is wrong, for people."},
    ),
)


_ERROR = _SHAPES[-1]


def pages() -> str:
    """The table of all paths, the console's files, and a section for each answer that is JSON.

    Raises:
        ValueError: the code and what is said of it here do not fit together.
    """
    found: dict[str, list[Any]] = {_ERROR.name: [json.loads(each.body) for each in (needs_certificate(), not_found())]}
    kinds: dict[Page, str] = {}
    for page, answer in asyncio.run(_ask_all()):
        kinds[page] = f"`{answer.content_type.partition(';')[0]}`"
        if page.shape:
            found.setdefault(page.shape, []).append(json.loads(answer.body))
    lines = ["| request | for | answer | |", "| --- | --- | --- | --- |"]
    for page in PAGES:
        kind = f"[{page.shape}](#{slug(page.shape)})" if page.shape else kinds.get(page, "")
        lines.append(f"| `{page.method} {page.path}` | {page.who} | {kind} | {page.about} |")
    known = {page.path for page in PAGES}
    names = [f"`{path}`" for path in sorted(files.of("management")) if path not in known]
    lines += ["", f"Files of the console: {', '.join(names)}.", ""]
    for shape in _SHAPES:
        lines += [*heading(shape), *table(shape, found[shape.name], found)]
    return "\n".join(lines)


async def _ask_all() -> list[tuple[Page, Answer]]:
    """The answers of a router with a state server and other routers, and of one without."""
    beside, alone = SampleRouter(state_server="unix:/nowhere"), SampleRouter()
    return [*await _ask(beside, OtherRouters(beside.settings)), *await _ask(alone, None)]


async def _ask(router: Router, others: OtherRouters | None) -> list[tuple[Page, Answer]]:
    """The answers to each GET."""
    console = ConsoleState(router, others=others)
    reports = Reports(
        unready=lambda: router.unready,
        status=lambda: status_body(router) | {"workers": [worker_body(each, 1.0) for each in _links(router)]},
        files=files.of("management"),
        views={files.STATE: console.on_management, files.ROUTER: console.of_router},
        settings=router.settings.shown(),
    )
    asked = [page for page in PAGES if page.method == "GET"]
    async with reporting(reports, liveness_timeout_s=60.0) as answers:
        return [(page, await asyncio.to_thread(_answer, answers, page.asked or page.path)) for page in asked]


def _answer(answers: Answers, path: str) -> Answer:
    if is_for_operators(path):
        return answers.to_operator("GET", path)
    return answers.of(path, is_stranger=False)


def _links(router: Router) -> Iterator[Link]:
    """A worker that has not connected yet, and one of which everything is known."""
    workers = router.workers
    for worker_id in ("", "w0"):
        link = Link(
            WorkerAddress("unix:/nowhere"),
            router.settings,
            workers.clock,
            workers.tokenizers,
            workers.suspects,
            lambda _: None,
            workers.history,
        )
        if worker_id:
            ranks = [worker_pb2.RankHealth(rank=rank, compute_s=1.0 + rank, collective_s=2.0 - rank) for rank in (0, 1)]
            link.status = worker_pb2.Status(ranks=ranks)
            link.worker_id, link.card, link.last_seen_at = worker_id, router.model(MODEL), 0.0
            link.health.slowness.judge(1.0, 0.0)
        yield link
