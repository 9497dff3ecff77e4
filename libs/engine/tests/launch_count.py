"""Counts what a step of our GPU path launches, without a GPU and without weights: models of published shapes on torch's
meta device, kernels that only note that they are launched, and ranks that only note that they meet.

    TRITON_INTERPRET=1 python libs/engine/tests/launch_count.py         writes docs/bench/gpu-launches.json and .md

Counted is a step's forward pass, up to the logits of all ranks: torch's operations but views and allocations, launches
of our Triton kernels, collectives, and the marks of progress. Bytes are those of each launch's tensors, read and
written; of an embedding or a chosen row those rows, of the cache what the step's sequences hold. Sampling has rows of
its own; copies of inputs to the device are not counted. Layers are alike, so that models have two and three of them
here and the rest is a difference times a number; the tests check that the fourth layer adds what the third adds.
"""

import argparse
import contextlib
import dataclasses
import importlib
import json
import math
import re
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from lockstep_engine import sampling
from lockstep_engine.attention import StepLayout
from lockstep_engine.attention_triton import TritonAttention
from lockstep_engine.chunk_graphs import ChunkInputs, ChunkSize
from lockstep_engine.config import BLOCK_SIZE, RECORDED_TOKENS
from lockstep_engine.device_marks import DeviceMarks, MarkStream
from lockstep_engine.graphs import DecodeInputs
from lockstep_engine.kernels import gpu, triton_attention, triton_linear
from lockstep_engine.kernels.tiles import LIMITS
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.largest_step import largest_plan
from lockstep_engine.linear import ColumnLinear, RowLinear, keep_codes
from lockstep_engine.model_config import ModelInfo
from lockstep_engine.models import build_model
from lockstep_engine.quantized.coded import INTEGERS, CodeForm
from lockstep_engine.sampling import Sampler
from specs import rank_spec
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")
DTYPE = torch.bfloat16
PROCESSORS = 132
"""Multiprocessors of the GPU that is counted for (H100); splits of keys follow them."""
CONTEXT, CHUNK, ROWS = 1024, 512, (1, 8, 64)
TPS = (1, 4, 8)
TABLE = Path(__file__).parents[3] / "docs/bench/gpu-launches.json"

_COMMON = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False}
_LLAMA = {"model_type": "llama", "vocab_size": 128256, "rope_theta": 500000.0, "num_key_value_heads": 8, **_COMMON}
MODELS = {
    "Llama-3-8B": (
        "LlamaForCausalLM",
        32,
        {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    ),
    "Llama-3-70B": (
        "LlamaForCausalLM",
        80,
        {**_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
    ),
    "Mixtral-8x7B": (
        "MixtralForCausalLM",
        32,
        {
            **_COMMON,
            "model_type": "mixtral",
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_theta": 1e6,
            "sliding_window": None,
        },
    ),
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM",
        61,
        {
            **_COMMON,
            "model_type": "deepseek_v3",
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "first_k_dense_replace": 1,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
        },
    ),
}
"""Architecture, layers and configuration: the published shapes."""

CODES = {"int8": CodeForm(None), "int4": CodeForm(128, table=INTEGERS)}
"""Forms in which weights of layers stay codes; all groups have the same zero point."""
_CODED = "Llama-3-8B"
_LARGE = 2**20
_KERNELS = ("attention", "coded", "compress", "exact_attention", "gate", "latent", "linear", "norm", "rows", "store")
_FREE = {
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "_unsafe_view",
    "_reshape_alias",
    "lift_fresh",
    "arange_start",
}
_GATHERS = {"embedding", "index_select", "index", "gather", "index_copy_", "index_fill_"}


@dataclasses.dataclass
class Cost:
    """What a step launches."""

    torch_operations: int = 0
    triton_launches: int = 0
    collectives: int = 0
    marks: int = 0
    bytes: int = 0
    names: Counter = dataclasses.field(default_factory=Counter)

    def numbers(self):
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "names"}


class CountingRanks(MarkStream):
    """A group of `size` ranks of which only the first is here."""

    rank = 0
    marks = None
    spent_ns = 0

    def __init__(self, size, cost):
        self.size, self._cost = size, cost
        self._marks = DeviceMarks(self, np.zeros(1, np.int64))

    def advance(self):
        pass

    def write(self, place):
        self._cost.marks += 1

    def all_reduce(self, x):
        return self._meet(x, 1)

    def all_gather(self, x):
        return self._meet(x, self.size)

    def _meet(self, x, times):
        if self.size == 1:
            return x
        self._marks.enter()
        self._cost.collectives += 1
        self._cost.bytes += x.nbytes * (1 + times)
        return x if times == 1 else x.new_empty(*x.shape[:-1], times * x.shape[-1])


class LargeOnMeta(TorchFunctionMode):
    """Makes large tensors without memory. Small ones are tried on numbers while a model is built."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.zeros, torch.empty) and math.prod(np.ravel(args).tolist()) > _LARGE:
            kwargs.setdefault("device", META)
        return func(*args, **kwargs)


class Operations(TorchDispatchMode):
    """Counts operations that are a launch. What torch computes to know shapes happens outside of it."""

    def __init__(self, cost):
        super().__init__()
        self._cost = cost

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        views = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if views or name in _FREE:
            return out
        made = tensors(out)
        self._cost.torch_operations += 1
        self._cost.names[name] += 1
        given = made if name in _GATHERS else tensors((args, kwargs or {}))
        if name == "index_fill_":  # the cache's blocks of a new owner, or single logits
            made, given = [], []
            filled, dim, places = args[:3]
            self._cost.bytes += filled.nbytes // filled.shape[dim] * len(places)
        self._cost.bytes += sum(each.nbytes for each in (*given, *made))
        return out


def tensors(tree):
    """The tensors among arguments, each once."""
    found = {}
    pending = [tree]
    while pending:
        each = pending.pop()
        if isinstance(each, torch.Tensor):
            found[id(each)] = each
        elif isinstance(each, dict):
            pending += each.values()
        elif isinstance(each, list | tuple):
            pending += each
    return list(found.values())


class CountedKernel:
    """In the place of a Triton kernel."""

    def __init__(self, name, cost, held_bytes):
        self._name, self._cost, self._held_bytes = name, cost, held_bytes

    def __getitem__(self, grid):
        return self._launch

    def _launch(self, *args, **kwargs):
        self._cost.triton_launches += 1
        self._cost.names[self._name] += 1
        given = tensors((args, kwargs))
        # The cache and the keys in it are larger than what is read of them.
        small = sum(each.nbytes for each in given if each.dim() != 4)
        if self._name == "_grouped":  # at most the experts that its pairs can have chosen
            weight, pairs = args[2], args[9]
            small -= weight.nbytes - weight.nbytes // len(weight) * min(len(weight), pairs)
        self._cost.bytes += small + (self._held_bytes if self._name.startswith("_attend") else 0)


class Counted:
    """One rank of a model of a published shape, with `layers` layers, whose weights stay codes if `codes` says so."""

    def __init__(self, name, layers, tp, *, exact=False, codes=None):
        architecture, _, settings = MODELS[name]
        self.cost = Cost()
        self.group = CountingRanks(tp, self.cost)
        with tempfile.TemporaryDirectory() as folder:
            config = {**settings, "architectures": [architecture], "num_hidden_layers": layers, "dtype": "bfloat16"}
            (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            info = ModelInfo(
                path=Path(folder),
                name=name,
                digest="",
                architecture=architecture,
                model_type=settings["model_type"],
                dtype="bfloat16",
                context_length=settings["max_position_embeddings"],
                vocab_size=settings["vocab_size"],
                hidden_size=settings["hidden_size"],
                eos_ids=(),
                created=0,
                weight_files=(),
            )
            with LargeOnMeta():
                self.model = build_model(info, self.group, DTYPE)
        self.model.module.to(META)
        if codes is not None:
            keep_all(self.model.module, CODES[codes])
        self.model.exact = exact
        triton_linear.counters(META)  # made once, and not by a step
        self.width = info.context_length // BLOCK_SIZE
        self.context_length = info.context_length
        self.problem = served_problem(self.model.head_dim, self.model.latent)

    def cache(self):
        return KvCache(
            layers=self.model.layers,
            kv_heads=self.model.kv_heads,
            head_dim=self.model.head_dim,
            blocks=self.width,
            dtype=DTYPE,
            device=META,
            latent=self.model.latent,
        )

    def count(self, work, tokens):
        """Run some work; `tokens`: of the cache that its attention reads, in each layer."""
        cost = self.cost
        for field in ("torch_operations", "triton_launches", "collectives", "marks", "bytes"):
            setattr(cost, field, 0)
        cost.names.clear()
        stored = 1 if self.model.latent else 2
        held = tokens * self.model.kv_heads * self.model.head_dim * stored * DTYPE.itemsize
        kept = []
        try:
            for part in _KERNELS:
                kept += _count_kernels(part, cost, held)
            for name, claimed in (("processors", PROCESSORS), ("limits", LIMITS[90])):
                kept.append((triton_attention, name, getattr(triton_attention, name)))
                setattr(triton_attention, name, lambda _device, claimed=claimed: claimed)
            with torch.no_grad(), Operations(cost):
                self.group._marks.begin_step()
                work()
                self.group._marks.end_step()
        finally:
            for module, name, kernel in kept:
                setattr(module, name, kernel)
        return dataclasses.replace(cost, names=Counter(cost.names))

    def decode(self, rows):
        """A recorded step: one token of each of so many sequences."""
        cache = self.cache()
        inputs = DecodeInputs(
            torch.empty(rows, dtype=torch.int64, device=META),
            torch.empty(rows, dtype=torch.int64, device=META),
            torch.empty(rows, self.width, dtype=torch.int32, device=META),
        )
        return self.count(lambda: self.group.all_gather(self.model.decode(cache, inputs)), rows * CONTEXT)

    def mixed(self, rows):
        """So many sequences that decode, and a chunk of a prompt."""
        cache = self.cache()
        starts = np.full(rows + 1, CONTEXT - 1, np.int32)
        lengths = np.ones(rows + 1, np.int32)
        starts[-1], lengths[-1] = 0, CHUNK
        layout = StepLayout(starts, lengths, np.zeros((rows + 1, CONTEXT // BLOCK_SIZE), np.int32))
        ids = torch.empty(rows + CHUNK, dtype=torch.int64, device=META)
        wanted = torch.empty(rows + 1, dtype=torch.int64, device=META)

        def work():
            attention = TritonAttention(cache, layout, exact=self.model.exact)
            self.group.all_gather(self.model.logits(ids, attention, wanted))

        # Both forms of the kernel are launched; each reads its own sequences.
        return self.count(work, (rows * CONTEXT + CHUNK) // 2)

    def recorded(self, rows):
        """The largest recorded step of so many sequences: all but one decode, and that one has a chunk of a prompt."""
        cache = self.cache()
        size = ChunkSize(RECORDED_TOKENS, rows)
        numbers = [torch.empty(rows, dtype=torch.int32, device=META) for _ in range(3)]
        inputs = ChunkInputs(
            torch.empty(size.tokens, dtype=torch.int64, device=META),
            *numbers,
            torch.empty(0, 2, dtype=torch.int32, device=META),
            *[torch.empty(rows + 1, self.width, dtype=torch.int32, device=META)] * 2,
        )
        decoding = rows - 1
        held = (decoding * CONTEXT + size.tokens - decoding) // 2
        return self.count(lambda: self.group.all_gather(self.model.mix(cache, inputs)), held)


def keep_all(model, form):
    """Have the weights of all layers as codes."""
    for layer in model.modules():
        if isinstance(layer, ColumnLinear | RowLinear):
            keep_codes(layer, form, on_gpu=True)
            layer.zeros = None  # the meta device does not know that all are equal
            layer.pack()


def served_problem(head_dim, latent):
    """Why the kernels do not serve heads of this width on a GPU."""
    kept, gpu.build_problem = gpu.build_problem, lambda: None
    try:
        return gpu.problem(torch.device("cuda"), DTYPE, head_dim, latent)
    finally:
        gpu.build_problem = kept


def costs(name, tp, *, layers, exact=False, codes=None):
    """{step: Cost} of a model with so many layers, or why there is none."""
    counted = Counted(name, layers, tp, exact=exact, codes=codes)
    if counted.problem:
        return counted.problem
    counted.model.fuse_on_gpu(counted.context_length)
    works = {f"decode {rows}": partial(counted.decode, rows) for rows in ROWS}
    works[f"{RECORDED_TOKENS} tokens of {ROWS[-1]}"] = partial(counted.recorded, ROWS[-1])
    works[f"{ROWS[-1]} + chunk of {CHUNK}"] = partial(counted.mixed, ROWS[-1])
    return {step: _counted_or_why(work) for step, work in works.items()}


def _counted_or_why(work):
    try:
        return work()
    except NotImplementedError as error:  # torch has no shape for what depends on a tensor's content
        (name,) = re.findall(r"torch\.(\w+)\(\)", str(error).splitlines()[0])
        return f"the host waits for {name} of each expert: cannot be counted, nor recorded"


def entry(name, tp, *, exact=False, codes=None):
    """The numbers of a whole model."""
    few, more = (costs(name, tp, layers=layers, exact=exact, codes=codes) for layers in (2, 3))
    if isinstance(few, str):
        return few
    layers = MODELS[name][1]
    return {
        step: cost if isinstance(cost, str) else _with_all_layers(cost, more[step], layers)
        for step, cost in few.items()
    }


def _with_all_layers(two, three, layers):
    """Two layers, and as many more as there are."""
    return {field: number + (layers - 2) * (three.numbers()[field] - number) for field, number in two.numbers().items()}


def rows():
    """(name of a row, model, tp, exact, form of codes)"""
    for name in MODELS:
        for tp in TPS:
            for exact in (False, True):
                yield f"{name} tp {tp}{' exact' if exact else ''}", name, tp, exact, None
    for codes in CODES:
        yield f"{_CODED} tp 1 {codes}", _CODED, 1, False, codes


_GREEDY = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "logprobs": -1, "min_tokens": 0}
_GREEDY |= {"frequency_penalty": 0.0, "presence_penalty": 0.0, "logit_bias": {}, "forbidden_ids": []}
SAMPLERS = {
    "greedy": _GREEDY,
    "temperature": _GREEDY | {"temperature": 1.0},
    "top_k": _GREEDY | {"temperature": 1.0, "top_k": 40},
    "top_p": _GREEDY | {"temperature": 1.0, "top_p": 0.9},
    "every option": {},
}
"""What differs from a request with every option, which has a grammar, too."""


def sampled_step(kind, rows, vocabulary=_LLAMA["vocab_size"]):
    """A step's sampling, as a call: so many requests of one kind, which have begun, on the meta device."""
    plan = largest_plan(rank_spec(vocab_size=vocabulary, max_seqs=rows, max_batch_tokens=CHUNK))
    sampler = Sampler(rows, vocabulary, META, kernels=True)
    for each in plan.added:
        sampler.add(msgspec.structs.replace(each, **SAMPLERS[kind]))
    logits = torch.empty(rows, vocabulary, dtype=DTYPE, device=META)
    masks = (plan.masked, plan.masks) if kind == "every option" else (None, None)

    def sample():
        with torch.inference_mode():
            sampler.sample(logits, plan.sampling_rows, plan.emitted, plan.uniforms, *masks)

    return sample


@contextlib.contextmanager
def nothing_fetched(cost=None):
    """Meanwhile results stay on the meta device, which has no contents, and the sampler's kernels are counted."""
    kept = [(sampling, "to_host", sampling.to_host)]
    sampling.to_host = lambda x: x
    kept += _count_kernels("sampling", cost or Cost(), 0)
    try:
        yield
    finally:
        for module, name, each in kept:
            setattr(module, name, each)


def _count_kernels(part, cost, held):
    """Put `CountedKernel`s in the place of a module's kernels. Returns what was there: (module, name, kernel)."""
    module = importlib.import_module(f"lockstep_engine.kernels.triton_{part}")
    found = [(module, name, kernel) for name, kernel in vars(module).items()
             if type(kernel).__name__ in ("JITFunction", "InterpretedFunction")]  # fmt: skip
    for _, name, _ in found:
        setattr(module, name, CountedKernel(name, cost, held))
    return found


def sampler_entry(kind):
    """The numbers of sampling for some numbers of rows."""
    counted = {}
    for count in ROWS:
        cost, sample = Cost(), sampled_step(kind, count)
        with nothing_fetched(cost), Operations(cost):
            sample()
        counted[f"{count} sampled"] = cost.numbers()
    return counted


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", help="rows whose name begins so; printed, not written")
    options = parser.parse_args()
    table = {}
    for row, name, tp, exact, codes in rows():
        if row.startswith(options.only or ""):
            began = time.perf_counter()
            table[row] = entry(name, tp, exact=exact, codes=codes)
            print(row, table[row], f"{time.perf_counter() - began:.1f} s", file=sys.stderr)
    table |= {f"Sampler: {kind}": sampler_entry(kind) for kind in SAMPLERS}
    if not options.only:
        TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        TABLE.with_suffix(".md").write_text(markdown(table), encoding="utf-8")


def markdown(table):
    """The table for people."""
    lines = [
        "# Launches of a step on a GPU",
        "",
        "Counted, not measured: on torch's meta device, for a GPU with 132 multiprocessors, bfloat16, a context of",
        f"{CONTEXT} tokens, by `TRITON_INTERPRET=1 python libs/engine/tests/launch_count.py` (its head says what is",
        "counted). `tests/test_launch_table.py` asserts these numbers. A recorded step is one launch for the host, and",
        f"these are its nodes: of a decode step, or of one of up to {RECORDED_TOKENS} tokens with chunks of prompts",
        f"({RECORDED_TOKENS} tokens of {ROWS[-1]}: {ROWS[-1]} sequences, of which all but one decode). A larger step",
        f"({ROWS[-1]} + chunk of {CHUNK}) launches them one by one. Torch's operations have a kernel each, some more",
        "than one. Bytes of a mixture are those of as many experts as can be chosen.",
        "Sampling is on rank 0, for a vocabulary of 128,256; every option: penalties, bias, min_tokens, top_p, min_p,",
        "log probabilities and a grammar in each row. Its launches do not grow with the rows.",
        "With several ranks the device also reads its clock, not counted here: before and after the first eight",
        "collectives, and one in eight of the others.",
        "int8, int4: weights of layers stay codes, with a scale a row, or in groups of 128; the head is bfloat16.",
        "",
        "| model, ranks | step | torch's operations | Triton's launches | collectives | marks of progress | GB moved |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, steps in table.items():
        if isinstance(steps, str):
            lines.append(f"| {row} | all | not by these kernels: {steps} | | | | |")
            continue
        for step, cost in steps.items():
            if isinstance(cost, str):
                lines.append(f"| {row} | {step} | {cost} | | | | |")
                continue
            *counts, moved = cost.values()
            lines.append(f"| {row} | {step} | " + " | ".join(map(str, counts)) + f" | {moved / 1e9:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
