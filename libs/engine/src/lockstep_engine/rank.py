"""A rank: one process, one device, one part of the model. It executes plans in order and decides nothing.

Its control socket carries start-up messages and doorbells; when it closes, the driver is gone and the rank ends.
"""

import faulthandler
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lockstep_common.errors import LockstepError
from lockstep_common.lifecycle import die_with_parent, name_process

from lockstep_engine import distributed
from lockstep_engine.attention import StepLayout, step_attention
from lockstep_engine.config import BLOCK_SIZE, EngineConfig
from lockstep_engine.kernels import cpu
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.mailbox import Mailbox
from lockstep_engine.model_config import inspect_model, refuse
from lockstep_engine.models import BuiltModel, build_model
from lockstep_engine.plan import (
    AllocateBlocks,
    ControlMessage,
    Loaded,
    Loading,
    Plan,
    RankSpec,
    Ready,
    Result,
    StartFailed,
    decode_control,
    decode_plan,
    encode_control,
    encode_result,
)
from lockstep_engine.sampling import Sampler
from lockstep_engine.sizes import CANARY_TOKENS, collective_bytes, message_sizes
from lockstep_engine.weights import load_weights

DOORBELL = struct.Struct("<Q")
"""A step's number; every other message is longer."""

MAX_CONTROL_BYTES = 64 * 1024
_CPU_KV_BYTES = 512 * 2**20
_CUDA_SHARE = 0.9
_PROGRESS_INTERVAL_S = 0.2


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
    rank.serve()


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
        if self._device.type == "cpu" and self._dtype is torch.float32 and cpu.usable(self._model.head_dim):
            self._model.fuse(info.context_length)
        phases.end("load")
        self._geometry: dict[str, Any] = {
            "layers": self._model.layers,
            "kv_heads": self._model.kv_heads,
            "head_dim": self._model.head_dim,
            "dtype": self._dtype,
        }
        _tell(control, Loaded(self._affordable_blocks(), phases.seconds))
        blocks = self._receive_blocks()
        self._cache = KvCache(**self._geometry, blocks=blocks, device=self._device)
        self._sampler = Sampler(spec.max_seqs, info.vocab_size, self._device) if spec.rank == 0 else None
        with torch.inference_mode():
            self._deterministic &= self._canary()
        _tell(
            control,
            Ready(self._deterministic, str(self._device), str(self._dtype).removeprefix("torch.")),
        )

    def serve(self) -> None:
        """Execute plans until the driver closes the socket."""
        with torch.inference_mode():
            while message := self._control.recv(MAX_CONTROL_BYTES):
                (step,) = DOORBELL.unpack(message)
                result = self._execute(decode_plan(self._mailbox.get_plan(step)))
                self._mailbox.steps[self._spec.rank] += 1
                if result is not None:
                    self._mailbox.put_result(encode_result(result))
                    self._control.send(message)

    def _execute(self, plan: Plan) -> Result | None:
        began = time.perf_counter_ns()
        self._group.spent_ns = 0
        starts, lengths, slots, samples, emitted = (
            np.frombuffer(data, dtype=np.int32)
            for data in (plan.starts, plan.lengths, plan.slots, plan.samples, plan.emitted)
        )
        tables = np.frombuffer(plan.tables, dtype=np.int32).reshape(-1, plan.table_width)
        ids = np.frombuffer(plan.token_ids, dtype=np.int32).astype(np.int64)
        sampled = samples.nonzero()[0]
        rows = (np.cumsum(lengths) - 1)[sampled]
        logits = self._forward(ids, starts, lengths, tables, rows)
        if self._sampler is None:
            return None
        for entry in plan.added:
            self._sampler.add(entry)
        tokens, logprobs = (
            self._sampler.sample(logits, slots[sampled], emitted[sampled], np.frombuffer(plan.uniforms))
            if len(sampled)
            else ([], [])
        )
        spent = time.perf_counter_ns() - began
        return Result(plan.step, tokens, logprobs, spent // 1000, self._group.spent_ns // 1000)

    def _forward(
        self, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, tables: np.ndarray, rows: np.ndarray
    ) -> torch.Tensor:
        """Logits [rows, vocabulary] for the tokens `rows`; their KV and that of all others goes into the cache."""
        attention = step_attention(self._cache, StepLayout(starts, lengths, tables), deterministic=self._deterministic)
        to_device = self._device
        local = self._model.logits(
            torch.from_numpy(ids).to(to_device), attention, torch.from_numpy(rows.astype(np.int64)).to(to_device)
        )
        return self._group.all_gather(local)[:, : self._model.vocab_size]

    def _canary(self) -> bool:
        """Compute a few tokens as one chunk and one by one, on every rank.

        It warms up what is allocated or chosen at first use, and shows on this machine, with these libraries, whether a
        token's logits depend on what is computed beside it.

        Returns:
            Whether both ways gave the same bits.
        """
        limit = min(self._spec.context_length, self._spec.max_batch_tokens, CANARY_TOKENS)
        count = max(2, min(limit, self._cache.padding_block * BLOCK_SIZE))
        ids = np.arange(count, dtype=np.int64) * 37 % self._model.vocab_size
        table = np.arange(-(-count // BLOCK_SIZE), dtype=np.int32)[None]
        every = np.arange(count)
        chunk = self._forward(ids, np.array([0], np.int32), np.array([count], np.int32), table, every)
        same = True
        for position in every[-9:]:  # across the boundary of a block
            single = self._forward(
                ids[position : position + 1], np.array([position], np.int32), np.array([1], np.int32), table, every[:1]
            )
            same &= torch.equal(single[0], chunk[position])
        self._cache.clear(torch.from_numpy(table[0].astype(np.int64)).to(self._device))
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
        return distributed.TorchDistributed(spec.rank, spec.tp, progress, deterministic=self._deterministic)

    def _affordable_blocks(self) -> int:
        size = KvCache.block_bytes(**self._geometry)
        if self._spec.kv_memory_bytes is not None:
            memory = self._spec.kv_memory_bytes
        elif self._device.type == "cuda":
            memory = int(torch.cuda.mem_get_info(self._device)[0] * _CUDA_SHARE)
        else:
            memory = _CPU_KV_BYTES
        most_useful = self._spec.max_seqs * -(-self._spec.context_length // BLOCK_SIZE)
        return min(memory // size, most_useful)

    def _receive_blocks(self) -> int:
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
