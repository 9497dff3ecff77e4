"""Runs in a pod with the router's image: the same request at each of a router's doors, and what each answers.

The argument is a JSON object: `host`, `http` and `grpc` (ports), `model`, `prompt`, and `key` if one has to be sent.
Prints the text that each door gives, or what it refuses with, as `texts`; and what the calls give that have other
answers, as `others`. The gRPC door is used as `grpcurl` does: all that is known of it comes from its reflection.

Some clients break their stream after its first tokens and come back for the rest. Only the router that has the stream
knows it, so they try new connections until they meet it.
"""

import json
import sys
import time
import urllib.error
import urllib.request
from itertools import islice

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

PATIENCE_S = 120.0
SERVICE = "lockstep.v1.Inference"
TOKENS = 24
BREAK_AFTER = 3
"""Events that a client takes before it breaks its stream."""
LONG = 1900
"""Tokens of a stream that is cancelled before its end."""

given = json.loads(sys.argv[1])
http, target = f"{given['host']}:{given['http']}", f"{given['host']}:{given['grpc']}"
headers = {"authorization": f"Bearer {given['key']}"} if "key" in given else {}
body = {"model": given["model"], "prompt": given["prompt"], "max_tokens": TOKENS, "temperature": 0}


def ask(path, sent=None, **more):
    """The answer to a GET, or to a POST of a body."""
    data = None if sent is None else json.dumps(sent).encode()
    request = urllib.request.Request(f"http://{http}{path}", data, {**headers, **more})
    request.add_header("content-type", "application/json")
    return urllib.request.urlopen(request, timeout=PATIENCE_S)


def reply(path, sent=None):
    with ask(path, sent) as answer:
        return json.load(answer)


def until_found(come_back):
    """What a client gets that comes back on new connections until it meets the router that has its stream."""
    until_s = time.monotonic() + PATIENCE_S
    while (found := come_back()) is None:
        if time.monotonic() > until_s:
            return f"no router has had the stream for {PATIENCE_S:g} s"
    return found


def rest():
    return reply("/v1/completions", body)["choices"][0]["text"]


def events_of(answer):
    """The ids and the texts of server-sent events; the text is None at the end."""
    event_id = None
    for line in answer:
        name, _, data = line.decode().strip().partition(": ")
        if name == "id":
            event_id = data
        elif name == "data" and data == "[DONE]":
            yield event_id, None
            return
        elif name == "data":
            yield event_id, json.loads(data)["choices"][0]["text"]


def whole(events):
    """Their text, if they have an end."""
    texts = [text for _, text in events]
    return "".join(texts[:-1]) if texts and texts[-1] is None else f"{texts} without an end"


def sse():
    with ask("/v1/completions", body | {"stream": True}) as answer:
        return whole(events_of(answer))


def stream_by_id():
    """`GET /v1/streams/{id}`, after a broken connection."""
    with ask("/v1/completions", body | {"stream": True}, **{"x-lockstep-resumable": "true"}) as answer:
        stream = answer.headers["x-lockstep-stream-id"]
        begun = list(islice(events_of(answer), BREAK_AFTER))

    def come_back():
        try:
            with ask(f"/v1/streams/{stream}", **{"last-event-id": begun[-1][0]}) as answer:
                return "".join(text for _, text in begun) + whole(events_of(answer))
        except urllib.error.HTTPError as error:
            if json.load(error)["error"]["code"] == "stream_not_found":
                return None
            raise

    return until_found(come_back)


def opened():
    return connect(f"ws://{http}/v1/stream", additional_headers=headers, open_timeout=PATIENCE_S, proxy=None)


def messages(socket, asked):
    """Send a message; the messages that answer it, the last one too."""
    socket.send(json.dumps(asked))
    while True:
        message = json.loads(socket.recv(timeout=PATIENCE_S))
        yield message
        if message["type"] in ("done", "error"):
            return


def text_of(answer):
    """The text of events that have arrived, or the error."""
    pieces = [choice["text"] for each in answer if each["type"] == "event" for choice in each["data"]["choices"]]
    return answer[-1] if answer[-1]["type"] == "error" else "".join(pieces)


def generate():
    return {"type": "generate", "id": "a", "endpoint": "completions", "body": body}


def websocket():
    with opened() as socket:
        return text_of(list(messages(socket, generate())))


def websocket_resume():
    with opened() as socket:
        # One message more: the first says that the stream has started.
        begun = list(islice(messages(socket, generate()), BREAK_AFTER + 1))
    resume = {"type": "resume", "id": "b", "stream": begun[0]["stream"], "last_event_id": begun[-1]["event_id"]}

    def come_back():
        with opened() as socket:
            answer = list(messages(socket, resume))
        is_elsewhere = answer[-1]["type"] == "error" and answer[-1]["error"]["code"] == "stream_not_found"
        return None if is_elsewhere else text_of(begun + answer)

    return until_found(come_back)


class WithKey(grpc.UnaryStreamClientInterceptor, grpc.StreamStreamClientInterceptor):
    def intercept_unary_stream(self, continuation, details, request):
        return continuation(details._replace(metadata=tuple(headers.items())), request)

    intercept_stream_stream = intercept_unary_stream


class Methods:
    """The service as its reflection describes it, on one connection: so all calls are one router's."""

    def __init__(self, plain):
        self._channel = grpc.intercept_channel(plain, WithKey())
        self._found = ProtoReflectionDescriptorDatabase(self._channel)
        if SERVICE not in self._found.get_services():
            raise SystemExit(f"reflection does not list {SERVICE}")
        self._service = DescriptorPool(self._found).FindServiceByName(SERVICE)

    def call(self, name, **fields):
        method = self._service.FindMethodByName(name)
        request = GetMessageClass(method.input_type)(**fields)
        take = GetMessageClass(method.output_type).FromString
        call = self._channel.unary_stream(f"/{SERVICE}/{name}", type(request).SerializeToString, take)
        return call(request, timeout=PATIENCE_S)

    def generate(self, tokens=TOKENS):
        sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": tokens > TOKENS}
        return self.call("Generate", model=given["model"], prompt=given["prompt"], sampling=sampling)


def by_reflection():
    with grpc.insecure_channel(target) as plain:
        return "".join(event.text for event in Methods(plain).generate())


def grpc_resume():
    with grpc.insecure_channel(target) as plain:
        methods = Methods(plain)
        call = methods.generate()
        begun = list(islice(call, BREAK_AFTER))
        call.cancel()
        rest = methods.call("Resume", request_id=begun[-1].request_id, last_event_id=begun[-1].event_id)
        return "".join(event.text for event in [*begun, *rest])


def grpc_cancel():
    """How the call of a cancelled stream ends, and what is said of the stream then."""
    with grpc.insecure_channel(target) as plain:
        methods = Methods(plain)
        call = methods.generate(LONG)
        stream = next(call).request_id
        cancelled = len(list(methods.call("Cancel", request_id=stream)))
        ends = [said(lambda: len(list(call))), said(lambda: len(list(methods.call("Resume", request_id=stream))))]
        return [cancelled, *ends]


def chat():
    asked = {"model": given["model"], "messages": [{"role": "user", "content": given["prompt"]}]}
    answer = reply("/v1/chat/completions", asked | {"max_tokens": TOKENS, "temperature": 0})
    return answer["choices"][0]["message"]["content"]


def responses():
    asked = {"model": given["model"], "input": given["prompt"], "max_output_tokens": TOKENS, "temperature": 0}
    return "".join(part["text"] for item in reply("/v1/responses", asked)["output"] for part in item["content"])


def embeddings():
    """The size of the vector, or the refusal."""
    try:
        return len(reply("/v1/embeddings", {"model": given["model"], "input": given["prompt"]})["data"][0]["embedding"])
    except urllib.error.HTTPError as error:
        return [error.code, json.load(error)["error"]["message"]] if error.code == 400 else error.code


def tokenize():
    """What the prompt's tokens are as text."""
    tokens = reply("/tokenize", {"model": given["model"], "prompt": given["prompt"], "add_special_tokens": False})[
        "tokens"
    ]
    return reply("/detokenize", {"model": given["model"], "tokens": tokens})["prompt"]


def models():
    return [model["id"] for model in reply("/v1/models")["data"]]


def health():
    with grpc.insecure_channel(target) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE_S)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def said(door):
    try:
        return door()
    except urllib.error.HTTPError as error:
        return error.code
    except InvalidStatus as error:
        return error.response.status_code
    except grpc.RpcError as error:
        return error.code().name


texts = (rest, sse, stream_by_id, websocket, websocket_resume, by_reflection, grpc_resume)
others = (health, grpc_cancel, chat, responses, embeddings, tokenize, models)
found = {"texts": texts, "others": others}
print(json.dumps({kind: {door.__name__: said(door) for door in doors} for kind, doors in found.items()}))
