"""What a span says of itself: its own attributes and those that it shares with others."""

from lockstep_common.tracing import Span


def all_attributes(span: Span):
    """Its attributes, as a copy."""
    found = dict(span.attributes)
    for shared in span.shared:
        found |= shared.attributes
    return found
