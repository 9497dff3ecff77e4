"""The worker's Prometheus metrics. Values are set in the event loop; the management thread serves them."""

from lockstep_common.telemetry import REGISTRY
from lockstep_engine import EngineState, EngineStatus, HostUsage
from prometheus_client import Counter, Gauge, Histogram

READY = Gauge("lockstep_worker_ready", "1 while the worker accepts requests", registry=REGISTRY)
EPOCH = Gauge("lockstep_worker_epoch", "Epoch of the rank group", registry=REGISTRY)
RANK_UP = Gauge("lockstep_worker_rank_up", "1 while the rank is ready", ["rank"], registry=REGISTRY)
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
HOST_BLOCKS = Gauge(
    "lockstep_worker_host_cache_blocks", "KV blocks of cached prefixes in host memory", registry=REGISTRY
)
HOST_BYTES = Gauge("lockstep_worker_host_cache_bytes", "Bytes of these blocks, over all ranks", registry=REGISTRY)
HOST_HITS = Counter(
    "lockstep_worker_host_cache_hits_total", "Requests that began with blocks from host memory", registry=REGISTRY
)
HOST_COPIES = Counter(
    "lockstep_worker_host_cache_copies_total",
    "KV blocks copied: in from host memory, out to it, or dropped because a step copies no more",
    ["way"],
    registry=REGISTRY,
)
LOADING = Gauge(
    "lockstep_worker_loading_ratio", "Share of the weights that starting ranks have read", registry=REGISTRY
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
STEP_TOKENS = Histogram(
    "lockstep_worker_step_tokens",
    "Tokens emitted by one step",
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    registry=REGISTRY,
)
SUBMITTED = Counter("lockstep_worker_submitted_total", "Submits received", registry=REGISTRY)
REJECTED = Counter("lockstep_worker_rejected_total", "Attempts refused or failed", ["code"], registry=REGISTRY)
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
    "lockstep_worker_prefix_snapshots_total", "Times that a router was told of cached blocks anew", registry=REGISTRY
)
EVENTS = Counter(
    "lockstep_worker_events_total",
    "Events of the pod, by outcome: posted, failed, or dropped because the queue was full",
    ["outcome"],
    registry=REGISTRY,
)


class StatusMeter:
    """Turns the engine's statuses into gauges and counters. Statuses count from 0 in each epoch; counters only grow."""

    def __init__(self) -> None:
        self._epoch = 0
        self._steps = 0
        self._host = HostUsage()
        self._was_ready = False
        self._fingerprint = ""

    def observe(self, status: EngineStatus, *, ready: bool, routers: int, streams: int) -> None:
        """Record one status."""
        if status.epoch != self._epoch:
            if self._was_ready:
                RESTARTS.inc(status.epoch - self._epoch)
            self._epoch, self._steps = status.epoch, 0
            self._host = HostUsage()
        self._was_ready = self._was_ready or status.state is EngineState.READY
        STEPS.inc(max(0, status.steps - self._steps))
        self._steps = max(self._steps, status.steps)
        READY.set(ready)
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
        self._observe_host(status)
        LOADING.set(status.loading)
        STEP_SECONDS.set(status.step_us / 1e6)
        DRIVER_SECONDS.set(status.driver_us / 1e6)
        ROUTERS.set(routers)
        STREAMS.set(streams)
        for rank in status.ranks:
            RANK_UP.labels(str(rank.rank)).set(rank.state == "ready")

    def _observe_host(self, status: EngineStatus) -> None:
        now, before = status.host, self._host
        HOST_BLOCKS.set(now.blocks)
        HOST_BYTES.set(now.used_bytes * len(status.ranks))
        # Its counts begin again also where the pools do, within an epoch.
        HOST_HITS.inc(max(0, now.hits - before.hits))
        for way, count, counted in (
            ("in", now.copied_in, before.copied_in),
            ("out", now.copied_out, before.copied_out),
            ("dropped", now.dropped, before.dropped),
        ):
            HOST_COPIES.labels(way).inc(max(0, count - counted))
        self._host = now
