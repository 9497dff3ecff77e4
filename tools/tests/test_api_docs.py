"""docs/api.md is what the router says."""

import re

from lockstep_common.errors import ErrorCode
from lockstep_tools.repository.api_docs import DOCUMENT, complete, document


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
