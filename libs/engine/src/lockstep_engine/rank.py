"""A rank: one process with one device and one part of the model. It executes plans in order and decides nothing.

Its control socket carries the messages of its start, and doorbells. When the socket closes, the driver is gone and the
rank ends.
"""

import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep_engine import distributed, fast_path
from lockstep_engine.attention import StepLayout
from lockstep_engine.attention_choice import step_attention
from lockstep_engine.attention_cpu import DecodingAttention
from lockstep_engine.attention_torch import TorchAttention
from lockstep_engine.blocks import HostSizes, PoolSizes
from lockstep_engine.cache_sizing import CacheSizing
from lockstep_engine.canary import Numerics
from lockstep_engine.chunk_graphs import ChunkInputs
from lockstep_engine.collective_clock import CollectiveClock
from lockstep_engine.control import (
    MAX_CONTROL_BYTES,
    AllocateBlocks,
    Loaded,
    Loading,
    RankMessage,
    RankSpec,
    Ready,
    SetLogLevel,
    StartProfile,
    StopProfile,
    decode_doorbell,
    decode_rank_message,
    encode_control,
    encode_doorbell,
)
from lockstep_engine.device_choice import pick_device, pick_dtype
from lockstep_engine.device_failures import is_out_of_memory
from lockstep_engine.device_marks import DeviceMarks, marks_of
from lockstep_engine.device_timer import DeviceTimer, Timestamp
from lockstep_engine.gpu_codes import coded_weights
from lockstep_engine.graphs import BuildCounter, DecodeInputs
from lockstep_engine.host_memory import HostMemory
from lockstep_engine.kernels import cpu, gpu, prebuilt
from lockstep_engine.kernels.ahead import Ahead
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.largest_step import SMALLEST_POOLS, device_memory, measure_largest_step
from lockstep_engine.mailbox import Mailbox
from lockstep_engine.models import BuiltModel, build_model
from lockstep_engine.plan import LAST_SAMPLED, Plan, Result, RowSampling, decode_plan, encode_result, message_sizes
from lockstep_engine.pooling import Pooled, Pooler
from lockstep_engine.profiler import RankProfiler
from lockstep_engine.sampling import Sampled, Sampler, Scores, score
from lockstep_engine.self_test import SelfTest
from lockstep_engine.sizes import collective_bytes
from lockstep_engine.step_recorder import RecordedSteps, StepRecorder
from lockstep_engine.transfers import to_device, to_device_at_once
from lockstep_engine.weights import load_weights, widen_codes

logger = logging.getLogger("lockstep.engine")

_PROGRESS_INTERVAL_S = 0.2
_POLL_S = 0.00003
"""How long a rank waits for a plan before it checks whether its device has finished a step."""


class Launched(NamedTuple):
    """A step that has been launched on the device."""

    number: int
    sampled: Sampled | None
    """None on ranks other than 0."""
    unserved: list[int]
    scores: Scores | None
    pooled: Pooled | None
    collective_us: int
    """The host's time in collectives."""
    idle: list[tuple[Timestamp, Timestamp]]
    """Intervals before the step in which the device had nothing to do."""
    computed: Timestamp
    """The end of the forward pass. Rank 0 samples after it, so up to here all ranks have equal work."""
    end: Timestamp


class Rank:
    """The loop that executes plans.

    Attributes:
        model: the rank's part of the model.
        cache: its KV cache.
        graphs: recorded steps; None if there are none.
        builds: counts kernels that are built while serving.
    """

    def __init__(
        self,
        spec: RankSpec,
        control: socket.socket,
        mailbox_fd: int,
        collectives_fd: int,
        store_path: str,
        host_fd: int = -1,
    ) -> None:
        self._spec = spec
        config, model = spec.config, spec.model
        self._control = control
        self._mailbox = Mailbox(mailbox_fd, config.tp, *message_sizes(spec))
        phases, self._decoding_attention = _PhaseTimer(), DecodingAttention()
        self._device = pick_device(config, spec.rank)
        torch.set_num_threads(spec.threads)
        self._timer, self._marks = DeviceTimer(self._device), marks_of(self._device, self._mailbox, spec.rank)
        phases.end("device")
        self._deterministic = self._device.type == "cpu" if config.deterministic is None else config.deterministic
        self._dtype = pick_dtype(config.dtype, model.dtype, self._device)
        self._group = self.join(collectives_fd, store_path)
        self._profiler = RankProfiler(spec.rank, self._device, self._group, control)
        phases.end("join")
        self.model: BuiltModel = build_model(
            model, self._group, self._dtype, shards=config.tp_shards if self._device.type == "cpu" else 1
        )
        self.model.exact = self._deterministic
        phases.end("build")
        by_kernels = self._load(phases)
        self._caches = CacheSizing(spec, self.model, self._device, self._dtype)
        self.graphs: RecordedSteps | None = None
        agree = partial(distributed.gather_reasons, self._group)
        recorder = StepRecorder(
            spec, self._device, self._compute_recorded, agree, records=by_kernels and config.cuda_graphs
        )
        sampler = partial(Sampler, config.max_seqs, model.vocab_size, self._device, kernels=by_kernels)
        self._sampler = sampler() if spec.rank == 0 else None
        by_mean = model.embedding is not None and model.embedding.pooling == "mean"
        self._pooler = Pooler(mean=by_mean, size=model.hidden_size)
        self._memory = device_memory(self._device)
        with torch.inference_mode(), gpu.refusing_failures(spec.rank, used=by_kernels):
            self._launch_all_forms(by_kernels=by_kernels)
            reserved = recorder.estimate_bytes(self._caches) + self._measure_largest_step()
        phases.end("estimate")
        free_bytes = None if self._memory is None else self._memory.free_bytes()
        loaded = Loaded(self._caches.affordable(free_bytes, reserved), phases.seconds)
        blocks, self._loaded_at_s, self._allocated_at_s = self._agree_on_blocks(loaded)
        phases.end("agree")
        self.cache = self._caches.make(blocks)
        self.host = HostMemory(blocks.host, self.cache, host_fd)
        phases.end("cache")
        with torch.inference_mode(), gpu.refusing_failures(spec.rank, used=by_kernels):
            numerics = SelfTest(
                spec,
                self.model,
                self.cache,
                self.forward,
                device=self._device,
                dtype=self._dtype,
                deterministic=self._deterministic,
            ).run(self._forward_by_torch, by_kernels=by_kernels)
            phases.end("self-test")
            self.graphs = recorder.record(self.cache)
            phases.end("record")
        if by_kernels:
            fast_path.check_prebuilt(config)
        if self._device.type == "cuda":
            self._mailbox.device_bytes[spec.rank] = torch.cuda.memory_reserved(self._device)
        self.builds = BuildCounter(lambda kernel: logger.error("a kernel was built while serving: %s", kernel))
        self.builds.install()
        self._report_ready(numerics, phases)

    def serve(self) -> None:
        """Execute plans until the driver closes the socket.

        A step's result is sent when the device has finished it. On the CPU that is when the launch returns. A GPU still
        computes then, and the next step is launched behind it if its plan is there.
        """
        launched: deque[Launched] = deque()
        idle: list[tuple[Timestamp, Timestamp]] = []
        free = self._timer.now()
        self._marks.spent_us(0)  # those of the start count in no step
        with torch.inference_mode():
            while True:
                if not launched or select.select([self._control], [], [], _POLL_S)[0]:
                    message = self._control.recv(MAX_CONTROL_BYTES)
                    if not message:
                        return
                    step = decode_doorbell(message)
                    if step is None:
                        self._obey(decode_rank_message(message))
                        continue
                    plan = decode_plan(self._mailbox.get_plan(step))
                    with self._profiler.step(plan):
                        launched.append(self.launch(plan, [*idle, (free, self._timer.now())]))
                    idle, free = [], launched[-1].end
                    self._answer_finished(launched)  # on the CPU: late moves are done while the driver plans
                    if len(plan.late_moves):
                        idle.append((free, self._timer.now()))
                        self.cache.compress(plan.late_moves)
                        free = self._timer.now()
                self._answer_finished(launched)

    def _answer_finished(self, launched: deque[Launched]) -> None:
        """Count the steps that the device has finished; rank 0 sends their results."""
        while launched and launched[0].end.reached():
            step = launched.popleft()
            since = step.idle[-1][1]
            waited_us = round(sum(to.us_since(begin) for begin, to in step.idle))
            busy_us, forward_us = round(step.end.us_since(since)), round(step.computed.us_since(since))
            collective_us = self._marks.spent_us(step.collective_us)
            self._mailbox.note_step(self._spec.rank, busy_us, forward_us, collective_us, waited_us)
            if step.sampled is not None:
                scores = () if step.scores is None else step.scores.read()
                result = Result(step.number, *step.sampled.read(), waited_us, collective_us, step.unserved, *scores)
                if step.pooled is not None:
                    result.embeddings = step.pooled.read()
                self._mailbox.put_result(step.number, encode_result(result))
                self._control.send(encode_doorbell(step.number))

    def launch(self, plan: Plan, idle: list[tuple[Timestamp, Timestamp]]) -> Launched:
        """Launch a step on the device.

        Args:
            plan: the plan of the step.
            idle: intervals before the step in which the device had nothing to do, the last one up to now.
        """
        self._group.spent_ns = 0
        self._marks.begin_step()
        self.host.copy(plan.spills, plan.loads)
        if not len(plan.lengths):
            return self._launch_nothing(plan.step, idle)
        sampled = plan.samples.nonzero()[0]
        rows = (plan.lengths.cumsum() - 1)[sampled] if plan.has_prefill else sampled
        targets = np.empty(0, np.int32)
        if plan.targets is not None:
            scored = (plan.targets >= 0).nonzero()[0]
            rows, targets = np.concatenate([rows, scored]), plan.targets[scored]
        layout = StepLayout(plan.starts, plan.lengths, plan.tables, plan.hot_tables, plan.moves)
        unserved = self._add_requests(plan.added)
        pooled: Pooled | None = None
        if plan.pools is None:
            logits = self.forward(self._token_ids(plan), layout, rows)
        else:
            logits, pooled = self._forward_pooled(plan, layout, rows)
        computed = self._timer.now()
        chosen: Sampled | None = None
        scores: Scores | None = None
        if self._sampler is not None:
            chosen = self._sampler.sample(
                logits[: len(sampled)] if len(targets) else logits,
                plan.sampling_rows[sampled],
                plan.emitted[sampled],
                plan.uniforms,
                plan.masked,
                plan.masks,
            )
            if len(targets):
                scores = score(logits[len(sampled) :], targets, vocabulary=plan.vocabulary_logprobs)
        spent_us = self._group.spent_ns // 1000
        self._marks.end_step()
        return Launched(plan.step, chosen, unserved, scores, pooled, spent_us, idle, computed, self._timer.now())

    def _launch_nothing(self, step: int, idle: list[tuple[Timestamp, Timestamp]]) -> Launched:
        """The rest of a step that only copies. The ranks meet once, so that rank 0's result means that all have
        copied.
        """
        self._group.all_gather(torch.zeros(1, dtype=torch.int64, device=self._device))
        computed = self._timer.now()
        chosen = None if self._sampler is None else Sampled(torch.empty(0, dtype=torch.int64), [])
        self._marks.end_step()
        return Launched(step, chosen, [], None, None, self._group.spent_ns // 1000, idle, computed, self._timer.now())

    def _add_requests(self, added: list[RowSampling]) -> list[int]:
        """Prepare the sampler for sampling rows that get a new request. This is done before the step's first
        collective, so that a failure concerns only one request.

        Returns:
            The sampling rows for which there is no memory.
        """
        unserved: list[int] = []
        if self._sampler is None:
            return unserved
        for entry in added:
            try:
                self._sampler.add(entry)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                unserved.append(entry.sampling_row)
        return unserved

    def _token_ids(self, plan: Plan) -> torch.Tensor:
        """A step's token ids [tokens], int64 on the device. Rank 0 has the ids that the driver did not know yet; the
        other ranks get them by a collective. On a GPU it is queued behind the step that samples them, so that no host
        waits.
        """
        unknown = (plan.token_ids == LAST_SAMPLED).nonzero()[0]
        owners = (np.repeat(plan.sampling_rows, plan.lengths) if plan.has_prefill else plan.sampling_rows)[unknown]
        if self._device.type == "cpu" and self._sampler is not None and self._group.size == 1:
            here = plan.token_ids.astype(np.int64)
            here[unknown] = self._sampler.last_here(owners)
            return torch.from_numpy(here)
        arrays = [each.astype(np.int64) for each in (plan.token_ids, unknown, owners)]
        ids, places, sampling_rows = to_device_at_once(arrays, self._device)
        if len(unknown):
            mine = torch.zeros_like(sampling_rows) if self._sampler is None else self._sampler.last(sampling_rows)
            ids.index_copy_(0, places, self._group.all_gather(mine)[: len(unknown)])
        return ids

    def forward(self, ids: torch.Tensor, layout: StepLayout, rows: NDArray[np.int64]) -> torch.Tensor:
        """Compute a step: the KV of all tokens goes into the cache.

        Args:
            ids: [tokens], int64, on the device.
            layout: the layout of these tokens.
            rows: [rows], indices of the tokens whose logits are wanted.

        Returns:
            Logits [rows, vocabulary], valid until the next call.
        """
        recorded = None if self.graphs is None else self.graphs.that_fit(layout, rows)
        if recorded is not None:
            self._mailbox.collectives[self._spec.rank] += 1  # recorded collectives do not count themselves
            logits = recorded.run(ids, layout, rows)
            self._marks.replayed()
            return logits
        attention = step_attention(self.cache, layout, deterministic=self._deterministic, kept=self._decoding_attention)
        return self._full_logits(self.model.logits(ids, attention, self._indices(rows)))

    def _forward_by_torch(self, ids: torch.Tensor, layout: StepLayout, rows: NDArray[np.int64]) -> torch.Tensor:
        """As `forward`, without the kernels."""
        attention = TorchAttention(self.cache, layout, deterministic=True)
        return self._full_logits(self.model.logits_by_modules(ids, attention, self._indices(rows)))

    def _forward_pooled(
        self, plan: Plan, layout: StepLayout, rows: NDArray[np.int64]
    ) -> tuple[torch.Tensor, Pooled | None]:
        """As `forward`, for a step that makes embeddings; rank 0 gets its hidden states."""
        attention = step_attention(self.cache, layout, deterministic=self._deterministic)
        ids, pooler = self._token_ids(plan), self._pooler
        wanted = self._indices(pooler.rows(plan))
        logits, states = self.model.logits_and_states(ids, attention, self._indices(rows), wanted)
        return self._full_logits(logits), pooler.fetch(plan, states) if self._spec.rank == 0 else None

    def _compute_recorded(self, cache: KvCache, inputs: DecodeInputs | ChunkInputs) -> torch.Tensor:
        """As `forward`, for a step that is recorded."""
        with self._marks.recorded():
            if isinstance(inputs, ChunkInputs):
                return self._full_logits(self.model.mix(cache, inputs))
            return self._full_logits(self.model.decode(cache, inputs))

    def _indices(self, numbers: NDArray[np.integer]) -> torch.Tensor:
        """The numbers as int64 on the device, without waiting for it."""
        return to_device(numbers.astype(np.int64), self._device)

    def _full_logits(self, local: torch.Tensor) -> torch.Tensor:
        """[rows, this rank's part of the vocabulary] → [rows, vocabulary]."""
        every = self._group.all_gather(local)
        return every if every.shape[1] == self.model.vocab_size else every[:, : self.model.vocab_size]

    @property
    def _form(self) -> tuple[torch.device, torch.dtype, int, int]:
        """What decides whether the GPU's kernels can serve."""
        return self._device, self._dtype, self.model.head_dim, self.model.latent

    def _by_kernels(self) -> bool:
        """Whether the GPU's kernels compute. Refuses a slow path that the settings do not allow."""
        form = self._form
        if self._device.type == "cuda":
            settings: Any = self.model.module.config
            text = settings.get_text_config()
            per_head = max(1, text.num_attention_heads // self._spec.config.tp // self.model.kv_heads)
            gpu.try_attention(
                *form[:3],
                per_head,
                compressed=self._spec.compressed is not None,
                windowed=bool(getattr(text, "sliding_window", None)),
                hot_alone=self._spec.model.windowed is not None,
                exact=self._deterministic,
                latent=self.model.latent,
            )
            agree = partial(distributed.gather_reasons, self._group)
            reason = fast_path.common_reason(agree, gpu.problem(*form))
            if reason is not None:
                gpu.give_up(reason)  # on all ranks, though it may be another's reason
                fast_path.without_kernels(self._spec.config, reason)
        return gpu.usable(*form)

    def _load(self, phases: "_PhaseTimer") -> bool:
        """Read the weights and choose what computes. Returns whether the GPU's kernels do."""
        model, kernels = self._spec.model, list[Ahead]()
        load_weights(
            self.model.module,
            model,
            self._device,
            self._report_loading(),
            codes_on_gpu=gpu.usable(*self._form),
            on_formed=lambda: kernels.extend(self._build_ahead()),
        )
        phases.end("load")
        for each in kernels:
            each.wait()
        by_kernels, kept = self._by_kernels(), coded_weights(self.model.module)
        if by_kernels:
            self.model.fuse_on_gpu(model.context_length)
            self._time_collectives()
            if kept:
                kept_bytes = sum(each.nbytes for each in kept)
                logger.info("%d quantized weights stay codes on the GPU: %.1f MiB", len(kept), kept_bytes / 2**20)
        elif kept:
            widen_codes(self.model.module, self._dtype)
        elif self._device.type == "cpu" and self._dtype is torch.float32 and cpu.build is not None:
            self.model.fuse(model.context_length)
        phases.end("kernels")
        return by_kernels

    def _time_collectives(self) -> None:
        """From here on by the GPU's clock."""
        if self._group.size > 1 and isinstance(self._marks, DeviceMarks):
            from lockstep_engine.kernels.triton_clock import TritonClockStream  # noqa: PLC0415 - it builds on Triton

            self._marks.clock = CollectiveClock(TritonClockStream(self._device))

    def _build_ahead(self) -> list[Ahead]:
        """Begin to build the GPU's kernels; none if they cannot serve."""
        if gpu.problem(*self._form) is not None:
            return []
        model, compressed = self.model, self._spec.compressed is not None
        form = model.module, model.hidden_act, self._dtype
        try:
            from lockstep_engine.gpu_calls import plain_calls  # noqa: PLC0415 - it builds on Triton

            prebuilt.activate()
            hot_alone = self._spec.model.windowed is not None
            calls = plain_calls(*form, exact=self._deterministic, compressed=compressed, hot_alone=hot_alone)
            return [Ahead(calls, self._device, self._spec.threads)]
        except Exception as error:  # of Triton; `_by_kernels` meets it again, and decides
            logger.debug("kernels are not built ahead: %s", type(error).__name__)
            return []

    def _launch_all_forms(self, *, by_kernels: bool) -> None:
        """Launch the kernels whose form follows the step, so that none is built while serving; without kernels it
        does nothing.
        """
        if not by_kernels:
            return
        if self._sampler is not None:
            self._sampler.launch_all(self._dtype, self._spec.config.tp)
        self.model.launch_products(self._dtype, self._spec.config.step_tokens)

    def _measure_largest_step(self) -> int:
        """Bytes that a step takes at most on a GPU beside the KV cache; 0 on the CPU."""
        if self._memory is None:
            return 0

        def run(plan: Plan) -> None:
            if self.launch(plan, []).unserved:
                raise MemoryError("the sampler's tables")

        self.cache = self._caches.make(SMALLEST_POOLS)
        self.host = HostMemory(HostSizes(), self.cache)
        agree = partial(distributed.gather_reasons, self._group)
        needed = measure_largest_step(self._spec, self._memory, run, agree)
        logger.info("the largest step needs %.1f MiB beside weights and KV cache", needed / 2**20)
        return needed

    def join(self, collectives_fd: int, store_path: str) -> distributed.Collectives:
        """The collectives with the other ranks."""
        spec, config = self._spec, self._spec.config
        if config.tp == 1:
            return distributed.Alone()

        def progress() -> None:
            self._mailbox.collectives[spec.rank] += 1
            self._marks.enter()

        if collectives_fd >= 0 and self._device.type == "cpu":
            return distributed.SharedMemory(collectives_fd, spec.rank, config.tp, collective_bytes(spec), progress)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        distributed.init_torch_distributed(backend, store_path, spec.rank, config.tp, config.start_timeout_s)
        on_gpu = self._device.type == "cuda"
        quick = on_gpu and config.collectives == "auto" and not self._deterministic
        one_shot = distributed.symmetric_memory(self._device, config.tp) if quick else None
        return distributed.TorchDistributed(
            spec.rank,
            config.tp,
            progress,
            deterministic=self._deterministic,
            on_end=self._marks.leave,
            on_gpu=on_gpu,
            one_shot=one_shot,
        )

    def _agree_on_blocks(self, loaded: Loaded) -> tuple[PoolSizes, float, float]:
        """Send `loaded` to the driver and wait for its answer. An order for the log may come before it.

        Returns:
            The blocks, and the times of both messages on the monotonic clock.
        """
        loaded_at_s = time.monotonic()
        self._send(loaded)
        while message := self._control.recv(MAX_CONTROL_BYTES):
            answer = decode_rank_message(message)
            if isinstance(answer, AllocateBlocks):
                return answer.blocks, loaded_at_s, time.monotonic()
            self._obey(answer)
        os._exit(0)

    def _send(self, message: RankMessage) -> None:
        self._control.send(encode_control(message))

    def _obey(self, order: RankMessage) -> None:
        match order:
            case SetLogLevel():
                logging.getLogger("lockstep").setLevel(order.level.upper())
            case StartProfile():
                self._profiler.start(order)
            case StopProfile():
                self._profiler.stop(order)
            case _:
                raise AssertionError(type(order).__name__)

    def _report_ready(self, numerics: Numerics, phases: "_PhaseTimer") -> None:
        self._send(
            Ready(
                deterministic=self._deterministic and numerics.deterministic,
                device=str(self._device),
                dtype=str(self._dtype).removeprefix("torch."),
                fingerprint=numerics.fingerprint if self._deterministic else "",
                step_s=numerics.pace.step_s,
                token_s=numerics.pace.token_s,
                layers=self.model.layers,
                first_kv_head=self.model.first_kv_head,
                kv_heads=self.model.kv_heads,
                head_dim=self.model.head_dim,
                latent=self.cache.latent,
                phases_s=phases.seconds,
                loaded_at_s=self._loaded_at_s,
                allocated_at_s=self._allocated_at_s,
            )
        )

    def _report_loading(self) -> Callable[[int, int], None]:
        last = 0.0

        def report(done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            if done == total or now - last > _PROGRESS_INTERVAL_S:
                last = now
                self._send(Loading(done, total))

        return report


class _PhaseTimer:
    """Seconds spent in each phase of a start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def end(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = round(now - self._last, 3)
        self._last = now
