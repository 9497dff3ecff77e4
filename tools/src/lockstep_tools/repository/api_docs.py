"""Write the generated parts of `docs/api.md` from the OpenAPI document, the proto file and the table of errors.

`--check` fails when they differ.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep_common.errors import MEANINGS
from lockstep_router.faces.rest.app import create_app
from lockstep_router.router import Router
from lockstep_router.settings import RouterSettings

from lockstep_tools.repository.generated_parts import fill, write_or_check
from lockstep_tools.repository.grpc_docs import service

DOCUMENT = Path(__file__).resolve().parents[4] / "docs/api.md"

_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "maxProperties": "at most {} entries",
}


def document() -> dict[str, Any]:
    """The router's OpenAPI document."""
    settings = RouterSettings.model_validate({"workers": ["unix:/nowhere"]})
    return create_app(Router(settings)).openapi()


def endpoints(api: dict[str, Any]) -> str:
    """A section for each endpoint: what it does, its parameters, the fields of its body."""
    lines = []
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            lines += [f"### `{method.upper()} {path}`", "", operation.get("description", ""), ""]
            lines += _parameters(operation.get("parameters", ()))
            body = operation.get("requestBody")
            if body is not None:
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                lines += [f"Body: [{name}](#{name.lower()}).", ""]
    return "\n".join(lines)


def bodies(api: dict[str, Any]) -> str:
    """A table for each object in a request's body: its fields, their forms, limits and defaults."""
    lines = []
    for name, schema in sorted(api["components"]["schemas"].items()):
        if "properties" not in schema:
            continue
        lines += [f"### {name}", "", " ".join(schema.get("description", "").split()), ""]
        lines += ["| field | form | default |", "| --- | --- | --- |"]
        required = schema.get("required", ())
        for field, each in schema["properties"].items():
            default = (
                "required" if field in required else f"`{json.dumps(each['default'])}`" if "default" in each else ""
            )
            lines.append(f"| `{field}` | {_form(each)} | {default} |")
        lines.append("")
    return "\n".join(lines)


def errors() -> str:
    """The table of all errors."""
    lines = ["| code | HTTP | type | gRPC |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{code}` | {each.http_status} | `{each.openai_type}` | `{each.grpc_status}` |"
        for code, each in MEANINGS.items()
    ]
    return "\n".join([*lines, ""])


def complete(text: str) -> str:
    """The document with its generated parts up to date."""
    api = document()
    parts = {"endpoints": endpoints(api), "bodies": bodies(api), "grpc": service(), "errors": errors()}
    return fill(text, parts)


def _parameters(parameters: Any) -> Iterator[str]:
    found = [each for each in parameters if each["in"] != "path"]
    for each in found:
        yield f"- {each['in']} `{each['name']}`: {each.get('description', '')}"
    if found:
        yield ""


def _form(schema: dict[str, Any]) -> str:
    """A field's form in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if kinds := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_form(kind) for kind in kinds if kind.get("type") != "null"))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    words = [schema.get("type", "any")]
    if schema.get("type") == "array":
        words.append(f"of {_form(schema.get('items', {}))}")
    limits = [sentence.format(schema[key]) for key, sentence in _LIMITS.items() if key in schema]
    return " ".join(words) + (f" ({', '.join(limits)})" if limits else "")


if __name__ == "__main__":
    write_or_check(DOCUMENT, complete, "lockstep_tools.repository.api_docs")
