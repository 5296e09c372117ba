// Shared by all pages: rendering, fetching and formatting. Values become text nodes, never markup.
import { html, render, useState, useEffect, useRef, useMemo, useCallback } from "/ui/vendor/preact.js";
export { html, render, useState, useEffect, useRef, useMemo, useCallback };

export class Refused extends Error {
  constructor(status, reason) { super(reason); this.status = status; }
}

// An integer that JavaScript would round is kept as text, in browsers that expose the source text.
const exact = (key, value, context) => (Number.isInteger(value) && !Number.isSafeInteger(value) && context ? context.source : value);
export const parse = (text) => JSON.parse(text, /\d{16}/.test(text) ? exact : undefined);

export async function api(path, { method = "GET", body } = {}) {
  // The browser would resolve these parts, and request or delete something else.
  if (path.split("?")[0].split("/").some((part) => part === "." || part === "..")) throw new Error("A browser cannot address a name that is only dots; use the command line instead.");
  const options = { method, headers: { accept: "application/json" } };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers["content-type"] = "application/json";
  }
  const answer = await fetch(path, options);
  const text = await answer.text();
  let content = null;
  try { content = text ? parse(text) : null; } catch { content = null; }
  if (!answer.ok) {
    const reason = content && (content.detail || content.reason || content.message || content.error);
    throw new Refused(answer.status, String(reason || `${answer.status} ${answer.statusText}`));
  }
  return content;
}

// The current user, requested before anything else so that the browser asks for a login only once, and again after the
// user has lost access.
export const who = { name: null, tags: [], refused: null };
export async function identify() {
  try {
    Object.assign(who, await api("/api/whoami"));
  } catch (error) {
    // Every page shows that the broker, or a proxy before it, is unavailable.
    if (error instanceof Refused && [401, 403, 429].includes(error.status)) who.refused = error;
  }
}
export const hasTag = (...tags) => who.name === null || who.tags.includes("administrator") || tags.some((tag) => who.tags.includes(tag));

export const q = encodeURIComponent;
export const query = (values) => {
  const pairs = Object.entries(values).filter(([, v]) => v !== undefined && v !== null && v !== "");
  return pairs.length ? "?" + pairs.map(([k, v]) => `${q(k)}=${q(v)}`).join("&") : "";
};

// Live numbers: one event stream for the whole dashboard. Pages refresh on its ticks, so a lost connection stops them.
export const live = { data: null, connected: false, at: 0, paused: false, tick: 0, listeners: new Set() };
const notify = () => live.listeners.forEach((listener) => listener());
// A browser has six connections for all tabs, so hidden tabs disconnect, or the seventh tab would never load.
const isHidden = () => document.visibilityState === "hidden";
let source = null;
let started = false;
export function connect() {
  started = true;
  if (source) source.close();
  if (isHidden()) return;
  source = new EventSource("/api/headrace/overview/stream");
  source.onmessage = (event) => {
    live.connected = true;
    live.at = Date.now();
    if (!live.paused) { live.data = JSON.parse(event.data); live.tick += 1; }
    notify();
  };
  source.onerror = async () => {
    live.connected = false;
    notify();
    if (source.readyState !== EventSource.CLOSED) return;  // the browser reconnects by itself
    await identify();
    if (who.refused) notify(); else setTimeout(connect, 2000);
  };
}
document.addEventListener("visibilitychange", () => { if (started && !who.refused) connect(); });
setInterval(() => { if (!isHidden() && live.at && Date.now() - live.at > 4000) { live.connected = false; notify(); } }, 1000);
export function pause(paused) { live.paused = paused; notify(); }
// The error of a user who has lost access.
export function useRefused() {
  const [refused, setRefused] = useState(who.refused);
  useEffect(() => {
    const listener = () => setRefused(who.refused);
    live.listeners.add(listener);
    return () => live.listeners.delete(listener);
  }, []);
  return refused;
}
export function useLive() {
  const [, redraw] = useState(0);
  useEffect(() => {
    const listener = () => redraw((n) => n + 1);
    live.listeners.add(listener);
    return () => live.listeners.delete(listener);
  }, []);
  return live;
}

// Data of a page: fetched at once, and again every `every` ticks. After a failure the old data is kept and marked.
export function useData(path, every = 2) {
  const [state, setState] = useState({ data: null, error: null, path: null });
  const busy = useRef(false);
  const wanted = useRef(path);
  wanted.current = path;
  const load = useCallback(async () => {
    if (!wanted.current || busy.current) return;
    busy.current = true;
    const asked = wanted.current;
    try {
      const data = await api(asked);
      if (asked === wanted.current) setState({ data, error: null, path: asked });
    } catch (error) {
      if (asked === wanted.current) setState((old) => ({ data: old.path === asked ? old.data : null, error, path: asked }));
    } finally {
      busy.current = false;
      if (asked !== wanted.current) load();
    }
  }, []);
  useEffect(() => { load(); }, [path]);
  useEffect(() => {
    let seen = live.tick;
    const listener = () => {
      if (every && live.tick - seen >= every && document.visibilityState === "visible") { seen = live.tick; load(); }
    };
    live.listeners.add(listener);
    return () => live.listeners.delete(listener);
  }, [every]);
  return { ...state, reload: load };
}

// One page of a list. If the list has become shorter, the last page is shown.
export function usePage(path, { page, ...wanted }) {
  const found = useData(path + query({ page: Number(page) || 1, page_size: 50, ...wanted }));
  const gone = found.error && /page_out_of_range: .* of (\d+)/.exec(found.error.message);
  useEffect(() => { if (gone) setParams({ page: gone[1] }); }, [gone && gone[0]]);
  return { ...found, error: gone ? null : found.error };
}

// Formatting
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
export const count = (n) => (n === null || n === undefined ? "–" : whole.format(n));
export const short = (n) => {
  if (n === null || n === undefined) return "–";
  for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(n) >= limit) return tenth.format(n / (limit === 1e4 ? 1e3 : limit)) + unit;
  }
  return Number.isInteger(n) ? whole.format(n) : tenth.format(n);
};
export const rate = (n) => (n === null || n === undefined ? "–" : n > 0 && n < 0.05 ? "<0.1" : short(Math.round(n * 10) / 10));
export const bytes = (n) => {
  if (n === null || n === undefined) return "–";
  let unit = 0;
  const units = ["B", "KB", "MB", "GB", "TB"];
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit += 1; }
  return `${unit && n < 100 ? tenth.format(n) : whole.format(n)} ${units[unit]}`;
};
export const ms = (n) => (n === null || n === undefined ? "–" : n < 10 ? `${tenth.format(n)} ms` : n < 10000 ? `${whole.format(n)} ms` : `${tenth.format(n / 1000)} s`);
export const time = (at) => (at && at > 0 ? new Date(at).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" }) : "–");
export const clock = (at) => {
  if (!(at > 0)) return "–";
  const date = new Date(at);
  const today = new Date().toDateString() === date.toDateString();
  const text = date.toLocaleTimeString("en-GB") + "." + String(date.getMilliseconds()).padStart(3, "0");
  return today ? text : `${date.toLocaleDateString("en-CA")} ${text}`;
};
export const ago = (at) => {
  if (!(at > 0)) return "–";
  const s = Math.max(0, (Date.now() - at) / 1000);
  if (s < 90) return `${Math.round(s)} s ago`;
  if (s < 5400) return `${Math.round(s / 60)} min ago`;
  if (s < 129600) return `${Math.round(s / 3600)} h ago`;
  return `${Math.round(s / 86400)} days ago`;
};

// The address: #/page/part/part?name=value. Every view can be linked to.
export function route() {
  const [path, search] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  return { page: parts[0] || "overview", parts: parts.slice(1), params: Object.fromEntries(new URLSearchParams(search || "")) };
}
export function go(path, params) { location.hash = "#/" + path + query(params || {}); }
export function setParams(changes) {
  const { params } = route();
  const path = location.hash.replace(/^#\/?/, "").split("?")[0];
  history.replaceState(null, "", "#/" + path + query({ ...params, ...changes }));
  dispatchEvent(new HashChangeEvent("hashchange"));
}
export const streamLink = (vhost, name, tab) => `#/stream/${q(vhost)}/${q(name)}${tab ? "/" + tab : ""}`;

const DEPTH_SHOWN = 32;  // deeper indentation could take all of the memory: ten thousand brackets, each line longer than the last
// Indented JSON, made from the text: printing the parsed value would round large numbers and drop duplicate names.
export function indented(text) {
  try { JSON.parse(text); } catch { return null; }
  let depth = 0;
  const line = () => "\n" + "  ".repeat(Math.min(depth, DEPTH_SHOWN));
  return text.replace(/"[^"\\]*(?:\\.[^"\\]*)*"|\{\s*\}|\[\s*\]|[{}[\],:]|\s+/g, (token) => {
    if (token[0] === '"') return token;
    if (/^\s/.test(token)) return "";
    if (token.length > 1) return token[0] + token.at(-1);
    if (token === "{" || token === "[") { depth += 1; return token + line(); }
    if (token === "}" || token === "]") { depth -= 1; return line() + token; }
    return token === "," ? token + line() : ": ";
  });
}

export async function copy(text) {
  try { await navigator.clipboard.writeText(text); say("Copied."); } catch { say("The browser does not allow copying.", "bad"); }
}
export const shellQuote = (text) => "'" + String(text).replaceAll("'", "'\\''") + "'";

// Toasts: short messages at the bottom of the window.
export const toasts = { list: [], listeners: new Set() };
let lastToast = 0;
export function say(text, kind = "good") {
  const entry = { id: ++lastToast, text, kind };
  toasts.list = [...toasts.list.slice(-2), entry];
  toasts.listeners.forEach((listener) => listener());
  setTimeout(() => {
    toasts.list = toasts.list.filter((other) => other !== entry);
    toasts.listeners.forEach((listener) => listener());
  }, kind === "bad" ? 8000 : 3500);
}
export async function attempt(work, done) {
  try { const result = await work(); if (done) say(done); return result ?? true; } catch (error) { say(error.message, "bad"); return null; }
}
