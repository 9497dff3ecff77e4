"""Write the services' settings into the chart's `values.schema.json`; `--check` fails when they differ (CI).

Two parts of the schema are generated, the rest is written by hand. The definitions of `settings` come from the
services' settings classes: the chart accepts exactly the services' settings, with the same limits. (Settings that the
chart decides are listed in `owned-settings.yaml`; the schema accepts them, and the templates refuse them with a
message.) An entry of `models` accepts all keys of `modelDefaults`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, get_args

import yaml
from lockstep_common.settings import ServiceSettings
from lockstep_router.settings import RouterSettings
from lockstep_state.settings import StateSettings
from lockstep_worker.quantities import QUANTITY, Bytes, parse_bytes
from lockstep_worker.settings import WorkerSettings
from pydantic import BeforeValidator

CHART = Path(__file__).resolve().parents[4] / "charts/lockstep"
SERVICES: dict[str, type[ServiceSettings]] = {
    "router": RouterSettings,
    "worker": WorkerSettings,
    "state": StateSettings,
}
"""Settings classes by their names in `owned-settings.yaml` and in the schema's definitions."""

_OF_A_MODEL = ("name", "servedName", "source")
_KEPT = (
    "type", "items", "additionalProperties", "enum", "pattern", "minimum", "maximum", "exclusiveMinimum", "minLength",
    "maxLength",
)  # fmt: skip


class ChartError(Exception):
    """What is wrong with the chart's files, in one sentence."""


def definition(settings: type[ServiceSettings], owned: dict[str, str]) -> dict[str, Any]:
    """The schema of a service's `settings` in the values.

    Args:
        settings: the service's class.
        owned: names that the chart decides, each with what to do instead.

    Raises:
        ChartError: a name in `owned` is no setting.
    """
    unknown = sorted(set(owned) - set(settings.model_fields))
    if unknown:
        raise ChartError(f"owned-settings.yaml: {settings.__name__} has no {', '.join(unknown)}")
    described = settings.model_json_schema(by_alias=False)["properties"]
    properties = {
        name: {"description": f"Not to be set: {owned[name]}."} if name in owned else _property(settings, name, schema)
        for name, schema in described.items()
    }
    return {
        "description": f"Settings of {settings.__module__}; made by `make chart-docs`.",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _property(settings: type[ServiceSettings], name: str, schema: dict[str, Any]) -> dict[str, Any]:
    described = {"description": schema["description"]}
    field = settings.model_fields[name]
    # A setting that may be None is left out of the values instead.
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    if len(kinds) != 1 or "$ref" in kinds[0]:
        raise ChartError(f"{settings.__name__}.{name}: chart_schema does not know this type")
    described |= {key: kinds[0][key] for key in _KEPT if key in kinds[0]}
    is_positive = Bytes in get_args(field.annotation)
    if is_positive or BeforeValidator(parse_bytes) in field.metadata:
        # Limits behind a validator are not in the schema.
        least = {"exclusiveMinimum": 0} if is_positive else {"minimum": 0}
        described = least | described | {"type": ["string", "integer"], "pattern": QUANTITY}
    return described


def complete(schema: dict[str, Any], owned: dict[str, dict[str, str]]) -> str:
    """The text of `values.schema.json` with its generated parts up to date."""
    made = {f"{name}Settings": definition(settings, owned[name]) for name, settings in SERVICES.items()}
    model = schema["$defs"]["model"]
    options = schema["properties"]["modelDefaults"]["properties"]
    inherited = {name: {"$ref": f"#/properties/modelDefaults/properties/{name}"} for name in options}
    own = {name: option for name, option in model["properties"].items() if name in _OF_A_MODEL}
    made["model"] = model | {"properties": own | inherited}
    return json.dumps(schema | {"$defs": schema["$defs"] | made}, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the schema, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed schema, write nothing")
    check = parser.parse_args().check
    path = CHART / "values.schema.json"
    present = path.read_text()
    try:
        fresh = complete(json.loads(present), yaml.safe_load((CHART / "owned-settings.yaml").read_text()))
    except ChartError as error:
        sys.exit(str(error))
    if not check:
        path.write_text(fresh)
    elif fresh != present:
        sys.exit("values.schema.json and the services' settings differ: run `make chart-docs` and commit the result")
    print("values.schema.json has the services' settings")


if __name__ == "__main__":
    main()
