"""Runs in a pod with the router's image: what tenants meet at their limits, and whose request a worker takes first.

The argument is a JSON object: `routers` (host:port), `model`, `marker` (a word that is in every prompt), `seats` (of
all workers), `long` (tokens of a stream that does not end by itself), and the keys of tenants: `tokens`, of a limit of
tokens a minute; `narrow`, of two streams at a time; `steady`, without a limit in reach; `low` and `high`, of these
priorities. Prints a JSON object:

- `tokens`: the answer to a prompt that exceeds the limit by itself, to one that fits, and then to one at each router.
- `streams`: the answer to a third stream at a router that has two, at the other routers, and after one of the two.
- `turns`: while all seats were taken, requests of `low` came, then those of `high`; the order in which they began.
- `texts`: answers, of which no log may have anything.
"""

import http.client
import json
import sys
import threading
import time
from contextlib import ExitStack
from queue import Empty, Queue
from typing import Any

from websockets.sync.client import ClientConnection, connect

PATIENCE_S = 120.0
WAITING = 4
"""Requests of each priority that wait."""
NO_TURN_S = 10.0
"""A freed seat that is still free then belonged to a worker without waiting requests."""

given = json.loads(sys.argv[1])
first = given["routers"][0]


def body_of(**fields: Any) -> dict[str, Any]:
    prompt = f"The {given['marker']} said"
    return {"model": given["model"], "prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}


def send(router: str, key: str, **fields: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(router, timeout=PATIENCE_S)
    headers = {"content-type": "application/json", "authorization": f"Bearer {given[key]}"}
    connection.request("POST", "/v1/completions", json.dumps(body_of(**fields)), headers)
    return connection, connection.getresponse()


def answer(router: str, key: str, **fields: Any) -> dict[str, Any]:
    """The status; the code, the field and Retry-After of a refusal, or the text."""
    connection, response = send(router, key, **fields)
    read = json.load(response)
    connection.close()
    if response.status == 200:
        return {"status": 200, "text": read["choices"][0]["text"], "usage": read["usage"]}
    error = read["error"]
    waits_s = int(response.headers.get("retry-after", 0))
    return {"status": response.status, "code": error["code"], "param": error["param"], "waits_s": waits_s}


def tokens() -> list[dict[str, Any]]:
    """The first two at the first router."""
    too_long = answer(first, "tokens", prompt=f"{given['marker']} " * 100, max_tokens=1)
    fits = answer(first, "tokens", max_tokens=80)
    until_s = time.monotonic() + PATIENCE_S
    # What an answer took is counted in the background.
    while (same := answer(first, "tokens", max_tokens=1))["status"] != 429 and time.monotonic() < until_s:
        time.sleep(0.05)
    return [too_long, fits, same, *(answer(router, "tokens", max_tokens=1) for router in given["routers"][1:])]


def streams() -> dict[str, Any]:
    opened = [send(first, "narrow", stream=True, max_tokens=given["long"]) for _ in range(2)]
    for _, response in opened:
        response.readline()
    third = answer(first, "narrow", max_tokens=1)
    elsewhere = [answer(router, "narrow", max_tokens=1)["status"] for router in given["routers"][1:]]
    opened[0][0].close()
    opened[0][1].close()
    until_s = time.monotonic() + PATIENCE_S
    while (after := answer(first, "narrow", max_tokens=1)["status"]) == 429 and time.monotonic() < until_s:
        time.sleep(0.05)
    opened[1][0].close()
    opened[1][1].close()
    return {"third": third, "elsewhere": elsewhere, "after": after}


class Requests:
    """Requests of a tenant on one WebSocket, whose beginnings are put into a queue."""

    def __init__(self, socket: ClientConnection, key: str, begun: "Queue[str]") -> None:
        self._socket = socket
        self._key = key
        self._begun = begun
        self._replies: Queue[dict[str, Any]] = Queue()
        """`started`, or the error instead."""
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, count: int) -> None:
        """Send requests, one after another; returns when all are accepted."""
        for number in range(count):
            body = body_of(max_tokens=given["long"], resumable=False)  # it ends with the socket
            message = {"type": "generate", "id": str(number), "endpoint": "completions", "body": body}
            self._socket.send(json.dumps(message))
            reply = self._replies.get(timeout=PATIENCE_S)
            if reply["type"] != "started":
                raise SystemExit(f"request {number} of {self._key}: {reply}")

    def cancel(self, number: int) -> None:
        self._socket.send(json.dumps({"type": "cancel", "id": str(number)}))

    def _read(self) -> None:
        seen: set[str] = set()
        for text in self._socket:
            message = json.loads(text)
            if message["type"] in ("started", "error"):
                self._replies.put(message)
            elif message["type"] == "event" and message["id"] not in seen:
                seen.add(message["id"])
                self._begun.put(self._key)


def turns() -> list[str]:
    begun: Queue[str] = Queue()
    order: list[str] = []
    with ExitStack() as sockets:
        tenants = {}
        for key in ("steady", "low", "high"):
            headers = {"authorization": f"Bearer {given[key]}"}
            waits = {"open_timeout": PATIENCE_S, "ping_timeout": PATIENCE_S}
            socket = connect(f"ws://{first}/v1/stream", additional_headers=headers, proxy=None, **waits)
            tenants[key] = Requests(sockets.enter_context(socket), key, begun)
        tenants["steady"].send(given["seats"])
        for _ in range(given["seats"]):
            begun.get(timeout=PATIENCE_S)
        for key in ("low", "high"):
            tenants[key].send(WAITING)
        if not begun.empty():
            raise SystemExit("there was a seat left")
        for number in range(given["seats"]):
            tenants["steady"].cancel(number)
            try:
                order.append(begun.get(timeout=NO_TURN_S))
            except Empty:
                continue
            if len(order) == 2 * WAITING:
                return order
    return order


answers = tokens()
texts = [each["text"] for each in answers if "text" in each]
print(json.dumps({"tokens": answers, "streams": streams(), "turns": turns(), "texts": texts}))
