"""Names of attributes. Those that begin with `gen_ai.` and other names without `lockstep.` are of OpenTelemetry's
semantic conventions, in the version below; a test compares them with the installed package.

Attributes hold numbers, ids that the platform made, a request's id, which clients may choose (64 characters at most),
and words of bounded sets. They never hold prompts, outputs, keys, users, sessions or messages of errors.
"""

from collections.abc import Mapping
from typing import Any

SCHEMA_URL = "https://opentelemetry.io/schemas/1.43.0"
"""The version of the conventions."""

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_CHOICES = "gen_ai.request.choice.count"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_FIRST_CHUNK_S = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
RPC_SYSTEM = "rpc.system.name"
RPC_METHOD = "rpc.method"
DB_SYSTEM = "db.system.name"

PROVIDER_NAME = "lockstep"

FACE = "lockstep.face"
REQUEST_ID = "lockstep.request_id"
FAILOVERS = "lockstep.failovers"
RESUMED = "lockstep.resumed"
KEPT_BECAUSE = "lockstep.trace.kept_because"
CLIENT_WAIT_S = "lockstep.client.wait_s"
CLIENT_WAITS = "lockstep.client.waits"
STREAM = "lockstep.stream"
"""The stream of an attempt, or the resumable one that a request reads."""
CANDIDATES = "lockstep.route.candidates"
POLICY = "lockstep.route.policy"
REASON = "lockstep.route.reason"
WORKER = "lockstep.worker"
WORKER_QUEUED = "lockstep.worker.queued"
WORKER_RUNNING = "lockstep.worker.running"
WORKER_WAIT_S = "lockstep.worker.queue_wait_s"
EPOCH = "lockstep.epoch"
ATTEMPT = "lockstep.attempt"
EMITTED_BEFORE = "lockstep.attempt.emitted_before"
TOKENS = "lockstep.tokens"
OUTCOME = "lockstep.outcome"
STEPS = "lockstep.steps"
KV_BLOCKS = "lockstep.kv.blocks"
KV_BYTES = "lockstep.kv.bytes"
KV_FETCH_S = "lockstep.kv.estimated_fetch_s"
KV_RECOMPUTE_S = "lockstep.kv.estimated_recompute_s"
RANK = "lockstep.rank"
COMPUTE_S = "lockstep.rank.compute_s"
COLLECTIVE_S = "lockstep.rank.collective_s"
PEER_WAIT_S = "lockstep.rank.peer_wait_s"
PLAN_WAIT_S = "lockstep.rank.plan_wait_s"


def is_called(attributes: Mapping[str, Any], wanted: str) -> bool:
    """Whether a span with these attributes is of a request or a stream with this id."""
    return wanted in (attributes.get(REQUEST_ID), attributes.get(STREAM))
