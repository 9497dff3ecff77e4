"""No code of the project reads what can run code: pickles, marshalled objects, a checkpoint's own modules."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for folder in ("libs", "services", "tools")
    for path in (ROOT / folder).rglob("*.py")
    if "tests" not in path.parts
)
_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "jsonpickle", "joblib", "marshal", "shelve"}
_OBJECTS = {"send_object_list", "recv_object_list", "broadcast_object_list", "all_gather_object", "scatter_object_list"}
"""Functions of torch.distributed that pickle what they send."""


def unsafe(source: str) -> Iterator[str]:
    """What in a module's source reads data that can run code, in words."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (f"imports {each.name}" for each in names if each.name.partition(".")[0] in _MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in _MODULES:
                yield f"imports {module}"
            case ast.Call():
                yield from unsafe_call(node)


def unsafe_call(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name in {"eval", "exec"} or name.rpartition(".")[2] in _OBJECTS:
        yield f"calls {name}"
    if name == "torch.load" and given.get("weights_only") != "True":
        yield "calls torch.load without weights_only"
    if given.get("trust_remote_code", "False") != "False":
        yield "trusts a checkpoint's code"
    if given.get("allow_pickle", "False") != "False":
        yield "allows pickles"


def test_sources_read_nothing_that_can_run_code() -> None:
    assert len(SOURCES) > 200
    found = [f"{path.relative_to(ROOT)} {each}" for path in SOURCES for each in unsafe(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import numpy, cloudpickle.x as c",
        "from marshal import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "dist.broadcast_object_list(a)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "eval(text)",
    ],
)
def test_each_kind_is_found(source: str) -> None:
    assert len(list(unsafe(source))) == 1
