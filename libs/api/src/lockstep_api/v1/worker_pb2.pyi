from lockstep_api.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Suspicion(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SUSPICION_NONE: _ClassVar[Suspicion]
    SUSPICION_SUSPECTED: _ClassVar[Suspicion]
    SUSPICION_ON_TRIAL: _ClassVar[Suspicion]

class StreamPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STREAM_PHASE_UNSPECIFIED: _ClassVar[StreamPhase]
    STREAM_PHASE_WAITING: _ClassVar[StreamPhase]
    STREAM_PHASE_RUNNING: _ClassVar[StreamPhase]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_RESTARTING: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_FAILED: _ClassVar[WorkerState]

class RankState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RANK_STATE_UNSPECIFIED: _ClassVar[RankState]
    RANK_STATE_STARTING: _ClassVar[RankState]
    RANK_STATE_READY: _ClassVar[RankState]
    RANK_STATE_DEAD: _ClassVar[RankState]
SUSPICION_NONE: Suspicion
SUSPICION_SUSPECTED: Suspicion
SUSPICION_ON_TRIAL: Suspicion
STREAM_PHASE_UNSPECIFIED: StreamPhase
STREAM_PHASE_WAITING: StreamPhase
STREAM_PHASE_RUNNING: StreamPhase
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_RESTARTING: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_FAILED: WorkerState
RANK_STATE_UNSPECIFIED: RankState
RANK_STATE_STARTING: RankState
RANK_STATE_READY: RankState
RANK_STATE_DEAD: RankState

class RouterFrame(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "several", "prefix_watch")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    SEVERAL_FIELD_NUMBER: _ClassVar[int]
    PREFIX_WATCH_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    submit: Submit
    cancel: Cancel
    several: RouterFrames
    prefix_watch: PrefixWatch
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., several: _Optional[_Union[RouterFrames, _Mapping]] = ..., prefix_watch: _Optional[_Union[PrefixWatch, _Mapping]] = ...) -> None: ...

class RouterFrames(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[RouterFrame]
    def __init__(self, frames: _Optional[_Iterable[_Union[RouterFrame, _Mapping]]] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router_id",)
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    def __init__(self, router_id: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("stream_id", "attempt", "prompt_ids", "emitted_ids", "sampling", "deadline_s", "tenant", "priority", "traceparent", "arrived_s", "embed", "handle", "suspicion", "tracestate", "request_id")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    EMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_S_FIELD_NUMBER: _ClassVar[int]
    EMBED_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SUSPICION_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    attempt: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    emitted_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.Sampling
    deadline_s: float
    tenant: str
    priority: int
    traceparent: str
    arrived_s: float
    embed: bool
    handle: int
    suspicion: Suspicion
    tracestate: str
    request_id: str
    def __init__(self, stream_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., emitted_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.Sampling, _Mapping]] = ..., deadline_s: _Optional[float] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., traceparent: _Optional[str] = ..., arrived_s: _Optional[float] = ..., embed: _Optional[bool] = ..., handle: _Optional[int] = ..., suspicion: _Optional[_Union[Suspicion, str]] = ..., tracestate: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("stream_id", "attempt")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    attempt: int
    def __init__(self, stream_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class PrefixWatch(_message.Message):
    __slots__ = ("max_blocks",)
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    max_blocks: int
    def __init__(self, max_blocks: _Optional[int] = ...) -> None: ...

class WorkerFrame(_message.Message):
    __slots__ = ("epoch", "hello", "tokens", "status", "rejected", "phases", "prefix_report", "ended_attempts")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_REPORT_FIELD_NUMBER: _ClassVar[int]
    ENDED_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    hello: Hello
    tokens: Tokens
    status: Status
    rejected: Rejected
    phases: Phases
    prefix_report: PrefixReport
    ended_attempts: EndedAttempts
    def __init__(self, epoch: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., phases: _Optional[_Union[Phases, _Mapping]] = ..., prefix_report: _Optional[_Union[PrefixReport, _Mapping]] = ..., ended_attempts: _Optional[_Union[EndedAttempts, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("worker_id", "incarnation", "model", "accepts_several")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_SEVERAL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    model: ModelCard
    accepts_several: bool
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., model: _Optional[_Union[ModelCard, _Mapping]] = ..., accepts_several: _Optional[bool] = ...) -> None: ...

class ModelCard(_message.Message):
    __slots__ = ("name", "digest", "architecture", "dtype", "context_length", "vocab_size", "tp", "tokenizer_digest", "deterministic", "created", "fingerprint", "grammar_engine", "default_sampling", "embedding")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_ENGINE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    architecture: str
    dtype: str
    context_length: int
    vocab_size: int
    tp: int
    tokenizer_digest: str
    deterministic: bool
    created: int
    fingerprint: str
    grammar_engine: str
    default_sampling: _inference_pb2.Sampling
    embedding: Embedding
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., tp: _Optional[int] = ..., tokenizer_digest: _Optional[str] = ..., deterministic: _Optional[bool] = ..., created: _Optional[int] = ..., fingerprint: _Optional[str] = ..., grammar_engine: _Optional[str] = ..., default_sampling: _Optional[_Union[_inference_pb2.Sampling, _Mapping]] = ..., embedding: _Optional[_Union[Embedding, _Mapping]] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("size", "dimensions", "any_dimension")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    ANY_DIMENSION_FIELD_NUMBER: _ClassVar[int]
    size: int
    dimensions: _containers.RepeatedScalarFieldContainer[int]
    any_dimension: bool
    def __init__(self, size: _Optional[int] = ..., dimensions: _Optional[_Iterable[int]] = ..., any_dimension: _Optional[bool] = ...) -> None: ...

class PrefixReport(_message.Message):
    __slots__ = ("number", "snapshot", "added", "removed", "hot_window")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    HOT_WINDOW_FIELD_NUMBER: _ClassVar[int]
    number: int
    snapshot: bool
    added: _containers.RepeatedScalarFieldContainer[int]
    removed: _containers.RepeatedScalarFieldContainer[int]
    hot_window: HotWindow
    def __init__(self, number: _Optional[int] = ..., snapshot: _Optional[bool] = ..., added: _Optional[_Iterable[int]] = ..., removed: _Optional[_Iterable[int]] = ..., hot_window: _Optional[_Union[HotWindow, _Mapping]] = ...) -> None: ...

class HotWindow(_message.Message):
    __slots__ = ("first", "last")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class TokenizerRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class TokenizerFiles(_message.Message):
    __slots__ = ("digest", "tokenizer_json", "tokenizer_config_json", "chat_template")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    tokenizer_json: bytes
    tokenizer_config_json: bytes
    chat_template: str
    def __init__(self, digest: _Optional[str] = ..., tokenizer_json: _Optional[bytes] = ..., tokenizer_config_json: _Optional[bytes] = ..., chat_template: _Optional[str] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("streams", "handles", "positions", "ids")
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    streams: _containers.RepeatedCompositeFieldContainer[StreamTokens]
    handles: _containers.RepeatedScalarFieldContainer[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, streams: _Optional[_Iterable[_Union[StreamTokens, _Mapping]]] = ..., handles: _Optional[_Iterable[int]] = ..., positions: _Optional[_Iterable[int]] = ..., ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StreamTokens(_message.Message):
    __slots__ = ("stream_id", "attempt", "position", "ids", "logprobs", "finish", "cached_tokens", "embedding")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    attempt: int
    position: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.Logprobs]
    finish: _inference_pb2.FinishReason
    cached_tokens: int
    embedding: bytes
    def __init__(self, stream_id: _Optional[str] = ..., attempt: _Optional[int] = ..., position: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.Logprobs, _Mapping]]] = ..., finish: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., cached_tokens: _Optional[int] = ..., embedding: _Optional[bytes] = ...) -> None: ...

class EndedAttempts(_message.Message):
    __slots__ = ("attempts",)
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    attempts: _containers.RepeatedCompositeFieldContainer[EndedAttempt]
    def __init__(self, attempts: _Optional[_Iterable[_Union[EndedAttempt, _Mapping]]] = ...) -> None: ...

class EndedAttempt(_message.Message):
    __slots__ = ("stream_id", "attempt", "prefill", "decode")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    attempt: int
    prefill: _containers.RepeatedCompositeFieldContainer[RankWork]
    decode: _containers.RepeatedCompositeFieldContainer[RankWork]
    def __init__(self, stream_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prefill: _Optional[_Iterable[_Union[RankWork, _Mapping]]] = ..., decode: _Optional[_Iterable[_Union[RankWork, _Mapping]]] = ...) -> None: ...

class RankWork(_message.Message):
    __slots__ = ("steps", "compute_s", "collective_s", "idle_s")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    steps: int
    compute_s: float
    collective_s: float
    idle_s: float
    def __init__(self, steps: _Optional[int] = ..., compute_s: _Optional[float] = ..., collective_s: _Optional[float] = ..., idle_s: _Optional[float] = ...) -> None: ...

class Phases(_message.Message):
    __slots__ = ("streams",)
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    streams: _containers.RepeatedCompositeFieldContainer[StreamPhaseChange]
    def __init__(self, streams: _Optional[_Iterable[_Union[StreamPhaseChange, _Mapping]]] = ...) -> None: ...

class StreamPhaseChange(_message.Message):
    __slots__ = ("stream_id", "attempt", "phase")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    attempt: int
    phase: StreamPhase
    def __init__(self, stream_id: _Optional[str] = ..., attempt: _Optional[int] = ..., phase: _Optional[_Union[StreamPhase, str]] = ...) -> None: ...

class RankHealth(_message.Message):
    __slots__ = ("rank", "pid", "state", "steps", "compute_s", "collective_s")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_S_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    state: RankState
    steps: int
    compute_s: float
    collective_s: float
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., state: _Optional[_Union[RankState, str]] = ..., steps: _Optional[int] = ..., compute_s: _Optional[float] = ..., collective_s: _Optional[float] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("state", "reason", "queued", "running", "free_blocks", "total_blocks", "tokens_per_s", "steps", "ranks", "pid", "step_deadline_s", "free_seqs", "queue_wait_s", "queue_wait_per_request_s", "queue_waits_s", "received", "lost")
    class QueueWaitsSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STEP_DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    FREE_SEQS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_WAIT_PER_REQUEST_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_WAITS_S_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    state: WorkerState
    reason: str
    queued: int
    running: int
    free_blocks: int
    total_blocks: int
    tokens_per_s: float
    steps: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankHealth]
    pid: int
    step_deadline_s: float
    free_seqs: int
    queue_wait_s: float
    queue_wait_per_request_s: float
    queue_waits_s: _containers.ScalarMap[int, float]
    received: int
    lost: LostBatch
    def __init__(self, state: _Optional[_Union[WorkerState, str]] = ..., reason: _Optional[str] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., steps: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankHealth, _Mapping]]] = ..., pid: _Optional[int] = ..., step_deadline_s: _Optional[float] = ..., free_seqs: _Optional[int] = ..., queue_wait_s: _Optional[float] = ..., queue_wait_per_request_s: _Optional[float] = ..., queue_waits_s: _Optional[_Mapping[int, float]] = ..., received: _Optional[int] = ..., lost: _Optional[_Union[LostBatch, _Mapping]] = ...) -> None: ...

class LostBatch(_message.Message):
    __slots__ = ("streams", "suspected", "on_trial")
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    SUSPECTED_FIELD_NUMBER: _ClassVar[int]
    ON_TRIAL_FIELD_NUMBER: _ClassVar[int]
    streams: int
    suspected: int
    on_trial: int
    def __init__(self, streams: _Optional[int] = ..., suspected: _Optional[int] = ..., on_trial: _Optional[int] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("stream_id", "attempt", "code", "message", "field", "retry_after_s", "retryable")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    attempt: int
    code: str
    message: str
    field: str
    retry_after_s: float
    retryable: bool
    def __init__(self, stream_id: _Optional[str] = ..., attempt: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., retryable: _Optional[bool] = ...) -> None: ...
