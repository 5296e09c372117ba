import { html, useData, api, attempt, say, setParams, hasTag } from "/ui/lib.js";
import { Table, Badge, Failure } from "/ui/parts.js";

export function Settings({ params }) {
  const { data, error } = useData("/api/headrace/settings", 0);
  const text = (params.filter || "").toLowerCase();
  const rows = (data || []).filter((s) => !text || s.name.includes(text));
  const upload = async (event) => {
    const file = event.target.files[0];
    if (!file) return;
    let body;
    try { body = JSON.parse(await file.text()); } catch { say("The file is not valid JSON.", "bad"); return; }
    await attempt(() => api("/api/definitions", { method: "POST", body }), "Imported.");
    event.target.value = "";
  };
  return html`
    <div class="head"><h1>Settings</h1><span class="muted">current values; change them with flags, environment variables or headrace.toml</span></div>
    <${Failure} error=${error} stale=${!!data} />
    ${hasTag("administrator") && html`<section class="card"><h2>Definitions</h2>
      <p>Export or import queues, exchanges, bindings, policies, users, permissions and topics as one file in RabbitMQ's format.</p>
      <div class="actions left"><a class="button" href="/api/definitions?download=headrace-definitions.json" download="headrace-definitions.json">Export</a>
        <label class="button">Import<input class="hidden" type="file" accept="application/json,.json" onChange=${upload} /></label></div>
    </section>`}
    <div class="bar"><input type="search" data-filter placeholder="Filter settings  ( / )" aria-label="Filter settings" value=${params.filter || ""} onInput=${(e) => setParams({ filter: e.target.value })} /></div>
    <${Table} caption="Settings" rows=${rows} keyOf=${(s) => s.name} columns=${[
      { key: "name", label: "Setting", cell: (s) => html`<span class="name">${s.name}</span>` },
      { key: "value", label: "Value", cell: (s) => html`<b class="name">${String(s.value)}</b>` },
      { key: "default", label: "Default", cell: (s) => html`<span class="name muted">${String(s.default)}</span>` },
      { key: "origin", label: "Source", cell: (s) => (s.origin === "default" ? html`<span class="muted">default</span>` : html`<${Badge} tone="blue">${s.origin}<//>`) }]} />`;
}
