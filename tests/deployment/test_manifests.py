"""k8s/: nothing drifts from the chart, and every folder builds. Needs helm and kubectl."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from lockstep_tools.repository import manifests

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
def test_drift_is_found_and_mended(tmp_path, capsys):
    for folder in ("charts", "k8s"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    changed = tmp_path / "k8s/base/router.yaml"
    changed.write_text("other\n")
    assert manifests.main(["--check"], tmp_path) == 1
    assert "k8s/base/router.yaml is not what the chart renders" in capsys.readouterr().err
    assert changed.read_text() == "other\n"
    assert manifests.main([], tmp_path) == 0
    assert manifests.main(["--check"], tmp_path) == 0
    assert changed.read_text() == (ROOT / "k8s/base/router.yaml").read_text()


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
def test_state_is_the_base_with_a_state_server_that_routers_know():
    base, documents = build("base"), build("overlays/state")
    added = {(each["kind"], each["metadata"]["name"]) for each in documents} - {
        (each["kind"], each["metadata"]["name"]) for each in base
    }
    kinds = ("ConfigMap", "Deployment", "NetworkPolicy", "Service", "ServiceAccount")
    assert added == {(kind, "lockstep-state") for kind in kinds}
    assert len(documents) == len(base) + len(added)
    settings = yaml.safe_load(of_kind(documents, "ConfigMap")["lockstep-router"]["data"]["config.yaml"])
    assert settings["state_server"] == "lockstep-state.lockstep.svc:9100"
    policies = of_kind(documents, "NetworkPolicy")
    for name, reaches in (("lockstep-router", True), ("lockstep-worker", False)):
        ports = [[port["port"] for port in rule["ports"]] for rule in policies[name]["spec"]["egress"]]
        assert ([9100] in ports) is reaches


def test_only_documents_that_differ_are_patches():
    before = {"a": "---\nkind: A\n---\nkind: B\n"}
    assert manifests.changed(before, {"a": "---\nkind: A\n---\nkind: B\nmore: 1\n"}) == "---\nkind: B\nmore: 1\n"


@needs_kubectl
def test_observability_is_wired_to_the_chart():
    documents = build("observability")
    assert set(of_kind(documents, "Deployment")) == {"prometheus", "grafana", "otel-collector", "jaeger"}
    maps = of_kind(documents, "ConfigMap")
    dashboards = next(document for name, document in maps.items() if name.startswith("grafana-dashboards"))
    charted = {path.name for path in (ROOT / "charts/lockstep/dashboards").iterdir()}
    assert set(dashboards["data"]) == charted
    for container in containers(documents):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert not container["image"].endswith(":latest")


def pod_specs(documents):
    return {name: each["spec"]["template"]["spec"] for name, each in of_kind(documents, "Deployment").items()}


@needs_kubectl
def test_grafana_generates_its_password_in_memory():
    """No manifest holds a password: the init container writes one to memory, and Grafana reads that file."""
    documents = build("observability")
    pod = pod_specs(documents)["grafana"]
    (init,), (grafana,) = pod["initContainers"], pod["containers"]
    variables = {each["name"]: each["value"] for each in grafana["env"]}
    assert [name for name in variables if "PASSWORD" in name] == ["GF_SECURITY_ADMIN_PASSWORD__FILE"]
    directory = str(Path(variables["GF_SECURITY_ADMIN_PASSWORD__FILE"]).parent)
    for container, read_only in ((init, False), (grafana, True)):
        (mount,) = (each for each in container["volumeMounts"] if each["mountPath"] == directory)
        assert (mount["name"], mount.get("readOnly", False)) == ("admin", read_only)
    assert {"name": "admin", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}} in pod["volumes"]
    assert init["image"] == grafana["image"]
    assert not of_kind(documents, "Secret")


@pytest.mark.skipif(shutil.which("base64") is None, reason="base64 is not installed")
@needs_kubectl
def test_each_pod_of_grafana_has_another_password(tmp_path):
    (init,) = pod_specs(build("observability"))["grafana"]["initContainers"]
    (script,) = init["args"]
    passwords = []
    for number in range(2):
        directory = tmp_path / str(number)
        directory.mkdir()
        command = [*init["command"], script.replace("/run/grafana", str(directory))]
        subprocess.run(command, timeout=10, check=True)
        (file,) = directory.iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
        passwords.append(file.read_text().strip())
    assert passwords[0] != passwords[1]
    assert all(len(password) == 32 for password in passwords)


@needs_kubectl
def test_tokens_of_observability_live_an_hour_and_who_needs_none_has_none():
    for name, pod in pod_specs(build("observability")).items():
        assert pod["automountServiceAccountToken"] is False, name
        tokens = [
            source["serviceAccountToken"]
            for volume in pod["volumes"]
            for source in volume.get("projected", {}).get("sources", [])
            if "serviceAccountToken" in source
        ]
        assert tokens == ([] if name in ("grafana", "jaeger") else [{"path": "token", "expirationSeconds": 3600}]), name
        (container,) = pod["containers"]
        mounted = [each for each in container["volumeMounts"] if each["name"] == "api-token"]
        assert all(each["readOnly"] for each in mounted)
        assert len(mounted) == len(tokens), name


@needs_kubectl
@pytest.mark.parametrize("service", ["router", "inference-worker", "kv-state-server"])
def test_images_expose_the_ports_of_their_pods(service):
    dockerfile = (ROOT / "services" / service / "Dockerfile").read_text()
    (exposed,) = (line.split()[1:] for line in dockerfile.splitlines() if line.startswith("EXPOSE "))
    for container in containers(build("overlays/state")):
        if f"/{service}:" in container["image"]:
            assert exposed == [str(port["containerPort"]) for port in container["ports"]]
            return
    pytest.fail(f"no pod runs {service}")
