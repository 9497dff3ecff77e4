"""Finds the tokens with which a chat template marks turns, by rendering a conversation of known texts.

Many tokenizers call these tokens special. Others do not: in DeepSeek-R1's distillations the user's mark is a token
like `<think>`, which an assistant writes and which stays one in former answers. The template alone shows a
difference.
"""

import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

_SYSTEM, _TURNS = "probe-system", ("probe-question-1", "probe-answer-1", "probe-question-2", "probe-answer-2")
_LAST = "probe-question-3"
_PAIR = re.compile(r"([<\[])(/?)(.+)")

Render = Callable[[Sequence[Mapping[str, Any]]], str | None]


def find_role_tokens(render: Render, tokens: Collection[str]) -> frozenset[str]:
    """Which of some tokens mark turns.

    A token between two turns marks one of them, and so do the two halves of a pair around the system's text. The
    exception are pairs such as `<think>` and `</think>` that stand before answers alone: some templates write them
    there for answers without reasoning. What ends the prompt does not count: it may open a block that the model
    closes.

    Args:
        render: renders messages with the template; None if it fails.
        tokens: candidates; words and spaces among them are none.
    """
    marks = sorted(filter(_is_mark, tokens), key=len, reverse=True)
    if not marks:
        return frozenset()
    gaps = _gaps(render, [_SYSTEM, *_TURNS, _LAST]) or _gaps(render, [*_TURNS, _LAST])
    if gaps is None:
        return frozenset()
    pattern = re.compile("|".join(map(re.escape, marks)))
    found = {text: frozenset(pattern.findall(gap)) for text, gap in gaps.items()}
    before_questions = found[_TURNS[2]] | found[_LAST] | _around_system(gaps, marks)
    others = frozenset[str]().union(*found.values()) - before_questions
    known = frozenset(tokens)
    return before_questions | {
        token for token in others if (other := _other_half(token)) not in known or other in before_questions
    }


def _around_system(gaps: Mapping[str, str], marks: Sequence[str]) -> frozenset[str]:
    """The two halves of a pair right before and right behind the system's text, if there is one."""
    before, behind = gaps.get(_SYSTEM, "").rstrip(), gaps[_TURNS[0]].lstrip()
    opening = next(filter(before.endswith, marks), "")
    closing = _other_half(opening)
    return frozenset({opening, closing}) if closing in marks and behind.startswith(closing) else frozenset()


def _gaps(render: Render, texts: Sequence[str]) -> dict[str, str] | None:
    """What a template writes before each of the texts; None if it does not write all of them in turn."""
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": "system" if text == _SYSTEM else next(roles), "content": text} for text in texts]
    rest, gaps = render(messages) or "", {}
    for text in texts:
        gap, there, rest = rest.partition(text)
        if not there:
            return None
        gaps[text] = gap
    return gaps


def _is_mark(token: str) -> bool:
    """Whether a token looks like no text that people write: it stands in brackets or between other signs."""
    return (
        not (token[:1].isalnum() or token[-1:].isalnum())
        and not (token[:1].isspace() or token[-1:].isspace())
        and any(map(str.isalnum, token))
    )


def _other_half(token: str) -> str:
    """The token that ends what this one begins, or begins what it ends; empty if its form has none."""
    match = _PAIR.fullmatch(token)
    return "" if match is None else f"{match[1]}{'' if match[2] else '/'}{match[3]}"
