from lockstep_api.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WriteOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WRITE_OUTCOME_UNSPECIFIED: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_OK: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_STALE: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_UNKNOWN: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_GAP: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_CONFLICT: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_SEALED: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_FULL: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_TOO_LARGE: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_INVALID: _ClassVar[WriteOutcome]
    WRITE_OUTCOME_UNAVAILABLE: _ClassVar[WriteOutcome]

class PutOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUT_OUTCOME_UNSPECIFIED: _ClassVar[PutOutcome]
    PUT_OUTCOME_STORED: _ClassVar[PutOutcome]
    PUT_OUTCOME_FULL: _ClassVar[PutOutcome]
    PUT_OUTCOME_INVALID: _ClassVar[PutOutcome]
WRITE_OUTCOME_UNSPECIFIED: WriteOutcome
WRITE_OUTCOME_OK: WriteOutcome
WRITE_OUTCOME_STALE: WriteOutcome
WRITE_OUTCOME_UNKNOWN: WriteOutcome
WRITE_OUTCOME_GAP: WriteOutcome
WRITE_OUTCOME_CONFLICT: WriteOutcome
WRITE_OUTCOME_SEALED: WriteOutcome
WRITE_OUTCOME_FULL: WriteOutcome
WRITE_OUTCOME_TOO_LARGE: WriteOutcome
WRITE_OUTCOME_INVALID: WriteOutcome
WRITE_OUTCOME_UNAVAILABLE: WriteOutcome
PUT_OUTCOME_UNSPECIFIED: PutOutcome
PUT_OUTCOME_STORED: PutOutcome
PUT_OUTCOME_FULL: PutOutcome
PUT_OUTCOME_INVALID: PutOutcome

class StreamRecord(_message.Message):
    __slots__ = ("schema", "model", "model_digest", "tokenizer_digest", "prompts", "choices", "request")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    schema: int
    model: str
    model_digest: str
    tokenizer_digest: str
    prompts: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenIds]
    choices: _containers.RepeatedCompositeFieldContainer[StreamChoice]
    request: bytes
    def __init__(self, schema: _Optional[int] = ..., model: _Optional[str] = ..., model_digest: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., prompts: _Optional[_Iterable[_Union[_inference_pb2.TokenIds, _Mapping]]] = ..., choices: _Optional[_Iterable[_Union[StreamChoice, _Mapping]]] = ..., request: _Optional[bytes] = ...) -> None: ...

class StreamChoice(_message.Message):
    __slots__ = ("stream_id", "sampling")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    sampling: _inference_pb2.Sampling
    def __init__(self, stream_id: _Optional[str] = ..., sampling: _Optional[_Union[_inference_pb2.Sampling, _Mapping]] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("choice", "position", "ids", "logprobs", "finish", "cached_tokens", "inexact", "numerics", "unproven")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INEXACT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    UNPROVEN_FIELD_NUMBER: _ClassVar[int]
    choice: int
    position: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.Logprobs]
    finish: _inference_pb2.FinishReason
    cached_tokens: int
    inexact: bool
    numerics: str
    unproven: bool
    def __init__(self, choice: _Optional[int] = ..., position: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.Logprobs, _Mapping]]] = ..., finish: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., cached_tokens: _Optional[int] = ..., inexact: _Optional[bool] = ..., numerics: _Optional[str] = ..., unproven: _Optional[bool] = ...) -> None: ...

class Seal(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: bytes
    def __init__(self, outcome: _Optional[bytes] = ...) -> None: ...

class StreamWrite(_message.Message):
    __slots__ = ("tenant", "stream_id", "epoch", "record", "pieces", "seal", "ttl_s", "owner", "left_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    stream_id: str
    epoch: int
    record: StreamRecord
    pieces: _containers.RepeatedCompositeFieldContainer[Piece]
    seal: Seal
    ttl_s: float
    owner: str
    left_s: float
    def __init__(self, tenant: _Optional[str] = ..., stream_id: _Optional[str] = ..., epoch: _Optional[int] = ..., record: _Optional[_Union[StreamRecord, _Mapping]] = ..., pieces: _Optional[_Iterable[_Union[Piece, _Mapping]]] = ..., seal: _Optional[_Union[Seal, _Mapping]] = ..., ttl_s: _Optional[float] = ..., owner: _Optional[str] = ..., left_s: _Optional[float] = ...) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ("writes",)
    WRITES_FIELD_NUMBER: _ClassVar[int]
    writes: _containers.RepeatedCompositeFieldContainer[StreamWrite]
    def __init__(self, writes: _Optional[_Iterable[_Union[StreamWrite, _Mapping]]] = ...) -> None: ...

class WriteResult(_message.Message):
    __slots__ = ("outcome", "epoch", "choice", "length", "field")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    outcome: WriteOutcome
    epoch: int
    choice: int
    length: int
    field: str
    def __init__(self, outcome: _Optional[_Union[WriteOutcome, str]] = ..., epoch: _Optional[int] = ..., choice: _Optional[int] = ..., length: _Optional[int] = ..., field: _Optional[str] = ...) -> None: ...

class AppendResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[WriteResult]
    def __init__(self, results: _Optional[_Iterable[_Union[WriteResult, _Mapping]]] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("tenant", "stream_id", "positions")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    stream_id: str
    positions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tenant: _Optional[str] = ..., stream_id: _Optional[str] = ..., positions: _Optional[_Iterable[int]] = ...) -> None: ...

class TakeRequest(_message.Message):
    __slots__ = ("tenant", "stream_id", "owner", "ttl_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    stream_id: str
    owner: str
    ttl_s: float
    def __init__(self, tenant: _Optional[str] = ..., stream_id: _Optional[str] = ..., owner: _Optional[str] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class ChoiceLog(_message.Message):
    __slots__ = ("position", "ids", "logprobs", "finish", "cached_tokens", "inexact", "numerics", "unproven")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INEXACT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    UNPROVEN_FIELD_NUMBER: _ClassVar[int]
    position: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.Logprobs]
    finish: _inference_pb2.FinishReason
    cached_tokens: int
    inexact: bool
    numerics: str
    unproven: bool
    def __init__(self, position: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.Logprobs, _Mapping]]] = ..., finish: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., cached_tokens: _Optional[int] = ..., inexact: _Optional[bool] = ..., numerics: _Optional[str] = ..., unproven: _Optional[bool] = ...) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ("record", "logs", "seal", "epoch", "owner", "left_s")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    record: StreamRecord
    logs: _containers.RepeatedCompositeFieldContainer[ChoiceLog]
    seal: Seal
    epoch: int
    owner: str
    left_s: float
    def __init__(self, record: _Optional[_Union[StreamRecord, _Mapping]] = ..., logs: _Optional[_Iterable[_Union[ChoiceLog, _Mapping]]] = ..., seal: _Optional[_Union[Seal, _Mapping]] = ..., epoch: _Optional[int] = ..., owner: _Optional[str] = ..., left_s: _Optional[float] = ...) -> None: ...

class TrimRequest(_message.Message):
    __slots__ = ("tenant", "stream_ids", "ttl_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STREAM_IDS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    stream_ids: _containers.RepeatedScalarFieldContainer[str]
    ttl_s: float
    def __init__(self, tenant: _Optional[str] = ..., stream_ids: _Optional[_Iterable[str]] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class TrimResponse(_message.Message):
    __slots__ = ("trimmed",)
    TRIMMED_FIELD_NUMBER: _ClassVar[int]
    trimmed: int
    def __init__(self, trimmed: _Optional[int] = ...) -> None: ...

class ClaimRequest(_message.Message):
    __slots__ = ("tenant", "key", "request_id", "fingerprint", "ttl_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    key: str
    request_id: str
    fingerprint: bytes
    ttl_s: float
    def __init__(self, tenant: _Optional[str] = ..., key: _Optional[str] = ..., request_id: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class LookUpClaimRequest(_message.Message):
    __slots__ = ("tenant", "key")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    key: str
    def __init__(self, tenant: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class ClaimResponse(_message.Message):
    __slots__ = ("granted", "request_id", "fingerprint")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    granted: bool
    request_id: str
    fingerprint: bytes
    def __init__(self, granted: _Optional[bool] = ..., request_id: _Optional[str] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class ReleaseClaimRequest(_message.Message):
    __slots__ = ("tenant", "key", "request_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    key: str
    request_id: str
    def __init__(self, tenant: _Optional[str] = ..., key: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class ReleaseClaimResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...

class BindRequest(_message.Message):
    __slots__ = ("tenant", "session", "worker_id", "ttl_s", "if_worker")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    IF_WORKER_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session: str
    worker_id: str
    ttl_s: float
    if_worker: str
    def __init__(self, tenant: _Optional[str] = ..., session: _Optional[str] = ..., worker_id: _Optional[str] = ..., ttl_s: _Optional[float] = ..., if_worker: _Optional[str] = ...) -> None: ...

class LookUpSessionRequest(_message.Message):
    __slots__ = ("tenant", "session")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session: str
    def __init__(self, tenant: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class TouchSessionRequest(_message.Message):
    __slots__ = ("tenant", "session", "ttl_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session: str
    ttl_s: float
    def __init__(self, tenant: _Optional[str] = ..., session: _Optional[str] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("worker_id", "bound")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    bound: bool
    def __init__(self, worker_id: _Optional[str] = ..., bound: _Optional[bool] = ...) -> None: ...

class ExpireSessionRequest(_message.Message):
    __slots__ = ("tenant", "session")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session: str
    def __init__(self, tenant: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class ExpireSessionResponse(_message.Message):
    __slots__ = ("expired",)
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    expired: bool
    def __init__(self, expired: _Optional[bool] = ...) -> None: ...

class AcquireLeaseRequest(_message.Message):
    __slots__ = ("name", "owner", "ttl_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: str
    ttl_s: float
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[str] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("name", "owner", "epoch", "ttl_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: str
    epoch: int
    ttl_s: float
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[str] = ..., epoch: _Optional[int] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("name", "owner", "epoch")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: str
    epoch: int
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class LookUpLeaseRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class LeaseResponse(_message.Message):
    __slots__ = ("granted", "owner", "epoch", "expires_in_s")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    granted: bool
    owner: str
    epoch: int
    expires_in_s: float
    def __init__(self, granted: _Optional[bool] = ..., owner: _Optional[str] = ..., epoch: _Optional[int] = ..., expires_in_s: _Optional[float] = ...) -> None: ...

class HeadRange(_message.Message):
    __slots__ = ("first", "count")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class BlockKey(_message.Message):
    __slots__ = ("hash", "heads")
    HASH_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    heads: HeadRange
    def __init__(self, hash: _Optional[bytes] = ..., heads: _Optional[_Union[HeadRange, _Mapping]] = ...) -> None: ...

class BlockHeader(_message.Message):
    __slots__ = ("schema", "key", "dtype", "shape", "length", "checksum")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    schema: int
    key: BlockKey
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    length: int
    checksum: int
    def __init__(self, schema: _Optional[int] = ..., key: _Optional[_Union[BlockKey, _Mapping]] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., length: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class LookUpBlocksRequest(_message.Message):
    __slots__ = ("tenant", "hashes", "heads")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    heads: _containers.RepeatedCompositeFieldContainer[HeadRange]
    def __init__(self, tenant: _Optional[str] = ..., hashes: _Optional[_Iterable[bytes]] = ..., heads: _Optional[_Iterable[_Union[HeadRange, _Mapping]]] = ...) -> None: ...

class LookUpBlocksResponse(_message.Message):
    __slots__ = ("present", "stored_bytes")
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    present: int
    stored_bytes: int
    def __init__(self, present: _Optional[int] = ..., stored_bytes: _Optional[int] = ...) -> None: ...

class PutBlocksRequest(_message.Message):
    __slots__ = ("tenant", "ttl_s", "header", "data")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    ttl_s: float
    header: BlockHeader
    data: bytes
    def __init__(self, tenant: _Optional[str] = ..., ttl_s: _Optional[float] = ..., header: _Optional[_Union[BlockHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutBlocksResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[PutOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[PutOutcome, str]]] = ...) -> None: ...

class GetBlocksRequest(_message.Message):
    __slots__ = ("tenant", "keys")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    keys: _containers.RepeatedCompositeFieldContainer[BlockKey]
    def __init__(self, tenant: _Optional[str] = ..., keys: _Optional[_Iterable[_Union[BlockKey, _Mapping]]] = ...) -> None: ...

class GetBlocksResponse(_message.Message):
    __slots__ = ("index", "header", "data")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    index: int
    header: BlockHeader
    data: bytes
    def __init__(self, index: _Optional[int] = ..., header: _Optional[_Union[BlockHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...
