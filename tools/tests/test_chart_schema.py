import json
import re
from typing import Annotated, Literal

import lockstep_router.metrics
import lockstep_state.metrics
import lockstep_worker.gpu_metrics
import lockstep_worker.metrics
import pytest
import yaml
from lockstep_common.settings import ServiceSettings
from lockstep_common.telemetry import REGISTRY
from lockstep_router.processes.answers import process_metrics
from lockstep_tools.repository.chart_schema import CHART, SERVICES, ChartError, complete, definition
from lockstep_worker.quantities import QUANTITY, Bytes, BytesOrNone, parse_bytes
from prometheus_client import CollectorRegistry
from pydantic import Field
from pydantic_settings import NoDecode


class Settings(ServiceSettings):
    mine: str = Field(description="the chart's")
    size: Bytes | None = Field(None, description="a size")
    room: BytesOrNone = Field(0, description="a room")
    count: int | None = Field(None, ge=1, description="a count")
    share: float = Field(0.5, gt=0, le=1, description="a share")
    level: Literal["low", "high"] = Field("low", description="a level")
    names: Annotated[tuple[str, ...], NoDecode] = Field((), max_length=3, description="names")
    pairs: Annotated[dict[str, str], NoDecode] = Field(default_factory=dict, description="pairs")


def test_limits_are_those_of_the_service():
    made = definition(Settings, {"mine": "use that"})
    assert made["additionalProperties"] is False
    assert made["properties"] == {
        "mine": {"description": "Not to be set: use that."},
        "size": {
            "description": "a size",
            "type": ["string", "integer"],
            "pattern": QUANTITY,
            "exclusiveMinimum": 0,
        },
        "room": {"description": "a room", "type": ["string", "integer"], "pattern": QUANTITY, "minimum": 0},
        "count": {"description": "a count", "type": "integer", "minimum": 1},
        "share": {"description": "a share", "type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "level": {"description": "a level", "type": "string", "enum": ["low", "high"]},
        "names": {"description": "names", "type": "array", "items": {"type": "string"}},
        "pairs": {"description": "pairs", "type": "object", "additionalProperties": {"type": "string"}},
    }


def test_a_setting_that_the_chart_decides_has_to_be_one():
    with pytest.raises(ChartError, match="Settings has no other"):
        definition(Settings, {"mine": "", "other": ""})


def test_a_type_of_a_new_kind_is_not_guessed():
    class Unknown(ServiceSettings):
        either: int | str = Field(1, description="one or the other")

    with pytest.raises(ChartError, match=r"Unknown\.either"):
        definition(Unknown, {})


def test_the_committed_schema_is_what_the_services_say():
    present = (CHART / "values.schema.json").read_text()
    owned = yaml.safe_load((CHART / "owned-settings.yaml").read_text())
    assert complete(json.loads(present), owned) == present


def test_the_schema_knows_the_values_and_no_others():
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert sorted(differences(schema, schema, values)) == []


def differences(schema: dict, part: dict, values: dict, at: str = ""):
    """Keys that only the values or only the schema has, in maps without further keys."""
    if "$ref" in part:
        part = lookup(schema, part["$ref"])
    if part.get("additionalProperties") is not False or "patternProperties" in part or at.endswith(".settings"):
        return
    open_lists = {".resources.claims"}
    optional = {key for key in part["properties"] if f"{at}.{key}".endswith(tuple(open_lists))}
    if at.rpartition(".")[2] in {"startup", "liveness", "readiness"}:
        optional |= set(part["properties"])
    yield from (f"{at}.{key}" for key in set(part["properties"]) ^ set(values) if key not in optional)
    for key, value in values.items():
        if isinstance(value, dict) and key in part["properties"]:
            yield from differences(schema, part["properties"][key], value, f"{at}.{key}")


def lookup(schema: dict, reference: str) -> dict:
    for name in reference.removeprefix("#/").split("/"):
        schema = schema[name]
    return schema


def test_an_entry_of_models_takes_what_model_defaults_take():
    schema = json.loads((CHART / "values.schema.json").read_text())
    own = set(schema["$defs"]["model"]["properties"]) - set(schema["properties"]["modelDefaults"]["properties"])
    assert own == {"name", "servedName", "source"}


@pytest.mark.parametrize("setting", ["kv_memory", "host_cache_bytes", "state_queue_bytes", "min_shm"])
@pytest.mark.parametrize(
    "text",
    [
        "512Mi", "2Gi", "1.5G", "4096", "1KiB", " 3M ", "0", "0.5T", "3M\n",
        "", "64000k", "1e9", "1E9", "1Pi", "1P", "500m", "-1", "+1", "1.", ".5", "1 Gi", "1Gi x", "\v1", "1\xa0",
        "\u0661", "GB",
    ],
)  # fmt: skip
def test_the_schema_takes_the_sizes_that_the_worker_takes(setting: str, text: str):
    schema = json.loads((CHART / "values.schema.json").read_text())
    try:
        parse_bytes(text)
        is_taken = True
    except ValueError:
        is_taken = False
    made = schema["$defs"]["workerSettings"]["properties"][setting]
    assert "string" in made["type"]
    assert (re.search(made["pattern"], text) is not None) == is_taken
    assert is_taken == bool(re.fullmatch(r"[ \n]*[0-9]+(\.[0-9]+)?([KMGT]i?)?B?[ \n]*", text))


@pytest.mark.parametrize("service", SERVICES)
def test_settings_of_the_services_have_descriptions(service: str):
    made = definition(SERVICES[service], {})
    assert all(each["description"] for each in made["properties"].values())


def test_alerts_and_dashboards_use_existing_metrics():
    assert lockstep_router.metrics
    assert lockstep_state.metrics
    assert lockstep_worker.metrics
    assert lockstep_worker.gpu_metrics
    of_parent = CollectorRegistry()
    process_metrics(of_parent)
    metrics = [*REGISTRY.collect(), *of_parent.collect()]
    exported = {sample for metric in metrics for sample in sample_names(metric.name, metric.type)}
    files = [*(CHART / "rules").glob("*.yaml"), *(CHART / "dashboards").glob("*.json")]
    scaled = CHART / "templates/inference-worker/scaledobject.yaml"
    asked = {
        name
        for path in (*files, scaled)
        for name in re.findall(r"\blockstep_(?:router|worker|state)_\w+", path.read_text())
    }  # fmt: skip
    assert len(files) == 8
    assert asked
    assert asked - exported == set()


def sample_names(name: str, kind: str) -> list[str]:
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
    return [name + suffix for suffix in suffixes.get(kind, [""])]
