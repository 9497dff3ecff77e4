"""Runs in a pod with the router's image: the same request at each of a router's doors, and what each answers.

The argument is a JSON object: `host`, `http` and `grpc` (ports), `model`, `prompt`, and `key` if one is to be sent.
Prints the text that each door gives, or what it refuses with. The gRPC door is used as `grpcurl` does: all that is
known of it comes from its reflection.
"""

import json
import sys
import urllib.error
import urllib.request

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

given = json.loads(sys.argv[1])
http, target = f"{given['host']}:{given['http']}", f"{given['host']}:{given['grpc']}"
headers = {"authorization": f"Bearer {given['key']}"} if "key" in given else {}
body = {"model": given["model"], "prompt": given["prompt"], "max_tokens": TOKENS, "temperature": 0}


def post(**fields):
    request = urllib.request.Request(f"http://{http}/v1/completions", json.dumps(body | fields).encode(), headers)
    request.add_header("content-type", "application/json")
    return urllib.request.urlopen(request, timeout=PATIENCE_S)


def rest():
    with post() as answer:
        return json.load(answer)["choices"][0]["text"]


def sse():
    text = ""
    with post(stream=True) as answer:
        for line in answer:
            name, _, data = line.decode().strip().partition(": ")
            if name == "data" and data != "[DONE]":
                text += json.loads(data)["choices"][0]["text"]
            elif name == "data":
                return text
    return f"{text} without an end"


def websocket():
    text = ""
    with connect(f"ws://{http}/v1/stream", additional_headers=headers, open_timeout=PATIENCE_S, proxy=None) as socket:
        socket.send(json.dumps({"type": "generate", "id": "a", "endpoint": "completions", "body": body}))
        while True:
            message = json.loads(socket.recv(timeout=PATIENCE_S))
            if message["type"] == "event":
                text += "".join(choice["text"] for choice in message["data"]["choices"])
            elif message["type"] != "started":
                return text if message["type"] == "done" else message


class WithKey(grpc.UnaryStreamClientInterceptor, grpc.StreamStreamClientInterceptor):
    def intercept_unary_stream(self, continuation, details, request):
        return continuation(details._replace(metadata=tuple(headers.items())), request)

    intercept_stream_stream = intercept_unary_stream


def by_reflection():
    with grpc.insecure_channel(target) as plain:
        channel = grpc.intercept_channel(plain, WithKey())
        found = ProtoReflectionDescriptorDatabase(channel)
        if SERVICE not in found.get_services():
            return f"reflection does not list {SERVICE}"
        method = DescriptorPool(found).FindServiceByName(SERVICE).FindMethodByName("Generate")
        request = GetMessageClass(method.input_type)(model=given["model"], prompt=given["prompt"])
        request.sampling.max_tokens, request.sampling.temperature = TOKENS, 0
        take = GetMessageClass(method.output_type).FromString
        call = channel.unary_stream(f"/{SERVICE}/Generate", type(request).SerializeToString, take)
        return "".join(event.text for event in call(request, timeout=PATIENCE_S))


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


doors = {"rest": rest, "sse": sse, "websocket": websocket, "grpc": by_reflection, "health": health}
print(json.dumps({name: said(door) for name, door in doors.items()}))
