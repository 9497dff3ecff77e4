"""Client of Lockstep: answers and streams that survive the death of routers.

`LockstepClient` and `AsyncLockstepClient` are typed; `lockstep_client.openai` has drop-ins for the official classes.
"""

from lockstep_client.aio import AsyncLockstepClient, AsyncStream
from lockstep_client.client import LockstepClient, Stream
from lockstep_client.errors import (
    AuthenticationError,
    CancelledError,
    ConnectionFailedError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    LockstepError,
    NotFoundError,
    OverloadedError,
    ProtocolError,
    RateLimitError,
    Received,
    StreamDiverged,
    StreamLost,
    StreamMoved,
    UnavailableError,
)
from lockstep_client.events import (
    Answer,
    Choice,
    Embeddings,
    Event,
    Finish,
    Logprob,
    Model,
    ReasoningPiece,
    TextPiece,
    Tokens,
    ToolCall,
    ToolCallPiece,
    Usage,
)
from lockstep_client.fields import StructuredOutputs
from lockstep_client.policy import Policy

__all__ = [
    "Answer",
    "AsyncLockstepClient",
    "AsyncStream",
    "AuthenticationError",
    "CancelledError",
    "Choice",
    "ConnectionFailedError",
    "DeadlineExceededError",
    "Embeddings",
    "Event",
    "Finish",
    "InternalError",
    "InvalidRequestError",
    "LockstepClient",
    "LockstepError",
    "Logprob",
    "Model",
    "NotFoundError",
    "OverloadedError",
    "Policy",
    "ProtocolError",
    "RateLimitError",
    "ReasoningPiece",
    "Received",
    "Stream",
    "StreamDiverged",
    "StreamLost",
    "StreamMoved",
    "StructuredOutputs",
    "TextPiece",
    "Tokens",
    "ToolCall",
    "ToolCallPiece",
    "UnavailableError",
    "Usage",
]
