"""The console's chat in a real browser: streams, failures, hostile output."""

import json

import pytest
from lockstep_common.errors import ErrorCode, LockstepError
from machine import wait_for
from steps import ENDLESSLY, SLOWLY, answer, hurry, said, say, speak, wait_ended, wait_text, wait_tokens, wait_until

pytestmark = pytest.mark.slow

HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    "\x1b[31mred\x1b[0m \u202eesrever\u2066 \x07 end"
)


def test_chat_streams_and_a_failover_is_seen_as_it_happens(served, open_page):
    text = speak(served, 200, ENDLESSLY)
    page = open_page(served.public)
    wait_text(page, "#workers h3", "w0")
    say(page, "tell me a story", 200)
    wait_tokens(page)
    victim = served.worker_with_streams()
    other = next(worker for worker in served.workers if worker is not victim)
    served.call(victim.kill)
    wait_text(page, ".node.worker[data-kind='bad'] h3", victim.worker_id)
    wait_text(page, ".node.worker[data-kind='bad'] .badge", "lost")
    wait_text(page, "#move-list strong", rf"stream \w{{8}} moved {victim.worker_id} → {other.worker_id}, \d")
    wait_text(page, "#announcer", rf"moved {victim.worker_id} to {other.worker_id}")
    wait_text(page, "#talk .moved", f"{victim.worker_id} → {other.worker_id}")
    hurry(served)
    wait_text(page, "#talk li.model .foot", "200 tokens, .*, cut at the token limit")
    assert said(page) == text


def test_an_answer_goes_on_after_a_broken_connection(served, open_page):
    text = speak(served, 200, ENDLESSLY)
    page = open_page(served.public)
    wait_text(page, "#workers h3", "w0")
    say(page, "go on", 200)
    wait_tokens(page)
    served.break_clients()
    wait_text(page, "#talk .moved", "the connection broke, and the answer goes on")
    hurry(served)
    wait_text(page, "#talk li.model .foot", "200 tokens")
    assert said(page) == text


@pytest.mark.parametrize("code", ["draining", "unavailable", "overloaded", "worker_lost"])
def test_an_answer_goes_on_after_a_failure_that_may_pass(served, open_page, code):
    text = speak(served, 200, ENDLESSLY)
    page = open_page(served.public)
    wait_text(page, "#workers h3", "w0")
    say(page, "go on", 200)
    wait_tokens(page)
    failure = LockstepError(ErrorCode(code), "not now")
    served.call(lambda: [generation.fail(failure) for generation in list(served.router.in_progress.generations)])
    wait_text(page, "#talk .moved", "the answer was interrupted, and the answer goes on")
    hurry(served)
    wait_text(page, "#talk li.model .foot", "200 tokens")
    assert said(page) == text


def test_an_answer_that_has_failed_for_good_is_not_asked_for_again(served, open_page):
    page = open_page(served.public)
    asked = []
    page.on("request", lambda sent: asked.append(sent.method) if "/v1/" in sent.url else None)
    chunks = [
        {"choices": [{"index": 0, "delta": {"content": "Half."}}]},
        {"error": {"message": "oh", "code": "internal"}},
    ]
    fulfill(page, [json.dumps(chunk) for chunk in chunks])
    wait_text(page, "#workers h3", "w0")
    say(page, "go on")
    wait_ended(page, 1)
    assert page.locator("#talk li.model .foot").inner_text() == "Error: oh"
    assert asked == ["POST"]


def fulfill(page, events):
    """Answer chats with these events."""
    body = "".join(f"data: {data}\n\n" for data in events)
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
    )


def deltas(*texts):
    """An answer's events, with the texts of its tokens."""
    return [json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}) for text in texts] + ["[DONE]"]


def test_an_answer_is_laid_out_once_a_frame(served, open_page):
    """Not once a token, or a long answer would take the browser the square of its length."""
    page = open_page(served.public)
    wait_text(page, "#workers h3", "w0")
    page.evaluate("""() => {
      const { get } = Object.getOwnPropertyDescriptor(Element.prototype, "scrollHeight");
      window.heights = window.framesShown = 0;
      Object.defineProperty(document.getElementById("talk"), "scrollHeight", {
        get() { window.heights += 1; return get.call(this); },
      });
      const count = () => { window.framesShown += 1; requestAnimationFrame(count); };
      count();
    }""")
    fulfill(page, deltas(*(f"word {number}\n" for number in range(3000))))
    say(page, "go on")
    wait_ended(page, 1)
    wait_until(page, AT_END)
    heights, frames = page.evaluate("[window.heights, window.framesShown]")
    assert 0 < heights <= frames + 5  # the wait reads it too
    assert heights < 1000


AT_END = """() => {
  const talk = document.getElementById("talk");
  return talk.scrollTop > 100 && talk.scrollHeight - talk.clientHeight - talk.scrollTop < 2;
}"""


def test_the_end_is_followed_unless_the_user_has_scrolled_up(served, open_page):
    ids = served.router.workers.tokenizers.get("tokenizer-1").encode("It was\n dark\n, and\n" * 99)
    served.script(delay_s=SLOWLY, token=lambda prompt, seed, position: ids[position])
    page = open_page(served.public)
    wait_text(page, "#workers h3", "w0")
    say(page, "a long story", 200)
    wait_until(page, AT_END)  # more than fits is there
    wait_until(page, AT_END.replace("> 100", "> 200"))
    page.evaluate("document.getElementById('talk').scrollTop = 20")
    length = len(said(page))
    wait_until(page, "length => document.querySelector('#talk .said').textContent.length > length + 60", length)
    assert page.evaluate("document.getElementById('talk').scrollTop") == 20
    page.evaluate("document.getElementById('talk').scrollTop = 1e6")
    length = len(said(page))
    wait_until(page, "length => document.querySelector('#talk .said').textContent.length > length + 60", length)
    wait_until(page, AT_END)
    page.evaluate("document.getElementById('talk').scrollTop = 20")
    page.click("#stop")
    wait_ended(page, 1)
    assert page.evaluate("document.getElementById('talk').scrollTop") == 20
    say(page, "and again", 2)
    wait_until(page, AT_END)


def begin_long_answer(served, open_page):
    """A page whose answer takes long, and the worker that gives it."""
    served.script(delay_s=ENDLESSLY)
    page = open_page(served.public)
    wait_text(page, "#workers h3", "w0")
    say(page, "never end", 200)
    wait_tokens(page)
    return page, served.worker_with_streams()


def test_an_answer_ends_with_the_page_that_asked_for_it(served, open_page):
    page, worker = begin_long_answer(served, open_page)
    page.reload()
    wait_text(page, "#stream-rows td", "cancelled")
    wait_for(lambda: not worker.seats.running, "its worker has heard of it")


def test_a_long_message_is_not_cut(served, open_page):
    page = open_page(served.public)
    wait_text(page, "#workers h3", "w0")
    page.fill("#max-tokens", "8")
    page.focus("#message")
    page.keyboard.insert_text("a " * 15_000 + "end")
    assert page.input_value("#message").endswith(" end")
    page.keyboard.press("Control+Enter")
    wait_text(page, "#talk li.model .foot[data-kind='bad']", "Error: ")
    wait_until(page, "() => document.getElementById('message').value.endsWith(' end')")


def test_a_line_end_of_two_tokens_is_one_line_end(served, open_page):
    page = open_page(served.public)
    fulfill(page, deltas("one\r", "\ntwo\r", "three", "\r\n", "\r"))
    wait_text(page, "#workers h3", "w0")
    say(page, "go on")
    wait_ended(page, 1)
    assert said(page) == "one\ntwo[U+000D]three\n[U+000D]"


def test_a_message_that_fails_is_put_back_and_is_no_part_of_the_conversation(served, open_page):
    speak(served, 60)  # other characters may be shown as escapes
    page = open_page(served.public)
    asked = []
    page.on("request", lambda sent: asked.append(sent.post_data_json) if "/chat/completions" in sent.url else None)
    wait_text(page, "#workers h3", "w0")
    say(page, "too much", 131072)
    wait_ended(page, 1)
    assert page.locator("#talk li.model .foot[data-kind='bad']").inner_text().startswith("Error: ")
    assert page.input_value("#message") == "too much"
    say(page, "less")
    wait_ended(page, 2)
    assert page.input_value("#message") == ""
    assert [message["content"] for message in asked[-1]["messages"]] == ["less"]
    first = answer(page)
    say(page, "more")
    wait_ended(page, 3)
    assert [message["content"] for message in asked[-1]["messages"]] == ["less", first, "more"]


def test_a_long_conversation_is_cut_to_one_that_the_user_begins(served, open_page):
    page = open_page(served.management)
    cut = """async () => {
      const { newest } = await import("/console/chat.js");
      const all = Array.from({ length: 41 }, (_, number) => ({ role: number % 2 ? "assistant" : "user", number }));
      return [newest(all), newest(all.slice(0, 1))].map((kept) => [kept[0].role, kept[0].number, kept.length]);
    }"""
    assert page.evaluate(cut) == [["user", 2, 39], ["user", 0, 1]]


def test_reasoning_has_a_label_and_is_no_part_of_the_conversation(served, open_page):
    page = open_page(served.public)
    deltas = [{"reasoning_content": "<b>Let me"}, {"reasoning_content": " see.\x07"}, {"content": "Yes."}]
    events = [json.dumps({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    asked = []

    def reason(route):
        asked.append(route.request.post_data_json)
        body = "".join(f"data: {data}\n\n" for data in [*events, "[DONE]"])
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", reason)
    wait_text(page, "#workers h3", "w0")
    for text, number in (("is it so?", 1), ("really?", 2)):
        say(page, text)
        wait_ended(page, number)
    assert page.locator("#talk .reasoning").first.inner_text() == "Reasoning\n<b>Let me see.[U+0007]"
    assert page.locator("#talk .reasoning").count() == page.locator("#talk .label").count() == 2
    assert page.locator("#talk b").count() == 0
    assert said(page) == "Yes.Yes."
    assert [message["content"] for message in asked[1]["messages"]] == ["is it so?", "Yes.", "really?"]


def test_stop_ends_the_stream_on_its_worker(served, open_page):
    page, worker = begin_long_answer(served, open_page)
    page.click("#stop")
    wait_text(page, "#talk li.model .foot", "^stopped$")
    wait_until(page, "() => document.activeElement.id === 'message'")
    wait_text(page, "#stream-rows td", "cancelled")
    wait_for(lambda: not worker.seats.running, "its worker has heard of it")


def test_hostile_output_is_text(served, open_page):
    tokenizer = served.router.workers.tokenizers.get("tokenizer-1")
    ids = tokenizer.encode(HOSTILE)
    served.script(token=lambda prompt, seed, position: ids[position])
    page = open_page(served.public)
    wait_text(page, "#workers h3", "w0")
    say(page, "<b>bold</b>", len(ids))
    wait_text(page, "#talk li.model .foot", "tokens")
    shown = answer(page)
    assert "<script>document.title='owned'</script>" in shown
    assert "[U+001B][31mred[U+001B][0m" in shown
    assert "[U+202E]esrever[U+2066]" in shown
    assert "[U+0007]" in shown
    assert page.locator("#talk img, #talk script, #talk b").count() == 0
    assert page.title() == "Lockstep console"
    assert page.evaluate("getComputedStyle(document.querySelector('#talk bdi')).unicodeBidi") == "isolate"
