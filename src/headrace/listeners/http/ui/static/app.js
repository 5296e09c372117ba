// The frame around every page: navigation, theme, connection status and keyboard shortcuts.
import { html, render, useState, useEffect, connect, pause, useLive, useRefused, route, go, ago, who, identify, hasTag } from "/ui/lib.js";
import { Toasts } from "/ui/parts.js";
import { Overview } from "/ui/pages/overview.js";
import { Streams } from "/ui/pages/streams.js";
import { Stream } from "/ui/pages/stream.js";
import { Readers, Reader } from "/ui/pages/readers.js";
import { DeadLetters, DeadLetterQueue } from "/ui/pages/dead_letters.js";
import { Pipelines } from "/ui/pages/pipelines.js";
import { Schemas, Subject } from "/ui/pages/schemas.js";
import { Connections } from "/ui/pages/connections.js";
import { Policies } from "/ui/pages/policies.js";
import { Users, User } from "/ui/pages/users.js";
import { Settings } from "/ui/pages/settings.js";

const PAGES = [
  ["overview", "Overview", Overview, "o"],
  ["streams", "Queues and topics", Streams, "s"],
  ["readers", "Consumer groups", Readers, "r"],
  ["dead-letters", "Dead letters", DeadLetters, "d"],
  ["pipelines", "Pipelines", Pipelines, "p"],
  ["schemas", "Schemas", Schemas, "h"],
  ["connections", "Connections", Connections, "c"],
  ["policies", "Policies", Policies, "y", "policymaker"],
  ["users", "Users", Users, "u", "administrator"],
  ["settings", "Settings", Settings, "t", "monitoring"],
];
const INNER = { stream: [Stream, "streams"], reader: [Reader, "readers"], "dead-letter": [DeadLetterQueue, "dead-letters"], user: [User, "users"], schema: [Subject, "schemas"] };

function useRoute() {
  const [at, setAt] = useState(route());
  useEffect(() => {
    const listener = () => setAt(route());
    addEventListener("hashchange", listener);
    listener();  // effects run after the first render, so the address may have changed already
    return () => removeEventListener("hashchange", listener);
  }, []);
  return at;
}

function theme() {
  try { return localStorage.getItem("headrace-theme"); } catch { return null; }
}
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  try { localStorage.setItem("headrace-theme", name); } catch { /* private browsing */ }
}

function keys(event) {
  if (event.metaKey || event.ctrlKey || event.altKey) return;
  if (event.target.closest("input,textarea,select,dialog")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "/") {
    const filter = document.querySelector("[data-filter]");
    if (filter) { event.preventDefault(); filter.focus(); filter.select(); }
  } else if (keys.go) {
    keys.go = false;
    const found = PAGES.find(([, , , key]) => key === event.key);
    if (found) go(found[0]);
  } else if (event.key === "g") {
    keys.go = true;
    clearTimeout(keys.timer);  // of the previous shortcut, which would cancel this one
    keys.timer = setTimeout(() => { keys.go = false; }, 1200);
  }
}

function Stale() {
  const state = useLive();
  if (state.connected || !state.at) return null;
  return html`<div class="banner bad" role="alert">The connection to the broker is lost; reconnecting. The data shown is from ${ago(state.at)}.</div>`;
}

function Status() {
  const state = useLive();
  const alarms = state.data ? state.data.alarms : [];
  const [tone, text] = !state.connected ? ["bad", state.at ? "disconnected" : "connecting"] : state.paused ? ["warn", "paused"]
    : alarms.some((alarm) => alarm.level === "error") ? ["bad", "error"] : alarms.length ? ["warn", "warning"] : ["good", "live"];
  return html`<button class=${"status " + tone} onClick=${() => pause(!state.paused)} title="Pause or resume live updates"
    aria-pressed=${state.paused}><span class="dot"></span>${text}</button>`;
}

// Shown when the login failed or was cancelled, or the user may not use the dashboard.
function Refusal() {
  const { status, message } = who.refused;
  const [title, text] = status === 403 ? ["You may not use the dashboard.", message]
    : status === 429 ? ["Too many failed logins.", message] : ["You are not logged in.", "Your browser will ask for your user name and password."];
  return html`<main class="notice"><h1>${title}</h1><p>${text}</p><p><button class="primary" onClick=${() => location.reload()}>Log in</button></p></main>`;
}

function Who() {
  if (!who.name) return null;
  const label = html`<span class="hidden">Logged in as </span><span class="name">${who.name}</span>`;
  return hasTag("administrator") ? html`<a class="who" href=${"#/user/" + encodeURIComponent(who.name)} title="Logged in as">${label}</a>` : html`<span class="who" title="Logged in as">${label}</span>`;
}

const NotFound = () => html`<h1>Page not found</h1><p><a href="#/overview">Overview</a></p>`;

function App() {
  return useRefused() ? html`<${Refusal} />` : html`<${Frame} />`;
}

function Frame() {
  const at = useRoute();
  const inner = INNER[at.page];
  const section = inner ? inner[1] : at.page;
  const found = PAGES.find(([name]) => name === at.page);
  const Page = inner ? inner[0] : found ? found[2] : NotFound;
  const title = PAGES.find(([name]) => name === section)?.[1] || "Overview";
  const thing = ["user", "schema"].includes(at.page) ? at.parts[0] : at.parts[1];
  useEffect(() => { document.title = `${thing || title} · Headrace`; }, [title, thing]);
  useEffect(() => { document.querySelector("nav.side [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" }); }, [section]);
  const dark = (theme() || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const [, flip] = useState(dark);
  return html`
    <a class="skip" href="#main" onClick=${(e) => { e.preventDefault(); document.getElementById("main").focus(); }}>Skip to content</a>
    <header class="top">
      <a class="brand" href="#/overview"><img src="/ui/icon.svg" alt="" width="26" height="26" />Headrace</a>
      <span class="grow"></span>
      <${Who} />
      <${Status} />
      <button class="quiet" aria-label="Light or dark theme" title="Light or dark theme" onClick=${() => { setTheme(dark ? "light" : "dark"); flip(!dark); }}>${dark ? "☀" : "☾"}</button>
    </header>
    <nav class="side" aria-label="Pages">${PAGES.filter(([, , , , tag]) => !tag || hasTag(tag)).map(([name, label, , key]) => html`
      <a key=${name} href=${"#/" + name} aria-current=${name === section ? "page" : undefined} title=${`g ${key}`}>${label}</a>`)}
    </nav>
    <main id="main" tabindex="-1">
      <${Stale} />
      <${Page} key=${at.page + "/" + at.parts.slice(0, 2).join("/")} parts=${at.parts} params=${at.params} />
    </main>
    <${Toasts} />`;
}

const chosen = theme();
if (chosen) document.documentElement.dataset.theme = chosen;
addEventListener("keydown", keys);
await identify();
const root = document.getElementById("app");
root.textContent = "";
if (!who.refused) connect();
render(html`<${App} />`, root);
