"""k8s/: nothing drifts from the chart, and every folder builds. Needs helm and kubectl."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from lockstep_tools import manifests

ROOT = Path(__file__).resolve().parents[2]

needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


def build(folder):
    command = ["kubectl", "kustomize", f"k8s/{folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def of_kind(documents, kind):
    return {document["metadata"]["name"]: document for document in documents if document["kind"] == kind}


def containers(documents):
    for kind in ("Deployment", "StatefulSet"):
        for document in of_kind(documents, kind).values():
            yield from document["spec"]["template"]["spec"]["containers"]


@needs_helm
def test_nothing_has_drifted(capsys):
    assert manifests.main(["--check"]) == 0, capsys.readouterr().err


@needs_helm
def test_drift_is_found(tmp_path, monkeypatch):
    files = manifests.rendered(ROOT)
    monkeypatch.setattr(manifests, "rendered", lambda _: {**files, Path("k8s/base/router.yaml"): "other\n"})
    assert manifests.main(["--check"]) == 1


def test_documents_are_told_apart_by_their_folder():
    text = (
        "---\n# Source: lockstep/templates/router/a.yaml\nkind: A\nmanaged-by: Helm\n"
        "---\n# Source: lockstep/templates/shared/b.yaml\nkind: B\n"
        "---\n# Source: lockstep/templates/router/c.yaml\nkind: C\n"
    )
    files = manifests.split(text)
    assert list(files) == ["router", "shared"]
    documents = list(yaml.safe_load_all(files["router"]))
    assert documents == [{"kind": "A", "managed-by": "kustomize"}, {"kind": "C"}]


@needs_kubectl
def test_base_is_the_reference_model_twice():
    documents = build("base")
    assert of_kind(documents, "StatefulSet")["lockstep-worker-reference"]["spec"]["replicas"] == 2
    assert of_kind(documents, "Namespace")["lockstep"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    for document in documents:
        assert "Helm" not in str(document["metadata"].get("labels", ""))


@needs_kubectl
def test_dev_is_one_of_each_that_can_be_written_to():
    documents = build("overlays/dev")
    assert of_kind(documents, "StatefulSet")["lockstep-worker-reference"]["spec"]["replicas"] == 1
    assert of_kind(documents, "Deployment")["lockstep-router"]["spec"]["replicas"] == 1
    assert not of_kind(documents, "PodDisruptionBudget")
    for container in containers(documents):
        assert container["image"].endswith("-dev")
        assert container["securityContext"]["readOnlyRootFilesystem"] is False


@needs_kubectl
def test_gpu_has_the_example_instead_of_the_reference_model():
    documents = build("overlays/gpu")
    (worker,) = of_kind(documents, "StatefulSet").values()
    (container,) = worker["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert container["image"] == "registry.example.com/lockstep/inference-worker:0.1.0-cuda"
    assert not any("reference" in str(document["metadata"]) for document in documents)


@needs_kubectl
def test_observability_is_wired_to_the_chart():
    documents = build("observability")
    assert set(of_kind(documents, "Deployment")) == {"prometheus", "grafana", "otel-collector"}
    maps = of_kind(documents, "ConfigMap")
    dashboards = next(document for name, document in maps.items() if name.startswith("grafana-dashboards"))
    charted = {path.name for path in (ROOT / "charts/lockstep/dashboards").iterdir()}
    assert set(dashboards["data"]) == charted
    for container in containers(documents):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert not container["image"].endswith(":latest")
