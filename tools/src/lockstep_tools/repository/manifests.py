"""`python -m lockstep_tools.repository.manifests [--check]`: writes the files of `k8s/` that come from the chart.

The chart is the only source of manifests. Kustomize's base and its overlays are renderings of it, and the
observability stack uses the chart's rules and dashboards; this writes all of them, or says which have drifted.
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from lockstep_tools.failure import FAILED, CommandError

ROOT = Path(__file__).resolve().parents[4]
CHART = Path("charts/lockstep")
RELEASE = "lockstep"
"""The release and the namespace of the rendered manifests."""
RUNBOOKS = "docs/runbooks"
"""The chart's default of `monitoring.runbooks`."""

_HEADER = "# Rendered from charts/lockstep by `make manifests`. Change the chart, not this file.\n"
_SOURCE = re.compile(r"^# Source: lockstep/templates/([^/\n]+)/[^\n]*\n", re.MULTILINE)
_GPU_VALUES = CHART / "examples/llama-3-8b.yaml"
_STATE = "kv-state-server"
_HELM_TIMEOUT_S = 60
_OF_ONE = 'namespace="$namespace",release="$release"'
_ABSENT = (
    r"group by (namespace, release) (present_over_time(\1[1d]) or lockstep_worker_ready)"
    r" unless group by (namespace, release) (\1)"
)


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Write the files, or with `--check` only compare them, in the repository at `root`.

    Returns:
        0, or 1 when a file has drifted or helm failed.
    """
    parser = argparse.ArgumentParser(prog="python -m lockstep_tools.repository.manifests", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is not as rendered")
    options = parser.parse_args(arguments)
    try:
        files = rendered(root)
    except CommandError as error:
        print(f"manifests: {error.message}", file=sys.stderr)
        return error.exit_code
    drifted = [path for path, text in files.items() if _read(root / path) != text]
    drifted += stale(root, files)
    if options.check:
        for path in drifted:
            print(f"manifests: {path} is not what the chart renders; run `make manifests`", file=sys.stderr)
        return FAILED if drifted else 0
    for path in drifted:
        _write(root / path, files.get(path))
        print(path)
    return 0


def rendered(root: Path) -> dict[Path, str]:
    """Every file of `k8s/` that comes from the chart, by its path in the repository.

    Raises:
        CommandError: helm is missing, or the chart does not render.
    """
    files = {Path(f"k8s/base/{folder}.yaml"): text for folder, text in split(_template(root)).items()}
    worker = split(_template(root, "--values", str(_GPU_VALUES)))["inference-worker"]
    files[Path("k8s/overlays/gpu/model.yaml")] = _HEADER + only_model(worker)
    with_state = split(_template(root, "--set", "state.enabled=true"))
    files[Path("k8s/overlays/state/state.yaml")] = with_state.pop(_STATE)
    base = {folder: files[Path(f"k8s/base/{folder}.yaml")] for folder in with_state}
    files[Path("k8s/overlays/state/patches.yaml")] = _HEADER + changed(base, with_state)
    for path in sorted((root / CHART / "dashboards").iterdir()):
        files[Path(f"k8s/observability/dashboards/{path.name}")] = path.read_text()
    for path in sorted((root / CHART / "rules").iterdir()):
        files[Path(f"k8s/observability/rules/{path.name}")] = _HEADER + of_all_releases(path.read_text())
    return files


def of_all_releases(rules: str) -> str:
    """The chart's rules, which are of one release, as rules of every release that is scraped: they group by namespace
    and release already. What is absent has no labels, so it is looked for where it was within the last day, and where
    workers are.
    """
    rules = rules[rules.index("groups:\n") :].replace(f"{{{_OF_ONE}}}", "").replace(f"{_OF_ONE},", "")
    rules = re.sub(r"absent\((\w+)\)", _ABSENT, rules)
    return rules.replace(", namespace: $namespace, release: $release", "").replace("$runbooks", RUNBOOKS)


def split(text: str) -> dict[str, str]:
    """A rendering's documents by the chart's folder of templates, as files."""
    files: dict[str, list[str]] = {}
    for document in re.split(r"^---\n", text, flags=re.MULTILINE):
        if (source := _SOURCE.search(document)) is not None:
            body = _SOURCE.sub("", document).strip()
            files.setdefault(source[1], []).append(body.replace("managed-by: Helm", "managed-by: kustomize"))
    return {folder: _HEADER + _join(documents) for folder, documents in sorted(files.items())}


def only_model(text: str) -> str:
    """Those of the workers' documents that belong to one model, not to all."""
    return _join([document for document in _documents(text) if "lockstep.dev/model:" in document])


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """The documents that are not the same before and after, as they are after: patches of a kustomization."""
    known = {document for text in before.values() for document in _documents(text)}
    return _join([each for _, text in sorted(after.items()) for each in _documents(text) if each not in known])


def stale(root: Path, files: Mapping[Path, str]) -> list[Path]:
    """Files that the chart no longer renders, in folders that hold rendered files only."""
    folders = ("k8s/observability/rules", "k8s/observability/dashboards")
    found = [path.relative_to(root) for folder in folders for path in sorted((root / folder).glob("*"))]
    return [path for path in found if path not in files]


def _documents(text: str) -> list[str]:
    """The documents of a rendered file, without its header."""
    found = re.split(r"^---\n", text.removeprefix(_HEADER), flags=re.MULTILINE)
    return [document.strip() for document in found if document.strip()]


def _join(documents: list[str]) -> str:
    return "---\n" + "\n---\n".join(documents) + "\n"


def _template(root: Path, *options: str) -> str:
    helm = shutil.which("helm")
    if helm is None:
        raise CommandError("helm is not installed, or not on PATH", FAILED)
    command = [helm, "template", RELEASE, str(CHART), "--namespace", RELEASE, "--skip-tests"]
    command += ["--set", "monitoring.dashboards.enabled=false,monitoring.rules.enabled=false", *options]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=_HELM_TIMEOUT_S, check=False)
    if done.returncode:
        raise CommandError(f"helm cannot render the chart: {done.stderr.strip()}", FAILED)
    return done.stdout


def _read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def _write(path: Path, text: str | None) -> None:
    if text is None:
        path.unlink()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
