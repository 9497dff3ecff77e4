"""Spans of OTLP in JSON: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding."""

from collections.abc import Iterable, Mapping
from typing import Any

from lockstep_common.tracing import names

from lockstep_tools.trace.spans import Span, as_process, as_text, as_time

_ERRORS = (2, "STATUS_CODE_ERROR")


def of_otlp(body: Mapping[str, Any]) -> list[Span]:
    """The spans of a message.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, OverflowError: it is not of this form.
    """
    found: list[Span] = []
    for of_process in body["resourceSpans"]:
        resource = _attributes(of_process.get("resource", {}).get("attributes", ()))
        process = as_process(resource.get("service.name", "?"), resource.get("service.instance.id", ""))
        for of_scope in of_process.get("scopeSpans", ()):
            found += [_span(each, process) for each in of_scope.get("spans", ())]
    return found


def _span(each: Mapping[str, Any], process: str) -> Span:
    attributes = _attributes(each.get("attributes", ()))
    is_error = each.get("status", {}).get("code") in _ERRORS
    return Span(
        as_text(each["traceId"]).lower(),
        as_text(each["spanId"]).lower(),
        as_text(each.get("parentSpanId", "")).lower(),
        as_text(each["name"]),
        process,
        as_time(each["startTimeUnixNano"]),
        as_time(each["endTimeUnixNano"]),
        attributes.get(names.ERROR_TYPE, "error") if is_error else "",
        attributes,
        [(as_text(event["name"]), as_time(event["timeUnixNano"])) for event in each.get("events", ())],
    )


def _attributes(pairs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    return {as_text(pair["key"]): as_text(_value(pair.get("value", {}))) for pair in pairs}


def _value(value: Mapping[str, Any]) -> str:
    """An `AnyValue`, which has one field at most. Values in values are read one level deep: ours are not deeper."""
    for kind, found in value.items():
        if kind == "arrayValue":
            return ", ".join(as_text(next(iter(each.values()), "")) for each in found.get("values", ()))
        return as_text(found)
    return ""
