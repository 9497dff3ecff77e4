// The timeline of one stream: its attempts with their phases, and what each rank did in these.

import { byId, element, keyed, setText } from "./dom.js";
import { count, duration, milliseconds, shown } from "./words.js";

// The phases of a stream, in order: {name, where, from, to, ranks}.
export function phases(stream, now) {
  const found = [];
  const add = (name, where, from, to, ranks = []) => {
    if (from !== null && to !== null && to >= from) found.push({ name, where, from, to, ranks });
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
    if (attempt.started_at !== null || attempt.first_token_at !== null) add("prefill", where, started, first, attempt.ranks.prefill);
    if (attempt.first_token_at !== null) add("decode", where, first, end, attempt.ranks.decode);
    at = end;
  }
  const isAttemptOver = !stream.attempts.length || stream.attempts.at(-1).ended_at !== null;
  if (isAttemptOver && (!stream.outcome || !stream.attempts.length)) add("routing", "router", at, stream.ended_at ?? now);
  return found;
}

// What a rank did in a phase; the class of its part of the bar, and the name of its time in the state.
const WORK = [["compute", "compute_s"], ["transfer", "transfer_s"], ["peers", "peer_wait_s"], ["idle", "idle_s"]];

function rankLane(work, { from, to }, begin, total) {
  const lane = element("div", { class: "lane rank" });
  const spent = WORK.reduce((sum, [, name]) => sum + work[name], 0);
  const scale = (100 * Math.min(1, (to - from) / Math.max(spent, 1e-9))) / total;
  let left = (100 * (from - begin)) / total;
  for (const [kind, name] of WORK) {
    const bar = element("i", { class: kind });
    bar.style.left = `${left}%`;
    bar.style.width = `${scale * work[name]}%`;
    left += scale * work[name];
    lane.append(bar);
  }
  return lane;
}

function showRanks(stream, parts) {
  const rows = parts.flatMap((phase, index) => phase.ranks.map((work, rank) => ({ key: `${index}.${rank}`, phase, rank, work })));
  byId("rank-table").hidden = !rows.length;
  const isReported = ({ ranks }) => ranks.prefill.length + ranks.decode.length > 0;
  const silent = stream.attempts.filter((attempt) => attempt.ended_at !== null && !isReported(attempt)).map((attempt) => shown(attempt.worker));
  setText(byId("rank-note"), [
    rows.length ? "Times are for all streams of the batch. The others wait for the rank that waits least." : "",
    stream.attempts.some((attempt) => attempt.ended_at === null) ? "A worker reports its ranks when the attempt has ended." : "",
    silent.length ? `Nothing is known from ${silent.join(", ")}.` : "",
  ].filter(Boolean).join(" "));
  keyed(byId("rank-rows"), rows, ({ key }) => key, () => element("tr", {}, element("th", { scope: "row" }), element("td"),
    ...["steps", ...WORK].map(() => element("td", { class: "number" }))), (row, { phase, rank, work }) => {
    const cells = [`${rank}`, `${phase.name}, ${phase.where}`, count(work.steps), ...WORK.map(([, name]) => milliseconds(work[name]))];
    cells.forEach((text, index) => setText(row.children[index], text));
  });
}

// Shows a stream in the dialog; undefined: it is no longer known.
export function showTimeline(stream, now) {
  if (stream === undefined) {
    setText(byId("timeline-summary"), "This stream is no longer among the newest.");
    return;
  }
  const end = stream.ended_at ?? now;
  const total = Math.max(end - stream.arrived_at, 0.001);
  setText(byId("timeline-title"), `Timeline of stream ${stream.stream}`);
  const left = stream.attempts_left_out ? ` ${stream.attempts_left_out} attempts are left out.` : "";
  const outcome = stream.outcome ? stream.outcome.replaceAll("_", " ") : "running";
  setText(byId("timeline-summary"), `${shown(stream.model)}, ${outcome}: ${count(stream.prompt_tokens)} prompt tokens, `
    + `${count(stream.tokens)} of at most ${count(stream.max_tokens)} tokens, ${stream.attempts.length} `
    + `attempt${stream.attempts.length === 1 ? "" : "s"}, ${duration(total)}.${left}`);
  const parts = phases(stream, now);
  keyed(byId("phase-rows"), parts.map((phase, index) => ({ ...phase, index })), (phase) => `${phase.index}${phase.name}`, (phase) => {
    const name = element("th", { scope: "row" }, element("span", { class: `swatch ${phase.name}`, "aria-hidden": "true" }), phase.name);
    return element("tr", {}, name, element("td"), element("td", { class: "number" }), element("td", { class: "number" }));
  }, (row, phase) => {
    setText(row.children[1], phase.where);
    setText(row.children[2], duration(phase.from - stream.arrived_at));
    setText(row.children[3], duration(phase.to - phase.from));
  });
  showRanks(stream, parts);
  byId("timeline-bars").replaceChildren(...parts.flatMap((phase) => {
    const bar = element("i", { class: phase.name });
    bar.style.left = `${(100 * (phase.from - stream.arrived_at)) / total}%`;
    bar.style.width = `${(100 * (phase.to - phase.from)) / total}%`;
    return [element("div", { class: "lane" }, bar), ...phase.ranks.map((work) => rankLane(work, phase, stream.arrived_at, total))];
  }));
}
