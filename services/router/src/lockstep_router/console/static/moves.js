// The list of streams that have moved, and the signs of a move that has just happened.

import { announce, byId, element, keyed, setText } from "./dom.js";
import { fly } from "./topology.js";
import { clock, count, duration, shown } from "./words.js";

let isFirst = true;
const unfinished = new Set();
const listeners = new Set();

// Calls the function with each move that is new; returns how to stop that.
export function onMove(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function sentence(move) {
  const gap = move.gap_s === null ? "" : `, ${duration(move.gap_s)}`;
  if (move.to) return `stream ${move.stream} moved ${shown(move.from)} → ${shown(move.to)}${gap}`;
  if (move.ended) return `stream ${move.stream} left ${shown(move.from)} and ended: ${move.ended}`;
  return `stream ${move.stream} leaves ${shown(move.from)}`;
}

export function showMoves(moves) {
  byId("moves-empty").hidden = moves.length > 0;
  const make = () => element("li", {}, element("time"), element("strong"), element("span", { class: "quiet" }));
  const fresh = new Set(keyed(byId("move-list"), moves, (move) => move.key, make, (item, move) => {
    setText(item.children[0], clock(move.at));
    setText(item.children[1], sentence(move));
    setText(item.children[2], `${move.reason.replaceAll("_", " ")}, after ${count(move.tokens)} tokens`);
  }));
  for (const move of [...moves].reverse()) {
    if (fresh.has(move.key) && !isFirst) {
      byId("move-list").querySelector(`[data-key="${CSS.escape(move.key)}"]`).classList.add("new");
      unfinished.add(move.key);
    }
    // Told when it is known where the stream went and how long it took, or that it ended.
    if (unfinished.has(move.key) && (move.gap_s !== null || move.ended || (move.to && move.tokens === 0))) {
      unfinished.delete(move.key);
      fly(move);
      announce(`${sentence(move)}.`.replace("→", "to"));
      for (const listener of listeners) listener(move);
    }
  }
  isFirst = false;
}
