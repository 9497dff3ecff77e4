"""A router as its clients see it: answers are a function of (prompt, seed), kept for those who come back.

`FakeRouter` is without a network. `Network` gives it one without sockets, whose connections break at chosen bytes;
`serving` gives it a real one.
"""

import base64
import contextlib
import json
import random
import socket
import struct
import threading
import time
from dataclasses import dataclass, field

from lockstep_client.generation import exchange_for
from lockstep_client.routers import Routers
from lockstep_client.steps import BrokenError, Expect, Give, Head, Outgoing, Pause, Read, Resolve, Send

WORDS = [
    "Ein",
    " naïve",
    " café",
    " 漢字",
    " 🙂",
    " \u2028",
    " the",
    " of",
    "\n",
    ' "quoted"',
    " end",
    " data:",
    ".",
]


def tokens_of(prompt, seed, count):
    """The tokens of an answer."""
    return random.Random(f"{prompt}/{seed}").choices(WORDS, k=count)


def vector_of(text):
    """The embedding of a text: four numbers that single precision holds exactly."""
    return tuple(random.Random(str(text)).randrange(-64, 64) / 64 for _ in range(4))


def text_of(prompt, seed, count):
    return "".join(tokens_of(prompt, seed, count))


@dataclass
class Kept:
    """An answer that clients can come back to."""

    events: list
    """(id, data) pairs."""
    key: str | None


@dataclass(eq=False)
class FakeRouter:
    name: str = "router-0"
    tokens_per_event: int = 1
    salt: str = ""
    """Another salt gives other tokens."""
    resumes: bool = True
    tells_usage: bool = True
    """Whether the last finish has the usage that follows it."""
    max_silence: str = ""
    """What it says of the silence of its streams."""
    line_end: str = "\n"
    refusals: list = field(default_factory=list)
    """Responses (status, headers, body) for the next requests."""
    error_after: tuple | None = None
    """(events, error): the next streams fail so."""
    kept: dict = field(default_factory=dict)
    generations: list = field(default_factory=list)
    """The bodies of the requests that began a generation."""
    seen: list = field(default_factory=list)
    """(method, path, headers) of all requests."""

    def respond(self, method, path, headers, content):
        """Status, headers and body."""
        headers = {name.lower(): value for name, value in headers.items()}
        self.seen.append((method, path, headers))
        if self.refusals:
            status, more, body = self.refusals.pop(0)
            return status, {"x-lockstep-router": self.name, **more}, body
        route = getattr(self, f"_{method.lower()}")
        status, more, body = route(path, headers, content)
        return status, {"x-lockstep-router": self.name, **more}, body

    def forget(self):
        """As after a restart."""
        self.kept.clear()

    def _get(self, path, headers, _):
        if path == "/healthz":
            return 200, {"content-type": "application/json"}, b'{"status":"ok"}'
        if path == "/v1/models":
            models = {"data": [{"id": "reference", "created": 7, "max_model_len": 2048}]}
            return 200, {"content-type": "application/json"}, json.dumps(models).encode()
        stream_id = path.removeprefix("/v1/streams/")
        if stream_id not in self.kept or not self.resumes:
            return error(404, "stream_not_found" if self.resumes else "not_found", "there is no such stream")
        return self.events(stream_id, headers.get("last-event-id"))

    def _delete(self, path, headers, _):
        self.kept.pop(path.removeprefix("/v1/streams/"), None)
        return 200, {}, b"{}"

    def _post(self, path, headers, content):
        body = json.loads(content)
        if path == "/tokenize":
            return 200, {}, json.dumps({"tokens": [1, 2, 3], "count": 3, "max_model_len": 2048}).encode()
        if path == "/v1/embeddings":
            return 200, {"content-type": "application/json"}, self.embed(body).encode()
        if path == "/detokenize":
            return 200, {}, json.dumps({"prompt": "abc"}).encode()
        key = headers.get("idempotency-key")
        known = [stream_id for stream_id, kept in self.kept.items() if key and kept.key == key]
        stream_id = known[0] if known else self._generate(path, body, key)
        if body.get("stream"):
            return self.events(stream_id, headers.get("last-event-id"))
        return 200, {"x-lockstep-stream-id": stream_id}, self.whole(path, body).encode()

    def embed(self, body):
        data = [
            {"index": index, "embedding": base64.b64encode(struct.pack("<4f", *vector_of(text))).decode()}
            for index, text in enumerate(body["input"])
        ]
        usage = {"prompt_tokens": 7, "total_tokens": 7}
        return json.dumps({"object": "list", "data": data[::-1], "model": "reference", "usage": usage})

    def _generate(self, path, body, key):
        self.generations.append(body)
        stream_id = f"r-{self.name}-{len(self.generations)}"
        make = self._make_response if path.endswith("/responses") else self.make
        self.kept[stream_id] = Kept(list(make(stream_id, path, body)), key)
        return stream_id

    def _prompt(self, body):
        return self.salt + json.dumps(body.get("messages") or body.get("prompt") or body.get("input"))

    def make(self, stream_id, path, body):
        is_chat = path.endswith("/chat/completions")
        choices, count = body.get("n") or 1, body["max_tokens"]
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        head = {
            "id": f"cmpl-{stream_id}",
            "object": kind,
            "created": 1000 + len(self.generations),
            "model": "reference",
        }
        given = ["-"] * choices
        usage = {"prompt_tokens": 5, "completion_tokens": count * choices, "total_tokens": 5 + count * choices}
        wants_usage = (body.get("stream_options") or {}).get("include_usage")

        def event(index, text, tokens, position, finish=None, role=None):
            given[index] = position
            choice = {"index": index, "finish_reason": finish, "logprobs": None}
            if tokens and body.get("logprobs"):
                choice["logprobs"] = logprobs(is_chat, tokens)
            if is_chat:
                choice["delta"] = ({"role": role} if role else {}) | ({} if text is None else {"content": text})
            else:
                choice["text"] = text or ""
            more = {"lockstep": {"usage": usage}} if finish and index == choices - 1 and self.tells_usage else {}
            chunk = head | {"choices": [choice]} | (more if wants_usage else {})
            return f"{stream_id}:{','.join(given)}", json.dumps(chunk, ensure_ascii=False)

        if is_chat:
            for index in range(choices):
                yield event(index, "", [], "0", role="assistant")
        for first in range(0, count, self.tokens_per_event):
            for index in range(choices):
                tokens = tokens_of(self._prompt(body), body["seed"] + index, count)[
                    first : first + self.tokens_per_event
                ]
                yield event(index, "".join(tokens), tokens, str(min(count, first + self.tokens_per_event)))
        for index in range(choices):
            yield event(index, None, [], f"{count}f", finish="length")
        if wants_usage:
            yield f"{stream_id}:{','.join(given)},u", json.dumps(head | {"choices": [], "usage": usage})

    def _make_response(self, stream_id, _, body):
        tokens = tokens_of(self._prompt(body), body["seed"], body["max_output_tokens"])
        head = {"id": f"resp_{stream_id}", "created_at": 1000 + len(self.generations), "model": "reference"}
        done = []
        number = 0

        def event(kind, **fields):
            nonlocal number
            data = {"type": f"response.{kind}"} | fields | {"sequence_number": number}
            number += 1
            return f"{stream_id}:{number}s{number}", json.dumps(data, ensure_ascii=False)

        for kind in ("created", "in_progress"):
            yield event(kind, response=head | {"output": [], "status": "in_progress"})
        for index, kind in enumerate(("message", "function_call")):
            item = {"id": f"item_{stream_id}_{index}", "type": kind}
            item |= {"call_id": f"call_{stream_id}", "name": "look"} if kind == "function_call" else {}
            name = "output_text" if kind == "message" else "function_call_arguments"
            place = {"output_index": index, "item_id": item["id"]}
            yield event("output_item.added", output_index=index, item=item | {"status": "in_progress"})
            for first in range(0, len(tokens), self.tokens_per_event):
                yield event(f"{name}.delta", **place, delta="".join(tokens[first : first + self.tokens_per_event]))
            text = "".join(tokens)
            yield event(f"{name}.done", **place, text=text)
            done.append(item | {"status": "completed", "text": text})
            yield event("output_item.done", output_index=index, item=done[-1])
        usage = {"input_tokens": 5, "output_tokens": 2 * len(tokens), "total_tokens": 5 + 2 * len(tokens)}
        yield event("completed", response=head | {"output": done, "status": "completed", "usage": usage})

    def events(self, stream_id, after):
        kept = self.kept[stream_id]
        ids = [event_id for event_id, _ in kept.events]
        if after is not None and after not in ids:
            return error(400, "invalid_request", "Last-Event-ID is no event of this stream", "Last-Event-ID")
        first = 0 if after is None else ids.index(after) + 1
        end = self.line_end
        parts = [f": keep-alive{end}{end}"]
        events = kept.events if self.error_after is None else kept.events[: self.error_after[0]]
        is_response = '"type": "response.' in kept.events[0][1]
        for event_id, data in events[first:]:
            parts += [f"event: {json.loads(data)['type']}{end}"] if is_response else []
            parts.append(f"id: {event_id}{end}data: {data}{end}{end}")
        if self.error_after is not None:
            body = self.error_after[1]
            failed = {"type": "response.failed", "response": {"error": body, "lockstep": {"code": body["code"]}}}
            data = json.dumps(failed if is_response else {"error": body})
            parts.append(f"data: {data}{end}{end}")
            self.error_after = None
            self.kept.pop(stream_id)
        elif not is_response:
            parts.append(f"data: [DONE]{end}{end}")
        headers = {"content-type": "text/event-stream; charset=utf-8", "x-lockstep-stream-id": stream_id}
        headers |= {"x-lockstep-max-silence": self.max_silence} if self.max_silence else {}
        return 200, headers, "".join(parts).encode()

    def whole(self, path, body):
        if path.endswith("/responses"):
            *_, (_, data) = self._make_response("r-whole", path, body)
            return json.dumps(json.loads(data)["response"])
        is_chat = path.endswith("/chat/completions")
        count = body["max_tokens"]
        choices = []
        for index in range(body.get("n") or 1):
            text = text_of(self._prompt(body), body["seed"] + index, count)
            content = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            choices.append({"index": index, "finish_reason": "length", "logprobs": None} | content)
        usage = {"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count}
        kind = "chat.completion" if is_chat else "text_completion"
        head = {"id": "cmpl-1", "object": kind, "created": 1, "model": "reference"}
        return json.dumps(head | {"choices": choices, "usage": usage})


def logprobs(is_chat, tokens):
    if is_chat:
        entries = [{"token": t, "logprob": -0.5, "bytes": list(t.encode()), "top_logprobs": []} for t in tokens]
        return {"content": entries, "refusal": None}
    offsets = [7] * len(tokens)
    return {
        "tokens": tokens,
        "token_logprobs": [-0.5] * len(tokens),
        "top_logprobs": [{t: -0.5} for t in tokens],
        "text_offset": offsets,
    }


def error(status, code, message, param=None):
    body = {"error": {"message": message, "type": "t", "param": param, "code": code}}
    return status, {"content-type": "application/json"}, json.dumps(body).encode()


class Clock:
    """A clock that moves when the client waits."""

    def __init__(self):
        self.now_s = 100.0
        self.pauses = []

    def __call__(self):
        return self.now_s

    def pause(self, seconds):
        self.pauses.append(seconds)
        self.now_s += seconds


class Network:
    """Carries out an exchange's steps without sockets. `cuts` are the bytes of a body after which connections break."""

    def __init__(self, routers, cuts=(), *, chunk_bytes=None):
        self.routers = routers
        """By root; None: no router listens."""
        self.cuts = list(cuts)
        self.chunk_bytes = chunk_bytes
        self.clock = Clock()
        self.addresses = {}
        self.sent = []
        """(router, method) of each request that reached one."""
        self.silences = 0
        """Requests whose answers do not come."""
        self.silence_kind = "silent"
        """How their connections end."""
        self.cut_kind = "broken"
        """How connections end that break; `silent`: nothing more comes on them; `late`: their own time ends."""
        self.late_s = 0.0
        """After how long it does."""
        self.waits = []
        """How long the head of each answer may take."""
        self.read_s = 0.0
        """The time that each chunk of a body takes."""
        self.expected = []
        """The silences that are waited for at most in the bodies of streams."""
        self._body = None

    def request(self, path, body, policy, *, headers=None, seed=1):
        """The outputs of a request: the head, then its content."""
        content = b"" if body is None else json.dumps(body).encode()
        request = Outgoing("GET" if body is None else "POST", path, headers or {}, content)
        chance = random.Random(seed)
        self.known = Routers(self.routers, avoid_s=policy.avoid_s, clock=self.clock, random=chance)
        self.exchange = exchange_for(request, self.known, policy, self.clock, chance)
        return self.run(self.exchange.run())

    def run(self, steps):
        result = broken = None
        while True:
            try:
                step = steps.throw(broken) if broken else steps.send(result)
            except StopIteration:
                return
            result = broken = None
            if isinstance(step, Give):
                yield step.value
                continue
            try:
                result = self._carry_out(step)
            except BrokenError as error:
                broken = error

    def _carry_out(self, step):
        match step:
            case Send():
                return self._send(step)
            case Expect():
                self.expected.append(step.silence_s)
                return None
            case Read():
                return self._read()
            case Pause():
                return self.clock.pause(step.seconds)
            case Resolve():
                return self.addresses.get(step.name.host, [])

    def _send(self, step):
        router = self.routers.get(step.router.address or step.router.root)
        if router is None:
            raise BrokenError("connect", "no connection")
        request = step.request
        self.sent.append((router, request.method))
        self.waits.append(step.silence_s)
        is_question = request.path.partition("?")[0] == "/healthz"
        if self.silences and not is_question:
            self.silences -= 1
            self.clock.pause(step.silence_s)
            raise BrokenError(self.silence_kind, "silent")
        status, headers, body = router.respond(request.method, request.path, request.headers, request.content)
        cut = self.cuts.pop(0) if self.cuts and not is_question else None
        self._is_cut = cut is not None and cut < len(body)
        self._body = body[:cut] if self._is_cut else body
        return Head(status, headers)

    def _read(self):
        self.clock.now_s += self.read_s
        if self._body:
            size = self.chunk_bytes or len(self._body)
            chunk, self._body = self._body[:size], self._body[size:]
            return chunk
        if self._is_cut:
            if self.cut_kind != "broken":
                self.clock.now_s += self.expected[-1] if self.cut_kind == "silent" else self.late_s
            raise BrokenError(self.cut_kind, "reset")
        return None


@dataclass
class Server:
    """A fake router on a port."""

    router: FakeRouter
    port: int
    cuts: list
    """Bytes of the next bodies after which the connection is reset; None: not."""
    hangs: list
    """Bytes of the next bodies after which nothing more comes; None: not."""
    closing: threading.Event
    listener: socket.socket
    connections: set = field(default_factory=set)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    def refuse(self):
        """Take no further connections."""
        self.closing.set()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def kill(self):
        """As SIGKILL looks from outside."""
        self.refuse()
        for connection in list(self.connections):
            reset(connection)


def reset(connection):
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


@contextlib.contextmanager
def serving(router, *, cuts=(), hangs=(), port=0, host="127.0.0.1"):
    listener = socket.create_server((host, port))
    server = Server(router, listener.getsockname()[1], list(cuts), list(hangs), threading.Event(), listener)
    threading.Thread(target=_accept, args=(server,), daemon=True).start()
    try:
        yield server
    finally:
        server.kill()


def _accept(server):
    while not server.closing.is_set():
        try:
            connection, _ = server.listener.accept()
        except OSError:
            return
        server.connections.add(connection)
        threading.Thread(target=_serve, args=(server, connection), daemon=True).start()


def _serve(server, connection):
    try:
        with connection.makefile("rb") as reader:
            while (line := reader.readline()).strip():
                method, path, _ = line.decode().split(" ", 2)
                headers = {}
                while name := reader.readline().decode().strip():
                    name, _, value = name.partition(":")
                    headers[name.strip()] = value.strip()
                lengths = [value for name, value in headers.items() if name.lower() == "content-length"]
                content = reader.read(int(lengths[0])) if lengths else b""
                if not _respond(server, connection, server.router.respond(method, path, headers, content)):
                    return
    except (OSError, ValueError):
        pass
    finally:
        server.connections.discard(connection)
        reset(connection)


def _respond(server, connection, response):
    status, headers, body = response
    is_stream = headers.get("content-type", "").startswith("text/event-stream")
    cut = server.cuts.pop(0) if server.cuts else None
    hang = server.hangs.pop(0) if server.hangs else None
    length = "transfer-encoding: chunked" if is_stream else f"content-length: {len(body)}"
    head = [f"HTTP/1.1 {status} X", length, *(f"{name}: {value}" for name, value in headers.items())]
    connection.sendall(("\r\n".join(head) + "\r\n\r\n").encode())
    part = body if cut is None and hang is None else body[: cut if hang is None else hang]
    if is_stream:
        part = b"%x\r\n%b\r\n" % (len(part), part) if part else b""
        connection.sendall(part + (b"0\r\n\r\n" if cut is None and hang is None else b""))
    else:
        connection.sendall(part)
    if hang is not None:
        server.closing.wait(30)
    elif cut is not None:
        time.sleep(0)  # the client may read what was sent before the reset
    return cut is None and hang is None
