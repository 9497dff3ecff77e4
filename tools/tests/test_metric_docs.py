"""docs/metrics.md is what the code says, and every metric is fit to be documented."""

import re

import pytest
from known_series import series
from lockstep_tools.repository import metric_docs
from lockstep_tools.repository.metric_docs import DOCUMENT, complete, services

ROOT = DOCUMENT.parents[1]
DEFINITION = re.compile(r"\b(?:Counter|Gauge|Histogram|Tally|(?:Top)?Tallies|Distributions?)\(\s*\"(lockstep_\w+)\"")
ALL = [facts for each in services().values() for facts in each]


def test_the_committed_document_is_what_the_code_says() -> None:
    text = DOCUMENT.read_text()
    assert complete(text) == text


def test_every_metric_has_a_name_with_its_service_a_meaning_and_bounded_labels() -> None:
    assert len(ALL) > 90
    for facts in ALL:
        assert re.fullmatch(r"(lockstep_(router|worker|state|tls|traces?)|vllm:)[a-z_]+", facts.name), facts
        assert len(facts.meaning) > 10, facts
        assert set(facts.labels) <= set(metric_docs.LABELS), facts


def test_every_metric_that_the_sources_define_is_documented() -> None:
    sources = [path for folder in ("services", "libs") for path in (ROOT / folder).glob("*/src/**/*.py")]
    defined = {name for path in sources for name in DEFINITION.findall(path.read_text())}
    assert len(defined) > 90
    assert {name.removesuffix("_total") for name in defined} == {
        facts.name.removesuffix("_total") for facts in ALL if not facts.name.startswith("vllm:")
    }


def test_no_name_is_given_twice() -> None:
    names = [facts.name for facts in ALL]
    assert len(names) == len(set(names))


def test_no_label_is_explained_that_no_metric_has() -> None:
    assert set(metric_docs.LABELS) == {label for facts in ALL for label in facts.labels}


def test_histograms_are_of_a_base_unit() -> None:
    assert {facts.unit for facts in ALL if facts.kind == "histogram"} <= {"seconds", "tokens", "bytes"}


def test_an_abbreviated_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="lockstep_router_wait_ms: use a base unit"):
        metric_docs._unit("lockstep_router_wait_ms", "How long it waits.")


def test_series_are_named_as_queries_name_them() -> None:
    assert {
        "lockstep_router_requests_total",
        "lockstep_router_streams",
        "lockstep_router_wait_seconds_bucket",
    } <= series()
    assert "lockstep_router_requests" not in series()


def test_a_changed_table_is_written_again() -> None:
    text = DOCUMENT.read_text()
    assert complete(text.replace("| gauge |", "| counter |")) == text
