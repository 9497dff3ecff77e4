// The newest streams as a table, of which each opens its timeline.

import { byId, element, keyed, setText } from "./dom.js";
import { showTimeline } from "./timeline.js";
import { clock, count, duration, shown } from "./words.js";

const FEW = 12;
let showsAll = false;
let opened = null;
let last = null;

// A router that is started again counts from 1 again.
const keyOf = (stream) => `${stream.key}.${stream.stream}`;
const firstToken = (stream) => stream.attempts.find((attempt) => attempt.first_token_at !== null)?.first_token_at ?? null;
const since = (from, to) => (to === null ? null : to - from);

export function showStreams(state) {
  last = state;
  const streams = showsAll ? state.streams : state.streams.slice(0, FEW);
  byId("streams-empty").hidden = state.streams.length > 0;
  const more = byId("more-streams");
  more.hidden = state.streams.length <= FEW;
  setText(more, showsAll ? `Show the newest ${FEW}` : `Show all ${state.streams.length}`);
  keyed(byId("stream-rows"), streams, keyOf, makeRow, (row, stream) => {
    const [head, arrived, outcome, workers, tokens, first, total] = row.children;
    setText(head.firstElementChild, stream.stream);
    setText(arrived, clock(stream.arrived_at));
    setText(outcome, stream.outcome ? stream.outcome.replaceAll("_", " ") : "running");
    setText(workers, stream.attempts.map((attempt) => shown(attempt.worker)).join(" → ") || "–");
    setText(tokens, count(stream.tokens));
    setText(first, duration(since(stream.arrived_at, firstToken(stream))));
    setText(total, duration((stream.ended_at ?? state.now) - stream.arrived_at));
  });
  if (opened !== null) showOpened();
}

const showOpened = () => showTimeline(last.streams.find((each) => keyOf(each) === opened), last.now);

function makeRow(stream) {
  const button = element("button", { type: "button", class: "row", "aria-haspopup": "dialog" });
  button.addEventListener("click", () => {
    opened = keyOf(stream);
    showOpened();
    byId("timeline").showModal();
  });
  const cells = ["", "", "", "number", "number", "number"].map((name) => element("td", name ? { class: name } : {}));
  return element("tr", {}, element("th", { scope: "row" }, button), ...cells);
}

byId("more-streams").addEventListener("click", () => {
  showsAll = !showsAll;
  showStreams(last);
});
byId("timeline").addEventListener("close", () => {
  opened = null;
});
