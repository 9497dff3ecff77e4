from lockstep_api.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StreamJournal(_message.Message):
    __slots__ = ("stream_id", "model_digest", "prompt_ids", "sampling", "emitted_ids", "finish", "tenant")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    model_digest: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.Sampling
    emitted_ids: _containers.RepeatedScalarFieldContainer[int]
    finish: _inference_pb2.FinishReason
    tenant: str
    def __init__(self, stream_id: _Optional[str] = ..., model_digest: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.Sampling, _Mapping]] = ..., emitted_ids: _Optional[_Iterable[int]] = ..., finish: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., tenant: _Optional[str] = ...) -> None: ...

class OpenStreamRequest(_message.Message):
    __slots__ = ("journal", "lease_epoch", "ttl_s")
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    LEASE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    journal: StreamJournal
    lease_epoch: int
    ttl_s: float
    def __init__(self, journal: _Optional[_Union[StreamJournal, _Mapping]] = ..., lease_epoch: _Optional[int] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class OpenStreamResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AppendTokensRequest(_message.Message):
    __slots__ = ("stream_id", "lease_epoch", "position", "ids", "finish")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    lease_epoch: int
    position: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    finish: _inference_pb2.FinishReason
    def __init__(self, stream_id: _Optional[str] = ..., lease_epoch: _Optional[int] = ..., position: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., finish: _Optional[_Union[_inference_pb2.FinishReason, str]] = ...) -> None: ...

class AppendTokensResponse(_message.Message):
    __slots__ = ("length",)
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    length: int
    def __init__(self, length: _Optional[int] = ...) -> None: ...

class ReadStreamRequest(_message.Message):
    __slots__ = ("stream_id", "from_position")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_POSITION_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    from_position: int
    def __init__(self, stream_id: _Optional[str] = ..., from_position: _Optional[int] = ...) -> None: ...

class ReadStreamResponse(_message.Message):
    __slots__ = ("journal",)
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    journal: StreamJournal
    def __init__(self, journal: _Optional[_Union[StreamJournal, _Mapping]] = ...) -> None: ...

class CloseStreamRequest(_message.Message):
    __slots__ = ("stream_id", "lease_epoch")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    lease_epoch: int
    def __init__(self, stream_id: _Optional[str] = ..., lease_epoch: _Optional[int] = ...) -> None: ...

class CloseStreamResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AcquireLeaseRequest(_message.Message):
    __slots__ = ("key", "owner", "ttl_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    key: str
    owner: str
    ttl_s: float
    def __init__(self, key: _Optional[str] = ..., owner: _Optional[str] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class AcquireLeaseResponse(_message.Message):
    __slots__ = ("acquired", "owner", "epoch")
    ACQUIRED_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    acquired: bool
    owner: str
    epoch: int
    def __init__(self, acquired: _Optional[bool] = ..., owner: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("key", "owner", "epoch")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    key: str
    owner: str
    epoch: int
    def __init__(self, key: _Optional[str] = ..., owner: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PutSessionRequest(_message.Message):
    __slots__ = ("session", "worker_id", "ttl_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    session: str
    worker_id: str
    ttl_s: float
    def __init__(self, session: _Optional[str] = ..., worker_id: _Optional[str] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class PutSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class GetSessionResponse(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class PutBlockRequest(_message.Message):
    __slots__ = ("key", "payload", "ttl_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    payload: bytes
    ttl_s: float
    def __init__(self, key: _Optional[bytes] = ..., payload: _Optional[bytes] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class PutBlockResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetBlockRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    def __init__(self, key: _Optional[bytes] = ...) -> None: ...

class GetBlockResponse(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...
