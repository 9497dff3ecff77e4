// The newest streams as a table, and the timeline of one of them.

import { byId, element, keyed, setText } from "./dom.js";
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
  if (opened !== null) showTimeline();
}

function makeRow(stream) {
  const button = element("button", { type: "button", class: "row", "aria-haspopup": "dialog" });
  button.addEventListener("click", () => {
    opened = keyOf(stream);
    showTimeline();
    byId("timeline").showModal();
  });
  const cells = ["", "", "", "number", "number", "number"].map((name) => element("td", name ? { class: name } : {}));
  return element("tr", {}, element("th", { scope: "row" }, button), ...cells);
}

// The phases of a stream, in order: {name, where, from, to}.
export function phases(stream, now) {
  const found = [];
  const add = (name, where, from, to) => {
    if (from !== null && to !== null && to >= from) found.push({ name, where, from, to });
  };
  let at = stream.arrived_at;
  for (const attempt of stream.attempts) {
    const end = attempt.ended_at ?? stream.ended_at ?? now;
    const where = shown(attempt.worker);
    // A worker may send the first token before it says that it has begun.
    const first = attempt.first_token_at ?? end;
    const started = Math.min(attempt.started_at ?? first, first);
    add("routing", "router", at, attempt.chosen_at);
    add("queue", where, attempt.chosen_at, started);
    if (attempt.started_at !== null || attempt.first_token_at !== null) add("prefill", where, started, first);
    if (attempt.first_token_at !== null) add("decode", where, first, end);
    at = end;
  }
  const isAttemptOver = !stream.attempts.length || stream.attempts.at(-1).ended_at !== null;
  if (isAttemptOver && (!stream.outcome || !stream.attempts.length)) add("routing", "router", at, stream.ended_at ?? now);
  return found;
}

function showTimeline() {
  const stream = last.streams.find((each) => keyOf(each) === opened);
  if (stream === undefined) {
    setText(byId("timeline-summary"), "This stream is no longer among the newest.");
    return;
  }
  const end = stream.ended_at ?? last.now;
  const total = Math.max(end - stream.arrived_at, 0.001);
  setText(byId("timeline-title"), `Timeline of stream ${stream.stream}`);
  const left = stream.attempts_left_out ? ` ${stream.attempts_left_out} attempts are left out.` : "";
  const outcome = stream.outcome ? stream.outcome.replaceAll("_", " ") : "running";
  setText(byId("timeline-summary"), `${shown(stream.model)}, ${outcome}: ${count(stream.prompt_tokens)} prompt tokens, `
    + `${count(stream.tokens)} of at most ${count(stream.max_tokens)} tokens, ${stream.attempts.length} `
    + `attempt${stream.attempts.length === 1 ? "" : "s"}, ${duration(total)}.${left}`);
  const parts = phases(stream, last.now);
  keyed(byId("phase-rows"), parts.map((phase, index) => ({ ...phase, index })), (phase) => `${phase.index}${phase.name}`, (phase) => {
    const name = element("th", { scope: "row" }, element("span", { class: `swatch ${phase.name}`, "aria-hidden": "true" }), phase.name);
    return element("tr", {}, name, element("td"), element("td", { class: "number" }), element("td", { class: "number" }));
  }, (row, phase) => {
    setText(row.children[1], phase.where);
    setText(row.children[2], duration(phase.from - stream.arrived_at));
    setText(row.children[3], duration(phase.to - phase.from));
  });
  byId("timeline-bars").replaceChildren(...parts.map((phase) => {
    const bar = element("i", { class: phase.name });
    bar.style.left = `${(100 * (phase.from - stream.arrived_at)) / total}%`;
    bar.style.width = `${(100 * (phase.to - phase.from)) / total}%`;
    return element("div", { class: "lane" }, bar);
  }));
}

byId("more-streams").addEventListener("click", () => {
  showsAll = !showsAll;
  showStreams(last);
});
byId("timeline").addEventListener("close", () => {
  opened = null;
});
