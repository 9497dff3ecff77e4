"""The console in a real browser: a failover on the topology, a timeline, the keyboard, axe, both themes."""

import contextlib
import os
import re
from pathlib import Path

import pytest
from lockstep_api.v1 import worker_pb2
from served import Served
from steps import ENDLESSLY, SLOWLY, hurry, say, wait_text, wait_tokens

pytestmark = pytest.mark.slow

OTHER_ID = "router-b<img/src=x>"
NOBODY = "127.0.0.1:1"


def test_a_timeline_opens_and_closes_by_keyboard_alone(served, open_page):
    page = open_page(served.public)
    wait_text(page, "#workers h3", "w0")

    def tab_to(selector):
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("selector => document.activeElement.matches(selector)", selector):
                return
        raise AssertionError(f"no Tab leads to {selector}")

    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    tab_to("#message")
    page.keyboard.type("hello there")
    tab_to("#send")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    wait_text(page, "#talk li.model .foot", "tokens")
    wait_text(page, "#stream-rows td", "finished")
    tab_to("#stream-rows button")
    page.keyboard.press("Enter")
    page.wait_for_selector("#timeline[open]")
    wait_text(page, "#timeline-summary", "finished: .* prompt tokens")
    phases = page.locator("#phase-rows th").all_text_contents()
    assert phases[0] == "routing"
    assert phases[-1] == "decode"
    assert page.evaluate("document.querySelector('#timeline').contains(document.activeElement)")
    page.keyboard.press("Escape")
    page.wait_for_selector("#timeline", state="hidden")
    assert page.evaluate("document.activeElement.matches('#stream-rows button')")


WORKS = {
    "prefill": [
        {"steps": 2, "compute_s": 0.0312, "collective_s": 0.0021, "idle_s": 0.0004},
        {"steps": 2, "compute_s": 0.0214, "collective_s": 0.0119, "idle_s": 0.0004},
    ],
    "decode": [
        {"steps": 24, "compute_s": 0.612, "collective_s": 0.048, "idle_s": 0.021},
        {"steps": 24, "compute_s": 0.433, "collective_s": 0.227, "idle_s": 0.021},
    ],
}


def test_a_timeline_shows_what_each_rank_did_in_each_phase(served, open_page):
    served.script(says_phase=True, hang_after=30)
    for worker in served.workers:
        worker.works = WORKS
    page = open_page(served.public)
    wait_text(page, "#workers h3", "w0")
    say(page, "which rank is it?", 90)
    wait_tokens(page)
    wait_text(page, "#stream-rows td", "running")
    page.locator("#stream-rows button").first.click()
    wait_text(page, "#rank-note", "when the attempt has ended")
    assert page.locator("#rank-table").is_hidden()
    page.keyboard.press("Escape")
    page.click("#stop")
    page.locator("#stream-rows button").first.click()
    wait_text(page, "#rank-rows th", "1")
    rows = [
        page.locator(f"#rank-rows tr:nth-child({number}) > *").all_text_contents()
        for number in range(1, page.locator("#rank-rows tr").count() + 1)
    ]
    name = rows[0][1].removeprefix("prefill, ")
    assert rows == [
        ["0", f"prefill, {name}", "2", "31.2 ms", "2.1 ms", "0.0 ms", "0.4 ms"],
        ["1", f"prefill, {name}", "2", "21.4 ms", "2.1 ms", "9.8 ms", "0.4 ms"],
        ["0", f"decode, {name}", "24", "612 ms", "48.0 ms", "0.0 ms", "21.0 ms"],
        ["1", f"decode, {name}", "24", "433 ms", "48.0 ms", "179 ms", "21.0 ms"],
    ]
    assert page.locator("#timeline-bars .lane.rank").count() == 4
    inside = """() => [...document.querySelectorAll("#timeline-bars .lane.rank")].every((lane) => {
      const parts = [...lane.children].map((part) => part.getBoundingClientRect());
      return parts.at(-1).right <= lane.getBoundingClientRect().right + 1 && parts[0].width > parts[2].width;
    })"""
    assert page.evaluate(inside)
    wait_text(page, "#rank-note", "all streams of the batch")


def test_a_worker_that_tells_nothing_of_its_ranks_is_said_to(served, open_page):
    page = open_page(served.public)
    wait_text(page, "#workers h3", "w0")
    say(page, "hello")
    wait_text(page, "#talk li.model .foot", "tokens")
    wait_text(page, "#stream-rows td", "finished")
    page.locator("#stream-rows button").first.click()
    wait_text(page, "#rank-note", "Nothing is known from w")


def test_the_management_port_is_read_only(served, open_page):
    page = open_page(served.management)
    wait_text(page, "#workers h3", "w0")
    wait_text(page, "#chat-off", "public port")
    assert page.locator("#chat-on").is_hidden()


def test_elements_with_one_key_do_not_grow_in_number(served, open_page):
    page = open_page(served.management)
    shown = """async () => {
      const { element, keyed } = await import("/console/dom.js");
      const list = element("ul");
      for (const _ of "12345") {
        keyed(list, ["a", "a", "b"], (item) => item, () => element("li"), (child, item) => child.textContent = item);
      }
      return list.textContent;
    }"""
    assert page.evaluate(shown) == "aab"


def test_each_move_is_announced_once_also_without_a_gap_and_after_a_restart(served, open_page):
    page = open_page(served.management)
    script = """async () => {
      const { onMove, showMoves } = await import("/console/moves.js");
      const move = { key: "1", stream: "aaaa", run: "", at: 0, from: "w0", to: "w1", reason: "link_lost", gap_s: null,
        tokens: 3, ended: "" };
      const next = { ...move, key: "2", from: "w1", to: "w2", gap_s: 0.5 };
      const restarted = { ...move, stream: "bbbb", gap_s: 0.1 };
      const reported = [];
      const stop = onMove(({ key, stream }) => reported.push(key + stream));
      showMoves([move], "r");  // what was before the page
      showMoves([], "r");
      showMoves([{ ...move, key: "3" }, move], "r");  // two answers of one request
      reported.push("then");
      showMoves([next, move], "r");
      showMoves([next, move], "r");
      showMoves([restarted], "r");
      showMoves([next, move], "another router");
      stop();
      return reported;
    }"""
    assert page.evaluate(script) == ["then", "1aaaa", "2aaaa", "1bbbb"]


def test_a_slow_rank_is_named_on_the_topology(served, open_page):
    page = open_page(served.management)
    wait_text(page, "#workers h3", "w0")
    assert page.locator(".pace").first.is_hidden(), "no step was run"
    served.workers[0].paces = ((0.0101, 0.0042), (0.0131, 0.0012))
    wait_text(page, "#workers .ranks li", "^rank 1 ready, slow, ")
    wait_text(page, ".pace p", "rank 1 is slow, the others wait for it")
    wait_text(page, ".pace li", r"^rank 1 computes 13\.1 ms, in collectives 1\.2 ms$")
    wait_text(page, "#announcer", "Rank 1 of worker w0 is slow")
    assert page.locator(".pace:visible").count() == 1, "of the other worker nothing is known"
    served.workers[0].paces = ((0.0101, 0.0042), (0.0104, 0.0039))
    wait_text(page, ".pace p", "last seconds$")
    assert not page.locator("#workers .ranks li", has_text="slow").count()


def test_ranks_that_restart_are_no_lost_connection(served, open_page):
    page = open_page(served.management)
    wait_text(page, "#workers h3", "w0")
    served.call(served.workers[0].announce, worker_pb2.WORKER_STATE_RESTARTING)
    wait_text(page, ".node.worker[data-kind='bad'] .badge", "^✕ restarting$")
    wait_text(page, ".node.worker[data-kind='bad'] .note", "^its ranks restart$")
    assert page.locator("#workers .ranks li", has_text="was").count() == 0
    served.call(served.workers[0].kill)
    wait_text(page, ".node.worker[data-kind='bad'] .badge", "lost: connecting")
    wait_text(page, ".node.worker[data-kind='bad'] .note", "the figures are its last ones")
    wait_text(page, "#workers .ranks li", "^rank 1 was ")


def test_a_worker_that_was_never_reached_is_not_lost(served, open_page):
    page = open_page(served.management)

    def with_new(route):
        response = route.fetch()
        state = response.json()
        new = state["workers"][0] | {"id": "", "target": "10.0.0.9:9000", "state": "connecting", "reason": "refused"}
        new |= {"last_seen_s": None, "ranks": [], "slow_rank": None, "total_blocks": 0, "free_blocks": 0}
        route.fulfill(response=response, json=state | {"workers": [*state["workers"], new]})

    page.route("**/console/state", with_new)
    wait_text(page, "#workers h3", "10.0.0.9:9000")
    node = page.locator(".node.worker", has_text="10.0.0.9:9000")
    assert node.get_attribute("data-kind") == "wait"
    assert node.locator(".badge").first.inner_text() == "· connecting"
    assert node.locator(".note").inner_text() == "not reached yet: refused"
    assert node.locator("dd").all_inner_texts() == ["never"]
    assert page.locator(".wire.bad").count() == 0
    check_axe(page)


def test_durations_times_and_counts_are_read_without_doubt(served, open_page):
    page = open_page(served.management)
    words = """async () => {
      const { clock, duration, tokens } = await import("/console/words.js");
      const now = Date.now() / 1000;
      return {
        durations: [7199, 7200, 10_799, 10_800, 86_399].map(duration),
        tokens: [0, 1, 1024].map(tokens),
        now: clock(now),
        before: clock(new Date(2020, 1, 3, 4, 5, 6).getTime() / 1000),
      };
    }"""
    found = page.evaluate(words)
    assert found["durations"] == ["120 min", "2 h 0 min", "3 h 0 min", "3 h 0 min", "24 h 0 min"]
    assert found["tokens"] == ["0 tokens", "1 token", "1,024 tokens"]
    assert re.fullmatch(r"\d\d:\d\d:\d\d", found["now"])
    assert found["before"] == "3 Feb 2020, 04:05:06"


def test_a_router_that_comes_back_to_a_forgotten_address_is_no_change(served, open_page):
    page = open_page(served.management)
    script = """async () => {
      const { showOthers } = await import("/console/others.js");
      const row = { address: "10.0.0.1:8001", facts: null, problem: "", heard_s: null };
      document.getElementById("announcer").textContent = "";
      showOthers({ problem: "", rows: [{ ...row, problem: "refused" }] });
      showOthers({ problem: "", rows: [] });
      showOthers({ problem: "", rows: [{ ...row, facts: { id: "router-c", version: "", state: "serving", unready: "",
        uptime_s: 1, requests: 0, streams: 0, max_streams: 1, failovers: 0, sessions: 0 }, heard_s: 0 }] });
      await new Promise((resolve) => setTimeout(resolve, 600));
      return document.getElementById("announcer").textContent;
    }"""
    assert "router-c" not in page.evaluate(script)


def test_whatever_scrolls_is_reached_by_keyboard(served, open_page):
    page = open_page(served.public)
    wait_text(page, "#workers h3", "w0")
    missed = """() => [...document.querySelectorAll("main *:not(textarea):not(select)")]
      .filter((each) => /auto|scroll/.test(getComputedStyle(each).overflow) && each.tabIndex !== 0)
      .map((each) => each.outerHTML.slice(0, 80))"""
    assert page.evaluate(missed) == []


@pytest.fixture
def two_routers(browser, tmp_path):
    """Two routers, of which the first shows the second, and one that cannot be reached."""
    with contextlib.ExitStack() as stack:
        directories = [tmp_path / name for name in ("first", "second")]
        for directory in directories:
            directory.mkdir()
        second = stack.enter_context(Served(directories[1], router_id=OTHER_ID))
        shown = [second.management_address, NOBODY]
        yield stack.enter_context(Served(directories[0], console_routers=shown)), second


def test_other_routers_are_on_the_topology_and_one_that_is_away_is_said_to_be(two_routers, open_page):
    first, second = two_routers
    page = open_page(first.management)
    wait_text(page, "#other-list h4", f"^Router {OTHER_ID}$")
    wait_text(page, "#other-list .badge", "serving")
    wait_text(page, "#other-list .badge", "does not answer")
    wait_text(page, "#other-list h4", f"^Router at {NOBODY}$")
    wait_text(page, "#other-list .note", "refused; nothing is known of it")
    assert page.locator("#others img").count() == 0, "a name is text"
    second.script(delay_s=SLOWLY)
    of_second = open_page(second.public)
    wait_text(of_second, "#workers h3", "w0")
    say(of_second, "a long story", 200)
    wait_text(page, "#other-list dd", r"^1 of 4,096$")
    assert page.locator("#stream-rows tr").count() == 0, "each router has streams of its own"
    second.call(setattr, second.router.in_progress, "draining", True)
    wait_text(page, "#other-list .badge", "draining")
    wait_text(page, "#announcer", f"Router {OTHER_ID}: draining")
    of_second.close()
    second.end()
    wait_text(page, "#announcer", f"Router {OTHER_ID}: does not answer")
    wait_text(page, "#other-list .note", "refused; the figures are its last ones")


# Colours depend on the theme and the layout on the width; the page without other routers is judged with all pairs.
@pytest.mark.parametrize(("theme", "width"), [("dark", 320), ("light", 380), ("light", 1440)])
def test_axe_finds_nothing_serious_with_other_routers(two_routers, open_page, theme, width):
    page = open_page(two_routers[0].management, width=width, theme=theme)
    wait_text(page, "#other-list .badge", "serving")
    wait_text(page, "#other-list .badge", "does not answer")
    picture(page, f"{theme}-{width}-routers")
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    check_axe(page)


def test_a_router_that_is_away_is_said_to_be(served, open_page):
    page = open_page(served.management)
    wait_text(page, "#connection", "live")
    page.context.set_offline(True)
    wait_text(page, "#connection", "not connected")
    wait_text(page, "#problem", "What is shown is old")
    page.context.set_offline(False)
    wait_text(page, "#connection", "live")


def test_a_page_of_another_version_than_its_router_asks_to_be_loaded_again(served, open_page):
    page = open_page(served.management)
    wait_text(page, "#connection", "live")

    def upgraded(route):
        response = route.fetch()
        route.fulfill(response=response, json=response.json() | {"format": 2})

    page.route("**/console/state", upgraded)
    wait_text(page, "#connection", "another version")
    assert page.is_visible("#problem")
    assert "load the page again" in page.inner_text("#problem")
    page.unroute("**/console/state")
    wait_text(page, "#connection", "live")
    assert page.is_hidden("#problem")


def test_a_key_opens_the_console_of_its_tenant(tmp_path, open_page):
    import key_files  # noqa: PLC0415 - beside the router's tests, which `served` adds to the path

    keys = key_files.write(
        tmp_path / "keys.yaml",
        key_files.tenant("search", key_files.KEY, requests_per_minute=100, concurrent_streams=4),
        key_files.tenant("chat", key_files.OTHER_KEY),
    )
    with Served(tmp_path, keys_file=keys) as served:
        page = open_page(served.public)
        page.wait_for_selector("#key-form")
        page.fill("#key", "lsk-wrong")
        page.keyboard.press("Enter")
        wait_text(page, "#problem", "key is not valid")
        page.fill("#key", key_files.KEY)
        page.keyboard.press("Enter")
        wait_text(page, "#tenant-rows th", "search")
        say(page, "hello")
        wait_text(page, "#talk li.model .foot", "tokens")
        wait_text(page, "#tenant-rows td", "1 of 100")
        assert page.locator("#tenant-rows tr").count() == 1
        kept = page.evaluate("[JSON.stringify(localStorage), document.cookie, location.href].join()")
        assert key_files.KEY not in kept


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 380, 1440])
def test_axe_finds_nothing_serious_and_nothing_overflows(served, open_page, theme, width):
    served.script(delay_s=ENDLESSLY)
    for worker in served.workers:
        worker.paces = ((0.0101, 0.0042), (0.0131, 0.0012))
        worker.works = WORKS
    page = open_page(served.public, width=width, theme=theme)
    wait_text(page, "#workers h3", "w0")
    say(page, "tell me a story about a router and two workers", 200)
    wait_tokens(page)
    victim = served.worker_with_streams()
    served.call(victim.kill)
    wait_text(page, "#move-list strong", "moved")
    hurry(served)
    wait_text(page, "#talk li.model .foot", "200 tokens")
    wait_text(page, ".node.worker .badge", "lost")
    wait_text(page, "#workers .ranks li", "^rank 1 ready, slow, ")
    picture(page, f"{theme}-{width}")
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    check_axe(page)
    page.locator("#stream-rows button").first.click()
    wait_text(page, "#timeline-summary", "2 attempts")
    wait_text(page, "#rank-rows th", "1")
    wait_text(page, "#rank-note", f"Nothing is known from {victim.worker_id}")
    picture(page, f"{theme}-{width}-timeline", full=False)
    check_axe(page)


def picture(page, name, *, full=True):
    """Keep a screenshot for people to look at, if a folder for them is named."""
    if folder := os.environ.get("LOCKSTEP_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/{name}.png", full_page=full)


def check_axe(page):
    """Let axe-core judge the page: by the DevTools protocol, since the page's own policy allows no other script."""
    package = pytest.importorskip("axe_playwright_python", reason="needs axe: pip install axe-playwright-python")
    page.evaluate(Path(package.__file__).with_name("axe.min.js").read_text())
    found = page.evaluate("axe.run(document).then(result => result.violations)")
    faults = [(each["id"], [node["html"] for node in each["nodes"]]) for each in found]
    assert not faults
