"""Write the generated parts of `docs/api.md` from the OpenAPI document, the proto file, the table of errors, and
answers that the router's code makes.

`--check` fails when they differ.
"""

import ast
import inspect
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from lockstep_common.errors import MEANINGS, ErrorCode
from lockstep_router.faces.openai.fields import IGNORED, UNSUPPORTED
from lockstep_router.faces.rest.app import create_app
from lockstep_router.faces.websocket.messages import ClientMessage
from starlette.routing import Route

from lockstep_tools.repository.answer_docs import ANSWERS, answers, socket_messages
from lockstep_tools.repository.answer_samples import SampleRouter
from lockstep_tools.repository.generated_parts import fill, write_or_check
from lockstep_tools.repository.grpc_docs import service
from lockstep_tools.repository.management_docs import pages

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

_OTHERS = {
    "/openapi.json": "Describe this API.",
    "/console": "Lead to the web console, if `console` is `public`.",
    "/console/{name}": "Show the [web console](console.md), if `console` is `public`. Its page is `/console/`; its "
    "files need no key, what it shows does.",
}
"""What those routes do that the OpenAPI document does not have."""


def document() -> dict[str, Any]:
    """The router's OpenAPI document."""
    return create_app(SampleRouter()).openapi()


def endpoints(api: dict[str, Any]) -> str:
    """A section for each endpoint: what it does, its parameters, its body and its answer."""
    lines = []
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            lines += [f"### `{method.upper()} {path}`", "", operation.get("description", ""), ""]
            lines += _parameters(operation.get("parameters", ()))
            body = operation.get("requestBody")
            if body is not None:
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                lines += [f"Body: [{name}](#{name.lower()}).", ""]
            lines += [f"Answer: {ANSWERS[method.upper(), path]}", ""]
    for path in other_paths():
        lines += [f"### `GET {path}`", "", _OTHERS[path], "", f"Answer: {ANSWERS['GET', path]}", ""]
    return "\n".join(lines)


def other_paths() -> list[str]:
    """The paths of routes that the OpenAPI document does not have."""
    app = create_app(SampleRouter(console="public"))
    routes = [route for route in app.routes if isinstance(route, Route) and not route.include_in_schema]
    return [re.sub(r":\w+}", "}", route.path) for route in routes]


def bodies(api: dict[str, Any]) -> str:
    """A table for each object in a request's body: its fields, their forms, limits, defaults and meanings."""
    lines = []
    schemas = api["components"]["schemas"]
    for name in sorted(_referred(api["paths"], schemas)):
        lines += [f"### {name}", "", " ".join(schemas[name]["description"].split()), "", *_fields(schemas[name])]
    return "\n".join(lines)


def other_fields() -> str:
    """Fields of OpenAI's API that bodies may have although no table has them."""
    refused = (f"| `{name}` | {sentence} |" for name, (_, sentence) in UNSUPPORTED.items())
    ignored = ", ".join(f"`{name}`" for name in sorted(IGNORED))
    return "\n".join(
        (f"Accepted and ignored: {ignored}.", "", "| field | other values |", "| --- | --- |", *refused, "")
    )


def client_messages() -> str:
    """A table for each message that a client sends on a WebSocket."""
    lines = []
    for model in get_args(ClientMessage):
        schema = model.model_json_schema()
        lines += [
            f"#### Message `{schema['properties']['type']['const']}`",
            "",
            schema["description"],
            "",
            *_fields(schema),
        ]
    return "\n".join(lines)


def errors() -> str:
    """The table of all errors."""
    sentences = attribute_docstrings(ErrorCode)
    lines = ["| code | HTTP | type | gRPC | |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| `{code}` | {each.http_status} | `{each.openai_type}` | `{each.grpc_status}` | {sentences[code.name]} |"
        for code, each in MEANINGS.items()
    ]
    return "\n".join([*lines, ""])


def attribute_docstrings(owner: type) -> dict[str, str]:
    """The strings below the attributes of a class, by the attributes' names."""
    (definition,) = ast.parse(inspect.getsource(owner)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        target.id: " ".join(after.value.value.split())
        for before, after in pairwise(definition.body)
        if isinstance(before, ast.Assign) and isinstance(target := before.targets[0], ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
    }


def complete(text: str) -> str:
    """The document with its generated parts up to date."""
    api = document()
    parts = {
        "endpoints": endpoints(api),
        "bodies": bodies(api),
        "other fields": other_fields(),
        "answers": answers(),
        "client messages": client_messages(),
        "router messages": socket_messages(),
        "grpc": service(),
        "management": pages(),
        "errors": errors(),
    }
    return fill(text, parts)


def _referred(part: Any, schemas: dict[str, Any]) -> set[str]:
    """The names of the schemas that request bodies in a part of the document refer to, and of those in them."""
    if isinstance(part, list):
        return set().union(*(_referred(each, schemas) for each in part))
    if not isinstance(part, dict):
        return set()
    names = {part["$ref"].rpartition("/")[2]} if "$ref" in part else set()
    inner = [schemas[name] for name in names] + [each for name, each in part.items() if name != "responses"]
    return names | _referred(inner, schemas)


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    """The table of an object's fields.

    Raises:
        ValueError: a field has no description.
    """
    required = schema.get("required", ())
    yield from ("| field | form | default | meaning |", "| --- | --- | --- | --- |")
    for name, each in schema["properties"].items():
        meaning = "The kind of the object." if "const" in each else each.get("description")
        if not meaning:
            raise ValueError(f"{schema['title']}.{name} has no description")
        default = "required" if name in required else f"`{json.dumps(each['default'])}`" if "default" in each else ""
        yield f"| `{name}` | {_form(each)} | {default} | {meaning} |"
    yield ""


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
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in values)
    words = [schema.get("type", "any")]
    if schema.get("type") == "array":
        words.append(f"of {_form(schema.get('items', {}))}")
    limits = [sentence.format(schema[key]) for key, sentence in _LIMITS.items() if key in schema]
    return " ".join(words) + (f" ({', '.join(limits)})" if limits else "")


if __name__ == "__main__":
    write_or_check(DOCUMENT, complete, "lockstep_tools.repository.api_docs")
