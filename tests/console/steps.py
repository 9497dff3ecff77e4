"""What tests do on the console's page, and what they wait for there."""

import time

from served import DEADLINE_S

SLOWLY = 0.05
"""Seconds between two tokens, so that something can be done meanwhile."""
ENDLESSLY = 0.25
"""The same for an answer that is to be disturbed: however slow the browser is, 200 tokens have not ended before."""


def wait_until(page, function, arg=None):
    """Wait until a function is true in the page. Playwright's own waiting needs `eval`, which the page forbids."""
    end = time.monotonic() + DEADLINE_S
    while not page.evaluate(function, arg):
        assert time.monotonic() < end, f"did not happen in time: {function} {arg}; the page: {page.inner_text('main')}"
        page.wait_for_timeout(30)


def wait_text(page, selector, pattern):
    """Wait until the text of an element has the pattern."""
    find = (
        "([selector, pattern]) =>"
        " [...document.querySelectorAll(selector)].some(found => RegExp(pattern).test(found.textContent))"
    )
    wait_until(page, find, [selector, pattern])


def wait_tokens(page):
    """Wait until the newest answer has begun."""
    wait_until(page, "() => document.querySelector('#talk li.model .text')?.textContent.length > 20")


def wait_ended(page, answers):
    """Wait until so many answers have ended."""
    ended = (
        "answers => document.querySelectorAll('#talk li.model:not([aria-busy]) .foot:not(:empty)').length === answers"
    )
    wait_until(page, ended, answers)


def say(page, text, most=24):
    page.fill("#max-tokens", str(most))
    page.fill("#message", text)
    page.keyboard.press("Control+Enter")


def answer(page):
    return page.locator("#talk li.model .text").last.text_content()


def speak(served, most, delay_s=SLOWLY):
    """Let the workers give plain words at this pace; returns the text of so many tokens."""
    tokenizer = served.router.workers.tokenizers.get("tokenizer-1")
    ids = tokenizer.encode("It was a dark night, and the wind had fallen. " * 20)[:most]
    assert len(ids) == most
    served.script(delay_s=delay_s, token=lambda prompt, seed, position: ids[position])
    return tokenizer.decode(ids)


def hurry(served):
    """Let the answers that run end soon."""
    for worker in served.workers:
        worker.script.delay_s = 0.01


def said(page):
    """What the model has said, without the marks of moves in it."""
    return "".join(page.locator("#talk li.model .said").all_text_contents())
