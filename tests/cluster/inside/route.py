"""Runs in a router's own pod: requests that show how its policy chooses, and the worker that each of them was sent to.

The router has to be new and to serve no other client. The argument is a JSON object: `model`; `sessions` of one request
each; `session` of the requests that have one session; `large`, the id of a worker; `readers`, sessions that ask about
the text `document`; `long`, tokens of a stream that does not end by itself. Prints a JSON object with the workers of
the requests of each stage, in the order of the requests:

- `spread`: a request of each session.
- `same`: requests of one session, one after another.
- `together`: streams of this session that run at the same time; each is sent when the workers have reported the others.
- `freed`: the same again, after the streams on the large worker have ended.
- `document`: a request about the document, then one of each reader; `cached` has the share of each prompt that was
  cached.
"""

import http.client
import json
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any

SAME, TOGETHER, FREED = 15, 6, 2
PATIENCE_S = 60.0
HEARTBEATS_S = 0.5
"""Time of some heartbeats."""

given = json.loads(sys.argv[1])
stages: list[str] = []
"""Of each stream, in the order in which they began."""


def wait_for(find: Callable[[], Any], what: str) -> Any:
    until_s = time.monotonic() + PATIENCE_S
    while not (found := find()):
        if time.monotonic() > until_s:
            raise SystemExit(f"{what}: not within {PATIENCE_S:g} s; {asked('status')['workers']}")
        time.sleep(0.01)
    return found


def asked(page: str) -> Any:
    """A page of the router's management port."""
    with urllib.request.urlopen(f"http://127.0.0.1:8001/{page}", timeout=PATIENCE_S) as answer:
        return json.load(answer)


def send(stage: str, session: str, prompt: str, **fields: Any) -> http.client.HTTPConnection:
    stages.append(stage)
    body = {"model": given["model"], "prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
    connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=PATIENCE_S)
    headers = {"content-type": "application/json", "x-session-id": session}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection


def complete(stage: str, session: str, prompt: str) -> dict[str, Any]:
    """The usage of a request that has ended. Its worker has reported it: until then it counts as load."""
    before = steps()
    connection = send(stage, session, prompt, max_tokens=1)
    response = connection.getresponse()
    answer: dict[str, Any] = json.load(response)
    connection.close()
    if response.status != 200:
        raise SystemExit(f"{stage}: {response.status} {answer}")
    wait_for(lambda: steps() > before, f"{stage}: a worker reports the request")
    usage: dict[str, Any] = answer["usage"]
    return usage


def steps() -> int:
    """Steps that the workers have reported; each request is one at least."""
    return sum(worker["steps"] for worker in asked("status")["workers"])


def running() -> int:
    """Requests on all workers, as they have reported it: what the policy knows."""
    return sum(worker["running"] + worker["queued"] for worker in asked("status")["workers"])


def await_running(count: int) -> None:
    wait_for(lambda: running() == count, f"{count} requests on the workers")


def workers() -> list[str]:
    """The worker of each stream so far."""

    def find() -> list[str] | None:
        # The newest first, made at most twice a second.
        streams = asked("console/state")["streams"][::-1]
        sent = [stream["attempts"][0]["worker"] for stream in streams if stream["attempts"]]
        return sent if len(sent) == len(stages) else None

    found: list[str] = wait_for(find, f"the router knows {len(stages)} streams")
    return found


def open_streams(stage: str, count: int) -> list[http.client.HTTPConnection]:
    """Streams that run. Each is sent when the workers have reported those before it."""
    opened = []
    before = running()
    for number in range(before + 1, before + count + 1):
        opened.append(send(stage, given["session"], "Once upon a time", stream=True, max_tokens=given["long"]))
        await_running(number)
    return opened


def reports() -> int:
    """Reports of cached blocks that the workers have sent."""
    return sum(worker["prefixes"]["reports"] for worker in asked("status")["workers"])


def await_reports(before: int) -> None:
    """Wait until the workers have reported all that they have cached since then: new blocks come with their next
    heartbeat. The number of blocks says nothing, since old ones may make room for new ones.
    """

    def are_told() -> bool:
        last = reports()
        time.sleep(HEARTBEATS_S)
        return before < last == reports()

    wait_for(are_told, f"the workers have sent more than {before} reports and send no more")


await_running(0)
for name in given["sessions"]:
    complete("spread", name, "Once")
for _ in range(SAME):
    complete("same", given["session"], "Once")

opened = open_streams("together", TOGETHER)
placed = workers()[-TOGETHER:]
for connection, worker in zip(opened, placed, strict=True):
    if worker == given["large"]:
        connection.close()
await_running(sum(worker != given["large"] for worker in placed))
opened += open_streams("freed", FREED)
for connection in opened:
    connection.close()
await_running(0)

cached = []
for reader in ("author", *given["readers"]):
    before = reports()
    usage = complete("document", reader, given["document"])
    cached.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
    if reader == "author" and asked("status")["models"][0]["policy"] == "prefix_aware":
        await_reports(before)

found: dict[str, list[Any]] = {stage: [] for stage in stages}
for stage, worker in zip(stages, workers(), strict=True):
    found[stage].append(worker)
print(json.dumps(found | {"cached": cached}))
