"""The checker sees each way in which a history can be wrong, and nothing wrong in right ones."""

from dataclasses import replace
from random import Random

import pytest
from lockstep_common.errors import ErrorCode
from simulated.checker import Rules, check_stream
from simulated.history import Event, History, Kind
from simulated.model import Expected, ids_of, text_of

RULES = Rules(longest_silence_s=5.0, deadline_slack_s=0.2, allowed_errors=frozenset({ErrorCode.UNAVAILABLE}))
IDS = (10, 11, 12, 13, 14, 15, 16, 17)


def history(*, end=Kind.FINISH, value="length", given=8, **fields):
    """A right history, one token in each event."""
    texts = [Event(1.0 + at, Kind.TEXT, text_of(IDS[at]), at + 1) for at in range(given)]
    end_at = (texts[-1].at if texts else 1.0) + 0.5
    return History("r", Expected(IDS, "length", len(IDS)), 0.5, events=[*texts, Event(end_at, end, value)], **fields)


def kinds(changed):
    return {violation.kind for violation in check_stream(changed, RULES)}


@pytest.mark.parametrize(
    "right",
    [
        history(),
        history(end=Kind.LEFT, value="", given=3),
        history(end=Kind.BROKEN, value="", given=0),
        history(end=Kind.ERROR, value="unavailable", given=4),
        history(end=Kind.ERROR, value="deadline_exceeded", given=2, timeout_s=2.0),
        history(usage=len(IDS)),
        history(end=Kind.ERROR, value="request_quarantined", given=2, is_poison=True),
    ],
)
def test_right_histories_are_right(right):
    assert check_stream(right, RULES) == []


@pytest.mark.parametrize("code", ["stream_not_found", "draining", "cancelled", "connection_failed", "stream_diverged"])
def test_errors_of_resumable_streams_need_an_explanation(code):
    failed = history(end=Kind.ERROR, value=code, given=3)
    assert kinds(failed) == {"unexplained error"}
    failed.explained.add(code)
    assert kinds(failed) == set()


def test_a_client_that_reconnects_may_be_silent_for_longer():
    quiet = history()
    quiet.events[-1] = replace(quiet.events[-1], at=20.0)
    assert kinds(quiet) == {"silence"}
    quiet.patience_s = 10.0
    assert kinds(quiet) == set()


def test_a_client_may_notice_its_timeout_late():
    late = history(end=Kind.ERROR, value="deadline_exceeded", timeout_s=4.0)
    late.events[-1] = replace(late.events[-1], at=9.5)
    assert kinds(late) == {"late"}
    late.tardy_s = 6.0
    assert kinds(late) == set()


def test_several_tokens_in_one_event_are_right():
    merged = history()
    text = "".join(map(text_of, IDS[:3]))
    merged.events[:3] = [Event(3.0, Kind.TEXT, text, 3)]
    assert check_stream(merged, RULES) == []


def renumbered(events):
    """The events with the count of tokens that a router would have given with them."""
    count, made = 0, []
    for event in events:
        if event.kind is Kind.TEXT:
            count += len(ids_of(event.value))
            event = replace(event, tokens=count)  # noqa: PLW2901
        made.append(event)
    return made


@pytest.mark.parametrize("at", range(len(IDS)))
@pytest.mark.parametrize("what", ["lost", "doubled", "changed", "reordered"])
def test_each_broken_token_is_seen(at, what):
    broken = history()
    texts, end = broken.events[:-1], broken.events[-1]
    if what == "lost":
        del texts[at]
    elif what == "doubled":
        texts.insert(at, texts[at])
    elif what == "changed":
        texts[at] = replace(texts[at], value=text_of(99))
    else:
        other = (at + 1) % len(IDS)
        texts[at], texts[other] = (
            replace(texts[at], value=texts[other].value),
            replace(texts[other], value=texts[at].value),
        )
    broken.events = renumbered([*texts, end])
    assert kinds(broken) & {"wrong tokens", "early end"}


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("second end", "several ends"),
        ("end twice", "several ends"),
        ("no end", "no end"),
        ("text after the end", "text after the end"),
        ("untyped error", "untyped error"),
        ("internal error", "unexplained error"),
        ("error that nothing explains", "unexplained error"),
        ("deadline before its time", "unexplained error"),
        ("deadline without a timeout", "unexplained error"),
        ("quarantine of an innocent request", "unexplained error"),
        ("wrong finish", "early end"),
        ("half a token", "broken text"),
        ("wrong count", "wrong count"),
        ("wrong usage", "wrong usage"),
        ("silence", "silence"),
        ("first token late", "silence"),
        ("late end", "late"),
        ("time runs back", "time runs back"),
    ],
)
def test_each_other_breakage_is_seen(what, kind):
    end = history().events[-1]
    broken = {
        "second end": lambda h: h.events.append(Event(end.at, Kind.ERROR, "unavailable")),
        "end twice": lambda h: h.events.append(end),
        "no end": lambda h: h.events.pop(),
        "text after the end": lambda h: h.events.append(Event(end.at, Kind.TEXT, text_of(20), 9)),
        "untyped error": lambda h: h.events.__setitem__(-1, replace(end, kind=Kind.ERROR, value="KeyError('x')")),
        "internal error": lambda h: h.events.__setitem__(-1, replace(end, kind=Kind.ERROR, value="internal")),
        "error that nothing explains": lambda h: h.events.__setitem__(
            -1, replace(end, kind=Kind.ERROR, value="draining")
        ),
        "deadline before its time": lambda h: (
            setattr(h, "timeout_s", 20.0),
            h.events.__setitem__(-1, replace(end, kind=Kind.ERROR, value="deadline_exceeded")),
        ),
        "deadline without a timeout": lambda h: h.events.__setitem__(
            -1, replace(end, kind=Kind.ERROR, value="deadline_exceeded")
        ),
        "quarantine of an innocent request": lambda h: h.events.__setitem__(
            -1, replace(end, kind=Kind.ERROR, value="request_quarantined")
        ),
        "wrong finish": lambda h: h.events.__setitem__(-1, replace(end, value="stop")),
        "half a token": lambda h: h.events.__setitem__(0, replace(h.events[0], value="00")),
        "wrong count": lambda h: h.events.__setitem__(3, replace(h.events[3], tokens=5)),
        "wrong usage": lambda h: setattr(h, "usage", 3),
        "silence": lambda h: h.events.__setitem__(-1, replace(end, at=end.at + 10)),
        "first token late": lambda h: setattr(h, "arrived_at", -9.0),
        "late end": lambda h: setattr(h, "timeout_s", 1.0),
        "time runs back": lambda h: h.events.__setitem__(2, replace(h.events[2], at=0.1)),
    }[what]
    changed = history()
    broken(changed)
    assert kind in kinds(changed)


def test_any_random_change_of_tokens_is_seen():
    """Whatever is done to the tokens: if they are not a prefix any more, it is seen."""
    rng = Random(1)
    for _ in range(2000):
        ids = list(IDS)
        for _ in range(rng.randint(1, 3)):
            at, action = rng.randrange(len(ids)), rng.randrange(4)
            if action == 0 and len(ids) > 1:
                del ids[at]
            elif action == 1:
                ids.insert(at, rng.choice(IDS))
            elif action == 2:
                ids[at] = rng.choice(IDS)
            else:
                rng.shuffle(ids)
        changed = history()
        texts = [Event(1.0 + n / 9, Kind.TEXT, text_of(each), n + 1) for n, each in enumerate(ids)]
        changed.events = [*texts, Event(3.0, Kind.FINISH, "length")]
        assert bool(kinds(changed)) == (tuple(ids) != IDS), ids
