"""The development loop: a changed source file is copied into running pods as Skaffold does it; they run the new code.

LOCKSTEP_DEV_IMAGES names the registry with the images of `make images DEV=1`; without it nothing here runs.
"""

import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
import yaml
from helm import Installation, install
from kube import Namespaces
from lockstep_tools.chaos.release import ROUTER, WORKER, of
from lockstep_tools.failure import CommandError
from machine import wait_for

ROOT = Path(__file__).parents[2]
REGISTRY = os.environ.get("LOCKSTEP_DEV_IMAGES", "")

pytestmark = pytest.mark.skipif(not REGISTRY, reason="LOCKSTEP_DEV_IMAGES not set")

_RELOADED_S = 120.0


@pytest.fixture(scope="module")
def developed(namespaces: Namespaces) -> Iterator[Installation]:
    """A release with the values of `skaffold dev`, without policies: the API server looks into its pods."""
    version = yaml.safe_load((ROOT / "charts/lockstep/Chart.yaml").read_text())["appVersion"]
    values = yaml.safe_load((ROOT / "k8s/skaffold/development.yaml").read_text())
    values["router"]["image"] = {"tag": f"{version}-dev"}
    values["modelDefaults"] |= {"tp": 1, "image": {"tag": f"{version}-cpu-dev"}}
    values["networkPolicy"] = {"enabled": False}
    with install(namespaces.new("dev"), REGISTRY, values) as installation:
        yield installation


@pytest.mark.parametrize(
    ("component", "container", "source", "asked", "old"),
    [
        (ROUTER, "router", "services/router/src/lockstep_router/faces/rest/app.py", "8000/proxy/healthz", '"alive"'),
        (
            *(WORKER, "worker", "services/inference-worker/src/lockstep_worker/metrics.py"),
            *("9001/proxy/metrics", '"1 while the worker takes requests"'),
        ),
    ],
)
def test_an_edit_is_answered_by_the_running_pod(
    developed: Installation, component: str, container: str, source: str, asked: str, old: str
) -> None:
    pod = of(developed.release.pods(), component)[0]
    text = (ROOT / source).read_text()
    assert text.count(old) == 1
    new = f'"edited {old[1:]}'
    path = f"/api/v1/namespaces/{developed.namespace}/pods/{pod.name}:{asked}"
    assert old.strip('"') in developed.kubectl.run("get", "--raw", path)
    sync(developed, pod.name, container, source, text.replace(old, new))

    def answers() -> bool:
        try:
            return new.strip('"') in developed.kubectl.run("get", "--raw", path)
        except CommandError:
            return False  # it is just starting

    wait_for(answers, f"the {container} answers with the new code", _RELOADED_S, every_s=0.5)
    developed.await_whole()
    (after,) = [each for each in developed.release.pods() if each.name == pod.name]
    assert (after.uid, after.restarts) == (pod.uid, pod.restarts)


def sync(installation: Installation, pod: str, container: str, source: str, text: str) -> None:
    """What Skaffold does with a changed file: a tar of what its rules make of it, unpacked at the container's root."""
    data = text.encode()
    entry = tarfile.TarInfo(destination(source).lstrip("/"))
    entry.size = len(data)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(entry, io.BytesIO(data))
    command = ["kubectl", "-n", installation.namespace, "exec", "-i", pod, "-c", container, "--"]
    command += ["tar", "xmf", "-", "-C", "/", "--no-same-owner"]
    done = subprocess.run(command, input=packed.getvalue(), capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()


def destination(source: str) -> str:
    """Where the rules of skaffold.yaml put a file."""
    artifacts = yaml.safe_load((ROOT / "skaffold.yaml").read_text())["build"]["artifacts"]
    rules = [rule for artifact in artifacts for rule in artifact.get("sync", {"manual": []})["manual"]]
    (found,) = {
        str(PurePosixPath(rule["dest"]) / source.removeprefix(rule["strip"]))
        for rule in rules
        if source.startswith(rule["strip"])
    }
    return found
