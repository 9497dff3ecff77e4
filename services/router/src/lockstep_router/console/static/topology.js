// The router, its workers and their ranks, and the line that a moving stream draws between two workers.

import { announce, byId, element, keyed, setFacts, setKind, setText } from "./dom.js";
import { count, duration, milliseconds, shown } from "./words.js";

const FLIGHT_MS = 6000;
const SVG = "http://www.w3.org/2000/svg";
const GOOD = new Set(["ready"]);
const PASSING = new Set(["loading", "starting", "draining", "retired"]);
const AWAY = new Set(["connecting", "silent"]);
const MARKS = { good: "✓", warn: "…", bad: "✕", wait: "·" };

const states = new Map();
let flights = [];
let last = null;

export function nameOf(worker) {
  return shown(worker.id || worker.target || "a worker");
}

// One that this router has never reached has no figures, and nothing of it was lost.
const isUnknown = (worker) => worker.state === "connecting" && worker.last_seen_s === null;

function kindOf(worker) {
  if (isUnknown(worker)) return "wait";
  if (GOOD.has(worker.state)) return worker.health.problems.length ? "warn" : "good";
  return PASSING.has(worker.state) ? "warn" : "bad";
}

export function showTopology(state) {
  last = state;
  showRouter(state);
  const keys = new Set(state.workers.map((worker) => worker.target ?? worker.id));
  for (const key of states.keys()) if (!keys.has(key)) states.delete(key);
  for (const worker of state.workers) announceChange(worker);
  keyed(byId("workers"), state.workers, (worker) => worker.target ?? worker.id, makeWorker, updateWorker);
  draw();
}

function showRouter(state) {
  const router = state.router;
  setText(byId("router-title"), `Router ${shown(router.id)}`);
  setKind(byId("router"), router.unready || router.state !== "serving" ? "warn" : "good");
  const server = state.state_server;
  setFacts(byId("router-facts"), [
    ["State", router.unready ? shown(router.unready) : router.state],
    ["Up", duration(router.uptime_s)],
    ["Requests", count(router.requests)],
    ["Streams", `${count(router.streams)} of ${count(router.max_streams)}`, router.streams / router.max_streams],
    ["Sessions", count(router.sessions)],
    ["Failovers", count(router.failovers)],
    ["Resumable", `${count(router.resumable.running)} run, ${count(router.resumable.kept)} kept`],
    ...(state.processes > 1 ? [["Processes", count(state.processes)]] : []),
    ...(server ? [["State server", server.reachable ? `reachable, ${count(server.streams)} streams` : "not reachable"]] : []),
    ...(router.version ? [["Version", router.version]] : []),
  ]);
}

// A change of a worker's state is announced once.
function announceChange(worker) {
  const key = worker.target ?? worker.id;
  const before = states.get(key);
  const now = { life: `${worker.state} ${worker.epoch}`, slow: worker.slow_rank };
  states.set(key, now);
  if (before === undefined) return;
  if (before.life !== now.life) announce(`Worker ${nameOf(worker)} is ${worker.state}.`);
  if (now.slow !== null && before.slow !== now.slow) announce(`Rank ${now.slow} of worker ${nameOf(worker)} is slow.`);
}

function makeWorker() {
  return element("li", {}, element("article", { class: "node worker" },
    element("div", { class: "title" }, element("h3"), element("span", { class: "badge" })),
    element("dl"),
    element("ul", { class: "ranks", "aria-label": "Ranks" }),
    element("div", { class: "pace", hidden: "" },
      element("p", { class: "quiet" }), element("ul")),
    element("p", { class: "note quiet" })));
}

function updateWorker(item, worker) {
  const node = item.firstElementChild;
  const [title, facts, ranks, pace, note] = node.children;
  const kind = kindOf(worker);
  const isLost = kind === "bad" && AWAY.has(worker.state);
  setKind(node, kind);
  setText(title.children[0], nameOf(worker));
  setKind(title.children[1], kind);
  setText(title.children[1], `${MARKS[kind]} ${[isLost ? `lost: ${worker.state}` : worker.state, ...worker.health.problems].join(", ")}`);
  const used = worker.total_blocks - worker.free_blocks;
  const share = worker.total_blocks ? used / worker.total_blocks : 0;
  const prompts = worker.prefixes;
  const hits = prompts.cached_tokens && prompts.predicted_tokens ? `${count(prompts.cached_tokens)} tokens` : "";
  setFacts(facts, isUnknown(worker) ? [["Heard", "never"]] : [
    ["Running", count(worker.running)],
    ["Queue", worker.queued ? `${count(worker.queued)}, ${duration(worker.queue_wait_s)}` : "0"],
    ["Epoch", count(worker.epoch)],
    ["Tokens/s", count(Math.round(worker.tokens_per_s))],
    ["Steps", count(worker.steps)],
    ["Heard", worker.last_seen_s === null ? "never" : `${duration(worker.last_seen_s)} ago`],
    ["KV blocks", `${count(used)} of ${count(worker.total_blocks)}`, share],
    ["Suspicion φ", String(worker.health.phi)],
    ["Breaker", worker.health.breaker],
    ...(hits ? [["Prefix hits", hits]] : []),
  ]);
  keyed(ranks, worker.ranks, (rank) => rank.rank, () => element("li", { class: "badge" }), (child, rank) => {
    // What the ranks of a lost worker do is unknown.
    const isSlow = kind !== "bad" && rank.rank === worker.slow_rank;
    setKind(child, isLost ? "wait" : isSlow ? "warn" : rank.state === "ready" ? "good" : rank.state === "dead" ? "bad" : "warn");
    setText(child, `rank ${rank.rank} ${isLost ? "was " : ""}${rank.state}${isSlow ? ", slow" : ""}, ${count(rank.steps)} steps`);
  });
  pace.hidden = kind === "bad" || !worker.ranks.some((rank) => rank.compute_s > 0);
  if (!pace.hidden) showPace(pace, worker);
  const reason = shown(worker.reason || worker.health.ejected_because);
  setText(note, noteOf(worker, kind, reason));
}

function noteOf(worker, kind, reason) {
  if (isUnknown(worker)) return reason ? `not reached yet: ${reason}` : "not reached yet";
  if (kind !== "bad") return reason || shown(worker.model);
  if (AWAY.has(worker.state)) return `${reason || "no connection"}; the figures are its last ones`;
  if (worker.state === "restarting") return reason ? `its ranks restart: ${reason}` : "its ranks restart";
  return reason || "it serves nothing";
}

// What a step of each rank took lately. Each bar is a share of the longest step: computing, then collectives, in which a
// rank waits for slower ones.
function showPace(pace, worker) {
  const [sentence, list] = pace.children;
  const slow = worker.slow_rank;
  setText(sentence, slow === null ? "Time of a step, last seconds" : `Time of a step, last seconds: rank ${slow} is slow, the others wait for it`);
  const longest = Math.max(...worker.ranks.map((rank) => rank.compute_s + rank.collective_s));
  const make = () => element("li", {}, element("span"),
    element("div", { class: "lane", "aria-hidden": "true" }, element("i", { class: "compute" }), element("i", { class: "collective" })));
  keyed(list, worker.ranks, (rank) => rank.rank, make, (item, rank) => {
    setText(item.children[0], `rank ${rank.rank} computes ${milliseconds(rank.compute_s)}, in collectives ${milliseconds(rank.collective_s)}`);
    const [compute, collective] = item.children[1].children;
    const share = longest > 0 ? 100 / longest : 0;
    compute.style.width = `${rank.compute_s * share}%`;
    collective.style.left = compute.style.width;
    collective.style.width = `${rank.collective_s * share}%`;
  });
}

// Lines.

export function fly(move) {
  flights.push({ from: move.from, to: move.to, until: Date.now() + FLIGHT_MS });
  flights = flights.slice(-4);
  setTimeout(draw, FLIGHT_MS + 50);
  draw();
}

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

export function draw() {
  if (last === null) return;
  const area = byId("map").getBoundingClientRect();
  const router = byId("router").getBoundingClientRect();
  const boxes = new Map();
  const parts = [];
  for (const item of byId("workers").children) {
    const box = item.firstElementChild.getBoundingClientRect();
    const worker = last.workers.find((each) => String(each.target ?? each.id) === item.dataset.key);
    if (!worker) continue;
    boxes.set(worker.id, box);
    const x = box.left + box.width / 2 - area.left;
    const from = { x: router.left + router.width / 2 - area.left, y: router.bottom - area.top };
    const y = box.top - area.top;
    const middle = from.y + 16;
    // A card below another one is reached along the edge, not through the upper card.
    const isBelow = y > middle + 40;
    const path = isBelow ? `M ${from.x} ${from.y} V ${middle} H -4 V ${y + 14} H 2` : `M ${from.x} ${from.y} V ${middle} H ${x} V ${y}`;
    parts.push(shape("path", { class: `wire ${kindOf(worker)}`, d: path }));
  }
  flights = flights.filter((flight) => flight.until > Date.now());
  for (const flight of flights) {
    const from = boxes.get(flight.from);
    const to = boxes.get(flight.to);
    if (from && to && from !== to) parts.push(...arc(from, to, area));
  }
  byId("wires").replaceChildren(...parts);
}

function arc(from, to, area) {
  const isSideBySide = Math.abs(from.top - to.top) < 40;
  const isUp = to.top < from.top;
  const start = isSideBySide ? { x: from.left + from.width / 2, y: from.top } : { x: from.right - 24, y: isUp ? from.top : from.bottom };
  const end = isSideBySide ? { x: to.left + to.width / 2, y: to.top } : { x: to.right - 24, y: isUp ? to.bottom : to.top };
  const bend = isSideBySide ? -36 : 0;
  const [sx, sy, ex, ey] = [start.x - area.left, start.y - area.top, end.x - area.left, end.y - area.top];
  const line = isSideBySide ? `M ${sx} ${sy} C ${sx} ${sy + bend}, ${ex} ${ey + bend}, ${ex} ${ey}` : `M ${sx} ${sy} L ${ex} ${ey}`;
  return [shape("path", { class: "flight", d: line }), shape("circle", { class: "flight-end", cx: ex, cy: ey, r: 5 })];
}

new ResizeObserver(draw).observe(byId("map"));
