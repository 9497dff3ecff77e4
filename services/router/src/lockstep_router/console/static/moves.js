// The list of streams that have moved, and the signs of a move that has just happened.

import { announce, byId, element, keyed, setText } from "./dom.js";
import { fly } from "./topology.js";
import { clock, duration, shown, tokens } from "./words.js";

// A router that is started again counts from 1 again.
const keyOf = (move) => `${move.key}.${move.stream}`;
let shownRouter = null;
const unfinished = new Set();
const listeners = new Set();

// Calls the function with each move that is new; returns how to stop that.
export function onMove(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function sentence(move) {
  const gap = move.gap_s === null ? "" : `, ${duration(move.gap_s)}`;
  if (move.to && (!move.ended || move.ended === "finished")) return `stream ${move.stream} moved ${shown(move.from)} → ${shown(move.to)}${gap}`;
  if (move.ended) return `stream ${move.stream} left ${shown(move.from)} and ended: ${move.ended}`;
  return `stream ${move.stream} leaves ${shown(move.from)}`;
}

export function showMoves(moves, router) {
  // Another router's moves are nothing that has just happened: behind a balancer, each answer may be of another one.
  const isFirst = shownRouter !== router;
  shownRouter = router;
  byId("moves-empty").hidden = moves.length > 0;
  byId("move-list").hidden = !moves.length;
  const make = () => element("li", {}, element("time"), element("strong"), element("span", { class: "quiet" }));
  const fresh = new Set(keyed(byId("move-list"), moves, keyOf, make, (item, move) => {
    setText(item.children[0], clock(move.at));
    setText(item.children[1], sentence(move));
    setText(item.children[2], `${move.reason.replaceAll("_", " ")}, after ${tokens(move.tokens)}`);
  }));
  const keys = new Set(moves.map(keyOf));
  for (const key of unfinished) if (!keys.has(key)) unfinished.delete(key);
  for (const [index, move] of [...moves.entries()].reverse()) {
    const key = keyOf(move);
    if (fresh.has(key) && !isFirst) {
      byId("move-list").querySelector(`[data-key="${CSS.escape(key)}"]`).classList.add("new");
      unfinished.add(key);
    }
    // Announced when it is known where the stream went and how long it took, or that it ended or has moved on before a token.
    // The answers of one request have the same name, and move from one worker at the same time.
    const isNext = (newer) => newer.stream === move.stream && newer.from === move.to;
    const movedOn = () => move.to && moves.slice(0, index).some(isNext);
    if (unfinished.has(key) && (move.gap_s !== null || move.ended || (move.to && move.tokens === 0) || movedOn())) {
      unfinished.delete(key);
      fly(move);
      announce(`${sentence(move)}.`.replace("→", "to"));
      for (const listener of listeners) listener(move);
    }
  }
}
