"""The init container that checks a fetched model lets nothing through that is not what it has to be."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

CHART = Path(__file__).parents[2] / "charts/lockstep"
HELM = shutil.which("helm")

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not installed")


@pytest.fixture(scope="module")
def scripts() -> list[str]:
    """The scripts of both init containers, as the chart renders them."""
    fetch = {"repository": "o/m", "revision": "0" * 40, "sha256": {"a": "0" * 64}}
    values = json.dumps({"models": [{"name": "m", "source": {"fetch": fetch}}]})
    command = [str(HELM), "template", "r", str(CHART), "-f", "-", "-s", "templates/inference-worker/statefulset.yaml"]
    done = subprocess.run(command, input=values, capture_output=True, text=True, timeout=60, check=True)
    containers = yaml.safe_load(done.stdout)["spec"]["template"]["spec"]["initContainers"]
    assert [each["name"] for each in containers] == ["model-fetch", "model-verify"]
    return [each["command"][2] for each in containers]


@pytest.fixture(scope="module")
def script(scripts: list[str]) -> str:
    """The script that checks the files."""
    return scripts[1]


def verify(script: str, model: Path, sums: dict[str, str]) -> tuple[int, str]:
    """The script's exit code and what it says, with the model in this directory."""
    assert script.count('"/model"') == 1
    here = script.replace('"/model"', repr(str(model)))
    environment = os.environ | {"MODEL_SHA256": json.dumps(sums)}
    command = [sys.executable, "-c", here]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr.strip()


def test_right_files_pass(script: str, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"1234")
    (tmp_path / "config").write_bytes(b"{}")
    sums = {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("weights", "config")}
    assert verify(script, tmp_path, sums) == (0, "")


def test_wrong_and_missing_files_are_named_and_wrong_ones_removed(script: str, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"1234")
    code, said = verify(script, tmp_path, {"weights": "0" * 64, "config": "1" * 64})
    assert code == 1
    assert said.startswith("the model is not the one of source.fetch.sha256: weights has sha256 03ac")
    assert "config: No such file or directory" in said
    assert not (tmp_path / "weights").exists()


def test_files_that_are_not_listed_are_refused_by_name(script: str, tmp_path: Path) -> None:
    model, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    for directory in (model / "more", elsewhere):
        directory.mkdir(parents=True)
        (directory / "model-2.safetensors").write_bytes(b"1234")
    for name in ("config", "chat_template.jinja", "more/README.md"):
        (model / name).write_bytes(b"{}")
    (model / "linked").symlink_to(elsewhere)
    code, said = verify(script, model, {"config": hashlib.sha256(b"{}").hexdigest()})
    assert code == 1
    names = ("chat_template.jinja", "linked", "more/README.md", "more/model-2.safetensors")
    assert said == "the model is not the one of source.fetch.sha256: " + "; ".join(f"{n} is not listed" for n in names)
    assert (model / "chat_template.jinja").exists()


def test_files_that_no_worker_reads_need_not_be_listed(script: str, tmp_path: Path) -> None:
    for name in ("config", "README.md", "LICENSE", ".gitattributes", ".cache/huggingface/config.lock", "lost+found/1"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"{}")
    assert verify(script, tmp_path, {"config": hashlib.sha256(b"{}").hexdigest()}) == (0, "")
    (tmp_path / ".cache").rename(tmp_path / "kept")
    (tmp_path / ".cache").symlink_to(tmp_path / "kept")
    assert ".cache is not listed" in verify(script, tmp_path, {"config": hashlib.sha256(b"{}").hexdigest()})[1]


def test_a_fetch_removes_what_another_revision_has_left(scripts: list[str], tmp_path: Path) -> None:
    model = tmp_path / "model"
    for name in ("config", "model-2.safetensors", "more/old", ".cache/huggingface/config.metadata"):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_bytes(b"{}")
    hub = "def snapshot_download(name, revision, local_dir, allow_patterns): print(name, revision, allow_patterns)\n"
    (tmp_path / "huggingface_hub.py").write_text(hub)
    sums = {"config": hashlib.sha256(b"{}").hexdigest()}
    variables = {"MODEL_REPOSITORY": "o/m", "MODEL_REVISION": "0" * 40, "MODEL_SHA256": json.dumps(sums)}
    command = [sys.executable, "-c", scripts[0].replace('"/model"', repr(str(model)))]
    environment = os.environ | variables | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"o/m {'0' * 40} ['config']\n"
    left = [str(path.relative_to(model)) for path in sorted(model.rglob("*")) if path.is_file()]
    assert left == [".cache/huggingface/config.metadata", "config"]
    assert verify(scripts[1], model, sums) == (0, "")
