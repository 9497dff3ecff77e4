"""From logits to tokens, in Triton: temperature, top-k, top-p, min-p and the draw, for all rows of a step in a number
of launches that depends on the kinds of settings alone.

A token depends on its own row, settings and number alone: nothing but integers is added up. A weight is
exp((logit - largest) / temperature) in units of 2**-44, rounded down, so that the largest weight is 2**44 and the sum
of a vocabulary of less than 2**19 tokens fits 63 bits.

Nothing is sorted. Non-negative floats are ordered as their bits are, read as integers: these are called keys. Let f(b)
be the number, or the sum, of the weights whose keys are above b. Top-k and top-p keep the keys from the least b with
f(b) < target, which is top_k, or top_p of the sum of what top-k keeps. The search begins with all keys. Each launch
divides the range that is left into `2**bits` equal parts, until it has one key, or one weight.

Logits of 16 bits make at most 2**16 weights of a row. Then the search is for the least logit instead, among all that
there can be in their order, and compares with its weight: it finds the same weight in fewer launches.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lockstep_engine.sampling_table import Kinds, RowChoices

_KEY_BITS = 30
"""Keys of weights up to 1 have so many bits."""
_LAST_LOGIT = tl.constexpr(2**16 - 1)
"""Number of the last logit of 16 bits, in their order."""
_FIRST_POSITIVE = tl.constexpr(2**15)
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
    """Bits of a key that a launch of the search decides."""
    bits_of_16: int = 3
    """The same for logits of 16 bits. More bits: fewer launches, each of which takes longer."""


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


@triton.jit
def _clamped(x, nan):
    """Logits as finite numbers."""
    x = tl.where(x == x, x, nan)  # noqa: PLR0124
    return tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST)


@triton.jit
def _keys_at(places, top, scale, orders: tl.constexpr):
    """Keys of the weights at places of the search's range: keys themselves, or numbers of logits in their order."""
    if orders is None:
        return places.to(tl.int32)
    else:
        number = tl.minimum(places, _LAST_LOGIT).to(tl.int32)
        positive = number >= _FIRST_POSITIVE
        pattern = tl.where(positive, number - _FIRST_POSITIVE, _LAST_LOGIT - number)
        if orders == tl.bfloat16:
            x = (pattern << 16).to(tl.float32, bitcast=True)
        else:
            x = pattern.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        x = _clamped(x, tl.where(positive, _LARGEST, -_LARGEST))
        return tl.exp2((x - top) * scale).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["tiles", "passes", "rows", "cuts"])
def _weigh(
    weights,
    tops,
    partial,
    totals,
    least,
    states,
    sums,
    logits,
    peaks,
    settings,
    row_stride,
    vocabulary,
    tiles,
    passes,
    rows,
    cuts,
    block: tl.constexpr,
    all_tiles: tl.constexpr,
    ways: tl.constexpr,
):
    """Weights, their sums in each tile, and the beginnings of the searches."""
    tile, row = tl.program_id(0), tl.program_id(1)
    scale = tl.load(settings + row * _FIELDS + 1).to(tl.float32)
    if scale > 0:
        all_at = tl.arange(0, all_tiles)
        mine = tl.load(peaks + row * tiles + all_at, mask=all_at < tiles, other=float("-inf"))
        top = _clamped(tl.max(mine, 0), _LARGEST)
        at = tile * block + tl.arange(0, block)
        inside = at < vocabulary
        x = tl.load(logits + row.to(tl.int64) * row_stride + at, mask=inside, other=0.0).to(tl.float32)
        weight = tl.where(inside, tl.exp2((_clamped(x, -_LARGEST) - top) * scale), 0.0)
        tl.store(weights + row.to(tl.int64) * vocabulary + at, weight, mask=inside)
        tl.store(partial + row * tiles + tile, tl.sum(_quantised(weight), 0))
        if tile == 0:
            tl.store(least + row, 0)
            if cuts != 0:
                tl.store(tops + row, top)
                tl.store(totals + row, 0)
                way = tl.arange(0, ways)
                nothing = tl.zeros((ways,), tl.int64)
                for index in range(2 * (passes + 1)):
                    tl.store(sums + (index * rows + row) * ways + way, nothing)
                part = tl.arange(0, _STATE)
                begun = tl.where(part == 0, -1, tl.where(part == 1, _UNKNOWN, 0)).to(tl.int64)
                counted = tl.load(settings + row * _FIELDS + 2) > 0
                nucleus = tl.load(settings + row * _FIELDS + 3) < 1
                by_sum = states + ((passes + 1) * rows + row) * _STATE
                tl.store(states + row * _STATE + part, tl.where(part == 3, tl.where(counted, 0, 1), begun))
                tl.store(by_sum + part, tl.where(part == 3, tl.where(nucleus, 0, 1), begun))


@triton.jit
def _narrowed(state, sums, target, step, top, scale, ways: tl.constexpr, counts: tl.constexpr, orders: tl.constexpr):
    """What a row's search knows after a launch: a place with f(its key) >= target, f of it, f at the end of the range
    that is left, and whether the search is at its end. The places that are left are above the first.
    """
    low = tl.load(state)
    above = tl.load(state + 1)
    below = tl.load(state + 2)
    done = tl.load(state + 3)
    if done == 0:
        way = tl.arange(0, ways)
        f = tl.load(sums + way)
        parts = tl.sum((f >= target).to(tl.int32), 0)
        low += parts.to(tl.int64) * step
        above = tl.where(parts > 0, tl.sum(tl.where(way == parts - 1, f, 0), 0), above)
        below = tl.where(parts < ways - 1, tl.sum(tl.where(way == parts, f, 0), 0), below)
        if counts:
            lone = above - below < 2
        else:
            smallest = _keys_at(low + 1, top, scale, orders).to(tl.float32, bitcast=True)
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


@triton.jit(do_not_specialize=["tiles", "rows", "index", "shift"])
def _search(
    states,
    sums,
    weights,
    tops,
    partial,
    totals,
    settings,
    vocabulary,
    tiles,
    rows,
    index,
    shift,
    block: tl.constexpr,
    all_tiles: tl.constexpr,
    bits: tl.constexpr,
    counts: tl.constexpr,
    orders: tl.constexpr,
):
    """Evaluate the last launch's f, and compute f at the limits of the parts of the range that is left."""
    ways: tl.constexpr = 2**bits
    tile, row = tl.program_id(0), tl.program_id(1)
    scale = tl.load(settings + row * _FIELDS + 1).to(tl.float32)
    if scale > 0:
        part = tl.arange(0, _STATE)
        old, new = index * rows + row, (index + 1) * rows + row
        done = tl.load(states + old * _STATE + 3)
        if done == 0:
            top = tl.load(tops + row)
            if counts:
                target = tl.maximum(tl.load(settings + row * _FIELDS + 2).to(tl.int64), 1)
            else:
                target = _nucleus(partial, totals, settings, row, tiles, all_tiles)
            step = tl.full((), 1, tl.int64) << shift
            low, above, below, done = _narrowed(
                states + old * _STATE, sums + old * ways, target, step << bits, top, scale, ways, counts, orders
            )
            if tile == 0:
                values = tl.where(part == 0, low, tl.where(part == 1, above, tl.where(part == 2, below, done)))
                tl.store(states + new * _STATE + part, values)
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
                for number in tl.static_range(ways - 1):
                    limit = _keys_at(low + (number + 1) * step, top, scale, orders)
                    over = tl.sum(tl.where(keys > limit, value, 0), 0).to(tl.int64)
                    f = tl.where(way == number, over, f)
                tl.atomic_add(sums + new * ways + way, f, mask=f > 0, sem="relaxed")
        elif tile == 0:
            tl.store(states + new * _STATE + part, tl.load(states + old * _STATE + part))


@triton.jit(do_not_specialize=["tiles", "rows", "by_count", "by_sum"])
def _keep(
    kept,
    least,
    totals,
    states,
    sums,
    weights,
    tops,
    partial,
    settings,
    vocabulary,
    tiles,
    rows,
    by_count,
    by_sum,
    block: tl.constexpr,
    all_tiles: tl.constexpr,
    ways: tl.constexpr,
    last: tl.constexpr,
    orders: tl.constexpr,
):
    """The least key that is kept, and the sums of what is kept in each tile. Not `last`: the sum of the weights that
    top-k keeps.
    """
    tile, row = tl.program_id(0), tl.program_id(1)
    scale = tl.load(settings + row * _FIELDS + 1).to(tl.float32)
    top_k = tl.load(settings + row * _FIELDS + 2).to(tl.int64)
    if (scale > 0) & (last or top_k > 0):
        top = tl.load(tops + row)
        step = tl.full((), 1, tl.int64)
        place = by_count * rows + row
        low, above, _, _ = _narrowed(
            states + place * _STATE, sums + place * ways, tl.maximum(top_k, 1), step, top, scale, ways, True, orders
        )
        limit = _keys_at(low + 1, top, scale, orders)
        if last:
            place = by_sum * rows + row
            target = _nucleus(partial, totals, settings, row, tiles, all_tiles)
            low, _, _, _ = _narrowed(
                states + place * _STATE, sums + place * ways, target, step, top, scale, ways, False, orders
            )
            min_p = tl.load(settings + row * _FIELDS + 4).to(tl.float32).to(tl.int32, bitcast=True)
            limit = tl.maximum(tl.maximum(limit, _keys_at(low + 1, top, scale, orders)), min_p)
        at = tile * block + tl.arange(0, block)
        weight = tl.load(weights + row.to(tl.int64) * vocabulary + at, mask=at < vocabulary, other=0.0)
        keys = weight.to(tl.int32, bitcast=True)
        over = tl.sum(tl.where(keys >= limit, _quantised(weight), 0), 0)
        if last:
            tl.store(kept + row * tiles + tile, over)
            if tile == 0:
                tl.store(least + row, limit)
        else:
            if tile == 0:  # of equal weights at the limit only so many count that there are top_k
                smallest = limit.to(tl.float32, bitcast=True)
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
    uniforms: torch.Tensor | None,
    last: torch.Tensor,
    tuning: Tuning | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose a token for each row.

    Args:
        logits: [rows, vocabulary], any float type; rows are contiguous.
        given: the model's own logits, in which a NaN or an infinity makes a row unusable; `logits` or as these.
        choices: settings of each row: sampling row; log2(e) / temperature, 0: the most likely token; top_k, 0: no
            limit; top_p, 1: no limit; min_p. And what kinds of them there are; more is no error.
        uniforms: [rows], float64, in [0, 1). None: no row draws.
        last: [sampling rows], int64; gets the tokens.
        tuning: how the work is divided.

    Returns:
        Tokens and usable tokens, [rows], int64: NO_TOKEN where the logits are no numbers.
    """
    rows, vocabulary = logits.shape
    settings, kinds = choices.settings, choices.kinds
    device, how = logits.device, tuning or Tuning()
    tiles = triton.cdiv(vocabulary, how.block)
    grid, all_tiles = (tiles, rows), triton.next_power_of_2(tiles)
    form = {"block": how.block, "num_warps": 1}
    tiled = {**form, "all_tiles": all_tiles}
    # Few pieces of memory and views of it, as each takes the host time; parts begin at multiples of 16 bytes.
    places = torch.empty(2, _aligned(rows * tiles), dtype=torch.int32, device=device)
    peaks = torch.empty(2, _aligned(rows * tiles), dtype=torch.float32, device=device)
    out = torch.empty(2, _aligned(rows), dtype=torch.int64, device=device)
    own = top_of_tiles = peaks[0]
    _peaks[grid](top_of_tiles, places, logits, logits.stride(0), vocabulary, tiles, **form)
    if given is not logits:
        own = peaks[1]
        _peaks[grid](own, places[1], given, given.stride(0), vocabulary, tiles, **form)
    weights, least, kept = top_of_tiles, places, out  # of the types that they have if they are read
    if kinds.draws:
        orders, key_bits, bits = _range(logits.dtype, how)
        ways, passes = 2**bits, -(-key_bits // bits)
        weights = torch.empty(rows, vocabulary, dtype=torch.float32, device=device)
        each = 2 * (passes + 1) * rows
        sizes = [_aligned(size) for size in (rows * tiles, rows * tiles, rows, each * ways, each * 4)]
        memory = torch.empty(sum(sizes), dtype=torch.int64, device=device)
        partial, kept, totals, sums, states = torch.split(memory, sizes)
        least = torch.empty(rows, dtype=torch.int32, device=device)
        tops = torch.empty(rows, dtype=torch.float32, device=device)
        _weigh[grid](weights, tops, partial, totals, least, states, sums, logits, top_of_tiles, settings,
                     logits.stride(0), vocabulary, tiles, passes, rows, int(kinds.cuts), ways=ways,
                     **tiled)  # fmt: skip
        if kinds.cuts:
            ends, sum_begins = [0, passes + 1], passes + 1

            def keep(*, last: bool) -> None:
                _keep[grid](kept, least, totals, states, sums, weights, tops, partial, settings, vocabulary, tiles,
                            rows, *ends, ways=ways, last=last, orders=orders, **tiled)  # fmt: skip

            def search(begin: int, *, counts: bool) -> int:
                for index in range(passes):
                    _search[grid](states, sums, weights, tops, partial, totals, settings, vocabulary, tiles, rows,
                                  begin + index, bits * (passes - 1 - index), bits=bits, counts=counts, orders=orders,
                                  **tiled)  # fmt: skip
                return begin + passes

            if kinds.top_k:
                ends[0] = search(0, counts=True)
            if kinds.top_p:
                if kinds.top_k:
                    keep(last=False)
                ends[1] = search(sum_begins, counts=False)
            keep(last=True)
        else:
            kept = partial
    _pick[rows,](out[0], out[1], last, kept, least, weights, top_of_tiles, places, own,
                 settings if uniforms is None else uniforms, settings, vocabulary, tiles, block=how.block,
                 all_tiles=all_tiles, num_warps=4)  # fmt: skip
    return out[0, :rows], out[1, :rows]


def launch_all(
    vocabulary: int, width: int, dtype: torch.dtype, drawn: torch.dtype, device: torch.device, rows: int = 2
) -> None:
    """Launch every kernel.

    Args:
        vocabulary: size of it.
        width: elements from one row of the logits to the next.
        dtype: of the model's logits.
        drawn: of the logits that are drawn from: float32 if they were changed, else as the model's.
        device: where they are.
        rows: how many there are.
    """
    given = torch.zeros(rows, width, dtype=dtype, device=device)[:, :vocabulary]
    logits = given if drawn is dtype else torch.zeros(rows, width, dtype=drawn, device=device)[:, :vocabulary]
    settings = torch.zeros(rows, _FIELDS.value, dtype=torch.float64, device=device)
    numbers = torch.zeros(rows, dtype=torch.float64, device=device)
    choices = RowChoices(settings, Kinds(draws=True, top_k=True, top_p=True, min_p=True))
    choose(logits, given, choices, numbers, torch.zeros(rows, dtype=torch.int64, device=device))


def _range(dtype: torch.dtype, how: Tuning) -> tuple[tl.dtype | None, int, int]:
    """What the search orders (None: keys), bits of the range, and bits that a launch decides."""
    match dtype:
        case torch.bfloat16:
            return tl.bfloat16, 16, how.bits_of_16
        case torch.float16:
            return tl.float16, 16, how.bits_of_16
        case _:
            return None, _KEY_BITS, how.bits


def _aligned(size: int) -> int:
    return size + -size % 4
