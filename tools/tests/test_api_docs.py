"""docs/api.md is what the router says."""

import ast
import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from fastapi.openapi.models import OpenAPI
from lockstep_api.v1 import inference_pb2
from lockstep_common.errors import ErrorCode
from lockstep_router.console import files
from lockstep_router.faces.rest.app import create_app
from lockstep_router.faces.websocket.handshake import shake_hands
from lockstep_router.faces.websocket.messages import ClientMessage
from lockstep_tools.repository.answer_samples import SampleRouter, rest_answers, samples
from lockstep_tools.repository.api_docs import DOCUMENT, attribute_docstrings, complete, document
from lockstep_tools.repository.field_tables import Data, Of, Shape, fields, table
from lockstep_tools.repository.grpc_docs import service
from lockstep_tools.repository.management_docs import PAGES
from starlette.routing import Route
from websockets.frames import CloseCode

ROOT = DOCUMENT.parents[1]
ROUTER = ROOT / "services/router/src/lockstep_router"
COMMON = ROOT / "libs/common/src/lockstep_common"
MANAGEMENT = [COMMON / f"{name}.py" for name in ("management", "operations", "answers")]

SINGLE_WORDS = {
    "accept",
    "age",
    "allow",
    "authorization",
    "baggage",
    "connection",
    "cookie",
    "date",
    "etag",
    "expect",
    "expires",
    "forwarded",
    "host",
    "location",
    "origin",
    "pragma",
    "referer",
    "server",
    "te",
    "traceparent",
    "tracestate",
    "trailer",
    "upgrade",
    "vary",
    "via",
}
"""Names of headers without a hyphen; those with one are known by it."""
NOT_HEADERS = {
    "100-continue",
    "chatcmpl-",
    "cmpl-",
    "latin-1",
    "lockstep-common",
    "lockstep-engine",
    "lockstep-router",
    "long-text",
    "longest-text",
    "no-cache",
    "no-referrer",
    "no-store",
    "probe-answer-1",
    "probe-answer-2",
    "probe-question-1",
    "probe-question-2",
    "probe-question-3",
    "probe-system",
    "r-",
    "same-origin",
    "utf-8",
    "x-guidance",
}
"""Other texts with a hyphen in the sources: values of headers, encodings, ids, packages, questions to templates."""
OF_LIBRARIES = {"allow", "date", "grpc-timeout", "sec-websocket-accept", "sec-websocket-key", "sec-websocket-version"}
OF_LIBRARIES |= {"upgrade", "x-forwarded-proto"}
"""Headers and metadata that FastAPI, uvicorn, websockets or gRPC read or write, not the router's own sources."""


def constants(path: Path) -> Iterator[str]:
    """The texts in a file's code, docstrings left out."""
    tree = ast.parse(path.read_text())
    bare = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node not in bare:
            if isinstance(node.value, str):
                yield node.value
            elif isinstance(node.value, bytes):
                yield node.value.decode("latin-1")


def header_names(paths: list[Path]) -> set[str]:
    """The names of headers and metadata in the code of these files; of those made of parts, what they begin with."""
    hyphenated = re.compile(r"[A-Za-z][A-Za-z0-9]*(-[A-Za-z0-9]+)*(-[A-Za-z0-9]*)")
    found = set()
    for text in (text for path in paths for text in constants(path)):
        # A line of a head, or a name alone.
        name = text.partition(":")[0] if re.match(r"[A-Za-z-]+: \S.*\r\n", text, re.DOTALL) else text
        if name.lower() in SINGLE_WORDS or hyphenated.fullmatch(name):
            found.add(name.lower())
    return found - NOT_HEADERS


def section(heading: str, text: str | None = None) -> str:
    """A section of the document, until the next heading of its level."""
    text = DOCUMENT.read_text() if text is None else text
    level = heading.partition(" ")[0]
    return text.partition(f"\n{heading}\n")[2].partition(f"\n{level} ")[0]


def named_in(heading: str) -> set[str]:
    """The names of headers or metadata in the tables of a section; `x-a-*` as `x-a-`."""
    cells = re.findall(r"^\| (`[^|]*) \|", section(heading), re.MULTILINE)
    names = (name for cell in cells for name in re.findall(r"`([^`]*)`", cell))
    return {name.partition(":")[0].removesuffix("*").lower() for name in names}


def missing(found: set[str], named: set[str]) -> set[str]:
    """What a table lacks. A name that ends with a hyphen is the beginning of others."""
    return {name for name in found if not (any(map(is_begun_by(name), named)) if name[-1] == "-" else name in named)}


def is_begun_by(beginning: str):
    return lambda name: name.startswith(beginning)


def test_the_committed_document_is_what_the_router_says() -> None:
    text = DOCUMENT.read_text()
    assert complete(text) == text


def test_every_endpoint_and_error_is_in_it() -> None:
    text, api = DOCUMENT.read_text(), document()
    for path, operations in api["paths"].items():
        for method in operations:
            assert f"### `{method.upper()} {path}`" in text
    assert all(f"| `{code}` |" in text for code in ErrorCode)


def test_routes_that_the_openapi_document_leaves_out_are_in_it() -> None:
    text = DOCUMENT.read_text()
    routes = [route for route in create_app(SampleRouter(console="public")).routes if isinstance(route, Route)]
    paths = {re.sub(r":\w+}", "}", route.path) for route in routes}
    assert {"/openapi.json", "/console", "/console/{name}"} <= paths
    assert all(f" {path}`\n" in text for path in paths)


def test_its_links_lead_to_sections() -> None:
    text = DOCUMENT.read_text()
    sections = {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in text.splitlines()}
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= sections


def test_a_changed_part_is_written_again() -> None:
    text = DOCUMENT.read_text()
    assert complete(text.replace("| `internal` | 500 |", "| `internal` | 501 |")) == text


def test_every_method_and_message_of_grpc_is_in_it() -> None:
    text = DOCUMENT.read_text()
    descriptor = inference_pb2.DESCRIPTOR
    assert all(f"| `{method.name}` |" in text for method in descriptor.services_by_name["Inference"].methods)
    for message in descriptor.message_types_by_name.values():
        part = text.partition(f"### message `{message.name}`\n")[2].partition("\n###")[0]
        assert all(f"| `{field.name}` |" in part for field in message.fields), message.name


def test_a_line_that_is_not_understood_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown form"):
        service("message A {\n  group B = 1 {\n")


# Errors.


def test_every_error_says_what_it_means() -> None:
    sentences, table_of_errors = attribute_docstrings(ErrorCode), section("## Errors")
    assert sentences.keys() == ErrorCode.__members__.keys()
    for code in ErrorCode:
        sentence = sentences[code.name]
        assert re.fullmatch(r"[A-Z][^.]*\.", sentence), code
        (row,) = (row for row in table_of_errors.splitlines() if row.startswith(f"| `{code}` |"))
        assert row.endswith(f"| {sentence} |")


def test_the_openapi_document_is_valid_and_has_errors_in_openais_shape() -> None:
    api = document()
    OpenAPI.model_validate(api)
    assert "ValidationError" not in str(api)
    schemas = api["components"]["schemas"]
    assert set(re.findall(r"#/components/schemas/(\w+)", str(api))) <= schemas.keys()
    assert schemas["Error"]["properties"]["error"]["properties"]["code"]["enum"] == list(ErrorCode)
    for path, operations in api["paths"].items():
        for operation in operations.values():
            failed = {status: each for status, each in operation["responses"].items() if status[0] not in "12"}
            assert ("default" in failed) is (path not in ("/healthz", "/readyz"))
            assert all(
                each["content"]["application/json"]["schema"]["$ref"].endswith("/Error") for each in failed.values()
            )


# Headers and metadata.


def test_every_header_of_the_sources_is_in_its_table() -> None:
    paths = [path for path in ROUTER.rglob("*.py") if "grpc" not in path.parts]
    found = header_names([*paths, *MANAGEMENT, COMMON / "trace_context.py"])
    few = "x-request-timeout x-accel-buffering retry-after x-ratelimit-limit- www-authenticate etag location l5d-"
    assert set(few.split()) <= found
    assert missing(found, named_in("## Headers")) == set()


def test_every_metadata_of_the_sources_is_in_its_table() -> None:
    found = header_names([*(ROUTER / "faces/grpc").rglob("*.py")])
    few = "lockstep-http-status retry-after x-lockstep-router x-lockstep-stream-id x-session-id idempotency-key"
    assert set(few.split()) <= found
    assert missing(found, named_in("## gRPC metadata")) == set()


def test_the_tables_of_headers_have_no_others() -> None:
    found = header_names([*ROUTER.rglob("*.py"), *MANAGEMENT, COMMON / "trace_context.py"]) | OF_LIBRARIES
    named = named_in("## Headers") | named_in("## gRPC metadata")
    beginnings = tuple(each for each in found if each.endswith("-"))
    assert {name for name in named - found if not name.startswith(beginnings)} == set()


def test_headers_of_answers_are_in_their_table() -> None:
    named = named_in("## Headers")
    answers = asyncio.run(rest_answers())
    assert any(answer.status_code == 405 and "allow" in answer.headers for _, answer in answers)
    assert missing({name for _, answer in answers for name in answer.headers}, named) == set()


def test_headers_of_a_handshake_are_in_their_table() -> None:
    given = {"upgrade": "websocket", "connection": "upgrade", "sec-websocket-version": "13"}
    given |= {"sec-websocket-key": "MDEyMzQ1Njc4OWFiY2RlZg==", "sec-websocket-protocol": "lockstep.v1"}
    headers = [(name.encode(), value.encode()) for name, value in given.items()]
    scope = {"path": "/v1/stream", "method": "GET", "http_version": "1.1", "headers": headers}
    lines = shake_hands(scope, ()).decode().splitlines()[1:]
    answered = {line.partition(":")[0].lower() for line in lines}
    assert "sec-websocket-accept" in answered
    assert missing(given.keys() | answered, named_in("## Headers")) == set()


@pytest.mark.parametrize(
    "line", ['{"x-new": "1"}', 'b"x-new: 1\\r\\n"', 'headers.get("X-New")', 'f"x-new{a}"', '(b"x-new", a)']
)
def test_a_header_that_is_not_in_the_table_is_found(line: str, tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(f'"""x-docstring"""\nvalue = {line}\n')
    assert missing(header_names([source]), named_in("## Headers")) == {"x-new"}


# WebSockets.


def test_every_message_of_a_websocket_is_in_it() -> None:
    text = section("## WebSocket")
    for model in get_args(ClientMessage):
        (kind,) = get_args(model.model_fields["type"].annotation)
        part = section(f"#### Message `{kind}`", text)
        assert all(f"| `{field}` |" in part for field in model.model_fields), kind
    source = (ROUTER / "faces/websocket/messages.py").read_text()
    written = set(re.findall(r'"type": ?"(\w+)"', source))
    assert {"started", "event", "done", "error", "cancelled", "pong", "draining"} <= written
    assert all(f"| `{kind}` |" in text for kind in written)


def test_every_close_code_of_a_websocket_is_in_it() -> None:
    source = "".join((ROUTER / f"faces/websocket/{name}.py").read_text() for name in ("socket", "session", "route"))
    codes = {CloseCode[name] for name in re.findall(r"CloseCode\.(\w+)", source)}
    assert CloseCode.SERVICE_RESTART in codes
    rows = re.findall(r"^\| ([0-9, ]+) \|", section("### Close codes"), re.MULTILINE)
    assert {int(code) for code in codes} <= {int(code) for row in rows for code in row.split(",")}


# The management port.


def test_every_path_of_the_management_port_is_in_it() -> None:
    text = section("## Management port")
    paths = {each for path in MANAGEMENT for each in constants(path) if re.fullmatch(r"(/[a-z]+)+/?", each)}
    assert {"/healthz", "/metrics", "/status", "/loglevel", "/debug/profile", "/debug/trace/"} <= paths
    paths -= {"/debug/"}  # what they all begin with
    assert {
        path for path in paths | files.of("management").keys() if f"{path}`" not in text and f"{path}{{" not in text
    } == set()
    assert all(f"| `{page.method} {page.path}` |" in text for page in PAGES)


# The fields of answers.


def test_answers_have_the_fields_that_they_are_known_for() -> None:
    usage = section("### Usage")
    assert "`prompt_tokens_details.cached_tokens`" in usage
    assert "`lockstep.usage`" in section("### Chat completion chunk")
    assert "`default_sampling.repetition_penalty`" in section("### Model")
    assert '`"stream.deleted"`' in section("### Deleted stream")
    assert "`error.retry_after_s`" in section("### Messages of the router")


def test_every_event_of_a_response_is_in_it() -> None:
    source = "".join(path.read_text() for path in (ROUTER / "faces/openai/responses").glob("*.py"))
    found = {each["type"] for each in samples()["Response events"]}
    assert set(re.findall(r'"(response\.[a-z_.]+)"', source)) <= found
    part = section("### Response events")
    assert all(f"| `{kind}` |" in part for kind in found)


def test_a_field_without_a_meaning_and_a_meaning_without_a_field_are_refused() -> None:
    shape = Shape("Thing", "A thing.", {"a": "Its a.", "a.b": "Its b."})
    assert list(fields(shape, [{"a": {"b": 1}}])) == ["a", "a.b"]
    with pytest.raises(ValueError, match=r"Thing: .*: a\.c"):
        fields(shape, [{"a": {"b": 1, "c": 2}}])
    with pytest.raises(ValueError, match=r"Thing: .*: a\.b"):
        fields(shape, [{"a": {}}])
    with pytest.raises(ValueError, match="no sample"):
        fields(shape, [])


def test_forms_of_fields_are_those_of_the_samples() -> None:
    meanings = {"type": "Kind.", "a": Of("Other", "Others."), "b": Data("Data."), "c": "Numbers.", "c[].d": "D."}
    given = [{"type": "x", "a": [{"e": 1}], "b": {"any": 1}, "c": []}, {"type": "y", "a": None, "c": [{"d": 1.5}]}]
    found: dict[str, list] = {}
    rows = list(table(Shape("Thing", "A thing.", meanings), given, found))
    assert rows[2:-1] == [
        '| `type` | `"x"` or `"y"` | Kind. |',
        "| `a` | array of [Other](#other) or null | Others. |",
        "| `b` | object; may be missing | Data. |",
        "| `c` | array of object | Numbers. |",
        "| `c[].d` | number | D. |",
    ]
    assert found == {"Other": [{"e": 1}]}
