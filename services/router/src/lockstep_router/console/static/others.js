// The other routers, as each has answered this one.

import { announce, byId, element, keyed, setFacts, setKind, setText } from "./dom.js";
import { count, duration, shown } from "./words.js";

const states = new Map();

// [what it is, in a word for a sentence; how good that is; its mark]
function stateOf({ facts, problem }) {
  if (problem) return ["does not answer", "bad", "✕"];
  if (facts === null) return ["being asked", "wait", "…"];
  if (facts.state !== "serving") return [facts.state, "warn", "…"];
  return facts.unready ? ["not ready", "warn", "…"] : ["serving", "good", "✓"];
}

const nameOf = ({ facts, address }) => (facts === null ? `at ${shown(address)}` : shown(facts.id));

export function showOthers(others) {
  const rows = others?.rows ?? [];
  const problem = others?.problem ?? "";
  byId("others").hidden = !rows.length && !problem;
  setText(byId("others-note"), problem ? `Not all may be shown: ${shown(problem)}` : "Each has its own connections to the workers, streams and limits.");
  const addresses = new Set(rows.map((row) => row.address));
  for (const address of states.keys()) if (!addresses.has(address)) states.delete(address);
  for (const row of rows) announceChange(row);
  keyed(byId("other-list"), rows, (row) => row.address, () => element("li", {}, element("article", { class: "node" },
    element("div", { class: "title" }, element("h4"), element("span", { class: "badge" })), element("dl"), element("p", { class: "note quiet" }))), (item, row) => {
    const [title, list, note] = item.firstElementChild.children;
    const { facts } = row;
    const [word, kind, mark] = stateOf(row);
    setKind(item.firstElementChild, kind);
    setText(title.children[0], `Router ${nameOf(row)}`);
    setKind(title.children[1], kind);
    setText(title.children[1], `${mark} ${word}`);
    setFacts(list, facts === null ? [] : [
      ["Requests", count(facts.requests)],
      ["Streams", `${count(facts.streams)} of ${count(facts.max_streams)}`, facts.max_streams ? facts.streams / facts.max_streams : 0],
      ["Sessions", count(facts.sessions)],
      ["Failovers", count(facts.failovers)],
      ["Up", duration(facts.uptime_s)],
      ["Heard", `${duration(row.heard_s)} ago`],
      ["Version", shown(facts.version) || "–"],
    ]);
    const old = facts === null ? "nothing is known of it" : "the figures are its last ones";
    const state = row.problem ? `${shown(row.problem)}; ${old}` : shown(facts?.unready ?? "");
    setText(note, [facts === null ? "" : shown(row.address), state].filter(Boolean).join(": "));
  });
}

// A change of a router's state is announced once.
function announceChange(row) {
  const [word] = stateOf(row);
  const before = states.get(row.address);
  states.set(row.address, word);
  if (before !== undefined && before !== "being asked" && before !== word) announce(`Router ${nameOf(row)}: ${word}.`);
}
