import { html, useState, useData, api, attempt, q, usePage, go, setParams, count, short, time, ago } from "/ui/lib.js";
import { kcat } from "/ui/pages/overview.js";
import { Act, Table, Badge, Failure, Empty, NoMatches, Dialog, Field, Snippet, Tile, Pager } from "/ui/parts.js";

const link = (row) => `#/reader/${row.kind}/${q(row.name)}`;
const tone = (state) => ({ Stable: "good", Empty: "", Dead: "bad" }[state] ?? "warn");

export function Readers({ params }) {
  const { data, error } = usePage("/api/headrace/readers", { page: params.page, name: params.filter });
  return html`
    <div class="head"><h1>Consumer groups</h1><span class="muted">Kafka consumer groups, and cursors of HTTP readers and Spark jobs</span></div>
    <div class="bar"><input type="search" data-filter placeholder="Filter by name  ( / )" aria-label="Filter by name" value=${params.filter || ""} onInput=${(e) => setParams({ filter: e.target.value, page: "" })} /></div>
    <${Failure} error=${error} stale=${!!data} />
    ${data && data.items.length > 0 && html`<${Table} caption="Consumer groups and cursors" rows=${data.items} keyOf=${(r) => r.kind + r.name} onOpen=${(row) => { location.hash = link(row); }} columns=${[
      { key: "name", label: "Name", wide: true, cell: (r) => html`<a class="name" href=${link(r)}>${r.name}</a>` },
      { key: "kind", label: "Kind", cell: (r) => html`<${Badge}>${r.kind === "cursor" ? "cursor" : r.protocol + " group"}<//>` },
      { key: "state", label: "State", cell: (r) => (r.kind === "cursor" ? ago(r.updated) : html`<${Badge} tone=${tone(r.state)}>${r.state}<//>`) },
      { key: "members", label: "Members", right: true, cell: (r) => (r.kind === "cursor" ? "–" : count(r.members)) },
      { key: "topics", label: "Topics", wide: true, cell: (r) => html`<span class="name">${r.topics.join(", ")}</span>` },
      { key: "lag", label: "Lag", right: true, cell: (r) => html`<b>${short(r.lag)}</b>` },
      { key: "pin", label: "Pins retention", cell: (r) => (r.pin ? "yes" : "no") }]} />
      <${Pager} page=${data.page} pages=${data.page_count} total=${data.total_count} filtered=${data.filtered_count} onPage=${(n) => setParams({ page: n })} />`}
    ${data && !data.items.length && params.filter && html`<${NoMatches} />`}
    ${data && !data.items.length && !params.filter && html`<${NoReaders} />`}`;
}

function NoReaders() {
  const { data } = useData("/api/headrace/overview", 30);
  const { addresses, tls } = data || {};
  return html`<${Empty} title="No consumer groups or cursors yet.">
      <div class="snippets">${addresses?.kafka && html`<${Snippet} title="Kafka consumer group (kcat)" code=${`${kcat(addresses, tls)} -G my-group orders`} />`}
      <${Snippet} title="Cursor over HTTP" code=${`curl -X PUT ${location.origin}/cursors/my-job -H 'content-type: application/json' \\\n  -d '{"topic": "orders", "partitions": [{"partition": 0, "offset": 0}]}'`} />
      <${Snippet} title="Spark" code=${`spark.readStream.format("headrace") \\\n  .option("bootstrap", "${location.origin}").option("topic", "orders").option("cursor", "my-job").load()`} /></div><//>`;
}

export function Reader({ parts }) {
  const [kind, name] = parts;
  const { data, error, reload } = useData(`/api/headrace/readers/${kind}/${q(name)}`);
  const [deleting, setDeleting] = useState(false);
  if (!data) return html`<div class="head"><h1 class="name">${name}</h1></div><${Failure} error=${error} />`;
  const most = Math.max(1, ...data.positions.map((p) => p.lag));
  return html`
    <div class="head"><h1 class="name">${data.name}</h1><${Badge}>${kind === "cursor" ? "cursor" : data.protocol + " group"}<//>
      ${kind === "group" && html`<${Badge} tone=${tone(data.state)}>${data.state}<//>`}<span class="grow"></span>
      <button class="quiet danger" onClick=${() => setDeleting(true)}>Delete</button></div>
    <${Failure} error=${error} stale=${true} />
    <div class="tiles"><${Tile} label="Lag" value=${short(data.lag)} title=${count(data.lag)} />${kind === "group" && html`<${Tile} label="Members" value=${count(data.members)} />`}<${Tile} label="Pins retention" value=${data.pin ? "yes" : "no"} /></div>
    <section class="card"><h2>Offsets</h2>
      <${Table} caption="Offsets" rows=${data.positions} keyOf=${(p) => p.topic + p.partition} columns=${[
        { key: "topic", label: "Topic", wide: true, cell: (p) => html`<a class="name" href=${`#/stream/${q("/")}/${q(p.topic)}`}>${p.topic}</a>` },
        { key: "partition", label: "Partition", right: true, cell: (p) => p.partition },
        { key: "start", label: "Start", right: true, cell: (p) => count(p.start) },
        { key: "offset", label: "Offset", right: true, cell: (p) => count(p.offset) },
        { key: "end", label: "End", right: true, cell: (p) => count(p.end) },
        { key: "lag", label: "Lag", right: true, cell: (p) => html`<meter min="0" max=${most} value=${p.lag} aria-hidden="true"></meter> ${count(p.lag)}` }]} />
    </section>
    ${data.member_details.length > 0 && html`<section class="card"><h2>Members</h2><${Table} caption="Members" rows=${data.member_details} keyOf=${(m) => m.id} columns=${[
      { key: "id", label: "Id", wide: true, cell: (m) => html`<span class="name">${m.id}</span>` }, { key: "client", label: "Client", cell: (m) => html`<span class="name">${m.client}</span>` }, { key: "host", label: "Host", cell: (m) => m.host }]} /></section>`}
    ${data.topics.length > 0 && html`<${Reset} kind=${kind} name=${name} topics=${data.topics} onDone=${reload} />`}
    ${deleting && html`<${Dialog} title=${kind === "cursor" ? "Delete the cursor?" : "Delete the consumer group?"} action="Delete" tone="danger" confirm=${name} onClose=${() => setDeleting(false)}
      onDone=${() => attempt(async () => { await api(`/api/headrace/readers/${kind}/${q(name)}`, { method: "DELETE" }); go("readers"); return true; }, "Deleted.")}>
      <p>Its committed offsets are deleted; messages are not. Should it return, its own settings decide where it starts.</p><//>`}`;
}

function Reset({ kind, name, topics, onDone }) {
  const [topic, setTopic] = useState(topics[0]);
  const [to, setTo] = useState("earliest");
  const [at, setAt] = useState("");
  const [plan, setPlan] = useState(null);
  const body = (dry) => ({ topic, to, dry_run: dry, offset: to === "offset" ? Number(at) : undefined, shift: to === "shift" ? Number(at) : undefined, timestamp: to === "timestamp" ? Date.parse(at) : undefined });
  const ask = async (dry) => api(`/api/headrace/readers/${kind}/${q(name)}/reset`, { method: "POST", body: body(dry) });
  const change = (set) => (event) => { setPlan(null); set(event.target.value); };
  return html`<section class="card"><h2>Reset offsets</h2>
    <form class="bar" onSubmit=${async (e) => { e.preventDefault(); setPlan(await attempt(() => ask(true))); }}>
      <select aria-label="Topic" onChange=${change(setTopic)}>${topics.map((t) => html`<option key=${t} value=${t} selected=${t === topic}>${t}</option>`)}</select>
      <select aria-label="To" value=${to} onChange=${change(setTo)}><option value="earliest">to earliest</option><option value="latest">to latest</option><option value="timestamp">to a time</option><option value="offset">to an offset</option><option value="shift">shift by</option></select>
      ${["timestamp", "offset", "shift"].includes(to) && html`<input required aria-label="Value" type=${to === "timestamp" ? "datetime-local" : "number"} value=${at} onInput=${change(setAt)} />`}
      <button type="submit">Preview</button></form>
    ${plan && html`<${Table} caption="Preview of the reset" rows=${plan.moves} keyOf=${(m) => m.partition} columns=${[
        { key: "partition", label: "Partition", right: true, cell: (m) => m.partition },
        { key: "from", label: "From", right: true, cell: (m) => count(m.from) }, { key: "to", label: "To", right: true, cell: (m) => count(m.to) },
        { key: "again", label: "Reprocessed", right: true, cell: (m) => count(m.again) }, { key: "skipped", label: "Skipped", right: true, cell: (m) => count(m.skipped) }]} />
      <div class="actions"><${Act} class="primary" act=${async () => { if (await attempt(() => ask(false), "Offsets reset.")) { setPlan(null); onDone(); } }}>Reset offsets<//></div>`}
  </section>`;
}
