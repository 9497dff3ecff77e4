"""What `inside/doors.py` prints where all doors are open, and where they are closed."""

from kube import Json

CLOSED: Json = {
    "texts": {
        "rest": 401,
        "sse": 401,
        "stream_by_id": 401,
        "websocket": 401,
        "websocket_resume": 401,
        "by_reflection": "UNAUTHENTICATED",
        "grpc_resume": "UNAUTHENTICATED",
    },
    "others": {
        "health": "SERVING",
        "grpc_cancel": "UNAUTHENTICATED",
        "chat": 401,
        "responses": 401,
        "embeddings": 401,
        "tokenize": 401,
        "models": 401,
    },
}
"""The answers to a client without a key, where keys are needed: only a router's health is for everyone."""


def check_open(said: Json, model: str, prompt: str) -> None:
    """Every door gives the same text, whole streams and those that were broken; and all other calls are answered."""
    assert said["texts"].keys() == CLOSED["texts"].keys()
    (text,) = set(said["texts"].values())
    assert isinstance(text, str)
    assert len(text) > 24, "each of 24 tokens is a character at least"
    others = said["others"]
    assert others["health"] == "SERVING"
    assert others["grpc_cancel"] == [1, "CANCELLED", "NOT_FOUND"]
    assert isinstance(others["chat"], str)
    assert len(others["chat"]) > 24
    assert others["responses"] == others["chat"]
    assert others["tokenize"] == prompt
    assert others["models"] == [model]
    status, refusal = others["embeddings"]
    assert (status, model in refusal) == (400, True), "the reference model has no embeddings, and the error names it"
