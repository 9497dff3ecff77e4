"""Recorded steps with chunks of prompts: what they read, that their attention is that of a step as it comes, and that
they are recorded by all ranks or by none.
"""

import logging
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fast_cases import fast_if, further
from lockstep_engine.attention import StepLayout
from lockstep_engine.attention_triton import ChunkAttention, TritonAttention
from lockstep_engine.chunk_graphs import ChunkInputs, ChunkSize, GraphedChunks, chunk_sizes
from lockstep_engine.config import EngineConfig, HotWindow
from lockstep_engine.graphs import DecodeInputs
from lockstep_engine.kernels import triton_attention, triton_exact_attention, triton_latent
from lockstep_engine.recorders import HostRecorder, NotRecordableError, Recording
from lockstep_engine.step_recorder import StepRecorder
from texts import Texts, assert_all_close, assert_same_bits
from torch.utils._python_dispatch import TorchDispatchMode
from triton_device import GPU

CPU = torch.device("cpu")


class Replayed:
    """Attention of a step that is recorded: `kind` of `Texts.attend`. Queries, keys and values of padding are NaN."""

    def __init__(self, cache, layout, *, exact=False):
        self._cache, self._layout, self._exact = cache, layout, exact

    def attend(self, layer, queries, keys, values, scoring):
        tokens, more = queries.shape[1], 16 - queries.shape[1] % 16
        parts = [torch.nn.functional.pad(each, (0, 0, 0, more), value=torch.nan) for each in (queries, keys, values)]
        seen = []

        def body(inputs):
            attention = ChunkAttention(self._cache, inputs, exact=self._exact)
            out = attention.attend(layer, *parts, scoring)
            seen.append(out)
            return out[inputs.rows.long()].flatten(1)

        size = ChunkSize(tokens + more, len(self._layout.lengths) + 1)
        compressed = self._cache.hot_window is not None
        graphs = GraphedChunks(body, [size], 16, CPU, HostRecorder(), compressed=compressed)
        graphs.capture()
        last = np.cumsum(self._layout.lengths) - 1
        assert graphs.fits(self._layout, last)
        wanted = graphs.run(torch.zeros(tokens, dtype=torch.int64), self._layout, last)
        assert torch.equal(wanted, seen[-1][last].flatten(1))
        assert not seen[-1][tokens:].any()  # zeros: NaN would go on to the next layer
        return seen[-1][:tokens]


OPTIONS = [
    fast_if(True, {}),
    further({"window": 20}),
    further({"soft_cap": 20.0}),
    further({"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}),
    fast_if(True, {"hot_window": HotWindow(1, 1)}),
    further({"hot_window": HotWindow(0, 0)}),
    further({"hot_window": HotWindow(1, 2), "window": 50}),
    further({"hot_window": HotWindow(1, 1), "compressed": (0,)}),
]


@pytest.mark.skipif(GPU, reason="texts lie on the CPU")
@pytest.mark.parametrize("options", OPTIONS, ids=lambda each: "-".join(map(str, each)))
def test_attention_is_that_of_steps_as_they_come(options, monkeypatch):
    monkeypatch.setattr(triton_attention, "splits_for", lambda *_: 2)
    texts, steps = some_texts()
    as_they_come = texts.attend(TritonAttention, steps, **options)
    assert_all_close(texts.attend(Replayed, steps, **options), as_they_come)


@pytest.mark.skipif(GPU, reason="texts lie on the CPU")
@pytest.mark.parametrize("options", OPTIONS[:1] + OPTIONS[-2:-1], ids=lambda each: "-".join(map(str, each)))
@pytest.mark.usefixtures("ordered_products")
@pytest.mark.slow
def test_attention_of_the_exact_mode_has_the_same_bits(options, monkeypatch):
    monkeypatch.setattr(triton_exact_attention, "SEGMENT", 32)
    monkeypatch.setitem(triton_exact_attention.ROWS, torch.float32, 32)
    monkeypatch.setattr(triton_attention, "splits_for", lambda *_: 2)
    texts, steps = some_texts()
    as_they_come = texts.attend(partial(TritonAttention, exact=True), texts.at_once(), **options)
    assert_same_bits(texts.attend(partial(Replayed, exact=True), steps, **options), as_they_come)


@pytest.mark.skipif(GPU, reason="texts lie on the CPU")
@pytest.mark.parametrize(("heads", "exact"), [(4, False), (20, True)])
@pytest.mark.usefixtures("ordered_products")
def test_attention_over_latents_is_that_of_steps_as_they_come(heads, exact, monkeypatch):
    """More heads than rows of a program: then each query of a chunk has programs of its own."""
    monkeypatch.setattr(triton_latent, "splits_for", lambda *_: 2)
    monkeypatch.setattr(triton_exact_attention, "SEGMENT", 32)
    texts = Texts([20, 40, 17], heads=heads, kv_heads=1, dim=48, latent=32, seed=4, scale=2.0)
    steps, options = texts.in_random_chunks(4), {"hot_window": HotWindow(1, 1)}
    as_they_come = texts.attend(partial(TritonAttention, exact=exact), steps, **options)
    replayed = texts.attend(partial(Replayed, exact=exact), steps, **options)
    (assert_same_bits if exact else assert_all_close)(replayed, as_they_come)


def some_texts():
    """Texts, and steps of chunks and single tokens, some of both."""
    texts = Texts([20, 70, 33], heads=2, kv_heads=1, seed=4, scale=2.0)
    steps = texts.in_random_chunks(5)
    counts = [{count == 1 for _, count in step} for step in steps]
    assert all(each in counts for each in ({True, False}, {False}, {True}))
    return texts, steps


class Body:
    """A step whose result tells what it was computed from."""

    def __init__(self):
        self.seen = []

    def __call__(self, inputs):
        self.seen.append(inputs)
        rows = inputs.rows.long()
        return torch.stack([inputs.ids[rows], inputs.rows], dim=1).float()


def layout(lengths, starts=None, width=2, **options):
    count = len(lengths)
    starts = [0] * count if starts is None else starts
    tables = np.arange(count * width, dtype=np.int32).reshape(count, width)
    return StepLayout(np.array(starts, np.int32), np.array(lengths, np.int32), tables, **options)


def graphed(sizes=None, *, body=None, compressed=False, recorder=None, **options):
    body = body or Body()
    graphs = GraphedChunks(
        body,
        sizes or chunk_sizes(40, 3),
        4,
        CPU,
        recorder or HostRecorder(),
        compressed=compressed,
        **options,
    )
    graphs.capture()
    return body, graphs


def rows_of(step):
    return np.cumsum(step.lengths) - 1


class TestSizes:
    def test_are_those_of_few_and_of_all_sequences(self):
        assert chunk_sizes(40, 3) == [(16, 3), (32, 3), (40, 3)]
        assert chunk_sizes(2, 64) == [(2, 2)]
        assert chunk_sizes(64, 64) == [(16, 8), (16, 16), (32, 8), (32, 32), (64, 8), (64, 64)]
        assert {each.tokens for each in chunk_sizes(2048, 64)} == {16, 32, *range(64, 513, 64)}

    @pytest.mark.parametrize("seqs", [1, 8, 9, 64, 512])
    @pytest.mark.parametrize("tokens", [2, 16, 17, 500, 2048])
    def test_hold_every_step_of_so_many_tokens_and_are_few(self, tokens, seqs):
        sizes = chunk_sizes(tokens, seqs)
        assert len(sizes) <= 20
        for each in range(1, min(tokens, 512) + 1):
            largest = ChunkSize(each, min(each, seqs))
            chosen = next(size for size in sizes if all(has >= of for has, of in zip(size, largest, strict=True)))
            assert chosen.tokens - each < 64
            assert chosen.moves >= largest.moves


class TestGraphedChunks:
    def test_records_the_largest_first_while_no_token_is_of_a_sequence(self):
        body, _ = graphed()
        assert [len(each.ids) for each in body.seen] == [40, 32, 16]
        assert not any(each.lengths.any() for each in body.seen)

    def test_runs_as_the_smallest_size_that_holds_the_step(self):
        body, graphs = graphed()
        for lengths, tokens in (([5], 16), ([16, 1], 32), ([30, 1, 9], 40), ([1], 16)):
            step = layout(lengths)
            out = graphs.run(torch.arange(sum(lengths)) + 100, step, rows_of(step))
            assert out.tolist() == [[100 + row, row] for row in rows_of(step)]
            assert len(body.seen[-1].ids) == tokens
            assert body.seen[-1].lengths.tolist() == lengths + [0] * (3 - len(lengths))

    def test_reads_what_stays_in_place(self):
        body, graphs = graphed([ChunkSize(16, 3)], compressed=True)
        for lengths in ([5], [1, 2, 3], [16]):
            step = layout(lengths)
            graphs.run(torch.arange(sum(lengths)), step, rows_of(step))
        pointers = {
            tuple(getattr(each, name).data_ptr() for name in ChunkInputs.__dataclass_fields__) for each in body.seen
        }
        assert len(pointers) == 1
        assert all(pointer % 16 == 0 for pointer in pointers.pop())

    def test_nothing_of_an_earlier_step_is_seen(self):
        body, graphs = graphed([ChunkSize(16, 3)], compressed=True)
        moves = np.array([[7, 8], [9, 10]], np.int32)
        step = layout([4, 4, 4], [50, 60, 70], moves=moves, hot_tables=np.full((3, 2), 9, np.int32))
        graphs.run(torch.arange(12), step, rows_of(step))
        assert body.seen[-1].moves.tolist() == [*moves.tolist(), *[[-1, -1]] * 2]
        assert body.seen[-1].hot_tables[:3, :2].unique().tolist() == [9]
        step = layout([2], [5])
        graphs.run(torch.arange(2), step, rows_of(step))
        inputs = body.seen[-1]
        assert inputs.starts.tolist() == [5, 0, 0]
        assert inputs.lengths.tolist() == [2, 0, 0]
        assert inputs.rows.tolist() == [1, 0, 0]
        assert (inputs.moves == -1).all()
        assert torch.equal(inputs.tables[0, :2], inputs.hot_tables[0, :2])

    @pytest.mark.parametrize(
        ("step", "wanted"),
        [
            (layout([41]), 1),
            (layout([1, 1, 1, 2]), 4),
            (layout([10], width=5), 1),
            (layout([10]), 4),
            (layout([10], moves=np.zeros((6, 2), np.int32)), 1),
        ],
        ids=["too many tokens", "too many sequences", "too long", "too many scored", "too many moves"],
    )
    def test_other_steps_do_not_fit(self, step, wanted):
        _, graphs = graphed(compressed=True)
        assert not graphs.fits(step, np.arange(wanted))

    def test_nothing_fits_after_it_is_closed(self):
        _, graphs = graphed()
        step = layout([3])
        assert graphs.fits(step, rows_of(step))
        graphs.close()
        assert not graphs.fits(step, rows_of(step))

    def test_a_body_that_looks_at_tensors_is_refused(self):
        with pytest.raises(NotRecordableError, match="needs the host"):
            graphed(body=lambda inputs: inputs.lengths.nonzero())

    def test_results_share_their_memory(self):
        _, graphs = graphed(recorder=Kept())
        step = layout([3, 1])
        results = [graphs.run(torch.arange(4), step, rows_of(step)), graphs.run(torch.arange(4), step, rows_of(step))]
        assert results[0].data_ptr() == results[1].data_ptr()

    def test_the_host_launches_as_much_for_any_step(self):
        """Copies of ids, of numbers and of both tables; and one replay."""
        _, graphs = graphed(chunk_sizes(512, 64), compressed=True, recorder=Kept())
        for lengths in ([2], [100] * 5, [1] * 60 + [200]):
            step, ids = layout(lengths), torch.arange(sum(lengths))
            with Copies() as copies:
                graphs.run(ids, step, rows_of(step))
            assert copies.count == 4


class Kept(HostRecorder):
    """Recordings that compute nothing again."""

    def record(self, work):
        return KeptRecording(work())


class KeptRecording(Recording):
    def replay(self):
        pass


class Copies(TorchDispatchMode):
    """Counts copies into tensors that stay in place."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ == "copy_"
        return func(*args, **(kwargs or {}))


class Meter(HostRecorder):
    """Claims to use 1000 bytes for the first recording and 10 for each more."""

    def used_bytes(self):
        return 5000 + (1000 + 10 * (len(self.recordings) - 1) if self.recordings else 0)


def test_memory_is_known_before_the_cache_is_made():
    sizes, recorder = chunk_sizes(512, 64), Meter()
    graphs = GraphedChunks(Body(), sizes, 4, CPU, recorder, compressed=False)
    shared_result = 64 * 2 * 4
    assert graphs.estimate_bytes() == 1000 + 10 * (len(sizes) - 1) + shared_result
    assert len(recorder.recordings) == 2


def test_in_the_exact_mode_chunks_whose_queries_share_no_program_are_not_recorded():
    """Each would take memory for all its segments."""
    texts = Texts([3], heads=20, kv_heads=1)
    with pytest.raises(NotRecordableError, match="20 query heads to a key head"):
        texts.attend(partial(Replayed, exact=True), texts.at_once())


def test_a_model_of_which_only_decode_steps_can_be_recorded_does_without_the_others(caplog):
    caplog.set_level(logging.WARNING, logger="lockstep.engine")
    seen = []

    def compute(cache, inputs):
        seen.append(type(inputs))
        if isinstance(inputs, ChunkInputs):
            inputs.lengths.nonzero()
        return inputs.ids + 1

    config = EngineConfig(model="", device="cuda", max_seqs=2)
    spec = SimpleNamespace(config=config, model=SimpleNamespace(context_length=32))
    recorder = StepRecorder(spec, CPU, compute, lambda said: [said], records=True)
    assert recorder.estimate_bytes(SimpleNamespace(make=lambda sizes: None)) == 0
    assert ChunkInputs in seen
    seen.clear()
    recorded = recorder.record(None)
    assert set(seen) == {DecodeInputs}
    step = layout([1, 1])
    assert recorded.that_fit(step, rows_of(step)) is recorded.decode
    step = layout([1, 2])
    assert recorded.that_fit(step, rows_of(step)) is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("steps with prompt tokens run without CUDA graphs: ")
    assert "needs the host" in said


def test_decode_steps_have_recordings_of_their_own_and_others_fit_those_with_chunks():
    spec = SimpleNamespace(
        config=EngineConfig(model="", max_seqs=3, max_batch_tokens=40), model=SimpleNamespace(context_length=32)
    )
    recorded = StepRecorder(spec, CPU, lambda _, inputs: inputs.ids + 1, lambda said: [said], records=True).record(None)
    moves = np.zeros((1, 2), np.int32)
    for step, expected in (
        (layout([1, 1]), recorded.decode),
        (layout([1, 2]), recorded.chunks),
        (layout([1, 1], moves=moves), recorded.chunks),
        (layout([1, 1], hot_tables=np.zeros((2, 2), np.int32)), recorded.chunks),
        (layout([41]), None),
    ):
        assert recorded.that_fit(step, rows_of(step)) is expected
    recorded.close()
    assert recorded.that_fit(layout([1]), np.arange(1)) is None
