"""Whole models through the GPU kernels and recorded decode steps, against `transformers`."""

import numpy as np
import pytest
import torch
from checkpoints import VOCABULARY, make
from fast_cases import further
from lockstep_engine.attention import StepLayout
from lockstep_engine.attention_triton import TritonAttention
from lockstep_engine.chunk_graphs import ChunkSize, GraphedChunks
from lockstep_engine.config import BLOCK_SIZE, EngineConfig
from lockstep_engine.distributed import Alone
from lockstep_engine.graphs import GraphedStep
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.model_config import inspect_model
from lockstep_engine.models import build_model
from lockstep_engine.recorders import HostRecorder, NotRecordableError, recorder_for
from lockstep_engine.weights import load_weights
from triton_device import DEVICE, GPU

pytestmark = pytest.mark.slow

PROMPT, MORE = 15, 3
WIDTH = 2


class Served:
    """A checkpoint in our model, with a cache."""

    def __init__(self, path, *, exact=False):
        info = inspect_model(EngineConfig(model=str(path)))
        self.model = build_model(info, Alone(), torch.float32)
        self.model.exact = exact
        load_weights(self.model.module, info, DEVICE)
        self.fused = self.model.fuse_on_gpu(64)
        self.cache = KvCache(
            layers=self.model.layers,
            kv_heads=self.model.kv_heads,
            head_dim=self.model.head_dim,
            blocks=8,
            dtype=torch.float32,
            device=DEVICE,
            latent=self.model.latent,
        )

    def layout(self, starts, length):
        """Sequence i has the blocks from 2 * i on, backwards."""
        tables = [[WIDTH * (row + 1) - 1 - block for block in range(WIDTH)] for row in range(len(starts))]
        lengths = np.full(len(starts), length, np.int32)
        return StepLayout(np.array(starts, np.int32), lengths, np.array(tables, np.int32))

    def prefill(self, ids):
        attention = TritonAttention(self.cache, self.layout([0] * len(ids), len(ids[0])))
        flat = torch.tensor(ids, device=DEVICE).flatten()
        rows = torch.arange(len(flat), device=DEVICE)
        return self.model.logits(flat, attention, rows).view(len(ids), -1, VOCABULARY)

    def decode(self, inputs):
        return self.model.decode(self.cache, inputs)


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("qwen3", True),
        ("gemma2", False),
        ("deepseek_v3", False),  # latents, and a mixture after the first layer
        further("deepseek_v2", False),
        further("mistral", True),
        further("llama-eight-heads", True),
        further("qwen2", True),
        further("bloom", False),
        further("phi3", False),
    ],
)
@torch.inference_mode()
def test_logits_equal_those_of_transformers(name, fused, tmp_path):
    path, reference = make(name, tmp_path)
    served = Served(path)
    assert served.fused == fused
    ids = torch.randint(0, VOCABULARY, (2, PROMPT + MORE), generator=torch.Generator().manual_seed(3))
    expected = reference(ids).logits.to(DEVICE)
    torch.testing.assert_close(served.prefill(ids[:, :PROMPT].tolist()), expected[:, :PROMPT], atol=1e-4, rtol=0)
    graphs = GraphedStep(served.decode, 4, WIDTH, DEVICE, None if GPU else HostRecorder(), sizes=[3])
    before = served.cache.keys.clone(), served.cache.values.clone()
    graphs.capture()
    assert torch.equal(before[0], served.cache.keys)
    assert torch.equal(before[1], served.cache.values)
    for position in range(PROMPT, PROMPT + MORE):
        layout = served.layout([position] * 2, 1)
        assert graphs.fits(layout)
        logits = graphs.run(ids[:, position].to(DEVICE), layout)
        torch.testing.assert_close(logits, expected[:, position], atol=1e-4, rtol=0)
    assert PROMPT < BLOCK_SIZE < PROMPT + MORE
    graphs.close()


STEPS = [
    [(0, 0, 9), (1, 0, 1)],
    [(1, 1, 14), (0, 9, 10)],
    [(1, 14, 15), (0, 10, 11)],
    [(0, 11, 18), (1, 15, 18)],
]
"""Parts of two texts: number of the text, first position, and the one behind the last; among them single tokens, the
rest of a prompt, and some that enter a block."""


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("qwen3", False),
        further("qwen3", True),
        ("gemma2", False),
        ("deepseek_v3", False),
        further("deepseek_v3", True),
        further("mistral", False),
        further("mixtral", True),
    ],
)
@torch.inference_mode()
def test_logits_of_recorded_steps_with_chunks_are_those_of_transformers(name, exact, tmp_path):
    path, reference = make(name, tmp_path)
    served = Served(path, exact=exact)
    ids = torch.randint(0, VOCABULARY, (2, 18), generator=torch.Generator().manual_seed(4))
    expected = reference(ids).logits.to(DEVICE)

    def mix(inputs):
        return served.model.mix(served.cache, inputs)

    sizes = [ChunkSize(16, 3)]
    graphs = GraphedChunks(mix, sizes, WIDTH, DEVICE, recorder_for(DEVICE), compressed=False)
    before = served.cache.keys.clone(), served.cache.values.clone()
    graphs.capture()
    assert torch.equal(before[0], served.cache.keys)
    assert torch.equal(before[1], served.cache.values)
    for step in STEPS:
        tables = np.array([[2 * text + 1, 2 * text] for text, _, _ in step], np.int32)
        starts, ends = (np.array([each[place] for each in step], np.int32) for place in (1, 2))
        layout = StepLayout(starts, ends - starts, tables)
        given, wanted = (torch.cat([each[text, begin:end] for text, begin, end in step]) for each in (ids, expected))
        rows = np.array([len(given) - 1, 0, len(given) // 2])  # the last, and two whose logits are to be scored
        assert graphs.fits(layout, rows)
        logits = graphs.run(given.to(DEVICE), layout, rows)
        torch.testing.assert_close(logits, wanted[rows.tolist()], atol=1e-4, rtol=0)
    graphs.close()


@pytest.mark.parametrize("exact", [True, False])
@torch.inference_mode()
def test_a_mixture_is_recorded(exact, tmp_path):
    path, reference = make("mixtral", tmp_path)
    served = Served(path, exact=exact)
    graphs = GraphedStep(served.decode, 1, WIDTH, DEVICE, None if GPU else HostRecorder())
    graphs.capture()
    ids = torch.randint(0, VOCABULARY, (1, PROMPT + 1), generator=torch.Generator().manual_seed(3))
    served.prefill(ids[:, :PROMPT].tolist())
    logits = graphs.run(ids[:, PROMPT].to(DEVICE), served.layout([PROMPT], 1))
    torch.testing.assert_close(logits, reference(ids).logits[:, PROMPT].to(DEVICE), atol=1e-4, rtol=0)
    graphs.close()


@torch.inference_mode()
def test_a_mixture_that_asks_which_experts_are_wanted_is_not_recorded(tmp_path):
    path, _ = make("gpt_oss", tmp_path)
    graphs = GraphedStep(Served(path).decode, 1, WIDTH, DEVICE, None if GPU else HostRecorder())
    with pytest.raises(NotRecordableError):
        graphs.capture()
    assert not graphs.fits(StepLayout(*np.ones((2, 1), np.int32), np.zeros((1, 1), np.int32)))


def test_models_of_other_shapes_are_left_to_their_modules(tmp_path):
    path, _ = make("phi3", tmp_path)
    info = inspect_model(EngineConfig(model=str(path)))
    model = build_model(info, Alone(), torch.float32)
    assert not model.fuse_on_gpu(64)
    assert model.decoder is None
