// Numbers, times and text as people read them.

const COUNT = new Intl.NumberFormat("en");
export const count = (number) => COUNT.format(number);

export const tokens = (number) => `${count(number)} token${number === 1 ? "" : "s"}`;

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 0.9995) return `${Math.max(0, Math.round(seconds * 1000))} ms`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  const minutes = Math.round(seconds / 60);
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const milliseconds = (seconds) => `${(seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0)} ms`;

// The time of day; of another day than today with its date.
export function clock(seconds) {
  const then = new Date(seconds * 1000);
  const time = then.toLocaleTimeString("en-GB");
  const now = new Date();
  if (then.toDateString() === now.toDateString()) return time;
  const year = then.getFullYear() === now.getFullYear() ? {} : { year: "numeric" };
  return `${then.toLocaleDateString("en-GB", { day: "numeric", month: "short", ...year })}, ${time}`;
}

// Characters that a terminal or a line of text would obey instead of showing them: controls, and marks that turn or
// hide what follows. Joiners are left alone, since scripts and emoji need them.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;

export function named(character) {
  const code = character.codePointAt(0);
  return `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
}

// Appends text to an element as text, with hidden characters made visible.
export function appendShown(target, text) {
  let from = 0;
  for (const match of text.replaceAll("\r\n", "\n").matchAll(HIDDEN)) {
    const source = match.input;
    if (match.index > from) target.append(source.slice(from, match.index));
    const mark = document.createElement("span");
    mark.className = "control";
    mark.textContent = named(match[0]);
    target.append(mark);
    from = match.index + match[0].length;
  }
  const rest = text.replaceAll("\r\n", "\n").slice(from);
  if (rest) target.append(rest);
}

export const shown = (text) => String(text).replace(HIDDEN, named);
