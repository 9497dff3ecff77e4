// Asks for the state once a second while the page is visible, and shows it.

import { hasKey, request, sentenceOf, setKey } from "./access.js";
import { showChat } from "./chat.js";
import { byId, element, keyed, setKind, setText } from "./dom.js";
import { showMoves } from "./moves.js";
import { showOthers } from "./others.js";
import { showStreams } from "./streams.js";
import { showTenants } from "./tenants.js";
import { showTopology } from "./topology.js";

const FORMAT = 1;
const EVERY_MS = 1000;
const MAX_PAUSE_MS = 5000;
const TIMEOUT_MS = 5000;

let timer = 0;
let isAsking = false;
let failures = 0;

async function poll() {
  clearTimeout(timer);
  if (document.hidden || isAsking) return;
  isAsking = true;
  try {
    const response = await request("state", { signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (response.status === 401) {
      askForKey(hasKey() ? await sentenceOf(response) : "");
      return;
    }
    if (!response.ok) throw new Error(await sentenceOf(response));
    const state = await response.json();
    failures = 0;
    byId("key-form").hidden = true;
    if (state.format === FORMAT) {
      show(state);
      connection("good", "live");
      problem("");
    } else {
      connection("warn", "another version");
      problem("The router is of another version than this page: load the page again.");
    }
  } catch (error) {
    failures += 1;
    connection("bad", "not connected");
    if (failures > 1) problem(`The router does not answer (${error.message}). What is shown is old.`);
  } finally {
    isAsking = false;
  }
  timer = setTimeout(poll, Math.min(EVERY_MS * (failures + 1), MAX_PAUSE_MS));
}

function show(state) {
  showTopology(state);
  showOthers(state.others);
  showMoves(state.moves, state.router.id);
  showStreams(state);
  showTenants(state.tenants);
  showChat(state);
  const links = state.links.filter(({ url }) => /^https?:\/\//.test(url));
  const make = ({ name, url }) => element("a", { href: url, text: name, rel: "noopener noreferrer", target: "_blank" });
  keyed(byId("links"), links, ({ url }) => url, make, () => {});
}

function askForKey(sentence) {
  setKey("");
  connection("warn", "needs a key");
  problem(sentence);
  byId("key-form").hidden = false;
}

function connection(kind, text) {
  setKind(byId("connection"), kind);
  setText(byId("connection"), text);
}

function problem(text) {
  byId("problem").hidden = !text;
  setText(byId("problem"), text);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  byId("key").value = "";
  poll();
});
document.addEventListener("visibilitychange", poll);

// The theme is a preference of this browser, and nothing else is stored for longer than the tab.
const THEME = "lockstep.theme";
function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}
const select = byId("theme");
try {
  const known = localStorage.getItem(THEME);
  if (known === "light" || known === "dark") select.value = known;
} catch {
  // The browser stores nothing: the system's theme it is.
}
setTheme(select.value);
select.addEventListener("change", () => {
  setTheme(select.value);
  try {
    localStorage.setItem(THEME, select.value);
  } catch {
    // As above.
  }
});

poll();
