"""Steps through the Triton kernels: what `StepAttention` promises, and decode steps from tensors that stay in place."""

import numpy as np
import pytest
import torch
import twins
from lockstep_engine import layer_cache
from lockstep_engine.attention import StepLayout
from lockstep_engine.attention_choice import step_attention
from lockstep_engine.attention_torch import TorchAttention
from lockstep_engine.attention_triton import DecodeAttention, Rotation, TritonAttention
from lockstep_engine.config import BLOCK_SIZE, HotWindow
from lockstep_engine.kernels.triton_attention import Paged
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.scoring import Scoring
from texts import LAYER, Texts, assert_all_close, by_torch, dense
from triton_device import DEVICE, GPU


def by_triton(cache, layout):
    return TritonAttention(cache, layout)


@pytest.mark.skipif(GPU, reason="texts lie on the CPU")
class TestSteps:
    @pytest.mark.parametrize("options", [{}, {"window": 20}, {"soft_cap": 20.0}], ids=str)
    def test_any_steps_agree_with_dense_attention(self, options):
        texts = Texts([20, 50, 17], kv_heads=1, seed=4)
        assert_all_close(texts.attend(by_triton, texts.in_random_chunks(4), **options), dense(texts, **options))

    @pytest.mark.parametrize("hot_window", [HotWindow(1, 1), HotWindow(0, 0)], ids=str)
    def test_blocks_are_compressed_on_the_way(self, hot_window):
        texts = Texts([20, 90], kv_heads=1, seed=5)
        steps = texts.in_random_chunks(5)
        ours = texts.attend(by_triton, steps, hot_window=hot_window)
        assert_all_close(ours, dense(texts, hot_window=hot_window))
        assert_all_close(ours, texts.attend(by_torch, steps, hot_window=hot_window))


class TestDecodeAttention:
    """A cache in which two sequences are to go on, at positions 36 and 16."""

    POSITIONS = (36, 16)
    TABLES = ((4, 2, 0), (1, 3, -1))

    def cache(self, hot_window=None):
        cache = KvCache(
            layers=2,
            kv_heads=2,
            head_dim=32,
            blocks=6,
            dtype=torch.float32,
            device=DEVICE,
            cold_blocks=6 if hot_window else 0,
            hot_window=hot_window,
        )
        generator = torch.Generator().manual_seed(1)
        cache.keys.copy_(torch.randn(cache.keys.shape, generator=generator))
        cache.values.copy_(torch.randn(cache.values.shape, generator=generator))
        return cache

    def parts(self, count):
        generator = torch.Generator().manual_seed(2)
        return [
            torch.randn(heads, count, 32, generator=generator).to(DEVICE) for heads in (4, 2, 2)
        ]  # queries, keys, values

    def test_is_a_step_of_single_queries_whose_other_rows_do_nothing(self):
        cache, other = self.cache(), self.cache()
        positions = torch.tensor([*self.POSITIONS, -1, -1], device=DEVICE)
        tables = torch.full((4, 5), -1, dtype=torch.int32, device=DEVICE)
        tables[:2, :3] = torch.tensor(self.TABLES, dtype=torch.int32)
        attention = DecodeAttention(cache, positions, tables)
        parts = self.parts(4)
        ours = attention.attend(LAYER, *parts, Scoring(0.2))
        layout = StepLayout(np.array(self.POSITIONS, np.int32), np.ones(2, np.int32), np.array(self.TABLES, np.int32))
        step = TorchAttention(other, layout, deterministic=False)
        expected = step.attend(LAYER, *(each[:, :2] for each in parts), Scoring(0.2))
        torch.testing.assert_close(ours[:2], expected, atol=1e-5, rtol=1e-5)
        assert not ours[2:].any()
        assert attention.positions.tolist() == [36, 16, 0, 0]
        for part, other_part in zip((cache.keys, cache.values), (other.keys, other.values), strict=True):
            # The other has cleared the block that its second sequence entered, as the CPU needs it.
            rows = [block for block in range(7) if block != self.TABLES[1][1]]
            assert torch.equal(part[LAYER, :, rows], other_part[LAYER, :, rows])

    def test_sees_cold_blocks(self):
        hot_window = HotWindow(0, 1)
        cache = self.cache(hot_window)
        layer_cache.compress(cache.layer(LAYER), torch.tensor([[4, 5]], device=DEVICE))
        tables = torch.tensor([[cache.first_cold + 5, 2, 0], [1, 3, -1]], dtype=torch.int32, device=DEVICE)
        positions = torch.tensor(self.POSITIONS, device=DEVICE)
        queries, keys, values = self.parts(2)
        ours = DecodeAttention(cache, positions, tables).attend(LAYER, queries, keys, values, Scoring(0.2))
        step = Paged(
            tables,
            tables,
            positions.int(),
            *torch.tensor([[1, 1], [0, 1]], dtype=torch.int32, device=DEVICE),
            hot_window,
        )
        expected = twins.attend(queries, cache.layer(LAYER), step, Scoring(0.2))
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)

    def test_merged_projections_are_rotated_stored_and_attended(self):
        positions = torch.tensor(self.POSITIONS, device=DEVICE)
        tables = torch.tensor(self.TABLES, dtype=torch.int32, device=DEVICE)
        queries, keys, values = self.parts(2)
        cosine, sine = torch.randn(2, 2, 32, device=DEVICE)
        merged = torch.cat([each.transpose(0, 1).flatten(1) for each in (queries, keys, values)], dim=1)
        rotation = Rotation(cosine, sine, None, 0.0, heads=4)
        ours = DecodeAttention(self.cache(), positions, tables).attend_merged(
            LAYER, merged, rotation, scale=0.2, window=30
        )
        rotated = [twins.rotate(each, cosine, sine) for each in (queries, keys)]
        expected = DecodeAttention(self.cache(), positions, tables).attend(
            LAYER, *rotated, values, Scoring(0.2, window=30)
        )
        torch.testing.assert_close(ours, expected.flatten(1), atol=1e-5, rtol=1e-5)


def test_the_kernels_are_chosen_on_a_gpu_alone():
    layout = StepLayout(np.zeros(1, np.int32), np.ones(1, np.int32), np.zeros((1, 1), np.int32))
    cache = KvCache(layers=1, kv_heads=1, head_dim=64, blocks=2, dtype=torch.float32, device=DEVICE)
    assert isinstance(step_attention(cache, layout, deterministic=False), TritonAttention) == GPU
    assert cache.first_cold * BLOCK_SIZE == 48
