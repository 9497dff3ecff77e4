"""GGUF files whose blocks stay as they are stored against a file in float: bytes on disk and in memory, and tokens of 1
and of 8 streams for a second of CPU time, with one thread. Rounds alternate between all sides.

CPU time depends less than time on what else runs. Steps are called without the engine around them. The model has random
weights. Blocks of K types are random, too, as nothing here quantizes to them; speed and memory do not depend on values.

    python tools/bench/gguf_blocks.py --model 0.5b --rounds 15
"""

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gguf
import measure
import numpy as np
import synthetic
import torch
from lockstep_engine import EngineConfig
from lockstep_engine.attention import StepLayout
from lockstep_engine.attention_choice import step_attention
from lockstep_engine.distributed import Alone
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.linear import ColumnLinear, RowLinear, VocabHead
from lockstep_engine.model_config import inspect_model
from lockstep_engine.models import build_model
from lockstep_engine.weights import load_weights
from lockstep_tools.model import gguf_files
from numpy.typing import NDArray

SIDES = {"float": "q8_0", "q8_0": "q8_0", "q4_0": "q4_0", "Q4_K_M": "Q4_K_M"}
"""What is compared, and the file that it is made of; float is float16, the default of `lockstep convert`."""
STREAMS = (1, 8)
_POSITION = 8
"""Of the tokens that are decoded; what is before them in the cache is 0."""
_STEP = 1.3e-4
"""A scale with which random blocks of 4 bits have values of about 0.02."""


def more_bits(layer: int, layers: int) -> bool:
    """Whether llama.cpp's Q4_K_M has 6 bits in a layer's values and down projections (`use_more_bits` there)."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def random_blocks(kind: gguf.GGMLQuantizationType, rows: int, columns: int) -> NDArray[np.uint8]:
    """A matrix in Q4_K or Q6_K."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (rows * columns // size, nbytes), np.uint8)
    steps = {0: _STEP, 2: 7.5 * _STEP} if kind is gguf.GGMLQuantizationType.Q4_K else {208: _STEP / 10}
    for at, step in steps.items():
        blocks[:, at : at + 2] = np.array([step], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def write_mixture(source: Path, target: Path, layers: int) -> None:
    """The file again, with the types of Q4_K_M."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name != "general.architecture" and not name.startswith("GGUF."):
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, sub_type=inner[-1] if inner else None)
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if len(tensor.shape) == 2:
            part = tensor.name.split(".")
            finer = part[0] != "blk" or (part[2] in ("attn_v", "ffn_down") and more_bits(int(part[1]), layers))
            kind = gguf.GGMLQuantizationType.Q6_K if finer else gguf.GGMLQuantizationType.Q4_K
            columns, rows = (int(size) for size in tensor.shape)
            data = random_blocks(kind, rows, columns)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Decoder:
    """A model in float32 on the CPU, as a rank has it, and steps that decode."""

    def __init__(self, folder: Path) -> None:
        info = inspect_model(EngineConfig(model=str(folder)))
        self._model = build_model(info, Alone(), torch.float32)
        load_weights(self._model.module, info, torch.device("cpu"))
        modules = list(self._model.module.modules())
        packed = [each.packed for each in modules if isinstance(each, ColumnLinear | RowLinear | VocabHead)]
        self.nbytes = sum(each.nbytes for each in (*packed, *self._model.module.parameters()) if each is not None)
        self._model.fuse(info.context_length)
        self._cache = KvCache(
            layers=self._model.layers,
            kv_heads=self._model.kv_heads,
            head_dim=self._model.head_dim,
            blocks=max(STREAMS),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )

    def decode(self, streams: int) -> float:
        """Decode a token of each stream; return the seconds of CPU time that it took."""
        starts, ones = np.full(streams, _POSITION, np.int32), np.ones(streams, np.int32)
        layout = StepLayout(starts, ones, np.arange(streams, dtype=np.int32)[:, None])
        began = time.process_time()
        with torch.inference_mode():
            attention = step_attention(self._cache, layout, deterministic=True)
            self._model.logits(torch.arange(streams), attention, torch.arange(streams))
        return time.process_time() - began


def make(shape: synthetic.Shape, folder: Path) -> None:
    """Write the files and the directories of all sides, unless they are there."""
    if (folder / "made").exists():
        return
    model = synthetic.write_random(shape, folder / "given")
    files = {kind: folder / f"{kind}.gguf" for kind in dict.fromkeys(SIDES.values())}
    for kind in ("q8_0", "q4_0"):
        gguf_files.write(model, files[kind], kind, lambda *_: None)
    write_mixture(files["q8_0"], files["Q4_K_M"], shape.layers)
    for side, kind in SIDES.items():
        (folder / side).mkdir()
        gguf_files.read(files[kind], folder / side, "float16", widen=side == "float")
    (folder / "made").touch()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=synthetic.SHAPES, default="0.5b")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="where the files are made, which takes minutes, or are from before")
    given = parser.parse_args()
    torch.set_num_threads(1)
    about = measure.machine()
    with ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make(synthetic.SHAPES[given.model], folder)
        decoders = {side: Decoder(folder / side) for side in SIDES}
        times: dict[tuple[str, int], list[float]] = {(side, count): [] for side in SIDES for count in STREAMS}
        for _ in range(1 + given.rounds):
            for (side, count), taken in times.items():
                taken.append(decoders[side].decode(count))
        on_disk = {side: sum(file.stat().st_size for file in (folder / side).glob("*.safetensors")) for side in SIDES}
    median = {key: statistics.median(each[1:]) for key, each in times.items()}  # the first of each warms up
    rows = []
    for side, decoder in decoders.items():
        row: list[Any] = [side, f"{on_disk[side] / 2**20:.0f}", f"{decoder.nbytes / 2**20:.0f}"]
        for count in STREAMS:
            row += [f"{count / median[side, count]:.1f}", f"{median['float', count] / median[side, count]:.2f}"]
        rows.append(row)
    speeds = [word for count in STREAMS for word in (f"tokens/CPU s, {count}", "over float")]
    print(measure.table(["weights", "MiB on disk", "MiB in memory", *speeds], rows))
    print(measure.made(f"`{measure.command()}`", about))


if __name__ == "__main__":
    main()
