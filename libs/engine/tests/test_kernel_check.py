"""The check of a GPU's kernels at a rank's start: it passes where they compute what torch computes, and names what they
do not. In Triton's interpreter without a GPU.
"""

import pytest
import torch
from checkpoints import make
from fast_cases import fast_if, further
from in_process_rank import InProcessRank
from lockstep_common.errors import LockstepError
from lockstep_engine import attention_triton, gpu_decoder, gpu_experts, kernel_check
from lockstep_engine.attention_torch import TorchAttention
from lockstep_engine.config import EngineConfig
from lockstep_engine.distributed import Alone
from lockstep_engine.kernel_check import MAX_DIFFERENCE
from lockstep_engine.kernels import gpu, launches, triton_attention, triton_compress
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.model_config import inspect_model
from lockstep_engine.models import build_model
from lockstep_engine.weights import load_weights
from triton.runtime.errors import OutOfResources
from triton_device import DEVICE, GPU

SETTINGS = {
    "device": "cuda" if GPU else "cpu",
    "max_seqs": 2,
    "max_batch_tokens": 40,
    "kv_hot_window": 16,
    "kv_memory_bytes": 2**20,
    "threads": 1,
    "cuda_graphs": False,
    "deterministic": False,  # on a CPU, too: as GPUs serve by default
}


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model that is served by the kernels."""
    path, _ = make("qwen3", tmp_path)
    if not GPU:
        monkeypatch.setattr(gpu, "usable", lambda *_: True)
    return path


@pytest.fixture
def found(monkeypatch):
    """The differences that a start finds."""
    differences, compare = [], kernel_check.compare

    def note(*given):
        differences.extend(compare(*given))
        return differences

    monkeypatch.setattr(kernel_check, "compare", note)
    return differences


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", further("float16")])
def test_right_kernels_are_far_below_the_bounds(model, found, dtype):
    with InProcessRank(model, dtype=dtype, **SETTINGS) as served:
        assert not served.rank.cache.keys[:, :, :-1].any()
    assert [each.what for each in found] == [
        "compressed keys and values",
        "the logits of a chunk",
        "the logits of a decode step",
    ]
    assert found[0].size == 0
    for each in found[1:]:
        assert 0 < each.size < MAX_DIFFERENCE[getattr(torch, dtype)] / 5


def broken_scale(monkeypatch):
    attend = triton_attention.attend

    def wrong(queries, cache, paged, scoring, tiles, out):
        attend(queries * 2, cache, paged, scoring, tiles, out)

    monkeypatch.setattr(triton_attention, "attend", wrong)


def broken_mask(monkeypatch):
    """A query does not see the eight keys before it."""
    begin = attention_triton.TritonAttention.__init__

    def wrong(attention, cache, step, *, exact):
        begin(attention, cache, step, exact=exact)
        attention._paged.starts.sub_(8).clamp_(0)

    monkeypatch.setattr(attention_triton.TritonAttention, "__init__", wrong)


def broken_norm(monkeypatch):
    norm = gpu_decoder.add_rms_norm

    def wrong(x, delta, weight, eps):
        return norm(x, delta, weight, eps) * (1 + torch.arange(len(weight), device=x.device) % 2).to(x.dtype)

    monkeypatch.setattr(gpu_decoder, "add_rms_norm", wrong)


def broken_decoding(monkeypatch):
    """Not a number, in a decode step alone."""
    gate = gpu_decoder.silu_mul
    monkeypatch.setattr(gpu_decoder, "silu_mul", lambda x: gate(x) * (float("nan") if len(x) == 1 else 1))


def broken_codes(monkeypatch):
    compress = triton_compress.compress

    def wrong(layers, moves):
        compress(layers, moves)
        layers.cold.key_scales.mul_(1.5)

    monkeypatch.setattr(triton_compress, "compress", wrong)


@pytest.mark.parametrize(
    ("breaks", "what"),
    [
        further(broken_scale, "the logits of a chunk"),
        fast_if(False, broken_mask, "the logits of a decode step"),
        further(broken_norm, "the logits of a chunk"),
        fast_if(False, broken_decoding, "the logits of a decode step"),
        fast_if(False, broken_codes, "compressed keys and values"),
    ],
)
def test_wrong_kernels_are_refused_by_name(model, monkeypatch, breaks, what):
    breaks(monkeypatch)
    with pytest.raises(AssertionError) as ended, InProcessRank(model, **SETTINGS):
        pass
    said = f"rank 0: the GPU's kernels do not compute what torch computes: {what} are off by"
    assert str(ended.value.__cause__).startswith(said)


def test_a_kernel_that_prefill_alone_cannot_launch_refuses_the_start(model, monkeypatch):
    attend = triton_attention.attend

    def launched(queries, cache, paged, scoring, tiles, out):
        if tiles.queries > 1:
            raise OutOfResources(120_000, 101_376, "shared memory")
        attend(queries, cache, paged, scoring, tiles, out)

    monkeypatch.setattr(triton_attention, "attend", launched)
    with pytest.raises(AssertionError) as ended, InProcessRank(model, **SETTINGS):
        pass
    refused = ended.value.__cause__
    assert isinstance(refused, LockstepError)  # after which no rank is started again
    if not GPU:  # on one, the first launches of a start find it, and with them the setting that would allow it
        assert refused.message.startswith("rank 0: the GPU's kernels cannot serve this model: ")
    assert "OutOfResources: " in refused.message
    assert "shared memory" in refused.message


@pytest.mark.parametrize("exact", [False, True])
def test_the_launches_of_a_start_are_those_of_attention(exact):
    """In the interpreter: each form of windows, cold blocks and split keys can be launched with the start's tensors."""
    for window in (False, True):
        calls = launches.attention_calls(2, 16, torch.float16, compressed=True, window=window, exact=exact)
        assert [call.kernel for call in calls] == ["attend_exact" if exact else "attend"] * 3 + ["compress"]
        for call in calls:
            call.launch(DEVICE)


@pytest.fixture
def mixture(tmp_path):
    """What a check of a mixture finds."""
    path, _ = make("mixtral", tmp_path)
    info = inspect_model(EngineConfig(model=str(path)))
    model = build_model(info, Alone(), torch.float32)
    model.exact = False
    load_weights(model.module, info, DEVICE)
    model.fuse_on_gpu(64)
    cache = KvCache(
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        blocks=2,
        dtype=torch.float32,
        device=DEVICE,
    )

    def by_kernels(ids, layout, rows):
        attention = attention_triton.TritonAttention(cache, layout)
        return model.logits(ids, attention, torch.from_numpy(rows).to(DEVICE))

    def by_torch(ids, layout, rows):
        attention = TorchAttention(cache, layout, deterministic=True)
        return model.logits_by_modules(ids, attention, torch.from_numpy(rows).to(DEVICE))

    def check():
        with torch.inference_mode():
            return kernel_check.compare(by_kernels, by_torch, cache, info.vocab_size, 9)

    return check


def test_the_experts_of_a_mixture_are_compared_with_the_models_own(mixture, monkeypatch):
    products, grouped = [], gpu_experts.grouped
    monkeypatch.setattr(gpu_experts, "grouped", lambda *given, **how: products.append(1) or grouped(*given, **how))
    for each in mixture():
        assert 0 < each.size < MAX_DIFFERENCE[torch.float32] / 5
    assert len(products) == 2 * 3 * 2  # two products in each of three layers, in a chunk and in a decode step


def test_wrong_experts_are_found(mixture, monkeypatch):
    grouped = gpu_experts.grouped
    monkeypatch.setattr(gpu_experts, "grouped", lambda *given, **how: grouped(*given, **how) * 1.5)
    assert [each.is_small for each in mixture()] == [False, False]
