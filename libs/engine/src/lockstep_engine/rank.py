"""A rank: one process, one device, one part of the model. It executes plans in order and decides nothing.

Its control socket carries start-up messages and doorbells; when it closes, the driver is gone and the rank ends.
"""

import faulthandler
import logging
import os
import select
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lockstep_common.errors import LockstepError
from lockstep_common.lifecycle import die_with_parent, name_process
from numpy.typing import NDArray

from lockstep_engine import distributed
from lockstep_engine.attention import StepLayout, layout_of_one, step_attention
from lockstep_engine.config import BLOCK_SIZE, EngineConfig
from lockstep_engine.graphs import BuildCounter, DecodeInputs, GraphedStep, NotRecordableError
from lockstep_engine.kernels import cpu, gpu
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.mailbox import Mailbox
from lockstep_engine.marks import CudaMark, HostMark, Mark
from lockstep_engine.model_config import inspect_model, refuse
from lockstep_engine.models import BuiltModel, build_model
from lockstep_engine.plan import (
    LAST_SAMPLED,
    AllocateBlocks,
    ControlMessage,
    Loaded,
    Loading,
    Plan,
    PoolSizes,
    RankSpec,
    Ready,
    Result,
    SlotSampling,
    StartFailed,
    decode_control,
    decode_plan,
    encode_control,
    encode_result,
)
from lockstep_engine.sampling import Sampled, Sampler, Scores, score
from lockstep_engine.sizes import CANARY_ROWS, canary_tokens, collective_bytes, message_sizes, pool_sizes
from lockstep_engine.weights import load_weights

logger = logging.getLogger("lockstep.engine")

DOORBELL = struct.Struct("<Q")
"""A step's number; every other message is longer."""

MAX_CONTROL_BYTES = 64 * 1024
_CPU_KV_BYTES = 512 * 2**20
_CUDA_SHARE = 0.9
_MOST_RECORDED = 512
"""Sequences of a recorded step: in larger ones the GPU has more to do than the host."""
_PROGRESS_INTERVAL_S = 0.2
_LOOK_S = 0.00003
"""How long a rank waits for a plan before it looks again whether its device is done with a step."""


@dataclass(frozen=True)
class _Launched:
    """A step that the device has been asked for."""

    number: int
    sampled: Sampled | None
    """None on other ranks than 0."""
    unserved: list[int]
    scores: Scores | None
    collective_us: int
    idle: list[tuple[Mark, Mark]]
    """Times before it in which there was nothing to do."""
    end: Mark


def run_rank(spec: RankSpec, control: socket.socket, mailbox_fd: int, collectives_fd: int, store_path: str) -> None:
    """Be a rank until the driver is gone. Returns only when a start has failed (the driver has been told)."""
    name_process(f"rank {spec.label}/{spec.rank}")
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's business
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the supervisor asks for stacks before it kills
    try:
        rank = Rank(spec, control, mailbox_fd, collectives_fd, store_path)
    except LockstepError as error:
        _tell(control, StartFailed(error.message, permanent=True))
        return
    except (OSError, RuntimeError, MemoryError) as error:
        _tell(control, StartFailed(f"rank {spec.rank}: {type(error).__name__}: {error}", permanent=False))
        return
    try:
        rank.serve()
    except (MemoryError, RuntimeError) as error:  # the others may be in a collective already: all start anew
        _tell(control, StartFailed(_death_note(spec.rank, error), permanent=False))
        raise


class Rank:
    """The model's part, its cache, and the loop that executes plans."""

    def __init__(
        self, spec: RankSpec, control: socket.socket, mailbox_fd: int, collectives_fd: int, store_path: str
    ) -> None:
        self._spec = spec
        self._control = control
        self._mailbox = Mailbox(mailbox_fd, spec.tp, *message_sizes(spec))
        phases = _Phases()
        self._device = pick_device(spec)
        torch.set_num_threads(spec.threads)
        self._deterministic = self._device.type == "cpu" if spec.deterministic is None else spec.deterministic
        info = inspect_model(EngineConfig(model=spec.model, tp=spec.tp))
        self._dtype = _pick_dtype(spec.dtype, info.dtype, self._device)
        self._group = self._join(collectives_fd, store_path)
        phases.end("join")
        self._model: BuiltModel = build_model(info, self._group, self._dtype)
        phases.end("build")
        load_weights(self._model.module, info, self._group, self._device, self._report_loading())
        by_kernels = gpu.usable(self._device, self._dtype, self._model.head_dim) and not self._deterministic
        if by_kernels:
            self._model.fuse_on_gpu(info.context_length)
        elif self._device.type == "cpu" and self._dtype is torch.float32 and cpu.usable(self._model.head_dim):
            self._model.fuse(info.context_length)
        phases.end("load")
        self._geometry: dict[str, Any] = {
            "layers": self._model.layers,
            "kv_heads": self._model.kv_heads,
            "head_dim": self._model.head_dim,
            "dtype": self._dtype,
        }
        self._records = by_kernels and spec.cuda_graphs
        self._graphs: GraphedStep | None = None
        with torch.inference_mode():
            graph_bytes = self._estimate_graphs()
        phases.end("estimate")
        _tell(control, Loaded(self._affordable_blocks(graph_bytes), phases.seconds))
        self._cache = self._make_cache(self._receive_blocks())
        self._sampler = Sampler(spec.max_seqs, info.vocab_size, self._device) if spec.rank == 0 else None
        with torch.inference_mode():
            same = self._canary()
            if by_kernels:
                self._warm_up()
            self._record()
        self._builds = BuildCounter(lambda kernel: logger.error("a kernel was built while serving: %s", kernel))
        self._builds.install()
        _tell(
            control,
            Ready(self._deterministic and same, str(self._device), str(self._dtype).removeprefix("torch.")),
        )

    def serve(self) -> None:
        """Execute plans until the driver closes the socket.

        A step's result goes out when the device is done with it. The CPU is when the step is launched; a GPU computes
        meanwhile, and the next step is launched behind it if its plan is there.
        """
        launched: deque[_Launched] = deque()
        idle: list[tuple[Mark, Mark]] = []
        free = self._mark()
        with torch.inference_mode():
            while True:
                if not launched or select.select([self._control], [], [], _LOOK_S)[0]:
                    message = self._control.recv(MAX_CONTROL_BYTES)
                    if not message:
                        return
                    plan = decode_plan(self._mailbox.get_plan(*DOORBELL.unpack(message)))
                    launched.append(self._launch(plan, [*idle, (free, self._mark())]))
                    idle, free = [], launched[-1].end
                    self._answer_finished(launched)  # the CPU's: what is left to do, it does while the driver plans
                    if plan.late_moves:
                        idle.append((free, self._mark()))
                        self._cache.compress(np.frombuffer(plan.late_moves, dtype=np.int32).reshape(-1, 2))
                        free = self._mark()
                self._answer_finished(launched)

    def _mark(self) -> Mark:
        return CudaMark() if self._device.type == "cuda" else HostMark()

    def _answer_finished(self, launched: deque[_Launched]) -> None:
        """Count the steps that the device is done with; rank 0 tells what they gave."""
        while launched and launched[0].end.reached():
            step = launched.popleft()
            self._mailbox.steps[self._spec.rank] += 1
            if step.sampled is not None:
                waited_us = round(sum(to.us_since(since) for since, to in step.idle))
                scores = () if step.scores is None else step.scores.read()
                result = Result(
                    step.number, *step.sampled.read(), waited_us, step.collective_us, step.unserved, *scores
                )
                self._mailbox.put_result(step.number, encode_result(result))
                self._control.send(DOORBELL.pack(step.number))

    def _launch(self, plan: Plan, idle: list[tuple[Mark, Mark]]) -> _Launched:
        self._group.spent_ns = 0
        starts, lengths, slots, samples, emitted = (
            np.frombuffer(data, dtype=np.int32)
            for data in (plan.starts, plan.lengths, plan.slots, plan.samples, plan.emitted)
        )
        tables = np.frombuffer(plan.tables, dtype=np.int32).reshape(-1, plan.table_width)
        sampled = samples.nonzero()[0]
        targets = np.frombuffer(plan.targets, dtype=np.int32)
        scored = (targets >= 0).nonzero()[0]
        rows = np.concatenate([(np.cumsum(lengths) - 1)[sampled], scored])
        layout = StepLayout(
            starts,
            lengths,
            tables,
            np.frombuffer(plan.hot_tables, dtype=np.int32).reshape(tables.shape) if plan.hot_tables else None,
            np.frombuffer(plan.moves, dtype=np.int32).reshape(-1, 2),
        )
        unserved = self._take_up(plan.added)
        ids = self._token_ids(np.frombuffer(plan.token_ids, dtype=np.int32), slots, lengths)
        logits = self._forward(ids, layout, rows)
        chosen: Sampled | None = None
        scores: Scores | None = None
        if self._sampler is not None:
            chosen = self._sampler.sample(
                logits[: len(sampled)], slots[sampled], emitted[sampled], np.frombuffer(plan.uniforms)
            )
            if len(scored):
                scores = score(logits[len(sampled) :], targets[scored], whole=plan.whole)
        return _Launched(plan.step, chosen, unserved, scores, self._group.spent_ns // 1000, idle, self._mark())

    def _take_up(self, added: list[SlotSampling]) -> list[int]:
        """Prepare the sampler for slots that have a new occupant, before this rank is in a collective: what fails here
        concerns nobody else. Returns the slots for which there is no memory.
        """
        unserved: list[int] = []
        if self._sampler is None:
            return unserved
        for entry in added:
            try:
                self._sampler.add(entry)
            except (MemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error):
                    raise
                unserved.append(entry.slot)
        return unserved

    def _token_ids(
        self, given: NDArray[np.int32], slots: NDArray[np.int32], lengths: NDArray[np.int32]
    ) -> torch.Tensor:
        """A step's token ids [tokens], int64 on the device. Those that the driver did not know yet are with rank 0; the
        others get them as they get sums, since on a GPU a collective waits its turn behind the step that samples them
        and no host has to.
        """
        ids = self._indices(given)
        unknown = (given == LAST_SAMPLED).nonzero()[0]
        if len(unknown):
            owners = np.repeat(slots, lengths)[unknown]
            mine = torch.zeros_like(ids[: len(unknown)]) if self._sampler is None else self._sampler.last(owners)
            ids.index_copy_(0, self._indices(unknown), self._group.all_gather(mine)[: len(unknown)])
        return ids

    def _forward(self, ids: torch.Tensor, layout: StepLayout, rows: NDArray[np.int64]) -> torch.Tensor:
        """Logits [rows, vocabulary] for the tokens `rows`; their KV and that of all others goes into the cache. Valid
        until the next call.

        Args:
            ids: [tokens], int64, on the device.
            layout: of these tokens.
            rows: [rows]
        """
        if self._graphs is not None and self._graphs.fits(layout):
            self._mailbox.collectives[self._spec.rank] += 1  # those that are recorded do not count themselves
            logits = self._graphs.run(ids, layout)
            return logits if np.array_equal(rows, np.arange(len(ids))) else logits[self._indices(rows)]
        attention = step_attention(
            self._cache,
            layout,
            deterministic=self._deterministic,
            plain=self._model.plain_attention,
        )
        return self._whole(self._model.logits(ids, attention, self._indices(rows)))

    def _indices(self, numbers: NDArray[np.integer]) -> torch.Tensor:
        """int64 on the device, without waiting for it."""
        return torch.from_numpy(numbers.astype(np.int64)).to(self._device, non_blocking=True)

    def _whole(self, local: torch.Tensor) -> torch.Tensor:
        """[rows, this rank's part of the vocabulary] → [rows, vocabulary]."""
        return self._group.all_gather(local)[:, : self._model.vocab_size]

    def _make_cache(self, blocks: PoolSizes) -> KvCache:
        return KvCache(
            **self._geometry,
            blocks=blocks.hot,
            cold_blocks=blocks.cold,
            rule=self._spec.hot_window,
            compressed_layers=self._spec.compressed_layers,
            device=self._device,
        )

    def _graphed(self, cache: KvCache) -> GraphedStep:
        """Decode steps over a cache, to be recorded."""

        def body(inputs: DecodeInputs) -> torch.Tensor:
            return self._whole(self._model.decode(cache, inputs))

        width = -(-self._spec.context_length // BLOCK_SIZE)
        return GraphedStep(body, min(self._spec.max_seqs, _MOST_RECORDED), width, self._device)

    def _estimate_graphs(self) -> int:
        """Memory that recorded decode steps will take, from recording some over a cache of next to nothing. Where they
        cannot be recorded it is said why, and they are not.
        """
        if not self._records:
            return 0
        graphs = self._graphed(self._make_cache(PoolSizes(1, 0 if self._spec.hot_window is None else 1)))
        try:
            return graphs.estimate_bytes()
        except NotRecordableError as error:
            self._leave_unrecorded(error)
            return 0
        finally:
            graphs.close()

    def _record(self) -> None:
        """Record decode steps, the largest first, if they can be."""
        if not self._records:
            return
        graphs = self._graphed(self._cache)
        try:
            graphs.capture()
        except NotRecordableError as error:
            self._leave_unrecorded(error)
        else:
            self._graphs = graphs

    def _leave_unrecorded(self, error: NotRecordableError) -> None:
        self._records = False
        logger.warning("decode steps run without CUDA graphs: %s", error)

    def _warm_up(self) -> None:
        """Run the GPU's kernels in the forms in which the canary does not: as many sequences as there can be, whose
        keys are not split over programs, and blocks compressed after a step. Later none may have to be built.
        """
        count, cache = self._spec.max_seqs, self._cache
        first = np.zeros((count, 1), np.int32)
        layout = StepLayout(first[:, 0], np.ones(count, np.int32), first)
        self._forward(torch.zeros(count, dtype=torch.int64, device=self._device), layout, np.arange(count))
        if cache.rule is not None and cache.cold_blocks:
            cache.compress(np.zeros((1, 2), np.int32))
        cache.clear(torch.zeros(1, dtype=torch.int64, device=self._device))

    def _canary(self) -> bool:
        """Compute a few tokens as one chunk and one by one, on every rank.

        It warms up what is allocated or chosen at first use, and shows on this machine, with these libraries, whether a
        token's logits depend on what is computed beside it.

        Returns:
            Whether both ways gave the same bits.
        """
        cache, rule = self._cache, self._cache.rule
        blocks = min(cache.padding_block, cache.cold_blocks + rule.blocks if rule is not None else cache.padding_block)
        count = max(2, min(canary_tokens(self._spec), blocks * BLOCK_SIZE))
        ids = torch.arange(count, device=self._device) * 37 % self._model.vocab_size
        hot = np.arange(-(-count // BLOCK_SIZE), dtype=np.int32)
        cold = np.maximum(hot - (0 if rule is None else rule.sink), 0)
        last = np.arange(max(0, count - CANARY_ROWS), count)  # across the boundary of a block
        chunk = self._forward(ids, layout_of_one(cache, 0, count, hot, cold), last)
        same = True
        for position, expected in zip(last.tolist(), chunk, strict=True):
            layout = layout_of_one(cache, position, 1, hot, cold)
            single = self._forward(ids[position : position + 1], layout, np.zeros(1, np.int64))
            same &= torch.equal(single[0], expected)
        cache.clear(torch.from_numpy(hot.astype(np.int64)).to(self._device))
        return same

    def _join(self, collectives_fd: int, store_path: str) -> distributed.Collectives:
        spec = self._spec
        if spec.tp == 1:
            return distributed.Alone()

        def progress() -> None:
            self._mailbox.collectives[spec.rank] += 1

        if collectives_fd >= 0 and self._device.type == "cpu":
            return distributed.SharedMemory(collectives_fd, spec.rank, spec.tp, collective_bytes(spec), progress)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        distributed.init_torch_distributed(backend, store_path, spec.rank, spec.tp, spec.start_timeout_s)
        quick = self._device.type == "cuda" and spec.collectives == "auto"
        one_shot = distributed.symmetric_memory(self._device, spec.tp) if quick else None
        return distributed.TorchDistributed(
            spec.rank, spec.tp, progress, deterministic=self._deterministic, one_shot=one_shot
        )

    def _affordable_blocks(self, graph_bytes: int) -> PoolSizes:
        """Blocks of the KV cache that there is memory for, beside recorded steps of so many bytes."""
        spec, layers = self._spec, self._geometry["layers"]
        strange = [layer for layer in spec.compressed_layers or () if layer >= layers]
        if strange:
            raise refuse(f"kv_compressed_layers names layer {strange[0]}; the model has {layers}, counted from 0")
        if self._spec.kv_memory_bytes is not None:
            memory = self._spec.kv_memory_bytes
        elif self._device.type == "cuda":
            torch.cuda.empty_cache()  # what loading and recording have left behind is free, too
            memory = max(0, int(torch.cuda.mem_get_info(self._device)[0] * _CUDA_SHARE) - graph_bytes)
        else:
            memory = _CPU_KV_BYTES
        cold = KvCache.cold_block_bytes(**self._geometry, compressed_layers=spec.compressed_layers)
        return pool_sizes(spec, memory, KvCache.block_bytes(**self._geometry), cold)

    def _receive_blocks(self) -> PoolSizes:
        message = self._control.recv(MAX_CONTROL_BYTES)
        if not message:
            os._exit(0)
        answer = decode_control(message)
        assert isinstance(answer, AllocateBlocks)
        return answer.blocks

    def _report_loading(self) -> Callable[[int, int], None]:
        last = 0.0

        def report(done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            if done == total or now - last > _PROGRESS_INTERVAL_S:
                last = now
                _tell(self._control, Loading(done, total))

        return report


class _Phases:
    """Seconds spent in each phase of a start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def end(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = round(now - self._last, 3)
        self._last = now


def _is_out_of_memory(error: BaseException) -> bool:
    """Of Python, of a GPU, or of torch's allocator on the CPU, whose errors have no type of their own."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _death_note(rank: int, error: BaseException) -> str:
    what = "has no memory for a step" if _is_out_of_memory(error) else "failed in a step"
    return f"rank {rank} {what}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _tell(control: socket.socket, message: ControlMessage) -> None:
    control.send(encode_control(message))


def pick_device(spec: RankSpec) -> torch.device:
    """The rank's device: CUDA if there is one for each rank (or it is asked for), else the CPU."""
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if spec.device == "cuda" and available < spec.tp:
        raise refuse(f"device cuda with tp = {spec.tp} needs {spec.tp} GPUs; this machine has {available}")
    if spec.device == "cuda" or (spec.device == "auto" and available >= spec.tp):
        device = torch.device("cuda", spec.rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _pick_dtype(wanted: str, stored: str, device: torch.device) -> torch.dtype:
    name = wanted
    if wanted == "auto":
        name = "float32" if device.type == "cpu" else stored
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
