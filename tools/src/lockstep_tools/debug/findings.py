"""What two looks at a worker say: which rank is stopped or stuck, and where it is."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep_common.hang import Progress, find_hung

_STUCK_S = 0.5
"""A step that runs for longer between two looks without any rank's progress is worth a sentence."""
_SHOWN_FRAMES = 8
_AND_STACK = "`kill -CONT` lets it go on. It ran for a moment now, to write where it was stopped"
_NO_STACK = "its stack cannot be read"


@dataclass(frozen=True)
class Finding:
    """One sentence, and the stack that belongs to it."""

    sentence: str
    stack: str = ""


def of_worker(name: str, first: Mapping[str, Any], last: Mapping[str, Any]) -> list[Finding]:
    """Findings about a worker's ranks, from `engine` in two answers of /debug/stacks; none: nothing is unusual."""
    found = [Finding(f"{name}: ranks are {last['state']}: {last.get('reason') or 'no reason is known'}")]
    found = [] if last.get("state") == "ready" else found
    if first.get("epoch") != last.get("epoch"):
        # The ranks of the first look have been killed meanwhile.
        return found + _unusual(name, first.get("ranks", []))
    ranks = last.get("ranks", [])
    seen = {each["rank"]: each for each in first.get("ranks", [])}
    unusual = _unusual(name, ranks)
    found += unusual
    is_stuck = (
        last.get("step_runs_s", 0.0) > _STUCK_S
        and bool(ranks)
        and all(each["rank"] in seen and seen[each["rank"]]["steps"] == each["steps"] for each in ranks)
        and all(_counters(seen[each["rank"]]) == _counters(each) for each in ranks)
    )
    return [*found, _stuck(name, ranks, last["step_runs_s"])] if is_stuck and not unusual else found


def of_log(name: str, lines: Sequence[str]) -> list[Finding]:
    """The newest loss of a worker's ranks in its log, with the stack of the rank that failed if it has left one."""
    entries = []
    for line in lines:
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue  # it was cut
    failed = next((each for each in reversed(entries) if each.get("message") == "rank failed"), None)
    if failed is None:
        return []
    of_rank = [each for each in entries if all(each.get(key) == failed.get(key) for key in ("rank", "epoch"))]
    texts = [str(each.get(field) or "") for each in of_rank for field in ("exception", "stack", "stderr")]
    states = [f", it was {each['process_state']}" for each in of_rank if "process_state" in each]
    sentence = (
        f"{name}: rank {failed.get('rank')} (pid {failed.get('pid')}) FAILED at {failed.get('time')} after "
        f"{failed.get('step')} steps of epoch {failed.get('epoch')}: {failed.get('reason')}{''.join(states[-1:])}"
    )
    return [Finding(sentence, _frames("\n".join(texts)))]


def _unusual(name: str, ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Ranks that are stopped, or gone, and then where the others are."""
    unusual = [each for each in ranks if each["process_state"].startswith(("stopped", "ended"))]
    found = []
    for rank in unusual:
        sentence = f"{name}: {_called(rank)} is {rank['process_state'].upper()} after {_progress(rank)}"
        progress = [f"rank {each['rank']} has {_progress(each)}" for each in ranks if each is not rank]
        waiting = f"; {', '.join(progress)}" if progress else ""
        stack = _innermost(rank)
        found.append(Finding(f"{sentence}{waiting}; {_AND_STACK if stack else _NO_STACK}", stack))
    others = [each for each in ranks if unusual and each not in unusual and each["stack"]]
    return found + [Finding(f"{name}: {_called(each)} is in", _innermost(each)) for each in others]


def _stuck(name: str, ranks: list[Mapping[str, Any]], runs_s: float) -> Finding:
    """The rank that the others wait for, by the driver's rule for hangs."""
    index, what = find_hung([_counters(each) for each in ranks])
    behind = ranks[index]
    since = f"no rank has moved for the {runs_s:.1f} s of this step"
    if _is_shared(behind, ranks):
        sentence = (
            f"{name}: {since}, and all ranks are at the same place ({_progress(behind)}); {_called(behind)} is in"
        )
    else:
        why = f"; {what}" if what else ""
        stuck = f"{name}: {_called(behind)} is STUCK: {since}{why}"
        sentence = f"{stuck}; it has {_progress(behind)}, and the others wait for it in"
    return Finding(sentence, _innermost(behind))


def _counters(rank: Mapping[str, Any]) -> Progress:
    """How far a rank has come. Workers of earlier versions report no marks of devices."""
    return Progress(rank["collectives"], rank.get("launched", 0), rank.get("reached", 0))


def _is_shared(behind: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all ranks are at the place of the one that has come least far, so that none of them is to blame."""
    own, all_counters = _counters(behind), [_counters(each) for each in ranks]
    if not all(each.launched for each in all_counters):
        return all(each.collectives == own.collectives for each in all_counters)
    # A host that has launched more does not matter while its device is at work.
    is_at_work = own.reached < own.launched
    return all(each.reached == own.reached and (is_at_work or each == own) for each in all_counters)


def _called(rank: Mapping[str, Any]) -> str:
    return f"rank {rank['rank']} (pid {rank['pid']})"


def _progress(rank: Mapping[str, Any]) -> str:
    launched, reached = rank.get("launched", 0), rank.get("reached", 0)
    marks = f", and reached mark {reached} of {launched}" if launched else ""
    return f"{rank['steps']} steps and {rank['collectives']} collectives{marks}"


def _innermost(rank: Mapping[str, Any]) -> str:
    """The innermost frames of the main thread, which faulthandler writes last."""
    return _frames(str(rank["stack"]))


def _frames(text: str) -> str:
    thread = text.rpartition("Current thread")[2] or text
    frames = [line.strip() for line in thread.splitlines() if line.startswith("  File")]
    return "\n".join(frames[:_SHOWN_FRAMES])
