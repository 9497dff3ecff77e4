// A conversation with a model. An answer is resumable: if its connection breaks, it is read on from where it was.

import { request, sentenceOf } from "./access.js";
import { announce, byId, element, keyed, setKind, setText } from "./dom.js";
import { onMove, sentence } from "./moves.js";
import { events } from "./sse.js";
import { appendShown, duration, tokens } from "./words.js";

const MAX_MESSAGES = 40;
const RETRY_FOR_MS = 60_000;
const NEAR_END_PX = 40;
// Codes of failures in the middle of an answer after which the router continues it for a client that comes back.
const PASSING = new Set(["draining", "unavailable", "overloaded", "worker_lost"]);
let messages = [];
let running = null;

// The newest messages. The first is the user's: templates may refuse a conversation that the model begins.
export function newest(all) {
  const kept = all.slice(-MAX_MESSAGES);
  return kept.slice(kept.findIndex(({ role }) => role === "user"));
}

export function showChat(state) {
  byId("chat-off").hidden = state.chat;
  byId("chat-on").hidden = !state.chat;
  const make = (model) => element("option", { value: model.name, text: model.name });
  const fresh = keyed(byId("model"), state.models, (model) => model.name, make, () => {});
  const most = byId("max-tokens");
  // A model with a short context must have room for the conversation as well.
  const contexts = state.models.map((model) => Math.floor(model.context_length / 2));
  if (fresh.length && most.value === most.defaultValue) most.value = Math.min(most.value, ...contexts);
}

function bubble(role) {
  const text = element("bdi", { class: "text", dir: "auto" });
  const foot = element("p", { class: "foot" });
  const item = element("li", { class: role }, element("h3", { text: role === "user" ? "You" : "Model" }), text, foot);
  byId("talk").append(item);
  return { item, text, foot };
}

let isFollowDue = false;
let isEndWanted = false;
let endBefore = 0;

// Keeps the end of the conversation in view, unless the user has scrolled up; `always`: also then. It does so once a
// frame, since to read the height lays out the whole conversation.
function follow(always = false) {
  isEndWanted ||= always;
  if (isFollowDue) return;
  isFollowDue = true;
  requestAnimationFrame(() => {
    const talk = byId("talk");
    const end = talk.scrollHeight - talk.clientHeight;
    // Compared with the end before the new text. A list that became shorter has been scrolled back by the browser.
    const wasAtEnd = talk.scrollTop >= Math.min(endBefore, end) - NEAR_END_PX;
    if (isEndWanted || wasAtEnd) talk.scrollTop = end;
    [isFollowDue, isEndWanted, endBefore] = [false, false, end];
  });
}

function randomKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// One answer: what it has so far, and how to get more of it.
class Answer {
  constructor(body, view) {
    this.body = body;
    this.view = view;
    this.key = randomKey();
    this.stopping = new AbortController();
    this.streamId = null;
    this.lastId = null;
    this.content = "";
    this.isDone = false;
    this.tokens = null;
    this.isCut = false;
    this.target = null;
    this.kind = null;
    this.heldBack = "";
    this.comesBack = false;
    this.interruption = "";
  }

  async run() {
    let deadline = 0;
    let pause = 250;
    while (!this.isDone) {
      const before = this.lastId;
      try {
        await this.read();
        if (this.isDone) return;
        throw new TypeError("the connection has ended");
      } catch (error) {
        // A TypeError is fetch's word for a connection that failed or broke.
        if (this.stopping.signal.aborted || !(error instanceof TypeError || error.isPassing)) throw error;
        if (this.lastId !== before || deadline === 0) [deadline, pause] = [Date.now() + RETRY_FOR_MS, 250];
        if (Date.now() > deadline) throw error.isPassing ? error : new Error("the router has not come back within a minute");
        if (!this.comesBack) this.interruption = error.isPassing ? "the answer was interrupted" : "the connection broke";
        setText(this.view.foot, error.isPassing ? `${error.message}; coming back…` : "connection lost, coming back…");
        await new Promise((resolve) => setTimeout(resolve, pause));
        pause = Math.min(2 * pause, 3000);
        this.comesBack = true;
      }
    }
  }

  open() {
    const signal = this.stopping.signal;
    const headers = this.lastId === null ? {} : { "Last-Event-ID": this.lastId };
    if (this.streamId !== null) return request(`../v1/streams/${encodeURIComponent(this.streamId)}`, { headers, signal });
    // The key makes a repetition join the first request, if that arrived.
    const all = { ...headers, "Content-Type": "application/json", "X-Lockstep-Resumable": "true", "Idempotency-Key": this.key };
    return request("../v1/chat/completions", { method: "POST", headers: all, body: JSON.stringify(this.body), signal });
  }

  async read() {
    const response = await this.open();
    if (!response.ok) {
      const error = new Error(await sentenceOf(response));
      error.isPassing = this.comesBack && response.status >= 500;
      throw error;
    }
    this.streamId = response.headers.get("X-Lockstep-Stream-ID") ?? this.streamId;
    if (this.comesBack) {
      this.comesBack = false;
      setText(this.view.foot, "");
      if (this.lastId !== null) this.mark(`${this.interruption}, and the answer goes on`);
    }
    for await (const { id, data } of events(response)) {
      if (data === "[DONE]") {
        this.isDone = true;
        return;
      }
      this.take(JSON.parse(data));
      this.lastId = id ?? this.lastId;
    }
  }

  take(chunk) {
    if (chunk.error) {
      const error = new Error(chunk.error.message);
      error.isPassing = PASSING.has(chunk.error.code);
      throw error;
    }
    if (chunk.usage) this.tokens = chunk.usage.completion_tokens;
    const choice = chunk.choices?.[0];
    if (choice?.finish_reason === "length") this.isCut = true;
    const delta = choice?.delta;
    if (delta?.reasoning_content) this.append("reasoning", delta.reasoning_content);
    if (delta?.content) {
      this.content += delta.content;
      this.append("said", delta.content);
    }
  }

  append(kind, text) {
    if (this.kind !== kind || this.target === null) {
      this.target = element("span", { class: kind });
      if (kind === "reasoning" && this.kind !== kind) this.target.append(element("span", { class: "label", text: "Reasoning" }));
      this.kind = kind;
      this.view.text.append(this.target);
    }
    // A carriage return may be the first half of a line's end, whose other half comes with the next token.
    const all = this.heldBack + text;
    this.heldBack = all.endsWith("\r") ? "\r" : "";
    appendShown(this.target, this.heldBack ? all.slice(0, -1) : all);
    follow();
  }

  // Shows what was held back for a next token, since there is none.
  finish() {
    appendShown(this.target ?? this.view.text, this.heldBack);
    this.heldBack = "";
  }

  mark(text) {
    this.view.text.append(element("span", { class: "moved", text: ` ⇄ ${text} ` }));
    this.target = null;
  }

  stop() {
    this.stopping.abort();
    // It would run on for its client to come back. The request outlives the page, which may be about to go.
    const options = { method: "DELETE", keepalive: true };
    if (this.streamId !== null) request(`../v1/streams/${encodeURIComponent(this.streamId)}`, options).catch(() => {});
    else request("../v1/streams", { ...options, headers: { "Idempotency-Key": this.key } }).catch(() => {});
  }
}

async function send(text) {
  const asked = newest([...messages, { role: "user", content: text }]);
  appendShown(bubble("user").text, text);
  const view = bubble("model");
  follow(true);
  const body = {
    model: byId("model").value,
    messages: asked,
    max_tokens: Number(byId("max-tokens").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  const answer = new Answer(body, view);
  running = answer;
  setRunning(true);
  view.item.setAttribute("aria-busy", "true");
  const unwatch = onMove((move) => {
    if (move.run && answer.streamId?.startsWith(move.run)) answer.mark(sentence(move));
  });
  const began = performance.now();
  let hasAnswer = true;
  try {
    await answer.run();
    const length = answer.tokens === null ? "" : `${tokens(answer.tokens)}, `;
    const cut = answer.isCut ? ", cut at the token limit" : "";
    setText(view.foot, `${length}${duration((performance.now() - began) / 1000)}${cut}`);
    announce(answer.isCut ? "The answer was cut at the token limit." : "The answer is complete.");
  } catch (error) {
    hasAnswer = answer.content !== "";
    const wasStopped = answer.stopping.signal.aborted;
    if (!wasStopped) setKind(view.foot, "bad");
    setText(view.foot, wasStopped ? "stopped" : `Error: ${error.message}`);
    announce(wasStopped ? "Stopped." : `Error: ${error.message}`);
  } finally {
    answer.finish();
    // A message without an answer is no part of the conversation, or it would make the next ones fail as well.
    if (hasAnswer) messages = [...asked, { role: "assistant", content: answer.content }];
    else byId("message").value ||= text;
    view.item.removeAttribute("aria-busy");
    running = null;
    setRunning(false);
    setTimeout(unwatch, 3000); // the move of its last token may be reported late
    follow();
  }
}

function setRunning(isRunning) {
  byId("send").disabled = isRunning;
  byId("clear").disabled = isRunning;
  if (!isRunning && document.activeElement === byId("stop")) byId("message").focus();
  byId("stop").disabled = !isRunning;
}

byId("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("message").value.trim();
  if (!text || running !== null) return;
  byId("message").value = "";
  byId("message").focus();
  send(text);
});
byId("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("chat-form").requestSubmit();
});
byId("stop").addEventListener("click", () => running?.stop());
// A page that is left or loaded again has no way back to its answer. One that the browser keeps may be shown again.
addEventListener("pagehide", (event) => {
  if (!event.persisted) running?.stop();
});
byId("clear").addEventListener("click", () => {
  messages = [];
  byId("talk").replaceChildren();
  byId("message").focus();
});
