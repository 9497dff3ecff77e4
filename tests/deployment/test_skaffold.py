"""skaffold.yaml: it keeps the rules of the schema that it uses, and all that it names exists. Needs no skaffold."""

import copy
import functools
import os
import subprocess
import tomllib
from pathlib import Path, PurePosixPath

import pytest
import yaml
from lockstep_tools.repository.images import catalog

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts/lockstep"

# skaffold.dev/docs/references/yaml, v4beta13: the keys of what is used here.
KEYS = {
    "": {"apiVersion", "kind", "metadata", "build", "deploy", "portForward", "profiles"},
    "build": {"artifacts", "tagPolicy", "local"},
    "artifact": {"image", "context", "custom", "sync"},
    "custom": {"buildCommand", "dependencies"},
    "dependencies": {"paths", "ignore"},
    "sync": {"manual"},
    "manual": {"src", "dest", "strip"},
    "release": {
        *("name", "chartPath", "namespace", "createNamespace", "wait"),
        *("valuesFiles", "setValueTemplates"),
    },
    "portForward": {"resourceType", "resourceName", "namespace", "port", "localPort"},
    "profile": {"name", "patches"},
    "patch": {"op", "path", "value"},
}


@functools.cache
def parsed():
    """Once: it takes longer than all tests here."""
    return yaml.safe_load((ROOT / "skaffold.yaml").read_text())


def load():
    """A copy that may be changed."""
    return copy.deepcopy(parsed())


def patched(name):
    """The configuration with a profile's patches, which are JSON patches (RFC 6902)."""
    config = load()
    profile = next(profile for profile in config["profiles"] if profile["name"] == name)
    for patch in profile["patches"]:
        *parents, last = patch["path"].strip("/").split("/")
        place = config
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place[part]
        if isinstance(place, list):
            if patch["op"] == "add":
                place.append(patch["value"]) if last == "-" else place.insert(int(last), patch["value"])
            else:
                place[int(last)] = patch["value"]
        elif patch["op"] == "remove":
            del place[last]
        else:
            assert patch["op"] == "add" or last in place, patch
            place[last] = copy.deepcopy(patch["value"])
    return config


def all_configurations():
    return [pytest.param(load(), id="default")] + [
        pytest.param(patched(profile["name"]), id=profile["name"]) for profile in load()["profiles"]
    ]


def test_profiles():
    assert [profile["name"] for profile in load()["profiles"]] == ["cpu", "gpu", "debug", "state"]
    for profile in load()["profiles"]:
        assert set(profile) <= KEYS["profile"]
        assert all(set(patch) <= KEYS["patch"] for patch in profile["patches"])


@pytest.mark.parametrize("config", all_configurations())
def test_every_key_is_one_of_the_schema(config):
    assert config["apiVersion"] == "skaffold/v4beta13"
    assert config["kind"] == "Config"
    assert set(config) <= KEYS[""]
    assert set(config["build"]) <= KEYS["build"]
    for artifact in config["build"]["artifacts"]:
        assert set(artifact) <= KEYS["artifact"]
        assert set(artifact["custom"]) <= KEYS["custom"]
        assert set(artifact["custom"]["dependencies"]) <= KEYS["dependencies"]
        for rule in artifact.get("sync", {"manual": []})["manual"]:
            assert set(rule) == KEYS["manual"]
    for release in config["deploy"]["helm"]["releases"]:
        assert set(release) <= KEYS["release"]
    for forward in config["portForward"]:
        assert set(forward) == KEYS["portForward"]


@pytest.mark.parametrize("config", all_configurations())
def test_the_builder_knows_every_image_and_option(config):
    for artifact in config["build"]["artifacts"]:
        script, image, *options = artifact["custom"]["buildCommand"].split()
        assert os.access(ROOT / script, os.X_OK)
        assert artifact["image"] == f"lockstep/{image}"
        assert image in catalog.IMAGES
        assert options in ([], ["--dev"], ["--dev", "--variant", "cuda"])
        assert (ROOT / artifact["context"] / catalog.IMAGES[image].project / "Dockerfile").exists()


def test_the_builder_says_what_is_missing():
    environment = {key: value for key, value in os.environ.items() if key != "IMAGE"}
    command = [ROOT / "tools/images/skaffold-build", "router"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode
    assert "IMAGE: Skaffold sets it" in done.stderr


def tracked():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [PurePosixPath(line) for line in done.stdout.splitlines()]


def matches(path, pattern):
    """Doublestar as Skaffold has it: `**` is any number of folders."""
    if pattern.endswith("/**"):
        return path.is_relative_to(pattern.removesuffix("/**"))
    head, _, tail = pattern.partition("/**/")
    return path.is_relative_to(head) and path.match(tail) if tail else str(path) == pattern


@pytest.mark.parametrize("config", all_configurations())
def test_dependencies_cover_the_sources_of_each_image(config):
    files = tracked()
    for artifact in config["build"]["artifacts"]:
        paths = artifact["custom"]["dependencies"]["paths"]
        for pattern in paths:
            assert any(matches(path, pattern) for path in files), f"{pattern} matches no file"
        image = catalog.IMAGES[artifact["image"].removeprefix("lockstep/")]
        for folder in catalog.needs(ROOT, image).sources:
            sources = [path for path in files if path.is_relative_to(folder) and path.suffix == ".py"]
            missed = [path for path in sources if not any(matches(path, pattern) for pattern in paths)]
            if "tools" not in folder:
                assert not missed, f"a change of {missed[0]} would not rebuild {artifact['image']}"


@pytest.mark.parametrize("config", all_configurations())
def test_a_changed_source_goes_to_where_the_image_has_it(config):
    for artifact in config["build"]["artifacts"]:
        if "sync" not in artifact:
            continue
        image = catalog.IMAGES[artifact["image"].removeprefix("lockstep/")]
        synced = {rule["strip"].rstrip("/") for rule in artifact["sync"]["manual"]}
        assert synced == set(catalog.needs(ROOT, image).sources)
        dockerfile = (ROOT / image.project / "Dockerfile").read_text()
        for rule in artifact["sync"]["manual"]:
            assert rule["src"].startswith(rule["strip"])
            assert rule["dest"] == "/app"
            assert rule["strip"].rstrip("/") in dockerfile


@pytest.mark.parametrize("config", all_configurations())
def test_the_release_sets_values_that_the_chart_has(config):
    (release,) = config["deploy"]["helm"]["releases"]
    values = yaml.safe_load((ROOT / release["chartPath"] / "values.yaml").read_text())
    for path in release["setValueTemplates"]:
        place = values
        for part in path.split("."):
            assert part in place, f"{path} is no value of the chart"
            place = place[part]
    for template in release["setValueTemplates"].values():
        names = [artifact["image"] for artifact in config["build"]["artifacts"]]
        assert any(template.endswith(f"_{name.replace('/', '_').replace('-', '_')}}}}}") for name in names), template
    for path in release["valuesFiles"]:
        assert yaml.safe_load((ROOT / path).read_text())


@pytest.mark.parametrize("config", all_configurations())
def test_ports_are_forwarded_to_what_the_chart_makes(config):
    services = (CHART / "templates/router/service.yaml").read_text()
    assert "lockstep.router.name" in services or "router" in services
    assert config["portForward"][0]["resourceName"] == "lockstep-router"
    assert config["portForward"][0]["port"] == 8000
    ports = [forward["localPort"] for forward in config["portForward"]]
    assert len(set(ports)) == len(ports)


def test_images_for_development_heed_what_the_debug_profile_sets():
    values = yaml.safe_load((ROOT / "k8s/skaffold/debug.yaml").read_text())
    services = {"router": "router", "modelDefaults": "inference-worker", "state": "kv-state-server"}
    for options, image in ((values[key], image) for key, image in services.items()):
        (variable,) = options["env"]
        _, _, dev = (ROOT / catalog.IMAGES[image].project / "Dockerfile").read_text().partition("FROM runtime AS dev")
        assert f"exec python ${variable['name']} -m lockstep_" in dev
        assert "5678" in variable["value"]


def test_a_reload_has_no_drain():
    """What ends a process for its reload has to be over before watchfiles kills it, after 20 s."""
    values = yaml.safe_load((ROOT / "k8s/skaffold/development.yaml").read_text())
    values |= yaml.safe_load((ROOT / "k8s/skaffold/state.yaml").read_text())
    for options in (values["router"], values["modelDefaults"], values["state"]):
        assert sum(options["settings"].values()) <= 5


def test_versions_agree():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "services/router/pyproject.toml").read_text())
    assert chart["appVersion"] == project["project"]["version"] == catalog.version(ROOT)
