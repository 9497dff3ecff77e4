"""Every form of every GPU kernel that a model of some shape launches, as calls with small tensors.

One list for two uses: `precompile` makes these calls on paper, so that machine code is there before a model is served,
and a rank makes those of its attention at its start, so that a kernel that cannot be loaded is found before a request
comes. The calls read and write nothing but their own tensors. A new kernel is added here: to `_LAUNCH`, and to
`calls`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lockstep_engine.collective_clock import WEIGHTS
from lockstep_engine.config import HotWindow
from lockstep_engine.kernels import (
    triton_attention,
    triton_clock,
    triton_coded,
    triton_compress,
    triton_exact_attention,
    triton_gate,
    triton_latent,
    triton_linear,
    triton_norm,
    triton_sampling,
    triton_store,
)
from lockstep_engine.kernels.codes import Codes
from lockstep_engine.kernels.tiles import PRODUCT_ROWS
from lockstep_engine.kernels.triton_attention import Paged, Tiles
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.quantized.coded import IN_WORD, INTEGERS, CodeForm
from lockstep_engine.scoring import Scoring

_WIDTH = 256
"""A multiple of every tile of a product."""
_SEGMENTED_WIDTH = 1024
"""The same, of more inputs than one segment has where there are few outputs."""
_SPLITS = 2
"""Any number above 1: kernels are not compiled again for others."""


@dataclass(frozen=True)
class ModelShape:
    """One rank's part of a model, as far as its kernels are compiled for it."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    """Width of the gated products on this rank."""
    dtype: torch.dtype
    vocabulary: int
    rotated: int
    """Components of a head that are rotated."""
    head_norms: bool = False
    window: bool = False
    plain: bool = True
    """Whether it has the plain Llama shape, for which norms, rotation and gates are kernels too."""
    compressed: bool = True
    """Whether old blocks of KV are stored in eight bits."""
    latent: int = 0
    """As in `KvCache`."""


@dataclass(frozen=True)
class CodeKind:
    """Weights of codes for which a product is compiled alike."""

    bits: int
    group: int | None
    """Inputs that share a scale, as far as the kernel looks at them; None: all inputs of a row do."""
    zeros: bool = False
    """Whether groups have zero points that differ."""
    table: bool = False
    per_127: bool = False
    offsets: bool = False

    def __str__(self) -> str:
        grouped = "a scale a row" if self.group is None else f"groups of {self.group}"
        more = [name.replace("_", " ") for name in ("zeros", "table", "per_127", "offsets") if getattr(self, name)]
        return ", ".join([f"{self.bits} bits", grouped, *more])


USUAL_CODES = (
    CodeForm(None),
    CodeForm(None, per_127=True),
    CodeForm(128, table=INTEGERS),
    CodeForm(64, table=tuple(map(float, range(-8, 8)))),
)
"""Forms for which machine code is built ahead, in the order of compressed-tensors' int8, bitsandbytes' int8, AWQ, GPTQ
and pack-quantized of four bits, and nf4 or fp4.
"""


@dataclass(frozen=True)
class Call:
    """A launch of a kernel. Equal calls need one compilation."""

    kernel: str
    """A key of `_LAUNCH`."""
    arguments: tuple[Any, ...]

    def launch(self, device: torch.device) -> None:
        """Launch it with tensors on this device."""
        _LAUNCH[self.kernel](device, *self.arguments)


def calls(shape: ModelShape) -> list[Call]:
    """All launches of a model of this shape."""
    found = attention_calls(
        shape.heads // shape.kv_heads,
        shape.head_dim,
        shape.dtype,
        compressed=shape.compressed,
        window=shape.window,
        latent=shape.latent,
    )
    found.append(Call("clock", ()))
    found += [Call("choose", (shape.vocabulary, shape.dtype, drawn)) for drawn in {shape.dtype: 0, torch.float32: 0}]
    if not shape.plain:
        return [*found, Call("store", (shape.kv_heads, shape.head_dim, shape.dtype, *_if_any(shape.latent)))]
    rotation = shape.heads, shape.kv_heads, shape.head_dim, shape.rotated, shape.head_norms, shape.dtype
    return [
        *found,
        *(Call("add_rms_norm", (shape.hidden, added, shape.dtype)) for added in (False, True)),
        Call("silu_mul", (shape.inner, shape.dtype)),
        Call("rotate_store", rotation),
    ]


def exact_calls(shape: ModelShape, products: Iterable[tuple[int, int, bool]]) -> list[Call]:
    """All launches of a model of this shape in the exact mode.

    Args:
        shape: of the model.
        products: inputs, outputs and whether there is a bias, of its linear layers.
    """
    attention = attention_calls(
        shape.heads // shape.kv_heads,
        shape.head_dim,
        shape.dtype,
        compressed=shape.compressed,
        window=shape.window,
        exact=True,
        latent=shape.latent,
    )
    forms = dict.fromkeys((*_alike(ins, outs), biased) for ins, outs, biased in products)
    others = [each for each in calls(shape) if each.kernel not in ("attend", "attend_latent", "compress")]
    return [*attention, *(Call("linear", (*form, shape.dtype)) for form in forms), *others]


def coded_calls(products: Iterable[tuple[int, int, bool, CodeForm]], dtype: torch.dtype) -> list[Call]:
    """The launches of products on weights that stay codes, in any mode.

    Args:
        products: inputs, outputs, whether there is a bias, and the form of the codes.
        dtype: of the activations.
    """
    found = list[Call]()
    for ins, outs, biased, form in products:
        ones, others = _coded_alike(ins, outs)
        # Whether zero points differ is known when they have been read.
        for zeros in (False, True) if form.table == INTEGERS and not form.offsets else (False,):
            found.append(Call("coded", (ones, others, biased, _kind(form, ins, zeros=zeros), dtype)))
    return list(dict.fromkeys(found))


def usual_coded_calls(shape: ModelShape) -> list[Call]:
    """The launches of a model of the plain shape whose linear layers are quantized in a usual form."""
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    merged = shape.hidden, (heads + 2 * kv_heads) * dim
    widths = [(*merged, False), (*merged, True), (heads * dim, shape.hidden, False)]
    widths += [(shape.hidden, 2 * shape.inner, False), (shape.inner, shape.hidden, False)]
    products = [(*each, form) for form in USUAL_CODES for each in widths if each[0] % (form.group or 1) == 0]
    return coded_calls(products, shape.dtype)  # codes stay where a rank's inputs are whole groups


def attention_calls(
    per_head: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    compressed: bool,
    window: bool = False,
    exact: bool = False,
    latent: int = 0,
) -> list[Call]:
    """The launches of attention, the exact mode's or the usual: decode with and without split keys, prefill; and of
    compression. `latent`: as in `KvCache`.
    """
    kinds = "prefill", "decode", "split"
    if latent:
        found = [Call("attend_latent", (per_head, head_dim, latent, dtype, compressed, exact, kind)) for kind in kinds]
    else:
        form = per_head, head_dim, dtype, compressed, window
        kernel = "attend_exact" if exact else "attend"
        found = [Call(kernel, (*form, kind)) for kind in kinds]
    return [*found, Call("compress", (head_dim, dtype, *_if_any(latent)))] if compressed else found


def _if_any(latent: int) -> tuple[int, ...]:
    return (latent,) if latent else ()


def _cache(
    kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, *, compressed: bool, latent: int = 0
) -> KvCache:
    return KvCache(
        layers=1,
        kv_heads=kv_heads,
        head_dim=head_dim,
        blocks=2,
        dtype=dtype,
        device=device,
        cold_blocks=2 if compressed else 0,
        hot_window=HotWindow(1, 4) if compressed else None,
        latent=latent,
    )


def _attend(
    device: torch.device,
    per_head: int,
    dim: int,
    dtype: torch.dtype,
    compressed: bool,
    window: bool,
    kind: str,
    exact: bool = False,
) -> None:
    kv_heads = 2
    cache = _cache(kv_heads, dim, dtype, device, compressed=compressed)
    none, paged = _empty_step(cache)
    merged = torch.zeros(4, kv_heads * (per_head + 2), dim, dtype=dtype, device=device)
    queries = merged[:, : kv_heads * per_head].transpose(0, 1)
    out = torch.zeros(4, kv_heads * per_head, dim, dtype=dtype, device=device)
    tile = 1
    if kind == "prefill" and exact:
        tile = triton_exact_attention.queries_a_tile(per_head, dtype)
    elif kind == "prefill":
        tile = triton_attention.queries_a_tile(per_head, dim, dtype)
    tiles = Tiles(none, none, tile, _SPLITS if kind == "split" else 1)
    attend = triton_exact_attention.attend if exact else triton_attention.attend
    attend(queries, cache.layer(0), paged, Scoring(1.0, 16 if window else None), tiles, out)


def _attend_latent(
    device: torch.device,
    heads: int,
    dim: int,
    latent: int,
    dtype: torch.dtype,
    compressed: bool,
    exact: bool,
    kind: str,
) -> None:
    cache = _cache(1, dim, dtype, device, compressed=compressed, latent=latent)
    none, paged = _empty_step(cache)
    layer, tile = cache.layer(0), 1
    if kind == "prefill":
        tile = triton_latent.queries_a_tile(heads, layer, exact=exact)
    queries = torch.zeros(heads, 4, dim, dtype=dtype, device=device)
    out = torch.zeros(4, heads, latent, dtype=dtype, device=device)
    tiles = Tiles(none, none, tile, _SPLITS if kind == "split" else 1)
    triton_latent.attend(queries, layer, paged, Scoring(1.0), tiles, out, exact=exact)


def _empty_step(cache: KvCache) -> tuple[torch.Tensor, Paged]:
    """Four sequences without queries, so that no row is computed; zeros for their tiles, too."""
    device = cache.keys.device
    none = torch.zeros(4, dtype=torch.int32, device=device)
    tables = torch.zeros(4, 4, dtype=torch.int32, device=device)
    return none, Paged(tables, tables, none, none, none, cache.hot_window)


def _compress(device: torch.device, dim: int, dtype: torch.dtype, latent: int = 0) -> None:
    cache = _cache(1 if latent else 2, dim, dtype, device, compressed=True, latent=latent)
    triton_compress.compress(cache.cold_layers(0), torch.zeros(4, 2, dtype=torch.int32, device=device))


def _store(device: torch.device, kv_heads: int, dim: int, dtype: torch.dtype, latent: int = 0) -> None:
    cache = _cache(kv_heads, dim, dtype, device, compressed=False, latent=latent)
    keys = torch.zeros(4, kv_heads, dim, dtype=dtype, device=device).transpose(0, 1)
    triton_store.store(cache.layer(0), keys, keys, _no_cells(device))


def _rotate_store(
    device: torch.device, heads: int, kv_heads: int, dim: int, rotated: int, normed: bool, dtype: torch.dtype
) -> None:
    cache = _cache(kv_heads, dim, dtype, device, compressed=False)
    qkv = torch.zeros(4, (heads + 2 * kv_heads) * dim, dtype=dtype, device=device)
    angles = torch.zeros(4, rotated, device=device)  # float32, as `GpuDecoder` has them
    weight = torch.zeros(dim, dtype=dtype, device=device)
    norms = (weight, weight) if normed else None
    triton_store.rotate_store(cache.layer(0), qkv, angles, angles, _no_cells(device), heads=heads, norms=norms, eps=1.0)


def _add_rms_norm(device: torch.device, hidden: int, added: bool, dtype: torch.dtype) -> None:
    x = torch.zeros(4, hidden, dtype=dtype, device=device)
    triton_norm.add_rms_norm(x, torch.zeros_like(x) if added else None, x[0], 1e-5)


def _silu_mul(device: torch.device, inner: int, dtype: torch.dtype) -> None:
    triton_gate.silu_mul(torch.zeros(4, 2 * inner, dtype=dtype, device=device))


def _choose(device: torch.device, vocabulary: int, dtype: torch.dtype, drawn: torch.dtype) -> None:
    triton_sampling.launch_all(vocabulary, vocabulary, dtype, drawn, device)


def _alike(ins: int, outs: int) -> tuple[int, int]:
    """Small widths for which a product is compiled as for these: Triton looks at multiples of 16, the product at
    multiples of its tile and at whether there are several segments.
    """
    segmented = triton_linear.segment_of(outs, ins) < ins
    return (_SEGMENTED_WIDTH if segmented else _WIDTH) + ins % _WIDTH, _WIDTH + outs % _WIDTH


def _linear(device: torch.device, ins: int, outs: int, biased: bool, dtype: torch.dtype) -> None:
    weight = torch.zeros(outs, ins, dtype=dtype, device=device)
    bias = torch.zeros(outs, dtype=dtype, device=device) if biased else None
    for rows in (1, *(most + 1 for most in PRODUCT_ROWS)):
        triton_linear.product(torch.zeros(1, rows, ins, dtype=dtype, device=device), weight.t().unsqueeze(0), bias)


def _coded_alike(ins: int, outs: int) -> tuple[int, int]:
    """As `_alike`, for codes, whose tiles have other widths."""
    segmented = triton_linear.segment_of(outs, ins) < ins
    return (_SEGMENTED_WIDTH if segmented else _WIDTH) + ins % (_WIDTH // 2), _WIDTH + outs % 16


def _kind(form: CodeForm, ins: int, *, zeros: bool) -> CodeKind:
    group = None if form.group is None or form.group >= ins else min(_WIDTH // 2, form.group & -form.group)
    return CodeKind(form.bits, group, zeros, form.table not in (None, INTEGERS), form.per_127, form.offsets)


def _coded(device: torch.device, ins: int, outs: int, biased: bool, kind: CodeKind, dtype: torch.dtype) -> None:
    codes = torch.zeros(outs, ins, dtype=torch.int8, device=device)
    if kind.bits == 4:
        codes = torch.zeros(outs, ins // IN_WORD, dtype=torch.int32, device=device)
    group = kind.group or ins
    scales = torch.zeros(-(-ins // group), outs, device=device)
    table = torch.zeros(16, device=device) if kind.table else None
    zeros, offsets = (scales if given else None for given in (kind.zeros, kind.offsets))
    weight = Codes(codes, scales, group, zeros, 0.0, table, kind.per_127, offsets)
    bias = torch.zeros(outs, dtype=dtype, device=device) if biased else None
    for rows in (1, *(most + 1 for most in PRODUCT_ROWS)):
        triton_coded.product(torch.zeros(rows, ins, dtype=dtype, device=device), weight, bias)


def _clock(device: torch.device) -> None:
    for weight in WEIGHTS:
        triton_clock.add_time(torch.zeros(1, dtype=torch.int64, device=device), weight)


def _product(device: torch.device, dtype: torch.dtype) -> None:
    torch.zeros(16, 16, dtype=dtype, device=device) @ torch.zeros(16, 16, dtype=dtype, device=device)


def _no_cells(device: torch.device) -> torch.Tensor:
    return torch.full((4,), -1, dtype=torch.int64, device=device)


_LAUNCH: dict[str, Callable[..., None]] = {
    "attend": _attend,
    "attend_exact": partial(_attend, exact=True),
    "attend_latent": _attend_latent,
    "compress": _compress,
    "store": _store,
    "rotate_store": _rotate_store,
    "add_rms_norm": _add_rms_norm,
    "silu_mul": _silu_mul,
    "choose": _choose,
    "linear": _linear,
    "coded": _coded,
    "product": _product,
    "clock": _clock,
}
