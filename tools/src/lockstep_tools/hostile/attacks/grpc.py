"""Attacks on the gRPC door, which has a port of its own."""

import asyncio

import grpc
from lockstep_api.v1 import inference_pb2

from lockstep_tools.hostile.attacks.registry import MODEL, Address, attack_on, count_connection, needs_effect, repeat

_GENERATE = "/lockstep.v1.Inference/Generate"
_CHANNELS = 4
_CALLS = 32
"""At a time on each channel."""
_EMPTY_MESSAGES = 19_000
"""In 37 KiB: few bytes, but many objects."""
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
"""Each channel has a connection of its own."""


@attack_on("grpc")
async def grpc_messages(address: Address) -> None:
    """Conversations of empty messages, many at a time, which are refused once they have been read."""
    conversation = inference_pb2.Conversation(messages=[inference_pb2.ChatMessage()] * _EMPTY_MESSAGES)
    data = inference_pb2.GenerateRequest(model=MODEL, conversation=conversation).SerializeToString()

    with needs_effect("the router has read no message") as note_refused:

        async def call(channel: grpc.aio.Channel) -> None:
            try:
                async for _ in channel.unary_stream(_GENERATE)(data):
                    pass
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                    note_refused()
                elif error.code() == grpc.StatusCode.UNAVAILABLE:
                    raise ConnectionError(error.details()) from error

        async def flood() -> None:
            async with grpc.aio.insecure_channel(f"{address[0]}:{address[1]}", options=_OPTIONS) as channel:
                await channel.channel_ready()
                count_connection()
                await repeat(_CALLS, lambda: call(channel))

        await asyncio.gather(*(flood() for _ in range(_CHANNELS)))
