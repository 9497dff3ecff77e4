"""docs/api.md is what the router says."""

import re

import pytest
from lockstep_api.v1 import inference_pb2
from lockstep_common.errors import ErrorCode
from lockstep_tools.repository.api_docs import DOCUMENT, complete, document
from lockstep_tools.repository.grpc_docs import service


def test_the_committed_document_is_what_the_router_says() -> None:
    text = DOCUMENT.read_text()
    assert complete(text) == text


def test_every_endpoint_and_error_is_in_it() -> None:
    text, api = DOCUMENT.read_text(), document()
    for path, operations in api["paths"].items():
        for method in operations:
            assert f"### `{method.upper()} {path}`" in text
    assert all(f"| `{code}` |" in text for code in ErrorCode)


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
        section = text.partition(f"### message `{message.name}`\n")[2].partition("\n###")[0]
        assert all(f"| `{field.name}` |" in section for field in message.fields), message.name


def test_a_line_that_is_not_understood_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown form"):
        service("message A {\n  group B = 1 {\n")
