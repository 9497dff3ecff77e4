// The API key of this tab, and requests with it. It is kept in this tab's session only, and goes to this origin only.

const NAME = "lockstep.key";
let key = "";
try {
  key = sessionStorage.getItem(NAME) ?? "";
} catch {
  // The browser keeps nothing: the key lives as long as the page.
}

export const hasKey = () => key !== "";

export function setKey(value) {
  key = value;
  try {
    if (value) sessionStorage.setItem(NAME, value);
    else sessionStorage.removeItem(NAME);
  } catch {
    // As above.
  }
}

export function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  return fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin", redirect: "error" });
}

// The sentence of an error that the router answered with.
export async function sentenceOf(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? body.error ?? `the router answered ${response.status}`;
  } catch {
    return `the router answered ${response.status}`;
  }
}
