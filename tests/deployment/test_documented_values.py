"""The values and commands that docs/deployment.md and the runbooks show are those of the chart, the Makefile and the
command line; the messages of probes in docs/troubleshooting.md are of the chart's probes."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from lockstep_common.errors import ErrorCode
from lockstep_router.settings import RouterSettings
from lockstep_state.settings import StateSettings
from lockstep_tools.cli import parse
from lockstep_tools.repository.images.catalog import IMAGES
from lockstep_worker.settings import WorkerSettings
from pydantic import BaseModel

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/deployment.md").read_text()
RUNBOOKS = (ROOT / "docs/runbooks/README.md").read_text()
TROUBLES = (ROOT / "docs/troubleshooting.md").read_text()
CHART = ROOT / "charts/lockstep"
SETTINGS: dict[str, type[BaseModel]] = {
    "router": RouterSettings,
    "modelDefaults": WorkerSettings,
    "state": StateSettings,
}
"""By where the chart has their values."""
NO_SETTINGS = frozenset({"requests_per_minute", "tokens_per_minute", "max_tokens", "ejected_because"}).union(
    ErrorCode, ("inter_token_deadline", "permission_denied", "read_only", "not_durable")
)
"""Fields of tenants, of requests and of the status, error codes and labels, which runbooks name besides."""
SCHEMA = json.loads((ROOT / "charts/lockstep/values.schema.json").read_text())
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
VALUES = [block for language, block in BLOCKS if language == "yaml"]
CODE = "".join(block for language, block in BLOCKS if language in ("", "bash"))


def _merged(defaults: Any, values: Any) -> Any:
    """Values over the chart's own, as Helm puts them."""
    if not isinstance(defaults, dict) or not isinstance(values, dict):
        return values
    return defaults | {name: _merged(defaults.get(name), value) for name, value in values.items()}


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    return schema["properties"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("values", VALUES, ids=range(len(VALUES)))
def test_values_are_those_of_the_chart(values: str) -> None:
    import jsonschema  # noqa: PLC0415 - takes a second, and each process of pytest-xdist imports this file

    defaults = yaml.safe_load((ROOT / "charts/lockstep/values.yaml").read_text())
    jsonschema.validate(_merged(defaults, yaml.safe_load(values)), SCHEMA)


@pytest.mark.parametrize("text", [TEXT, RUNBOOKS], ids=["deployment", "runbooks"])
def test_set_values_exist(text: str) -> None:
    paths = re.findall(r"--set\s+([A-Za-z._]+)=", text)
    assert len(paths) > 3
    for path in paths:
        names, _, setting = path.partition(".settings.")
        schema = SCHEMA
        for name in names.split("."):
            assert name in _properties(schema), path
            schema = _properties(schema)[name]
        if setting:
            assert setting in SETTINGS[names].model_fields, path


def test_settings_that_runbooks_name_exist() -> None:
    known = NO_SETTINGS.union(*(settings.model_fields for settings in SETTINGS.values()))
    for path in (ROOT / "docs/runbooks").glob("Lockstep*.md"):
        named = re.findall(r"`(?!lockstep_)([a-z]+(?:_[a-z]+)+)`", path.read_text().partition("## Do")[2])
        assert known.issuperset(named), path


def test_commands_can_be_parsed() -> None:
    commands = re.findall(r"^lockstep (.*)$", CODE, re.MULTILINE)
    assert len(commands) > 3
    for command in commands:
        parse(shlex.split(re.sub(r"\s+>\s*\S+", "", command), comments=True))


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"\bmake ([a-z-]+)", CODE)
    assert targets
    for target in targets:
        assert f"\n{target}:" in makefile, target


def test_first_request_is_for_the_model_of_the_first_values() -> None:
    (served,) = [model["servedName"] for model in yaml.safe_load(VALUES[0])["models"]]
    assert re.findall(r"""-d '{"model": "([^"]*)""", CODE) == [served]


def test_all_images_are_named() -> None:
    for name in IMAGES:
        assert f"lockstep/{name}:" in TEXT, name


def test_probes_fail_with_messages_of_http() -> None:
    worker = (CHART / "templates/inference-worker/statefulset.yaml").read_text()
    paths = re.findall(r'include "lockstep.probe" \(dict "root" \$ "path" "(/\w+)"\)', worker)
    (port,) = re.findall(r"name: management, containerPort: (\d+)", worker)
    messages = re.findall(r"(?:Startup|Readiness|Liveness) probe failed: ([^\n`]+)", TROUBLES)
    assert len(messages) > 2
    for message in messages:
        asked = re.match(r'Get "http://[0-9.]+:(\d+)(/\w+)": ', message)
        assert message == "HTTP probe failed with statuscode: 503" or (asked and asked[1] == port and asked[2] in paths)
    assert "NOT_SERVING" not in TROUBLES


def test_upgrades_take_the_values_of_a_new_chart() -> None:
    """`--reuse-values` leaves out what a new version of the chart adds."""
    assert "--reset-then-reuse-values" in TEXT
    assert "--reuse-values" not in TEXT + TROUBLES
