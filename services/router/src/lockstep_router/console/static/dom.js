// Builds and updates elements. Text is only ever set as text: nothing here or elsewhere parses markup.

export const byId = (id) => document.getElementById(id);

export function element(name, options = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (key === "class") made.className = value;
    else if (key === "text") made.textContent = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

// Changes text only where it differs, so that selections and screen readers are left in peace.
export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

export function setKind(node, kind) {
  if (node.dataset.kind !== kind) node.dataset.kind = kind;
}

// Makes the children of `parent` those of `items`, in order. Elements live on with their item's key, and with them the
// focus. Returns the keys that are new.
export function keyed(parent, items, keyOf, make, update) {
  const known = new Map();
  for (const child of parent.children) known.set(child.dataset.key, child);
  const fresh = [];
  const times = new Map();
  let before = parent.firstElementChild;
  for (const item of items) {
    let key = String(keyOf(item));
    const time = (times.get(key) ?? 0) + 1;
    times.set(key, time);
    if (time > 1) key = `${key} (${time})`; // two workers may have one name
    let child = known.get(key);
    if (child === undefined) {
      child = make(item);
      child.dataset.key = key;
      fresh.push(key);
    }
    known.delete(key);
    update(child, item);
    if (child === before) before = before.nextElementSibling;
    else parent.insertBefore(child, before);
  }
  for (const child of known.values()) child.remove();
  return fresh;
}

// A list of terms and values that keeps its elements: `facts` is a list of [term, value, share or undefined].
export function setFacts(list, facts) {
  const make = ([term]) => element("div", {}, element("dt", { text: term }), element("dd"));
  keyed(list, facts, ([term]) => term, make, (child, [, value, share]) => {
    setText(child.children[1], value);
    if (share === undefined) return;
    if (child.children.length < 3) child.append(element("div", { class: "meter", "aria-hidden": "true" }, element("i")));
    child.children[2].firstElementChild.style.width = `${Math.min(100, Math.max(0, share * 100))}%`;
  });
}

let waiting = [];
let timer = 0;

// Gives sentences to a screen reader, a few at a time.
export function announce(sentence) {
  if (waiting.length < 3) waiting.push(sentence);
  if (timer) return;
  timer = setTimeout(() => {
    byId("announcer").textContent = waiting.join(" ");
    waiting = [];
    timer = 0;
  }, 300);
}
