"""The scripts that run inside a build: what they drop, what they keep, and that it still loads."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "images"


def load(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


elf, sbom = load("elf"), load("sbom")


@pytest.fixture
def install(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return load("install")


def library():
    """An extension module with symbols to lose."""
    spec = importlib.util.find_spec("xxhash._xxhash")
    return Path(spec.origin)


def test_a_shortened_library_still_loads(tmp_path):
    package = tmp_path / "xxhash"
    shutil.copytree(library().parent, package)
    copy = package / library().name
    before = copy.stat().st_size
    saved = elf.strip(copy)
    assert saved > before // 2
    assert copy.stat().st_size == before - saved
    program = "import xxhash; print(xxhash.__file__, xxhash.xxh64_hexdigest(b'a'))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(package / "__init__.py"), "d24ec4f1a98c6e5b"]
    assert elf.strip(copy) == 0


@pytest.mark.parametrize("content", [b"", b"GROUP ( libc.so.6 )", b"\x7fELF\x01\x01" + bytes(100)])
def test_what_is_no_64_bit_library_is_left_alone(tmp_path, content):
    path = tmp_path / "x.so"
    path.write_bytes(content)
    assert elf.strip(path) == 0
    assert path.read_bytes() == content


def test_unused_files_go_and_what_torch_needs_stays(tmp_path, install):
    kept = ("torch/bin/torch_shm_manager", "torch/testing/__init__.py", "numpy/testing/x.py", "nvidia/cu13/lib/libx.so")
    gone = ("torch/bin/protoc", "torch/bin/test_jit", "torch/include/x.h", "torch/test/x", "numpy/_core/tests/x.py")
    for name in kept + gone:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    install.remove_unused(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == set(kept)


@pytest.mark.slow
def test_of_the_kubernetes_client_the_apis_used_are_left(tmp_path, install):
    origin = Path(importlib.util.find_spec("kubernetes").origin).parent
    site = tmp_path / "site"
    shutil.copytree(origin, site / "kubernetes", ignore=shutil.ignore_patterns("__pycache__"))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    install.trim_kubernetes(site, python, ["DiscoveryV1Api"])
    apis = {path.stem for path in (site / "kubernetes/aio/client/api").glob("*.py")}
    assert apis == {"__init__", "discovery_v1_api"}
    assert {path.stem for path in (site / "kubernetes/client/api").glob("*.py")} <= {"__init__"}
    assert (site / "kubernetes/aio/client/models/v1_endpoint_slice.py").is_file()
    program = (
        "import kubernetes.aio.client as c, kubernetes.aio.config; print(c.DiscoveryV1Api.__module__); c.AppsV1Api"
    )
    done = subprocess.run([str(python), "-B", "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "kubernetes.aio.client.api.discovery_v1_api\n"
    assert "apps_v1_api" in done.stderr


def test_an_environment_without_the_kubernetes_client_keeps_all_its_files(tmp_path, install):
    other = tmp_path / "rich/client/api/apps_v1_api.py"
    other.parent.mkdir(parents=True)
    other.touch()
    install.trim_kubernetes(tmp_path, tmp_path / "no-python", ["DiscoveryV1Api"])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [other]


def test_the_environment_is_split_into_layers(tmp_path, install):
    venv = tmp_path / "opt/venv"
    site = venv / "lib/python3.11/site-packages"
    for name in ("torch", "torchgen", "torch-2.dist-info", "nvidia", "triton", "rich"):
        (site / name).mkdir(parents=True)
    install.split(site, venv, tmp_path / "layers")
    found = {
        layer.name: {path.name for path in (layer / site.relative_to("/")).iterdir()}
        for layer in (tmp_path / "layers").iterdir()
    }
    assert found == {
        "cuda": {"nvidia", "triton"},
        "torch": {"torch", "torchgen", "torch-2.dist-info"},
        "packages": {"rich"},
    }


STATUS = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u10
Description: GNU C Library
 Package: not this

Package: vim
Status: deinstall ok config-files
Architecture: amd64
Version: 9
"""


def test_the_sbom_lists_what_dpkg_says_is_installed():
    assert [package["purl"] for package in sbom.debian_packages(STATUS)] == [
        "pkg:deb/debian/libc6@2.36-9+deb12u10?arch=amd64"
    ]


@pytest.mark.slow
def test_an_sbom_is_valid_and_the_same_each_time(tmp_path):
    status = tmp_path / "status"
    status.write_text(STATUS)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    folder = next(venv.glob("lib/python3*/site-packages")) / "rich-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: rich\nVersion: 1\nLicense: MIT\n")
    texts = []
    for number in range(2):
        path = tmp_path / f"{number}/x.cdx.json"
        sbom.write(Path(sys.prefix), venv, "router", "1", path, status)
        texts.append(path.read_text())
    assert texts[0] == texts[1]
    assert {"rich", "libc6", "python"} == {component["name"] for component in json.loads(texts[0])["components"]}
    # Here, because every process of pytest-xdist would wait for the grammars that this compiles.
    from cyclonedx.schema import SchemaVersion  # noqa: PLC0415
    from cyclonedx.validation.json import JsonStrictValidator  # noqa: PLC0415

    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(texts[0]) is None
