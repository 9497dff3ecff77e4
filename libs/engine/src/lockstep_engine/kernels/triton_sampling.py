"""From logits to tokens, in Triton: temperature, top-k, top-p, min-p and the draw, for all rows of a step in a number
of launches that depends on the kinds of settings alone.

A token depends on its own row, settings and number alone: nothing but integers is added up. A weight is
exp((logit - largest) / temperature) in units of 2**-44, rounded down, so that the largest weight is 2**44 and the sum
of a vocabulary of less than 2**19 tokens fits 63 bits.

Nothing is sorted. Non-negative floats are ordered as their bits are, read as integers: these are called keys. Let f(b)
be the number, or the sum, of the weights whose keys are above b. Top-k and top-p keep the keys from the least b with
f(b) < target, which is top_k, or top_p of the sum of what top-k keeps. The search begins with all keys. Each launch
divides the range that is left into `2**bits` equal parts, until it has one key, or one weight.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lockstep_engine.sampling_table import RowChoices

_KEY_BITS = 30
"""Keys of weights up to 1 have so many bits."""
_UNIT = tl.constexpr(2.0**44)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_UNKNOWN = tl.constexpr(2**62)
_FIELDS = tl.constexpr(5)
_STATE = tl.constexpr(4)
_NO_TOKEN = tl.constexpr(-1)


@dataclass(frozen=True)
class Tuning:
    """How the work is divided. Results do not depend on it."""

    block: int = 1024
    """Tokens of a program."""
    bits: int = 3
    """Bits of the keys that a launch of the search decides; a divisor of 30."""
    warps: int = 1


@triton.jit(do_not_specialize=["tiles"])
def _peaks(peaks, places, logits, row_stride, vocabulary, tiles, block: tl.constexpr):
    """The largest logit of each tile, and where it is first. NaN counts as infinity."""
    tile, row = tl.program_id(0), tl.program_id(1)
    at = tile * block + tl.arange(0, block)
    x = tl.load(logits + row.to(tl.int64) * row_stride + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # noqa: PLR0124
    peak = tl.max(x, 0)
    tl.store(peaks + row * tiles + tile, peak)
    tl.store(places + row * tiles + tile, tl.min(tl.where(x == peak, at, vocabulary - 1), 0))


@triton.jit
def _quantised(weights):
    return (weights * _UNIT).to(tl.int64)


@triton.jit(do_not_specialize=["tiles", "passes", "rows"])
def _weigh(
    weights,
    partial,
    totals,
    least,
    by_count,
    by_sum,
    sums_by_count,
    sums_by_sum,
    logits,
    peaks,
    settings,
    row_stride,
    vocabulary,
    tiles,
    passes,
    rows,
    block: tl.constexpr,
    all_tiles: tl.constexpr,
    ways: tl.constexpr,
    cuts: tl.constexpr,
):
    """Weights, their sums in each tile, and the beginnings of the searches."""
    tile, row = tl.program_id(0), tl.program_id(1)
    scale = tl.load(settings + row * _FIELDS + 1).to(tl.float32)
    if scale > 0:
        all_at = tl.arange(0, all_tiles)
        mine = tl.load(peaks + row * tiles + all_at, mask=all_at < tiles, other=float("-inf"))
        peak = tl.minimum(tl.maximum(tl.max(mine, 0), -_LARGEST), _LARGEST)
        at = tile * block + tl.arange(0, block)
        inside = at < vocabulary
        x = tl.load(logits + row.to(tl.int64) * row_stride + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(x == x, x, -_LARGEST)  # noqa: PLR0124
        x = tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST)
        weight = tl.where(inside, tl.exp2((x - peak) * scale), 0.0)
        tl.store(weights + row.to(tl.int64) * vocabulary + at, weight, mask=inside)
        tl.store(partial + row * tiles + tile, tl.sum(_quantised(weight), 0))
        if tile == 0:
            tl.store(least + row, 0)
            if cuts:
                way = tl.arange(0, ways)
                nothing = tl.zeros((ways,), tl.int64)
                for index in range(passes + 1):
                    tl.store(sums_by_count + (index * rows + row) * ways + way, nothing)
                    tl.store(sums_by_sum + (index * rows + row) * ways + way, nothing)
                part = tl.arange(0, _STATE)
                begun = tl.where(part == 0, -1, tl.where(part == 1, _UNKNOWN, 0)).to(tl.int64)
                counted = tl.load(settings + row * _FIELDS + 2) > 0
                nucleus = tl.load(settings + row * _FIELDS + 3) < 1
                tl.store(by_count + row * _STATE + part, tl.where(part == 3, tl.where(counted, 0, 1), begun))
                tl.store(by_sum + row * _STATE + part, tl.where(part == 3, tl.where(nucleus, 0, 1), begun))
                tl.store(totals + row, 0)


@triton.jit
def _narrowed(states, sums, row, target, step, ways: tl.constexpr, counts: tl.constexpr):
    """What the search knows after a launch: a key with f(key) >= target, f of it, whether it is at its end. The keys
    that are left are above this key.
    """
    low = tl.load(states + row * _STATE)
    above = tl.load(states + row * _STATE + 1)
    below = tl.load(states + row * _STATE + 2)
    done = tl.load(states + row * _STATE + 3)
    if done == 0:
        way = tl.arange(0, ways)
        f = tl.load(sums + row * ways + way)
        parts = tl.sum((f >= target).to(tl.int32), 0)
        low += parts.to(tl.int64) * step
        above = tl.where(parts > 0, tl.sum(tl.where(way == parts - 1, f, 0), 0), above)
        below = tl.where(parts < ways - 1, tl.sum(tl.where(way == parts, f, 0), 0), below)
        if counts:
            lone = above - below < 2
        else:
            smallest = (low + 1).to(tl.int32).to(tl.float32, bitcast=True)
            lone = above - below < 2 * _quantised(smallest)
        done = lone.to(tl.int64)
    return low, above, below, done


@triton.jit
def _nucleus(partial, totals, settings, row, tiles, all_tiles: tl.constexpr):
    """The sum that top-p wants to be reached: at least one unit, so that a token is kept."""
    at = tl.arange(0, all_tiles)
    total = tl.sum(tl.load(partial + row * tiles + at, mask=at < tiles, other=0), 0)
    total = tl.where(tl.load(settings + row * _FIELDS + 2) > 0, tl.load(totals + row), total)
    wanted = tl.load(settings + row * _FIELDS + 3) * total.to(tl.float64)
    target = wanted.to(tl.int64)
    target += (target.to(tl.float64) < wanted).to(tl.int64)
    return tl.maximum(target, 1)


@triton.jit(do_not_specialize=["tiles", "shift"])
def _search(
    states,
    sums,
    new_states,
    new_sums,
    weights,
    partial,
    totals,
    settings,
    vocabulary,
    tiles,
    shift,
    block: tl.constexpr,
    all_tiles: tl.constexpr,
    bits: tl.constexpr,
    counts: tl.constexpr,
):
    """Evaluate the last launch's f, and compute f at the limits of the parts of the range that is left."""
    ways: tl.constexpr = 2**bits
    tile, row = tl.program_id(0), tl.program_id(1)
    scale = tl.load(settings + row * _FIELDS + 1)
    if scale > 0:
        part = tl.arange(0, _STATE)
        done = tl.load(states + row * _STATE + 3)
        if done == 0:
            if counts:
                target = tl.maximum(tl.load(settings + row * _FIELDS + 2).to(tl.int64), 1)
            else:
                target = _nucleus(partial, totals, settings, row, tiles, all_tiles)
            step = tl.full((), 1, tl.int64) << shift
            low, above, below, done = _narrowed(states, sums, row, target, step << bits, ways, counts)
            if tile == 0:
                values = tl.where(part == 0, low, tl.where(part == 1, above, tl.where(part == 2, below, done)))
                tl.store(new_states + row * _STATE + part, values)
            if done == 0:
                at = tile * block + tl.arange(0, block)
                weight = tl.load(weights + row.to(tl.int64) * vocabulary + at, mask=at < vocabulary, other=0.0)
                keys = weight.to(tl.int32, bitcast=True)
                if counts:  # noqa: SIM108 - the two have different types
                    value = tl.full((block,), 1, tl.int32)
                else:
                    value = _quantised(weight)
                way = tl.arange(0, ways)
                f = tl.zeros((ways,), tl.int64)
                first, width = low.to(tl.int32), step.to(tl.int32)
                for index in tl.static_range(ways - 1):
                    over = tl.sum(tl.where(keys > first + (index + 1) * width, value, 0), 0).to(tl.int64)
                    f = tl.where(way == index, over, f)
                tl.atomic_add(new_sums + row * ways + way, f, mask=f > 0, sem="relaxed")
        elif tile == 0:
            tl.store(new_states + row * _STATE + part, tl.load(states + row * _STATE + part))


@triton.jit(do_not_specialize=["tiles"])
def _keep(
    kept,
    least,
    totals,
    by_count,
    by_sum,
    sums_by_count,
    sums_by_sum,
    weights,
    partial,
    settings,
    vocabulary,
    tiles,
    block: tl.constexpr,
    all_tiles: tl.constexpr,
    ways: tl.constexpr,
    last: tl.constexpr,
):
    """The least key that is kept, and the sums of what is kept in each tile. Not `last`: the sum of the weights that
    top-k keeps.
    """
    tile, row = tl.program_id(0), tl.program_id(1)
    scale = tl.load(settings + row * _FIELDS + 1)
    top_k = tl.load(settings + row * _FIELDS + 2).to(tl.int64)
    if (scale > 0) & (last or top_k > 0):
        target = tl.maximum(top_k, 1)
        step = tl.full((), 1, tl.int64)
        low, above, _, _ = _narrowed(by_count, sums_by_count, row, target, step, ways, True)
        limit = low + 1
        if last:
            target = _nucleus(partial, totals, settings, row, tiles, all_tiles)
            low, _, _, _ = _narrowed(by_sum, sums_by_sum, row, target, step, ways, False)
            min_p = tl.load(settings + row * _FIELDS + 4).to(tl.float32).to(tl.int32, bitcast=True)
            limit = tl.maximum(tl.maximum(limit, low + 1), min_p.to(tl.int64))
        at = tile * block + tl.arange(0, block)
        weight = tl.load(weights + row.to(tl.int64) * vocabulary + at, mask=at < vocabulary, other=0.0)
        keys = weight.to(tl.int32, bitcast=True)
        over = tl.sum(tl.where(keys >= limit.to(tl.int32), _quantised(weight), 0), 0)
        if last:
            tl.store(kept + row * tiles + tile, over)
            if tile == 0:
                tl.store(least + row, limit.to(tl.int32))
        else:
            if tile == 0:  # of equal weights at the limit only so many count that there are top_k
                smallest = limit.to(tl.int32).to(tl.float32, bitcast=True)
                over -= tl.where(above < _UNKNOWN, above - top_k, 0) * _quantised(smallest)
            tl.atomic_add(totals + row, over, sem="relaxed")


@triton.jit(do_not_specialize=["tiles"])
def _pick(
    ids,
    usable,
    last_ids,
    kept,
    least,
    weights,
    peaks,
    places,
    given,
    uniforms,
    settings,
    vocabulary,
    tiles,
    block: tl.constexpr,
    all_tiles: tl.constexpr,
):
    """A row's token: the first whose sum, with those before it, is above the number's share of the whole."""
    row = tl.program_id(0)
    at = tl.arange(0, all_tiles)
    scale = tl.load(settings + row * _FIELDS + 1)
    if scale > 0:
        parts = tl.load(kept + row * tiles + at, mask=at < tiles, other=0)
        total = tl.sum(parts, 0)
        target = (tl.load(uniforms + row) * total.to(tl.float64)).to(tl.int64)
        target = tl.minimum(target, total - 1)
        tile = tl.sum((tl.cumsum(parts, 0) <= target).to(tl.int32), 0)
        target -= tl.sum(tl.where(at < tile, parts, 0), 0)
        inner = tl.arange(0, block)
        where = tile * block + inner
        weight = tl.load(weights + row.to(tl.int64) * vocabulary + where, mask=where < vocabulary, other=0.0)
        keys = weight.to(tl.int32, bitcast=True)
        values = tl.where(keys >= tl.load(least + row), _quantised(weight), 0)
        chosen = tile * block + tl.sum((tl.cumsum(values, 0) <= target).to(tl.int32), 0)
    else:
        mine = tl.load(peaks + row * tiles + at, mask=at < tiles, other=float("-inf"))
        first = tl.min(tl.where(mine == tl.max(mine, 0), at, tiles - 1), 0)
        chosen = tl.load(places + row * tiles + first)
    chosen = tl.minimum(chosen, vocabulary - 1).to(tl.int64)
    largest = tl.max(tl.load(given + row * tiles + at, mask=at < tiles, other=float("-inf")), 0)
    tl.store(ids + row, chosen)
    tl.store(last_ids + tl.load(settings + row * _FIELDS).to(tl.int64), chosen)
    tl.store(usable + row, tl.where((largest > float("-inf")) & (largest < float("inf")), chosen, _NO_TOKEN))


def choose(
    logits: torch.Tensor,
    given: torch.Tensor,
    choices: RowChoices,
    uniforms: torch.Tensor,
    last: torch.Tensor,
    tuning: Tuning | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose a token for each row.

    Args:
        logits: [rows, vocabulary], any float type; rows are contiguous.
        given: the model's own logits, in which a NaN or an infinity makes a row unusable; `logits` or as these.
        choices: settings of each row: sampling row; log2(e) / temperature, 0: the most likely token; top_k, 0: no
            limit; top_p, 1: no limit; min_p. And what kinds of them there are; more is no error.
        uniforms: [rows], float64, in [0, 1).
        last: [sampling rows], int64; gets the tokens.
        tuning: how the work is divided.

    Returns:
        Tokens and usable tokens, [rows], int64: NO_TOKEN where the logits are no numbers.
    """
    rows, vocabulary = logits.shape
    settings, kinds = choices.settings, choices.kinds
    device = logits.device
    how = tuning or Tuning()
    tiles = triton.cdiv(vocabulary, how.block)
    grid, all_tiles = (tiles, rows), triton.next_power_of_2(tiles)
    ways, passes = 2**how.bits, _KEY_BITS // how.bits
    form = {"block": how.block, "num_warps": how.warps}
    tiled = {**form, "all_tiles": all_tiles}
    # Few pieces of memory, as an allocation costs as much as a launch; parts begin at multiples of 16 bytes.
    places = torch.empty(2, _aligned(rows * tiles), dtype=torch.int32, device=device)
    peaks = torch.empty(2, _aligned(rows * tiles), dtype=torch.float32, device=device)
    out = torch.empty(2, _aligned(rows), dtype=torch.int64, device=device)
    _peaks[grid](peaks[0], places[0], logits, logits.stride(0), vocabulary, tiles, **form)
    own = peaks[0]
    if given is not logits:
        own = peaks[1]
        _peaks[grid](own, places[1], given, given.stride(0), vocabulary, tiles, **form)
    weights = partial = least = kept = peaks
    if kinds.draws:
        weights = torch.empty(rows, vocabulary, dtype=torch.float32, device=device)
        sizes = [rows * tiles, rows * tiles, rows, 2 * (passes + 1) * rows * ways, 2 * (passes + 1) * rows * 4]
        sizes = [_aligned(size) for size in sizes]
        partial, kept, totals, sums, states = torch.empty(sum(sizes), dtype=torch.int64, device=device).split(sizes)
        least = torch.empty(rows, dtype=torch.int32, device=device)
        sums_of = sums[: 2 * (passes + 1) * rows * ways].view(2, passes + 1, rows, ways)
        states_of = states[: 2 * (passes + 1) * rows * 4].view(2, passes + 1, rows, 4)
        _weigh[grid](weights, partial, totals, least, states_of[0, 0], states_of[1, 0], sums_of[0], sums_of[1], logits,
                     peaks[0], settings, logits.stride(0), vocabulary, tiles, passes, rows, ways=ways,
                     cuts=kinds.cuts, **tiled)  # fmt: skip
        if kinds.cuts:
            ends = [0, 0]
            for kind, wanted in enumerate((kinds.top_k, kinds.top_p)):
                if not wanted:
                    continue
                for index in range(passes):
                    shift = _KEY_BITS - how.bits * (index + 1)
                    _search[grid](states_of[kind, index], sums_of[kind, index], states_of[kind, index + 1],
                                  sums_of[kind, index + 1], weights, partial, totals, settings, vocabulary, tiles,
                                  shift, bits=how.bits, counts=kind == 0, **tiled)  # fmt: skip
                ends[kind] = passes
                if kind == 0 and kinds.top_p:
                    _keep[grid](kept, least, totals, states_of[0, passes], states_of[1, 0], sums_of[0, passes],
                                sums_of[1, 0], weights, partial, settings, vocabulary, tiles, ways=ways, last=False,
                                **tiled)  # fmt: skip
            _keep[grid](kept, least, totals, states_of[0, ends[0]], states_of[1, ends[1]], sums_of[0, ends[0]],
                        sums_of[1, ends[1]], weights, partial, settings, vocabulary, tiles, ways=ways, last=True,
                        **tiled)  # fmt: skip
        else:
            kept = partial
    _pick[rows,](out[0], out[1], last, kept, least, weights, peaks[0], places[0], own, uniforms, settings, vocabulary,
                 tiles, block=how.block, all_tiles=all_tiles, num_warps=4)  # fmt: skip
    return out[0, :rows], out[1, :rows]


def _aligned(size: int) -> int:
    return size + -size % 4
