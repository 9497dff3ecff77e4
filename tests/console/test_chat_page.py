"""The console's chat in a real browser: streams, failures, hostile output."""

import json

import pytest
from steps import SLOWLY, answer, said, say, speak, wait_ended, wait_text, wait_tokens, wait_until

pytestmark = pytest.mark.slow

HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    "\x1b[31mred\x1b[0m \u202eesrever\u2066 \x07 end"
)


def test_chat_streams_and_a_failover_is_seen_as_it_happens(served, open_page):
    text = speak(served, 60)
    page = open_page(served.public)
    wait_text(page, "#workers h3", "w0")
    say(page, "tell me a story", 60)
    wait_tokens(page)
    victim = served.worker_with_streams()
    other = next(worker for worker in served.workers if worker is not victim)
    served.call(victim.kill)
    wait_text(page, ".node.worker[data-kind='bad'] h3", victim.worker_id)
    wait_text(page, ".node.worker[data-kind='bad'] .badge", "lost")
    wait_text(page, "#move-list strong", rf"stream \w{{8}} moved {victim.worker_id} → {other.worker_id}, \d")
    wait_text(page, "#announcer", rf"moved {victim.worker_id} to {other.worker_id}")
    wait_text(page, "#talk .moved", f"{victim.worker_id} → {other.worker_id}")
    wait_text(page, "#talk li.model .foot", "60 tokens, .*, cut at the token limit")
    assert said(page) == text


def test_an_answer_goes_on_after_a_broken_connection(served, open_page):
    text = speak(served, 60)
    page = open_page(served.public)
    wait_text(page, "#workers h3", "w0")
    say(page, "go on", 60)
    wait_tokens(page)
    served.break_clients()
    wait_text(page, "#talk .moved", "the connection broke, and the answer goes on")
    wait_text(page, "#talk li.model .foot", "60 tokens")
    assert said(page) == text


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
    served.script(delay_s=SLOWLY)
    page = open_page(served.public)
    wait_text(page, "#workers h3", "w0")
    say(page, "never end", 200)
    wait_tokens(page)
    worker = served.worker_with_streams()
    page.click("#stop")
    wait_text(page, "#talk li.model .foot", "^stopped$")
    wait_until(page, "() => document.activeElement.id === 'message'")
    wait_text(page, "#stream-rows td", "cancelled")
    assert not worker.seats.running


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
