"""Compiles the GPU kernels ahead, on a machine without a GPU: `python -m lockstep_engine.precompile build FOLDER`.

    module FOLDER     compile the C module by which Triton launches kernels; needs a C compiler
    build FOLDER      compile machine code for models and GPUs; needs no other program
    check FOLDER      make the same calls with the folder alone; fails if any of them has to be compiled
    table             what each kernel needs on each GPU, as Markdown

The image with CUDA holds such a folder; ranks read it (`kernels.prebuilt`).
"""

import argparse
import itertools
import json
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from lockstep_engine.kernels import model_list, prebuilt
from lockstep_engine.kernels.model_list import MODELS, Widths
from lockstep_engine.kernels.tiles import LIMITS

_COMPILE_DEADLINE_S = 300
_TABLE_MODEL = "llama-3.1-8b"


@dataclass(frozen=True)
class Task:
    """A part of the work, for a process of its own: Triton has one target in a process."""

    arch: int
    models: tuple[Widths, ...]
    tps: tuple[int, ...]
    """Numbers of ranks; empty: the usual ones of each model."""
    dtypes: tuple[str, ...]
    compressed: tuple[bool, ...]
    code: Path
    """Where machine code is written to, or read from."""
    part: int
    parts: int
    """This task's calls: `part` out of `parts`."""
    check: bool = False


@dataclass(frozen=True)
class Done:
    """What a task did."""

    calls: int
    compiled: tuple[str, ...]
    """Names of the kernels that were not there."""


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel needs."""

    arch: int
    call: str
    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    warps: int

    @property
    def programs(self) -> int:
        """Programs of it on a multiprocessor at once."""
        return LIMITS[self.arch].programs(self.registers, self.shared_bytes, self.warps)


def run_task(task: Task) -> Done:
    """Make a task's calls on a GPU on paper. Runs in a process of its own."""
    import triton  # noqa: PLC0415 - loaded in this process alone

    from lockstep_engine.kernels.paper import PaperDriver  # noqa: PLC0415 - it builds on Triton

    PaperDriver(task.arch).install()
    compiled: list[str] = []
    triton.knobs.compilation.store_binary_only = True
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: None if cache_hit else compiled.append(src.name)
    mine = list(_calls(task))[task.part :: task.parts]
    with tempfile.TemporaryDirectory() as empty:
        triton.knobs.cache.dir = empty if task.check else str(task.code)
        if task.check:
            prebuilt.activate()
        for call in mine:
            call.launch(torch.device("cpu"))
    return Done(len(mine), tuple(compiled))


def _calls(task: Task) -> Iterator["launches.Call"]:  # type: ignore[name-defined]  # noqa: F821
    """Each call of the task's models once."""
    from lockstep_engine.kernels import launches  # noqa: PLC0415 - it builds on Triton

    seen = set()
    for widths in task.models:
        for heads, kv_heads, inner in model_list.splits(widths, task.tps):
            for dtype in task.dtypes:
                forms = dict.fromkeys(itertools.product(task.compressed, widths.windows))
                if len(widths.windows) > 1:  # layers with a window may have no cold blocks where others have them
                    forms[False, True] = None
                for compressed, window in forms:
                    shape = launches.ModelShape(
                        heads=heads,
                        kv_heads=kv_heads,
                        head_dim=widths.head_dim,
                        hidden=widths.hidden,
                        inner=inner,
                        dtype=getattr(torch, dtype),
                        vocabulary=widths.vocabulary,
                        rotated=widths.head_dim,
                        head_norms=widths.head_norms,
                        window=window,
                        plain=widths.plain,
                        compressed=compressed,
                        latent=widths.latent,
                    )
                    codes = launches.usual_coded_calls(shape) if widths.plain else []
                    for call in (*launches.calls(shape), *codes):
                        if call not in seen:
                            seen.add(call)
                            yield call


def run_all(options: argparse.Namespace, *, check: bool) -> list[Done]:
    """All tasks, several at once."""
    code = options.folder / prebuilt.CODE
    tasks = [
        Task(
            arch,
            tuple(_widths(name) for name in options.model or MODELS),
            tuple(options.tp),
            tuple(options.dtype),
            tuple(each == "lazy" for each in options.compression),
            code,
            part,
            options.jobs,
            check,
        )
        for arch in options.arch
        for part in range(options.jobs)
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context, max_tasks_per_child=1) as pool:
        return list(pool.map(run_task, tasks))


def build(options: argparse.Namespace) -> None:
    """Compile machine code into the folder, and say in its manifest what it is for."""
    code = options.folder / prebuilt.CODE
    code.mkdir(parents=True, exist_ok=True)
    done = run_all(options, check=False)
    for path in code.rglob("__grp__*"):
        path.unlink()  # it has the paths of this machine
    for path in code.rglob("*.source"):
        path.unlink()
    write_manifest(options.folder, archs=options.arch, models=sorted(options.model or MODELS))
    print(f"{sum(len(each.compiled) for each in done)} kernels compiled, {sum(each.calls for each in done)} calls")


def check(options: argparse.Namespace) -> None:
    """Fail if the folder lacks a kernel of these models."""
    os.environ[prebuilt.FOLDER_VARIABLE] = str(options.folder)
    problem = None if options.code_only else prebuilt.module_problem(options.folder)
    if problem is not None:
        sys.exit(problem)
    done = run_all(options, check=True)
    missing = sorted({name for each in done for name in each.compiled})
    if missing:
        sys.exit(f"{options.folder} lacks machine code of {', '.join(missing)}")
    print(f"{sum(each.calls for each in done)} calls, none was compiled")


def build_module(options: argparse.Namespace) -> None:
    """Compile Triton's C module. It is linked with an empty library in the place of the driver's, which only a machine
    with a GPU has.
    """
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("gcc") or shutil.which("clang") or "cc"]
    source = prebuilt.source_path()
    python = sysconfig.get_paths("posix_prefix")["include"]
    with tempfile.TemporaryDirectory() as name:
        stub = Path(name) / "libcuda.so.1"
        _compile([*compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(stub), "-x", "c", os.devnull])
        flags = ["-O3", "-shared", "-fPIC", "-Wno-psabi", f"-I{source.parent / 'include'}", f"-I{python}"]
        # The library is named though nothing of it is used here: the module must load the driver's.
        linked = ["-Wl,--no-as-needed", f"-L{name}", "-l:libcuda.so.1"]
        _compile([*compiler, str(source), *flags, *linked, "-o", str(prebuilt.module_path(folder))])
    write_manifest(folder)
    print(prebuilt.module_path(folder))


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMPILE_DEADLINE_S)
    except OSError as error:
        sys.exit(f"Triton's C module was not built, a C compiler is needed: {error}")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        sys.exit(f"Triton's C module was not built: {lines[0]}")


def write_manifest(folder: Path, **fields: object) -> None:
    """Add what the folder holds to its manifest."""
    path = folder / prebuilt.MANIFEST
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    known |= {"triton": version("triton"), "driver_sha256": prebuilt.source_digest(), **fields}
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def usage_of(arch: int, model: str) -> list[Usage]:
    """What the kernels of a model on one GPU need. Runs in a process of its own."""
    import triton  # noqa: PLC0415 - loaded in this process alone

    from lockstep_engine.kernels.paper import PaperDriver  # noqa: PLC0415 - it builds on Triton

    found: list[Usage] = []
    form = ""

    def note(name: str, cubin: bytes, shared: int, warps: int) -> tuple[int, int]:
        registers, spilled = resources(cubin)
        found.append(Usage(arch, form, name, registers, spilled, shared, warps))
        return registers, spilled

    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        PaperDriver(arch, note=note).install()
        for call in _calls(Task(arch, (_widths(model),), (1,), ("bfloat16",), (True,), Path(folder), 0, 1)):
            if call.kernel == "coded" and (call.arguments[2] or call.arguments[3].per_127):
                continue  # a bias or a factor more than another
            form = " ".join(map(str, call.arguments)).replace("torch.", "")
            call.launch(torch.device("cpu"))
    return found


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and its spilled bytes, by Triton's own cuobjdump."""
    import triton  # noqa: PLC0415 - loaded in this process alone

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_DEADLINE_S).stdout
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def print_table(options: argparse.Namespace) -> None:
    """Registers, shared memory and occupancy of each kernel and GPU."""
    model = (options.model or [_TABLE_MODEL])[0]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context, max_tasks_per_child=1) as pool:
        used = list(pool.map(usage_of, options.arch, [model] * len(options.arch)))
    print(f"Compiled, not measured: {model}, bfloat16, tp 1, Triton {version('triton')}.\n")
    print("| GPU | kernel | for | registers | spilled bytes | shared bytes | warps | programs a multiprocessor |")
    print("|---|---|---|---|---|---|---|---|")
    for each in (usage for one in used for usage in one):
        cells = f"sm_{each.arch}", f"`{each.kernel}`", each.call, each.registers, each.spilled_bytes
        print("|", *(f"{cell} |" for cell in (*cells, each.shared_bytes, each.warps, each.programs)))


def _widths(name: str) -> Widths:
    """A model of the list, or the folder of one.

    Raises:
        SystemExit: there is no such model.
    """
    if name in MODELS:
        return MODELS[name]
    path = Path(name) / "config.json"
    try:
        return model_list.from_config(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        sys.exit(f"--model {name}: neither of the list ({', '.join(MODELS)}) nor a folder with a config.json: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lockstep_engine.precompile", description="Compile kernels ahead.")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    what = argparse.ArgumentParser(add_help=False)
    what.add_argument(
        "--arch", type=int, action="append", choices=LIMITS, help="compute capability, as 90; all if none"
    )
    what.add_argument("--model", action="append", metavar="NAME", help="of the list, or a folder with a config.json")
    what.add_argument("--tp", type=int, action="append", default=[], help="numbers of GPUs; the usual ones if none")
    what.add_argument("--dtype", action="append", choices=("bfloat16", "float16", "float32"), help="bfloat16 if none")
    what.add_argument("--compression", action="append", choices=("lazy", "none"), help="of old KV; lazy if none")
    what.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0))), help="processes at once")
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("folder", type=Path)
    for name, run, parents in (
        ("module", build_module, [where]),
        ("build", build, [where, what]),
        ("check", check, [where, what]),
        ("table", print_table, [what]),
    ):
        action = actions.add_parser(name, parents=parents, help=(run.__doc__ or "").strip().partition("\n")[0])
        action.set_defaults(run=run)
        if name == "check":
            action.add_argument("--code-only", action="store_true", help="leave the C module out")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one action."""
    options = _parser().parse_args(arguments)
    for name, default in (("arch", list(LIMITS)), ("dtype", ["bfloat16"]), ("compression", ["lazy"])):
        if getattr(options, name, None) is None:
            setattr(options, name, default)
    if getattr(options, "jobs", 1) < 1:
        _parser().error("--jobs must be at least 1")
    options.run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
