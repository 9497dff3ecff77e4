"""The worker's Prometheus metrics. Values are set in the event loop; the management thread serves them."""

import resource
import time
from pathlib import Path

from lockstep_common.distributions import Distribution
from lockstep_common.errors import ErrorCode
from lockstep_common.telemetry import REGISTRY
from lockstep_engine import EngineState, EngineStatus, RankStatus
from prometheus_client import Counter, Gauge

from lockstep_worker.growth import Growth
from lockstep_worker.streams import LiveStream
from lockstep_worker.vllm_names import VllmNames

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PAGE_BYTES = resource.getpagesize()

READY = Gauge("lockstep_worker_ready", "1 while the worker accepts requests", ["served_model"], registry=REGISTRY)
EPOCH = Gauge("lockstep_worker_epoch", "Epoch of the rank group", registry=REGISTRY)
RANK_UP = Gauge("lockstep_worker_rank_up", "1 while the rank is ready", ["rank"], registry=REGISTRY)
RANK_STEPS = Counter(
    "lockstep_worker_rank_steps_total", "Steps finished by the rank, over all epochs", ["rank"], registry=REGISTRY
)
RANK_FORWARD = Counter(
    "lockstep_worker_rank_forward_seconds_total",
    "Time of the rank's device in the forward passes of its steps, collectives included",
    ["rank"],
    registry=REGISTRY,
)
RANK_COLLECTIVE = Counter(
    "lockstep_worker_rank_collective_seconds_total",
    "Part of it in collectives: transfer, and waiting for slower ranks, so that the slowest rank has the least. On a "
    "GPU by the device's clock; of many alike it times one in eight",
    ["rank"],
    registry=REGISTRY,
)
RANK_MEMORY = Gauge(
    "lockstep_worker_rank_memory_bytes",
    "Memory of the rank: `resident` of its process, `device` that it had reserved of its GPU when it became ready",
    ["rank", "kind"],
    registry=REGISTRY,
)
RANK_CLOCK = Gauge(
    "lockstep_worker_rank_clock_skew_seconds",
    "How far the rank's monotonic clock is from the worker's, by the messages of its start: `least` and `most` that "
    "explain when they came",
    ["rank", "bound"],
    registry=REGISTRY,
)
RUNNING = Gauge("lockstep_worker_running", "Requests in the batch", registry=REGISTRY)
QUEUED = Gauge("lockstep_worker_queued", "Requests waiting", registry=REGISTRY)
QUEUE_WAIT = Gauge(
    "lockstep_worker_queue_wait_seconds", "Estimated wait of one more request before it runs", registry=REGISTRY
)
NUMERICS = Gauge(
    "lockstep_worker_numerics_info",
    "1 for the numerics fingerprint of the current ranks",
    ["fingerprint"],
    registry=REGISTRY,
)
FREE_BLOCKS = Gauge("lockstep_worker_free_blocks", "KV blocks that can be allocated", registry=REGISTRY)
TOTAL_BLOCKS = Gauge("lockstep_worker_total_blocks", "All KV blocks", registry=REGISTRY)
KV_USAGE = Gauge(
    "lockstep_worker_kv_usage_ratio",
    "Share of the KV blocks that running requests use, of all or of the cold ones, whichever is larger",
    registry=REGISTRY,
)
HOST_BLOCKS = Gauge(
    "lockstep_worker_host_cache_blocks", "KV blocks of cached prefixes in host memory", registry=REGISTRY
)
HOST_BYTES = Gauge("lockstep_worker_host_cache_bytes", "Bytes of these blocks, over all ranks", registry=REGISTRY)
HOST_HITS = Counter(
    "lockstep_worker_host_cache_hits_total", "Requests that began with blocks from host memory", registry=REGISTRY
)
HOST_COPIES = Counter(
    "lockstep_worker_host_cache_copies_total",
    "KV blocks copied: in from host memory, out to it, or dropped because all slots were in use by other copies",
    ["way"],
    registry=REGISTRY,
)
REMOTE_WAITING = Gauge(
    "lockstep_worker_remote_cache_waiting", "Requests that wait for KV blocks of the state server", registry=REGISTRY
)
REMOTE_FETCHES = Counter(
    "lockstep_worker_remote_cache_fetches_total",
    "Fetches of cached prefixes from the state server, by outcome: `fetched`; `absent`; `gate`, computing is faster; "
    "`unmeasured`, nothing is known of the way; `deadline`, blocks that had come count; `unavailable`; "
    "`damaged`; `cancelled`",
    ["outcome"],
    registry=REGISTRY,
)
REMOTE_FETCHED_BLOCKS = Counter(
    "lockstep_worker_remote_cache_fetched_blocks_total",
    "KV blocks fetched from the state server, each with the parts of all ranks",
    registry=REGISTRY,
)
REMOTE_FETCH_SECONDS = Distribution(
    "lockstep_worker_remote_cache_fetch_seconds",
    "Time of a fetch from the state server that the gate let pass, whatever its outcome",
    buckets=_SECONDS,
    registry=REGISTRY,
)
REMOTE_BYTES = Counter(
    "lockstep_worker_remote_cache_bytes_total",
    "Content of KV blocks from the state server (`in`) and to it (`out`)",
    ["direction"],
    registry=REGISTRY,
)
REMOTE_GATE_FETCH = Counter(
    "lockstep_worker_remote_cache_estimated_fetch_seconds_total",
    "What the gate had estimated for the complete fetches",
    registry=REGISTRY,
)
REMOTE_GATE_RECOMPUTE = Counter(
    "lockstep_worker_remote_cache_estimated_recompute_seconds_total",
    "What the gate had estimated for computing their blocks instead",
    registry=REGISTRY,
)
REMOTE_GATE_TOOK = Counter(
    "lockstep_worker_remote_cache_complete_fetch_seconds_total",
    "What the complete fetches took, to be compared with both estimates",
    registry=REGISTRY,
)
REMOTE_GATE_ERRORS = Counter(
    "lockstep_worker_remote_cache_slow_fetches_total",
    "Complete fetches that took longer than computing their blocks was estimated to take",
    registry=REGISTRY,
)
REMOTE_LATENCY = Gauge(
    "lockstep_worker_remote_cache_latency_seconds",
    "Mean time of the state server's last answers without content",
    registry=REGISTRY,
)
REMOTE_BANDWIDTH = Gauge(
    "lockstep_worker_remote_cache_bytes_per_second",
    "Bandwidth of the last transfers from the state server; 0: none yet",
    registry=REGISTRY,
)
REMOTE_PUTS = Counter(
    "lockstep_worker_remote_cache_puts_total",
    "Parts of KV blocks offered to the state server, by outcome: `stored`; `full`, there is no room for the tenant; "
    "`refused`; `failed`, it did not answer; `dropped`, the queue was full, so that the engine offers them again for a "
    "while, or the worker ended",
    ["outcome"],
    registry=REGISTRY,
)
REMOTE_QUEUE_BYTES = Gauge(
    "lockstep_worker_remote_cache_queue_bytes", "Parts of KV blocks that wait to be stored", registry=REGISTRY
)
REMOTE_FAILURES = Counter(
    "lockstep_worker_remote_cache_failures_total",
    "Calls of the state server that failed, by gRPC status",
    ["reason"],
    registry=REGISTRY,
)
REMOTE_BREAKER = Gauge(
    "lockstep_worker_remote_cache_breaker_open",
    "1 while the state server is not asked, because it did not answer",
    registry=REGISTRY,
)
KV_BLOCKS = Gauge(
    "lockstep_worker_kv_blocks",
    "KV blocks by tier, `hot` in the model's precision or `cold` (in eight bits, or without the layers that have a "
    "sliding window, or both), and use, `used` by running requests or `free`: empty, or cached for prefixes",
    ["tier", "use"],
    registry=REGISTRY,
)
COMPRESSED = Counter(
    "lockstep_worker_compressed_blocks_total", "KV blocks compressed, over all epochs", registry=REGISTRY
)
PREEMPTIONS = Counter(
    "lockstep_worker_preemptions_total",
    "Times that a running request had to wait again because KV blocks were missing",
    registry=REGISTRY,
)
PROMPT_TOKENS = Counter(
    "lockstep_worker_prompt_tokens_total", "Tokens of the prompts that began to run", registry=REGISTRY
)
PREFIX_HIT_TOKENS = Counter(
    "lockstep_worker_prefix_hit_tokens_total", "Those of them that were in the prefix cache", registry=REGISTRY
)
QUEUE_SECONDS = Distribution(
    "lockstep_worker_queue_seconds",
    "From the arrival of an attempt of a stream until the ranks computed it",
    buckets=_SECONDS,
    registry=REGISTRY,
)
PREFILL_SECONDS = Distribution(
    "lockstep_worker_prefill_seconds",
    "From there to its first token, preemptions included",
    buckets=_SECONDS,
    registry=REGISTRY,
)
DECODE_SECONDS = Distribution(
    "lockstep_worker_decode_seconds",
    "From the first to the last token of an attempt that ended its stream; an embedding has no tokens",
    buckets=_SECONDS,
    registry=REGISTRY,
)
LOADING = Gauge(
    "lockstep_worker_loading_ratio",
    "Share of the weights that starting ranks have read",
    ["served_model"],
    registry=REGISTRY,
)
STEP_SECONDS = Gauge("lockstep_worker_step_seconds", "Mean time of the last steps", registry=REGISTRY)
DRIVER_SECONDS = Gauge(
    "lockstep_worker_driver_seconds",
    "Mean idle time of rank 0 before each of the last steps",
    registry=REGISTRY,
)
ROUTERS = Gauge("lockstep_worker_routers", "Connected routers", registry=REGISTRY)
STREAMS = Gauge("lockstep_worker_streams", "Live streams of all routers", registry=REGISTRY)
STEPS = Counter("lockstep_worker_steps_total", "Steps finished, over all epochs", registry=REGISTRY)
TOKENS = Counter("lockstep_worker_tokens_total", "Tokens emitted", registry=REGISTRY)
STEP_TOKENS = Distribution(
    "lockstep_worker_step_tokens",
    "Tokens emitted by one step",
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    registry=REGISTRY,
)
SUBMITTED = Counter("lockstep_worker_submitted_total", "Submits received", registry=REGISTRY)
REJECTED = Counter("lockstep_worker_rejected_total", "Attempts refused or failed", ["code"], registry=REGISTRY)
for _code in (
    ErrorCode.INVALID_REQUEST,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED,
    ErrorCode.RESOURCE_EXHAUSTED,
    ErrorCode.OVERLOADED,
    ErrorCode.UNAVAILABLE,
    ErrorCode.DRAINING,
    ErrorCode.WORKER_LOST,
    ErrorCode.DEADLINE_EXCEEDED,
    ErrorCode.NUMERICAL_ERROR,
    ErrorCode.INTERNAL,
):
    REJECTED.labels(_code)  # from 0: of a series that begins at 1, Prometheus sees no increase
RESTARTS = Counter("lockstep_worker_restarts_total", "Restarts of the rank group", registry=REGISTRY)
STRANGERS = Counter(
    "lockstep_worker_refused_peers_total",
    "Calls refused because the peer's certificate is not for a router",
    registry=REGISTRY,
)
OVERFLOWS = Counter("lockstep_worker_overflows_total", "Routers disconnected for reading too slowly", registry=REGISTRY)
PREFIX_KEYS = Counter(
    "lockstep_worker_prefix_keys_total", "News of cached blocks sent to routers that want them", registry=REGISTRY
)
PREFIX_SNAPSHOTS = Counter(
    "lockstep_worker_prefix_snapshots_total", "Snapshots of all cached blocks sent to a router", registry=REGISTRY
)
EVENTS = Counter(
    "lockstep_worker_events_total",
    "Events of the pod, by outcome: posted, failed, or dropped because the queue was full",
    ["outcome"],
    registry=REGISTRY,
)


VLLM_NAMES = VllmNames(REGISTRY)


def kv_usage(status: EngineStatus) -> float:
    """The share of the KV blocks that is in use, of all or of the cold ones, whichever is larger.

    Hot blocks are as many as a full batch needs: many may be free while requests are preempted for want of cold ones.
    """
    pools = ((status.total_blocks, status.free_blocks), (status.cold_blocks, status.free_cold_blocks))
    return max(1 - free / total if total else 0.0 for total, free in pools)


def count_tokens(emitted: int) -> None:
    """Record what a step emitted."""
    if emitted:
        TOKENS.inc(emitted)
        STEP_TOKENS.observe(emitted)


def note_start(stream: LiveStream) -> None:
    """Record a stream's wait, when the ranks compute it for the first time."""
    stream.started_at = time.monotonic()
    QUEUE_SECONDS.observe(stream.started_at - stream.arrived_at, 1, stream.kept_id)


def measure(stream: LiveStream, *, has_tokens: bool, is_finished: bool) -> None:
    """Record a stream's times, when its first token or its end has come. An embedding ends without any token."""
    now = time.monotonic()
    is_first = stream.first_token_at is None
    if stream.first_token_at is None:
        stream.first_token_at = now
        # Tokens that come before the report that it runs: it ran at once.
        PREFILL_SECONDS.observe(now - (stream.started_at or stream.arrived_at), 1, stream.kept_id)
    if is_finished and (has_tokens or not is_first):
        DECODE_SECONDS.observe(now - stream.first_token_at, 1, stream.kept_id)


class RankMeter:
    """The metrics of one rank. Their labels are looked up once."""

    def __init__(self, rank: int) -> None:
        label = str(rank)
        self._up = RANK_UP.labels(label)
        self._steps = Growth(RANK_STEPS.labels(label).inc)
        self._forward = Growth(RANK_FORWARD.labels(label).inc)
        self._collective = Growth(RANK_COLLECTIVE.labels(label).inc)
        self._device = RANK_MEMORY.labels(label, "device")
        self._clock = [RANK_CLOCK.labels(label, bound) for bound in ("least", "most")]
        self._pid = 0
        RANK_MEMORY.labels(label, "resident").set_function(self._resident_bytes)

    def observe(self, status: RankStatus) -> None:
        """Record one status."""
        self._pid = status.pid
        self._up.set(status.state == "ready")
        self._steps.observe(status.steps)
        self._forward.observe(status.forward_s)
        self._collective.observe(status.collective_s)
        self._device.set(status.device_bytes)
        for bound, seconds in zip(self._clock, status.clock_skew_s, strict=True):
            bound.set(seconds)

    def _resident_bytes(self) -> float:
        """Memory of its process when the metrics are read; 0: it does not run."""
        try:
            return int(Path(f"/proc/{self._pid}/statm").read_text().split()[1]) * _PAGE_BYTES
        except OSError:
            return 0.0


class StatusMeter:
    """Turns the engine's statuses into gauges and counters. Statuses count from 0 in each epoch; counters only grow.

    Args:
        model: the name that clients use, which is routers' label `model`; monitors set a worker's to the chart's name.
    """

    def __init__(self, model: str) -> None:
        self._ready = READY.labels(model)
        self._loading = LOADING.labels(model)
        self._ranks: dict[int, RankMeter] = {}
        self._blocks = {
            (tier, use): KV_BLOCKS.labels(tier, use) for tier in ("hot", "cold") for use in ("used", "free")
        }
        self._finished_steps = Growth(STEPS.inc)
        self._compressed = Growth(COMPRESSED.inc)
        self._preemptions = Growth(PREEMPTIONS.inc)
        self._prompt_tokens = Growth(PROMPT_TOKENS.inc)
        self._hit_tokens = Growth(PREFIX_HIT_TOKENS.inc)
        self._epoch = 0
        self._host_hits = Growth(HOST_HITS.inc)
        self._host_copies = {way: Growth(HOST_COPIES.labels(way).inc) for way in ("in", "out", "dropped")}
        self._was_ready = False
        self._fingerprint = ""

    def observe(self, status: EngineStatus, *, ready: bool, routers: int, streams: int) -> None:
        """Record one status."""
        if status.epoch != self._epoch:
            if self._was_ready:
                RESTARTS.inc(status.epoch - self._epoch)
            self._epoch = status.epoch
        self._was_ready = self._was_ready or status.state is EngineState.READY
        self._finished_steps.observe(status.steps)
        self._ready.set(ready)
        EPOCH.set(status.epoch)
        RUNNING.set(status.running)
        QUEUED.set(status.queued)
        QUEUE_WAIT.set(status.queue_wait_s)
        if status.fingerprint != self._fingerprint:
            self._fingerprint = status.fingerprint
            NUMERICS.clear()
            NUMERICS.labels(status.fingerprint).set(1)
        FREE_BLOCKS.set(status.free_blocks)
        TOTAL_BLOCKS.set(status.total_blocks)
        KV_USAGE.set(usage := kv_usage(status))
        self._observe_host(status)
        self._loading.set(status.loading)
        STEP_SECONDS.set(status.step_us / 1e6)
        DRIVER_SECONDS.set(status.driver_us / 1e6)
        ROUTERS.set(routers)
        STREAMS.set(streams)
        for rank in status.ranks:
            if rank.rank not in self._ranks:
                self._ranks[rank.rank] = RankMeter(rank.rank)
            self._ranks[rank.rank].observe(rank)
        self._observe_cache(status)
        VLLM_NAMES.observe(status.running, status.queued, usage, status.total_blocks)

    def _observe_cache(self, status: EngineStatus) -> None:
        hot, free_hot = status.total_blocks - status.cold_blocks, status.free_blocks - status.free_cold_blocks
        for tier, total, free in (("hot", hot, free_hot), ("cold", status.cold_blocks, status.free_cold_blocks)):
            self._blocks[tier, "free"].set(free)
            self._blocks[tier, "used"].set(total - free)
        self._compressed.observe(status.compressed_blocks)
        self._preemptions.observe(status.preemptions)
        self._prompt_tokens.observe(status.prompt_tokens)
        self._hit_tokens.observe(status.cached_tokens)

    def _observe_host(self, status: EngineStatus) -> None:
        usage = status.host
        HOST_BLOCKS.set(usage.blocks)
        REMOTE_WAITING.set(status.remote.fetching)
        HOST_BYTES.set(usage.used_bytes * len(status.ranks))
        self._host_hits.observe(usage.hits)
        self._host_copies["in"].observe(usage.copied_in)
        self._host_copies["out"].observe(usage.copied_out)
        self._host_copies["dropped"].observe(usage.dropped)
