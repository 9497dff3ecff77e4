// The router, its workers and their ranks, and the line that a moving stream draws between two workers.

import { announce, byId, element, keyed, setFacts, setKind, setText } from "./dom.js";
import { count, duration, shown } from "./words.js";

const FLIGHT_MS = 6000;
const SVG = "http://www.w3.org/2000/svg";
const GOOD = new Set(["ready"]);
const PASSING = new Set(["loading", "starting", "draining", "retired"]);
const MARKS = { good: "✓", warn: "…", bad: "✕", wait: "·" };

const states = new Map();
let flights = [];
let last = null;

export function nameOf(worker) {
  return shown(worker.id || worker.target || "a worker");
}

function kindOf(worker) {
  if (GOOD.has(worker.state)) return worker.health.problems.length ? "warn" : "good";
  return PASSING.has(worker.state) ? "warn" : "bad";
}

export function showTopology(state) {
  last = state;
  showRouter(state);
  const keys = new Set(state.workers.map((worker) => worker.target ?? worker.id));
  for (const key of states.keys()) if (!keys.has(key)) states.delete(key);
  for (const worker of state.workers) tell(worker);
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

// A change of a worker's state is told once.
function tell(worker) {
  const key = worker.target ?? worker.id;
  const before = states.get(key);
  const now = `${worker.state} ${worker.epoch}`;
  states.set(key, now);
  if (before !== undefined && before !== now) announce(`Worker ${nameOf(worker)} is ${worker.state}.`);
}

function makeWorker() {
  return element("li", {}, element("article", { class: "node worker" },
    element("div", { class: "title" }, element("h3"), element("span", { class: "badge" })),
    element("dl"),
    element("ul", { class: "ranks", "aria-label": "Ranks" }),
    element("p", { class: "note quiet" })));
}

function updateWorker(item, worker) {
  const node = item.firstElementChild;
  const [title, facts, ranks, note] = node.children;
  const kind = kindOf(worker);
  setKind(node, kind);
  setText(title.children[0], nameOf(worker));
  setKind(title.children[1], kind);
  setText(title.children[1], `${MARKS[kind]} ${[kind === "bad" ? `lost: ${worker.state}` : worker.state, ...worker.health.problems].join(", ")}`);
  const used = worker.total_blocks - worker.free_blocks;
  const share = worker.total_blocks ? used / worker.total_blocks : 0;
  const prompts = worker.prefixes;
  const hits = prompts.cached_tokens && prompts.predicted_tokens ? `${count(prompts.cached_tokens)} tokens` : "";
  setFacts(facts, [
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
    // Nobody knows what the ranks of a lost worker do.
    setKind(child, kind === "bad" ? "wait" : rank.state === "ready" ? "good" : rank.state === "dead" ? "bad" : "warn");
    setText(child, `rank ${rank.rank} ${kind === "bad" ? "was " : ""}${rank.state}, ${count(rank.steps)} steps`);
  });
  const reason = shown(worker.reason || worker.health.ejected_because);
  setText(note, kind === "bad" ? `${reason || "no connection"}; the figures are its last ones` : reason || shown(worker.model));
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
  const beside = Math.abs(from.top - to.top) < 40;
  const isUp = to.top < from.top;
  const start = beside ? { x: from.left + from.width / 2, y: from.top } : { x: from.right - 24, y: isUp ? from.top : from.bottom };
  const end = beside ? { x: to.left + to.width / 2, y: to.top } : { x: to.right - 24, y: isUp ? to.bottom : to.top };
  const bend = beside ? -36 : 0;
  const [sx, sy, ex, ey] = [start.x - area.left, start.y - area.top, end.x - area.left, end.y - area.top];
  const line = beside ? `M ${sx} ${sy} C ${sx} ${sy + bend}, ${ex} ${ey + bend}, ${ex} ${ey}` : `M ${sx} ${sy} L ${ex} ${ey}`;
  return [shape("path", { class: "flight", d: line }), shape("circle", { class: "flight-end", cx: ex, cy: ey, r: 5 })];
}

new ResizeObserver(draw).observe(byId("map"));
