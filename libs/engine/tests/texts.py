"""Random texts for attention, run through any kind of it in any steps, and what must come out."""

import math

import numpy as np
import torch
from lockstep_engine.attention import StepLayout
from lockstep_engine.attention_cpu import CompiledAttention
from lockstep_engine.attention_torch import TorchAttention
from lockstep_engine.config import BLOCK_SIZE, SlidingWindow
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.layer_cache import quantize
from lockstep_engine.scoring import Scoring

CPU = torch.device("cpu")
LAYER = 1
POISON = 1e20
"""Where no token of a sequence is. Finite: a masked score stays masked, a weight of 0 hides a value."""


def by_kernel(cache, layout):
    return CompiledAttention(cache, layout)


def by_torch(cache, layout):
    return TorchAttention(cache, layout, deterministic=True)


def by_torchs_products(cache, layout):
    return TorchAttention(cache, layout, deterministic=False)


class Texts:
    """Random queries, keys and values of sequences, and blocks for them in disorder. `latent`: as in `KvCache`."""

    def __init__(self, lengths, *, heads=4, kv_heads=2, dim=32, seed=0, scale=1.0, latent=0):
        generator = torch.Generator().manual_seed(seed)
        self.lengths, self.heads, self.kv_heads, self.dim = lengths, heads, kv_heads, dim
        self.queries = [torch.randn(heads, each, dim, generator=generator) * scale for each in lengths]
        self.keys = [torch.randn(kv_heads, each, dim, generator=generator) * scale for each in lengths]
        self.latent = latent
        if latent:
            self.values = [each[..., :latent] for each in self.keys]
        else:
            self.values = [torch.randn(kv_heads, each, dim, generator=generator) for each in lengths]
        needs = [-(-each // BLOCK_SIZE) for each in lengths]
        order = np.random.default_rng(seed).permutation(sum(needs)).astype(np.int32)
        self.blocks = np.split(order, np.cumsum(needs)[:-1])
        self.cold = [each[::-1].copy() for each in self.blocks]

    def round_to(self, dtype):
        """Let all numbers be of this type, so that nothing is lost where they are stored in it."""
        for tensors in (self.queries, self.keys, self.values):
            tensors[:] = [each.to(dtype).float() for each in tensors]

    def attend(
        self,
        kind,
        steps,
        *,
        poison=True,
        hot_window=None,
        compressed=(0, LAYER),
        dtype=torch.float32,
        drops=False,
        hot_layers=(),
        copies=None,
        **options,
    ):
        """Outputs [length, heads, width of values] of each sequence after `steps`, each a list of (sequence, tokens to
        compute), of a model that computes in `dtype`.

        With a hot_window, blocks are compressed when it says so, and what nobody may read any more becomes NaN. With
        `drops`, blocks before the window of the step's first query become NaN, too, and tables have them no more.
        `hot_layers` have no cold blocks. With them `copies` may be a hot window, in place of hot_window: cold blocks
        are copies.
        """
        window = SlidingWindow(options["window"]) if drops else None
        total = sum(len(each) for each in self.blocks)
        cache = KvCache(
            layers=2,
            kv_heads=self.kv_heads,
            head_dim=self.dim,
            blocks=total,
            dtype=dtype,
            device=CPU,
            cold_blocks=0 if hot_window is None and copies is None else total,
            hot_window=hot_window,
            compressed_layers=compressed,
            latent=self.latent,
            hot_layers=hot_layers,
        )
        for each in cache.layers:
            each.keys[:, :total] = math.nan  # what earlier owners left; a block is cleared when it is entered
            each.values[:, :total] = math.inf
        spoil(cache)
        done = [0] * len(self.lengths)
        self._copied = [0] * len(self.lengths)
        out = [torch.full((each, self.heads, self.latent or self.dim), math.nan) for each in self.lengths]
        for step in steps:
            if copies is not None:
                self._copy(step, done, cache, copies)
            attention = kind(cache, self._layout(step, done, cache, window, copies))
            if poison:
                self._poison(cache, step, done)
            parts = [
                torch.cat(
                    [tensors[sequence][:, done[sequence] : done[sequence] + count] for sequence, count in step], dim=1
                ).to(dtype)
                for tensors in (self.queries, self.keys, self.values)
            ]
            result = attention.attend(LAYER, *parts, Scoring(self.dim**-0.5, **options))
            for (sequence, count), part in zip(step, result.split([count for _, count in step]), strict=True):
                out[sequence][done[sequence] : done[sequence] + count] = part
                done[sequence] += count
        return out

    def _copy(self, step, done, cache, rule):
        """Make the copies that the step's first queries see, of blocks that nobody may read any more."""
        for sequence, _ in step:
            made = slice(self._copied[sequence], rule.first_hot(done[sequence] // BLOCK_SIZE))
            cache.compress(np.stack([self.blocks[sequence][made], self.cold[sequence][made]], axis=1))
            for tensor, _ in cache.block_tensors(cold=False):
                tensor[:, :, self.blocks[sequence][made].tolist()] = math.nan
            self._copied[sequence] = made.stop

    def _layout(self, step, done, cache, window, copies):
        hot_window = cache.hot_window
        width = max(-(-(done[sequence] + count) // BLOCK_SIZE) for sequence, count in step)
        tables, hot_tables = np.full((2, len(step), width), -1, np.int32)
        moves = np.empty((0, 2), np.int32)
        both = False
        for row, (sequence, count) in enumerate(step):
            first, last = done[sequence] // BLOCK_SIZE, (done[sequence] + count - 1) // BLOCK_SIZE
            hot, cold = self.blocks[sequence], self.cold[sequence]
            tables[row, : last + 1] = hot_tables[row, : last + 1] = hot[: last + 1]
            if copies is not None:
                copied = slice(self._copied[sequence])
                tables[row, copied] = hot_tables[row, copied] = cold[copied] + cache.first_cold
            if hot_window is None:
                continue
            before, begin, end = (
                hot_window.first_hot(block) for block in (max(done[sequence] - 1, 0) // BLOCK_SIZE, first, last)
            )
            hot_tables[row, hot_window.sink : begin] = -1
            tables[row, hot_window.sink : end] = cold[hot_window.sink : end] + cache.first_cold
            moves = np.concatenate([moves, np.stack([hot[before:end], cold[before:end]], axis=1)])
            both |= first < last
            for gone in hot[hot_window.sink : before].tolist():
                cache.keys[:, :, gone] = cache.values[:, :, gone] = math.nan
        for row, (sequence, _) in enumerate(step if window is not None else ()):
            dropped = slice(window.first_seen(done[sequence]))
            tables[row, dropped] = hot_tables[row, dropped] = -1
            gone = self.blocks[sequence][dropped].tolist()
            cache.keys[:, :, gone] = cache.values[:, :, gone] = math.nan
            if hot_window is not None:
                spoil(cache, self.cold[sequence][dropped].tolist())
        starts = np.array([done[sequence] for sequence, _ in step], np.int32)
        lengths = np.array([count for _, count in step], np.int32)
        return StepLayout(starts, lengths, tables, hot_tables if both else None, moves)

    def _poison(self, cache, step, done):
        for sequence, count in step:
            end = done[sequence] + count
            if end % BLOCK_SIZE:
                block = self.blocks[sequence][end // BLOCK_SIZE]
                cache.keys[:, :, block, :, end % BLOCK_SIZE :] = POISON
                cache.values[:, :, block, end % BLOCK_SIZE :] = POISON

    def at_once(self):
        return [[(sequence, length) for sequence, length in enumerate(self.lengths)]]

    def one_by_one(self):
        return [
            [(sequence, 1) for sequence, length in enumerate(self.lengths) if length > position]
            for position in range(max(self.lengths))
        ]

    def in_random_chunks(self, seed):
        """Steps in which some sequences decode, some prefill, some pause; in changing order."""
        chooser = np.random.default_rng(seed)
        left = list(self.lengths)
        steps = []
        while any(left):
            step = [
                (sequence, int(min(left[sequence], chooser.choice([1, 1, 2, 15, 16, 17, 40]))))
                for sequence in chooser.permutation(len(left)).tolist()
                if left[sequence] and chooser.random() < 0.7
            ]
            for sequence, count in step:
                left[sequence] -= count
            steps += [step] if step else []
        return steps


def spoil(cache, blocks=slice(-1)):
    """What earlier owners left in cold blocks: nothing that may be read before it is written."""
    for layer in cache.layers:
        cold = layer.cold
        for tensor in () if cold is None else (cold.keys, cold.values, cold.key_scales, cold.value_scales):
            if tensor is not None:
                tensor[:, blocks] = 0x7F if tensor.dtype is torch.uint8 else math.nan


def dense(texts, *, window=None, soft_cap=None, bias=None, hot_window=None):
    """Reference in float64, each sequence for itself, without blocks: two sets of keys and values, and for each query
    and key the choice between them.
    """
    outs = []
    for queries, *stored in zip(texts.queries, texts.keys, texts.values, strict=True):
        repeat = texts.heads // texts.kv_heads
        position = torch.arange(queries.shape[1])
        block = position // BLOCK_SIZE
        cold = torch.zeros(len(block), len(block), dtype=torch.bool)
        if hot_window is not None:
            cold = (block[None, :] >= hot_window.sink) & (block[:, None] - block[None, :] > hot_window.size)
        k, v = (each.double().repeat_interleave(repeat, 0) for each in stored)
        kept = [compressed(each) for each in stored]
        if texts.latent:
            kept[1] = kept[0][..., : texts.latent]
        cold_k, cold_v = (each.double().repeat_interleave(repeat, 0) for each in kept)
        q = queries.double()
        scores = torch.where(cold, q @ cold_k.transpose(1, 2), q @ k.transpose(1, 2)) * texts.dim**-0.5
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if bias is not None:
            scores = scores + bias[:, None, : len(position)]
        hidden = position[None, :] > position[:, None]
        if window:
            hidden |= position[None, :] <= position[:, None] - window
        weights = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
        out = weights.masked_fill(cold, 0) @ v + weights.masked_fill(~cold, 0) @ cold_v
        outs.append(out.transpose(0, 1).float())
    return outs


def compressed(x):
    """Vectors [..., dim] as they come back from a cold block."""
    codes, scales = quantize(x, x.dim() - 1)
    return codes.view(torch.float8_e4m3fn).float() * scales.unsqueeze(-1)


def assert_all_close(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)


def assert_same_bits(ours, expected):
    assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))
