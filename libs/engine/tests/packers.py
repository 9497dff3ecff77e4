"""Quantized tensors written the slow way, one integer at a time, from the formats' descriptions; and their values.

Nothing here is shared with the package that reads them. Blocks of GGUF are random bytes, and their values are those of
the package `gguf`.
"""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def _random(seed=0):
    return np.random.default_rng(seed)


def _word(integers, bits):
    """Integers in a 32-bit word, the first in the lowest bits, as int32."""
    total = 0
    for place, integer in enumerate(integers):
        total |= int(integer) << (bits * place)
    return np.uint32(total).view(np.int32)


def _pack_last(integers, bits):
    """[..., n] → [..., n * bits / 32], filled up with 0."""
    per = 32 // bits
    rows = integers.reshape(-1, integers.shape[-1])
    words = [[_word(row[first : first + per], bits) for first in range(0, len(row), per)] for row in rows]
    return np.array(words, dtype=np.int32).reshape(*integers.shape[:-1], -1)


def _steps(shape, random, dtype=np.float16):
    """Scales of a size that makes weights of about 0.1."""
    return np.asarray(random.uniform(0.5, 1.5, shape) * 0.02, dtype)


def _tensors(**arrays):
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def gptq(out, inside, *, bits=4, group=32, permuted=False, version=1, seed=0):
    """(tensors of a linear, their float32 values [out, in])."""
    random = _random(seed)
    groups = -(-inside // group)
    codes = random.integers(0, 2**bits, (inside, out))
    zeros = random.integers(0, 2**bits, (groups, out))
    scales = _steps((groups, out), random)
    index = np.arange(inside) // group
    if permuted:
        index = random.permutation(index)
    stored_zeros = (zeros - 1) % 2**bits if version == 1 else zeros
    tensors = _tensors(
        qweight=_pack_last(codes.T, bits).T,
        qzeros=_pack_last(stored_zeros, bits),
        scales=scales,
        g_idx=index.astype("i4"),
    )
    values = np.empty((out, inside), np.float32)
    for i in range(inside):
        values[:, i] = (codes[i] - zeros[index[i]]).astype(np.float32) * scales[index[i]].astype(np.float32)
    return tensors, torch.from_numpy(values)


def awq(out, inside, *, group=32, dtype=np.float16, seed=0):
    """As `gptq`; with scales of `dtype`."""
    random = _random(seed)
    groups = inside // group
    codes, zeros = random.integers(0, 16, (inside, out)), random.integers(0, 16, (groups, out))
    scales = _steps((groups, out), random, dtype)
    order = [first + place for first in range(0, out, 8) for place in AWQ_ORDER]
    tensors = _tensors(qweight=_pack_last(codes[:, order], 4), qzeros=_pack_last(zeros[:, order], 4), scales=scales)
    values = np.empty((out, inside), np.float32)
    for i in range(inside):
        values[:, i] = (codes[i] - zeros[i // group]).astype(np.float32) * scales[i // group].astype(np.float32)
    return tensors, torch.from_numpy(values)


def packed(out, inside, *, bits=4, group=32, zeros=None, permuted=False, seed=0):
    """compressed-tensors' pack-quantized; `zeros`: None (symmetric), "packed" or "plain"."""
    random = _random(seed)
    half = 2 ** (bits - 1)
    groups = -(-inside // group)
    codes = random.integers(-half, half, (out, inside))
    zero = random.integers(-half, half, (out, groups)) if zeros else np.zeros((out, groups), int)
    scales = _steps((out, groups), random)
    index = np.arange(inside) // group
    arrays = {"weight_packed": _pack_last(codes + half, bits), "weight_scale": scales}
    arrays["weight_shape"] = np.array([out, inside])
    if zeros == "packed":
        arrays["weight_zero_point"] = _pack_last((zero + half).T, bits).T
    elif zeros == "plain":
        arrays["weight_zero_point"] = zero.astype(np.int8)
    if permuted:
        index = random.permutation(index)
        arrays["weight_g_idx"] = index.astype("i4")
    values = (codes - zero[:, index]).astype(np.float32) * scales[:, index].astype(np.float32)
    return _tensors(**arrays), torch.from_numpy(values)


def scaled(out, inside, *, codes="int8", shape=None, block=None, suffix="scale", dtype=np.float16, zeros=False, seed=0):
    """Bytes with scales of a shape, or of blocks [rows, columns]."""
    random = _random(seed)
    grid = shape if block is None else (-(-out // block[0]), -(-inside // block[1]))
    scales = _steps(grid, random, dtype)
    integers = torch.from_numpy(random.integers(-127, 128, (out, inside)).astype(np.int8))
    weight = integers if codes == "int8" else (integers.float() / 8).to(torch.float8_e4m3fn)
    tensors = {"weight": weight, f"weight_{suffix}": torch.from_numpy(scales)}
    wide = scales.astype(np.float32)
    if block is not None:
        wide = np.repeat(np.repeat(wide, block[0], 0), block[1], 1)[:out, :inside]
    elif wide.size == 1:
        wide = wide.reshape(1, 1)
    elif wide.ndim == 1:
        wide = wide[:, None]
    number = weight.float()
    if zeros:
        zero = torch.from_numpy(random.integers(-8, 8, grid).astype(np.int8))
        tensors["weight_zero_point"] = zero
        repeated = zero.float() if block is None else zero.float().repeat_interleave(block[1], 1)[:, :inside]
        number = number - repeated
    return tensors, number * torch.from_numpy(wide)


def nf4(out, inside, *, nested=True, seed=0):
    """bitsandbytes' nf4, with double quantization or without. Names go on after that of the weight."""
    random = _random(seed)
    count, block, nested_block = out * inside, 64, 256
    codes = random.integers(0, 16, count)
    raw = np.array([(codes[i] << 4) | (codes[i + 1] if i + 1 < count else 0) for i in range(0, count, 2)], np.uint8)
    blocks = -(-count // block)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float16", "shape": [out, inside]}
    arrays = {"weight": raw[:, None], "weight.quant_map": np.array(NF4, np.float32)}
    if nested:
        table = np.sort(random.uniform(-1, 1, 256)).astype(np.float32)
        coarse = random.uniform(0.02, 0.03, -(-blocks // nested_block)).astype(np.float32)
        stored = random.integers(0, 256, blocks).astype(np.uint8)
        largest = table[stored] * coarse[np.arange(blocks) // nested_block] + np.float32(0.125)
        arrays |= {"weight.absmax": stored, "weight.nested_quant_map": table, "weight.nested_absmax": coarse}
        state |= {"nested_blocksize": nested_block, "nested_dtype": "float32", "nested_offset": 0.125}
    else:
        largest = arrays["weight.absmax"] = random.uniform(0.05, 0.2, blocks).astype(np.float32)
    arrays["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    values = np.array(NF4, np.float32)[codes] * largest[np.arange(count) // block]
    return _tensors(**arrays), torch.from_numpy(values.reshape(out, inside).astype(np.float32))


def int8_rows(out, inside, seed=0):
    """bitsandbytes' int8."""
    random = _random(seed)
    codes = random.integers(-127, 128, (out, inside)).astype(np.int8)
    largest = random.uniform(0.1, 0.3, out).astype(np.float32)
    values = codes.astype(np.float32) * largest[:, None] * np.float32(1 / 127)
    tensors = _tensors(weight=codes, SCB=largest, weight_format=np.array(0, np.uint8))
    return tensors, torch.from_numpy(values)


def ternary(out, inside, *, divides=True, seed=0):
    """BitNet: four rows in a byte, a quarter of the rows apart."""
    random = _random(seed)
    codes = random.integers(-1, 2, (out, inside))
    quarter = out // 4
    raw = np.zeros((quarter, inside), np.uint8)
    for row in range(out):
        raw[row % quarter] |= ((codes[row] + 1) << (2 * (row // quarter))).astype(np.uint8)
    scale = np.array([11.0 if divides else 0.09], np.float32)
    values = codes.astype(np.float32) * (1 / scale if divides else scale)
    return _tensors(weight=raw, weight_scale=scale), torch.from_numpy(values.astype(np.float32))


def mxfp4(experts, out, inside, seed=0):
    """(blocks, scales, values [experts, in, out])."""
    random = _random(seed)
    codes = random.integers(0, 16, (experts, out, inside // 32, 32))
    exponents = random.integers(122, 126, (experts, out, inside // 32)).astype(np.uint8)
    blocks = np.zeros((experts, out, inside // 32, 16), np.uint8)
    for place in range(16):
        blocks[..., place] = codes[..., 2 * place] | (codes[..., 2 * place + 1] << 4)
    values = np.array(E2M1)[codes] * 2.0 ** (exponents.astype(int) - 127)[..., None]
    flat = torch.from_numpy(values.reshape(experts, out, inside).astype(np.float32))
    return *(torch.from_numpy(each) for each in (blocks, exponents)), flat.transpose(1, 2).contiguous()


GGUF_FLOATS = {"q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2)}
GGUF_FLOATS |= {"q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
"""Where the float16 numbers of a block are, by its type."""


def gguf_blocks(kind, out, inside, seed=0, floats=None):
    """Blocks of a type, with random bytes. `floats`: numbers to draw scales from, instead of those that make values of
    about 0.1.
    """
    random, type_ = _random(seed), gguf.GGMLQuantizationType[kind.upper()]
    size, nbytes = gguf.GGML_QUANT_SIZES[type_]
    blocks = random.integers(0, 256, (out * inside // size, nbytes), np.uint8)
    for at in GGUF_FLOATS[kind]:
        most = 0.0001 if kind.endswith("_k") else 0.005
        numbers = random.uniform(-most, most, len(blocks)) if floats is None else random.choice(floats, len(blocks))
        blocks[:, at : at + 2] = numbers.astype(np.float16)[:, None].view(np.uint8)
    rows = blocks.reshape(out, -1)
    return _tensors(**{f"weight_{kind}": rows}), torch.from_numpy(gguf.dequantize(rows, type_).reshape(out, inside))


def compressed_config(form, *, bits=8, kind="int", strategy="channel", symmetric=True, **more):
    """A quantization_config of compressed-tensors with one group."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def quantized_twin(
    path: Path, folder: Path, config, pack, keep=("embed", "lm_head", "norm", "wte", ".gate.", "router")
):
    """Copy a checkpoint twice: its matrices packed by `pack(out, in, seed)`, and with the values that this means.

    Returns:
        (the quantized directory, the plain one).
    """
    tensors = {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}
    coded, plain = {}, {}
    for seed, (name, value) in enumerate(tensors.items()):
        if value.dim() != 2 or not name.endswith(".weight") or any(part in name for part in keep):
            coded[name] = plain[name] = value
            continue
        packed_tensors, values = pack(*value.shape, seed=seed)
        stem = name.removesuffix(".weight")
        coded |= {f"{stem}.{part}": each for part, each in packed_tensors.items()}
        plain[name] = values.contiguous()
    settings = json.loads((path / "config.json").read_text())
    made = []
    for kind, content, extra in (("coded", coded, {"quantization_config": config}), ("plain", plain, {})):
        target = folder / f"{path.name}-{kind}"
        shutil.copytree(path, target, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file({name: each.contiguous() for name, each in content.items()}, target / "model.safetensors")
        (target / "config.json").write_text(json.dumps(settings | extra))
        made.append(target)
    return made[0], made[1]
