"""Recorded decode steps: which recording runs, what it reads, and that no kernel is built after the recording."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lockstep_engine import recorders
from lockstep_engine.attention import StepLayout
from lockstep_engine.graphs import BuildCounter, GraphedStep, graph_sizes
from lockstep_engine.recorders import CudaRecorder, HostRecorder, NotRecordableError

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


class Body:
    """A step whose result tells what it was computed from; notes the shapes that it runs with."""

    def __init__(self):
        self.sizes = []
        self.seen = None

    def __call__(self, inputs):
        self.sizes.append(len(inputs.ids))
        self.seen = inputs
        live = inputs.positions >= 0
        first = inputs.tables[:, 0].long()
        return torch.stack([inputs.ids, inputs.positions, torch.where(live, first, -1)], dim=1).float()


def layout(positions, tables=None, lengths=None, **options):
    count = len(positions)
    tables = [[each] for each in range(count)] if tables is None else tables
    return StepLayout(
        np.array(positions, np.int32),
        np.array(lengths or [1] * count, np.int32),
        np.array(tables, np.int32),
        **options,
    )


def graphed(max_seqs=6, width=4, **options):
    body = Body()
    step = GraphedStep(body, max_seqs, width, CPU, **options)
    step.capture()
    return body, step


class TestSizes:
    def test_are_dense_where_steps_are_short(self):
        assert graph_sizes(1) == [1]
        assert graph_sizes(6) == [1, 2, 4, 6]
        assert graph_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
        assert graph_sizes(300)[-4:] == [256, 272, 288, 300]

    @pytest.mark.parametrize("max_seqs", [1, 2, 3, 5, 8, 9, 255, 257, 512])
    def test_reach_the_largest_and_waste_little(self, max_seqs):
        sizes = graph_sizes(max_seqs)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == max_seqs
        for count in range(1, max_seqs + 1):
            chosen = next(size for size in sizes if size >= count)
            assert chosen - count < max(2, 16 if count > 256 else 8)


class TestGraphedStep:
    def test_records_the_largest_first(self):
        body, _ = graphed()
        assert body.sizes == [6, 4, 2, 1]

    def test_rows_do_nothing_while_it_records(self):
        body, _ = graphed()
        assert (body.seen.positions == -1).all()

    @pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6)])
    def test_runs_as_the_next_size_and_fills_it_up(self, count, size):
        body, step = graphed()
        body.sizes.clear()
        positions = list(range(10, 10 + count))
        out = step.run(torch.arange(100, 100 + count), layout(positions))
        assert body.sizes == [size]
        assert out.tolist() == [[100 + row, 10 + row, row] for row in range(count)]
        assert body.seen.positions.tolist()[count:] == [-1] * (size - count)

    def test_nothing_of_an_earlier_step_is_seen(self):
        body, step = graphed()
        step.run(torch.arange(6), layout([90] * 6, [[7, 7, 7, 7]] * 6))
        out = step.run(torch.tensor([3]), layout([5], [[2]]))
        assert out.tolist() == [[3, 5, 2]]
        out = step.run(torch.tensor([3, 4, 5]), layout([5, 6, 7], [[2], [1], [0]]))
        assert out.tolist() == [[3, 5, 2], [4, 6, 1], [5, 7, 0]]
        assert body.seen.positions.tolist() == [5, 6, 7, -1]

    def test_inputs_stay_where_they_are(self):
        body, step = graphed()
        pointers = set()
        for count in (1, 6, 3, 2):
            step.run(torch.arange(count), layout([1] * count))
            pointers.add((body.seen.ids.data_ptr(), body.seen.positions.data_ptr(), body.seen.tables.data_ptr()))
        assert len(pointers) == 1

    def test_a_result_is_lost_with_the_next_run(self):
        """The stand-in is as strict as a GPU, where recordings share memory."""
        _, step = graphed()
        old = step.run(torch.arange(2), layout([1, 2]))
        step.run(torch.arange(5), layout([1] * 5))
        assert old.isnan().all()

    @pytest.mark.parametrize(
        "step",
        [
            layout([1] * 7),
            layout([1, 2], lengths=[1, 2]),
            layout([1], tables=[[0] * 5]),
            layout([1], hot_tables=np.zeros((1, 1), np.int32)),
            layout([1], moves=np.zeros((1, 2), np.int32)),
        ],
        ids=["too many", "a chunk", "too long", "both versions", "moves"],
    )
    def test_other_steps_do_not_fit(self, step):
        _, recorded = graphed()
        assert not recorded.fits(step)

    def test_steps_of_decoding_fit(self):
        _, recorded = graphed()
        assert recorded.fits(layout([1, 5, 9]))
        assert recorded.fits(layout([1], moves=np.zeros((0, 2), np.int32)))

    def test_nothing_fits_before_it_is_recorded_or_after_it_is_closed(self):
        step = GraphedStep(Body(), 4, 4, CPU)
        assert not step.fits(layout([1]))
        step.capture()
        assert step.fits(layout([1]))
        step.close()
        assert not step.fits(layout([1]))

    @pytest.mark.parametrize(
        "look",
        [
            lambda x: x.sum().item(),
            lambda x: x.nonzero(),
            lambda x: int(x[0]),
            lambda x: bool((x > 0).all()),
            lambda x: x[x > 0],
            lambda x: x.index_put_((x == x,), torch.arange(len(x))),
            torch.repeat_interleave,
            lambda x: torch.bincount(x.abs()),
            torch.unique_consecutive,
        ],
    )
    def test_a_body_that_looks_at_tensors_is_refused_and_nothing_fits(self, look):
        def body(inputs):
            look(inputs.ids)
            return inputs.ids

        step = GraphedStep(body, 2, 4, CPU)
        with pytest.raises(NotRecordableError, match="needs the host"):
            step.capture()
        assert not step.fits(layout([1]))

    @pytest.mark.parametrize(
        "compute", [lambda x: x.masked_fill_(x > 0, 1), lambda x: x.repeat_interleave(2, output_size=2 * len(x))]
    )
    def test_a_body_whose_shapes_are_known_is_recorded(self, compute):
        def body(inputs):
            compute(inputs.ids.clone())
            return inputs.ids

        step = GraphedStep(body, 2, 4, CPU)
        step.capture()
        assert step.fits(layout([1]))


class Meter(HostRecorder):
    """Claims to use 1000 bytes for the first recording and 10 for each more."""

    def used_bytes(self):
        return 5000 + (1000 + 10 * (len(self.recordings) - 1) if self.recordings else 0)


class TestMemory:
    def test_is_measured(self):
        _, step = graphed(recorder=Meter())
        assert step.bytes == 1030
        assert step.seconds > 0

    def test_is_known_before_the_cache_is_made(self):
        recorder = Meter()
        step = GraphedStep(Body(), 64, 4, CPU, recorder)
        assert step.estimate_bytes() == 1000 + 10 * (len(graph_sizes(64)) - 1)
        assert len(recorder.recordings) == 2

    def test_one_size_alone_is_known_as_well(self):
        assert GraphedStep(Body(), 1, 4, CPU, Meter()).estimate_bytes() == 1000


class CachingGpu:
    """A GPU's memory as torch's allocator uses it: it keeps what a step has needed, and gives it back before a graph is
    recorded, whose pool then takes as much again.
    """

    ROW, GRAPH = 100, 10
    """Bytes that a step needs for a row, and that a graph takes of its own."""

    def __init__(self):
        self.kept = self.pool = self.graphs = 0
        self.records = False

    def step(self, inputs):
        needed = self.ROW * len(inputs.ids)
        if self.records:
            self.pool = max(self.pool, needed)
        else:
            self.kept = max(self.kept, needed)
        return inputs.ids + 1

    def empty_cache(self):
        self.kept = 0

    def mem_get_info(self, device):
        used = 5000 + self.kept + self.pool + self.GRAPH * self.graphs
        return 10**6 - used, 10**6

    @contextmanager
    def graph(self, graph, pool, stream):
        self.empty_cache()
        self.records = True
        yield
        self.records = False
        self.graphs += 1


@pytest.fixture
def caching_gpu(monkeypatch):
    gpu = CachingGpu()
    for name in ("empty_cache", "mem_get_info", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    return gpu


class TestMemoryBesideACache:
    """What the allocator has kept of the steps before a recording must not hide what the recording takes."""

    def test_is_known_before_the_recordings_are_made(self, caching_gpu):
        step = GraphedStep(caching_gpu.step, 64, 4, CPU, CudaRecorder(CPU))
        assert step.estimate_bytes() == 64 * caching_gpu.ROW + len(step.sizes) * caching_gpu.GRAPH
        assert caching_gpu.graphs == 2

    def test_is_measured(self, caching_gpu):
        step = GraphedStep(caching_gpu.step, 64, 4, CPU, CudaRecorder(CPU))
        caching_gpu.kept = 3000  # of the self-test's steps
        step.capture()
        assert step.bytes == 64 * caching_gpu.ROW + len(step.sizes) * caching_gpu.GRAPH


class TestFailedRecording:
    """When the end of a recording fails, torch leaves the recorder's stream and the allocator's pool in use."""

    def test_stream_and_allocator_are_as_before(self, caching_gpu, monkeypatch):
        streams, ended = ["usual"], []

        @contextmanager
        def graph(graph, pool, stream):
            streams.append("recorder's")
            yield
            raise RuntimeError("operation failed due to a previous error during capture")

        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[-1])
        monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
        monkeypatch.setattr(recorders, "end_allocation", ended.append)
        with pytest.raises(RuntimeError, match="during capture"):
            CudaRecorder(CPU).record(lambda: torch.zeros(1))
        assert streams == ["usual", "recorder's", "usual"]
        assert ended == [(0, 1)]


class TestBuildCounter:
    def test_counts_builds_and_calls_the_next_hook(self):
        runtime = pytest.importorskip("triton").knobs.runtime
        handed_on = []
        before = runtime.jit_post_compile_hook
        runtime.jit_post_compile_hook = lambda **given: handed_on.append(given)
        told = []
        counter = BuildCounter(told.append).install()
        try:
            runtime.jit_post_compile_hook(key="kernel", repr="_attend[...]")
            runtime.jit_post_compile_hook(key="other", repr="_reduce[...]")
        finally:
            counter.remove()
            runtime.jit_post_compile_hook(key="third")
            runtime.jit_post_compile_hook = before
        assert counter.builds == 2
        assert [each["key"] for each in handed_on] == ["kernel", "other", "third"]
        assert told == ["_attend[...]", "_reduce[...]"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    def test_replays_compute_what_the_body_does(self):
        device = torch.device("cuda")
        body = Body()
        step = GraphedStep(body, 6, 4, device)
        assert isinstance(step.recorder, CudaRecorder)
        step.capture()
        body.sizes.clear()
        for count in (1, 6, 3, 2, 6):
            out = step.run(torch.arange(count) + 100, layout(list(range(count))))
            assert out.tolist() == [[100 + row, row, row] for row in range(count)]
        assert body.sizes == []
        step.close()
