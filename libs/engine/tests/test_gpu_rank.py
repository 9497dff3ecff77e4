"""A rank that computes with the GPU's kernels: in Triton's interpreter, and with recordings that do their work again,
where there is no GPU. Its reference is the rank's way on the CPU.
"""

import logging

import numpy as np
import pytest
import torch
from checkpoints import make
from fast_cases import further
from in_process_engine import InProcessEngine, InProcessModel
from in_process_rank import InProcessRank
from lockstep_engine import SamplingParams
from lockstep_engine import rank as rank_module
from lockstep_engine.attention import StepLayout
from lockstep_engine.attention_triton import DecodeAttention, TritonAttention
from lockstep_engine.chunk_graphs import GraphedChunks
from lockstep_engine.config import BLOCK_SIZE, EngineConfig
from lockstep_engine.device_marks import MARKS_PER_STEP, DeviceMarks, TorchMarkStream
from lockstep_engine.gpu_decoder import GpuDecoder
from lockstep_engine.graphs import GraphedStep
from lockstep_engine.kernels import gpu, triton_compress
from triton_device import DEVICE, GPU

pytestmark = pytest.mark.slow

SETTINGS = {
    "device": DEVICE.type,
    "deterministic": False,
    "max_seqs": 3,
    "max_batch_tokens": 40,
    "kv_hot_window": 16,
    "kv_memory_bytes": 2**20,
    "threads": 1,
}
WINDOW = EngineConfig(model="", kv_hot_window=16).hot_window
PROMPTS = [[(7 * each + 3) % 300 + 2 for each in range(50)], [9, 100, 250, 4, 77]]


def requests(counts):
    """The prompts, with so many new tokens for each."""
    return [
        (prompt, SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))
        for prompt, count in zip(PROMPTS, counts, strict=False)
    ]


def on_the_cpu(path, counts):
    engine = InProcessEngine(InProcessModel(path), hot_window=WINDOW)
    return engine.run(*((prompt, (), params) for prompt, params in requests(counts)))


@pytest.fixture(autouse=True)
def by_triton(monkeypatch):
    """After this the kernels are taken for usable. What the CPU's way is compared with must be computed before."""

    def take():
        if not GPU:
            monkeypatch.setattr(gpu, "usable", lambda *_: True)

    return take


class Steps:
    """Notes how many sequences each step had, by how it was computed, and the moves of blocks; of those with chunks how
    many tokens.
    """

    def __init__(self, monkeypatch):
        self.replayed, self.chunks, self.eager, self.moves = [], [], [], 0
        run, begin, compress = GraphedStep.run, TritonAttention.__init__, triton_compress.compress
        run_chunks = GraphedChunks.run

        def note_run(graphs, ids, layout, rows):
            self.replayed.append(len(ids))
            return run(graphs, ids, layout, rows)

        def note_chunks(graphs, ids, layout, rows):
            self.chunks.append(len(ids))
            return run_chunks(graphs, ids, layout, rows)

        def note_begin(attention, cache, step, *, exact):
            self.eager.append(len(step.lengths))
            begin(attention, cache, step, exact=exact)

        def note_compress(layers, moves):
            self.moves += int((moves[:, 0] >= 0).sum()) * len(layers.numbers)
            compress(layers, moves)

        monkeypatch.setattr(GraphedStep, "run", note_run)
        monkeypatch.setattr(GraphedChunks, "run", note_chunks)
        monkeypatch.setattr(TritonAttention, "__init__", note_begin)
        monkeypatch.setattr(triton_compress, "compress", note_compress)


def decodes(plan):
    return (plan.lengths == 1).all()


class Memory:
    """A device's memory, of which the largest step is told: what it did by the kernels is in `largest`."""

    def __init__(self, steps):
        self._steps = steps
        self.largest = None

    def free_bytes(self):
        return 2**28  # more than a GPU's recordings take

    def peak_bytes(self, work):
        self._steps.eager, self._steps.moves = [], 0
        work()
        self.largest = [*self._steps.eager], self._steps.moves
        return 2**20


@pytest.mark.parametrize(
    ("name", "dtype", "overlap"),
    [
        ("qwen3", "float32", True),
        further("qwen3", "float16", False),
        further("gemma2", "float32", True),
    ],
)
def test_tokens_are_those_of_the_cpu_and_decoding_is_replayed(name, dtype, overlap, tmp_path, monkeypatch, by_triton):
    """After the largest step, which is run before the cache has its size: by the kernels, with cold blocks, and
    without a trace in the sampler or in the cache.
    """
    counts = (16, 6)
    path, _ = make(name, tmp_path)
    expected = on_the_cpu(path, counts)
    by_triton()
    steps = Steps(monkeypatch)
    memory = Memory(steps)
    monkeypatch.setattr(rank_module, "device_memory", lambda device: memory)
    with InProcessRank(path, dtype=dtype, overlap=overlap, **SETTINGS, max_context=128) as served:
        (sequences,), moves = memory.largest
        assert sequences == SETTINGS["max_seqs"]
        assert moves > 0
        assert isinstance(served.rank.model.decoder, GpuDecoder) == (name == "qwen3")
        assert served.rank.graphs.decode.sizes == (1, 2, 3)
        # The canary, in which blocks go cold, and as many sequences as there can be; then all sizes once more.
        assert steps.eager[-1] == 3
        assert steps.moves > moves
        assert not steps.replayed
        steps.eager, steps.moves = [], 0
        assert served.run(*requests(counts)) == expected
        assert len(PROMPTS[0]) < 4 * BLOCK_SIZE < len(PROMPTS[0]) + counts[0] - 1
        layers = served.rank.model.layers
        assert steps.moves == 2 * layers  # within the prompt's last chunk, and between two steps of decoding
        single = [decodes(plan) for plan in served.plans]
        assert len(steps.replayed) == sum(single) > counts[0] - 3
        assert set(steps.replayed) == {1, 2}
        assert steps.chunks == [len(plan.token_ids) for plan in served.plans if not decodes(plan)]
        assert len(steps.chunks) == 2
        assert not steps.eager
        assert served.mailbox.collectives[0] == len(single)
        assert served.rank.builds.builds == 0
        assert served.ready.dtype == dtype


@pytest.mark.parametrize("mode", ["none", "lazy"])
def test_layers_with_a_window_see_hot_blocks_alone(mode, tmp_path, monkeypatch, by_triton):
    """Also in recorded steps: what they see begins behind blocks that are cold in the tables."""
    path, _ = make("gemma2", tmp_path)
    rule = EngineConfig(model="", kv_hot_window=48, kv_compression=mode).hot_window
    prompt = [(11 * each + 5) % 300 + 2 for each in range(100)]
    request = prompt, SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    expected = InProcessEngine(InProcessModel(path), hot_window=rule).run((prompt, (), request[1]))
    by_triton()
    steps = Steps(monkeypatch)
    settings = SETTINGS | {"max_seqs": 1, "kv_compression": mode, "kv_memory_bytes": 2**22}
    with InProcessRank(path, dtype="float32", **settings) as served:
        steps.moves = 0
        assert served.run(request) == expected
        assert len(steps.replayed) == 15
        assert steps.moves == (3 if mode == "lazy" else 0)  # blocks 1 to 3, in the one layer that has cold ones
        assert served.rank.builds.builds == 0
        assert served.scheduler.blocks.needs(512).cold == (27 if mode == "lazy" else 28)


def test_the_marks_of_a_rank_end_with_its_steps(tmp_path, monkeypatch, by_triton):
    """All of them are replayed: each step has its own numbers."""
    path, _ = make("llama-grouped-untied", tmp_path)
    by_triton()
    if not GPU:

        def on_the_cpu_too(device, mailbox, rank):
            word = mailbox.reached[rank : rank + 1]
            return DeviceMarks(TorchMarkStream(word, device), mailbox.launched[rank : rank + 1])

        monkeypatch.setattr(rank_module, "marks_of", on_the_cpu_too)
    placed = []
    replayed = DeviceMarks.replayed
    monkeypatch.setattr(DeviceMarks, "replayed", lambda marks: (replayed(marks), placed.append(marks._place)))
    with InProcessRank(path, **SETTINGS | {"max_seqs": 1, "kv_compression": "none"}) as served:
        first = int(served.mailbox.launched[0])
        served.run((PROMPTS[1], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)))
        steps = len(served.plans)
        assert served.mailbox.steps[0] == steps
        assert served.mailbox.launched[0] == first - first % MARKS_PER_STEP + (steps + 1) * MARKS_PER_STEP - 1
        assert served.mailbox.reached[0] == served.mailbox.launched[0]
        assert len(placed) == steps
        assert len(set(placed)) == 1


@pytest.mark.exhaustive
def test_only_some_rows_of_a_recorded_step_are_wanted(tmp_path, by_triton):
    path, _ = make("qwen3", tmp_path)
    by_triton()
    with InProcessRank(path, **SETTINGS) as served, torch.inference_mode():
        rank = served.rank
        step = StepLayout(np.zeros(3, np.int32), np.ones(3, np.int32), np.array([[0], [1], [2]], np.int32))
        ids = torch.tensor([5, 6, 7], device=DEVICE)
        every = rank.forward(ids, step, np.arange(3)).clone()
        some = rank.forward(ids, step, np.array([2, 0]))
        assert torch.equal(some, every[[2, 0]])


@pytest.mark.exhaustive
def test_without_graphs_every_step_runs_as_it_comes(tmp_path, monkeypatch, by_triton):
    path, _ = make("llama-grouped-untied", tmp_path)
    expected = on_the_cpu(path, (3, 3))
    by_triton()
    steps = Steps(monkeypatch)
    with InProcessRank(path, **SETTINGS, cuda_graphs=False) as served:
        steps.eager = []
        assert served.run(*requests((3, 3))) == expected
        assert served.rank.graphs is None
        assert len(steps.eager) == len(served.plans)


@pytest.mark.exhaustive  # a minute; `test_gpu_decoder` records the steps of a mixture
def test_a_mixture_is_recorded(tmp_path, monkeypatch, by_triton):
    path, _ = make("mixtral", tmp_path)
    expected = on_the_cpu(path, (3, 3))
    by_triton()
    steps = Steps(monkeypatch)
    with InProcessRank(path, **SETTINGS | {"max_seqs": len(PROMPTS)}) as served:
        assert served.run(*requests((3, 3))) == expected
        assert len(steps.replayed) == sum(decodes(plan) for plan in served.plans) > 0
        assert len(steps.chunks) == len(served.plans) - len(steps.replayed) > 0


def test_a_mixture_that_cannot_be_recorded_says_so_and_runs_as_it_comes(tmp_path, monkeypatch, caplog, by_triton):
    """Its experts have biases, and so are not grouped."""
    caplog.set_level(logging.WARNING, logger="lockstep.engine")
    path, _ = make("gpt_oss", tmp_path)
    expected = on_the_cpu(path, (3, 3))
    by_triton()
    steps = Steps(monkeypatch)
    with InProcessRank(path, **SETTINGS | {"max_seqs": len(PROMPTS)}, fast_path="preferred") as served:
        steps.eager = []
        assert served.run(*requests((3, 3))) == expected
        assert served.rank.graphs is None
        assert len(steps.eager) == len(served.plans)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "lockstep.engine"]
    assert said.startswith("decode steps run without CUDA graphs: ")
    assert "needs the host" in said


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "usable"),
    [
        ("cuda", torch.bfloat16, 128, True),
        ("cuda", torch.float32, 256, True),
        ("cuda", torch.float16, 260, False),
        ("cuda", torch.float16, 10, False),
        ("cuda", torch.float64, 128, False),
        ("cpu", torch.float32, 128, False),
    ],
)
def test_the_kernels_serve_some_types_and_widths_on_gpus(device, dtype, head_dim, usable, monkeypatch):
    monkeypatch.setattr(gpu, "build_problem", lambda: None)
    assert gpu.usable(torch.device(device), dtype, head_dim) == usable


@pytest.mark.parametrize(
    ("head_dim", "latent", "usable"), [(576, 512, True), (48, 32, True), (578, 514, False), (640, 512, False)]
)
def test_the_kernels_serve_latents_of_some_widths(head_dim, latent, usable, monkeypatch):
    monkeypatch.setattr(gpu, "build_problem", lambda: None)
    assert gpu.usable(torch.device("cuda"), torch.bfloat16, head_dim, latent) == usable
    assert gpu.problem(torch.device("cuda"), torch.bfloat16, 576) == (
        "heads are 576 wide; kernels take multiples of 4 up to 256"
    )


@pytest.mark.exhaustive  # minutes; `test_exact_ranks` shows the same of two ranks
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
@pytest.mark.usefixtures("ordered_products")
def test_the_exact_mode_finds_at_its_start_that_it_holds(name, tmp_path, by_triton):
    """Token by token, beside others and in chunks: the self-test's logits have the same bits."""
    path, _ = make(name, tmp_path)
    expected = on_the_cpu(path, (3, 3))
    by_triton()
    with InProcessRank(path, **SETTINGS | {"deterministic": True}) as served:
        assert served.ready.deterministic
        assert served.ready.fingerprint
        assert served.rank.graphs is not None  # a mixture's, too: nothing of it needs the host
        assert served.run(*requests((3, 3))) == expected


@pytest.mark.exhaustive
def test_without_the_exact_mode_there_is_no_fingerprint(tmp_path, by_triton):
    path, _ = make("llama-grouped-untied", tmp_path)
    by_triton()
    with InProcessRank(path, **SETTINGS) as served:
        assert not served.ready.deterministic
        assert served.ready.fingerprint == ""


def test_a_build_after_the_start_is_counted_and_told(tmp_path, caplog, by_triton):
    triton = pytest.importorskip("triton")
    path, _ = make("llama-grouped-untied", tmp_path)
    with InProcessRank(path, **SETTINGS | {"device": "cpu"}) as served:
        triton.knobs.runtime.jit_post_compile_hook(repr="_attend[...]")
        assert served.rank.builds.builds == 1
    assert "a kernel was built while serving: _attend[...]" in caplog.text


@pytest.mark.exhaustive
def test_a_recorded_step_uses_what_stays_in_place(tmp_path, monkeypatch, by_triton):
    """Nothing but the memory of the first call is read: no host array of a step finds its way into a recording."""
    path, _ = make("llama-grouped-untied", tmp_path)
    by_triton()
    begun = []
    begin = DecodeAttention.__init__

    def note(attention, cache, positions, tables, **options):
        begun.append((positions.data_ptr(), tables.data_ptr(), cache))
        begin(attention, cache, positions, tables, **options)

    monkeypatch.setattr(DecodeAttention, "__init__", note)
    with InProcessRank(path, **SETTINGS) as served:
        estimated, captured = begun[:3], begun[3:]
        assert len({id(cache) for _, _, cache in estimated}) == 1
        assert {cache for _, _, cache in captured} == {served.rank.cache}
        assert len({pointers[:2] for pointers in captured}) == 1
