import { html, useState, usePage, api, attempt, q, setParams, count, short, ago } from "/ui/lib.js";
import { Table, Badge, Failure, Empty, NoMatches, Dialog, Pager } from "/ui/parts.js";

export function Connections({ params }) {
  const tab = params.show === "channels" ? "channels" : "connections";
  return html`
    <div class="head"><h1>Connections</h1></div>
    <div class="bar"><input type="search" data-filter placeholder="Filter by name  ( / )" aria-label="Filter by name" value=${params.filter || ""} onInput=${(e) => setParams({ filter: e.target.value, page: "" })} />
      <div class="choice" role="group" aria-label="Show">${[["connections", "Connections"], ["channels", "Channels"]].map(([key, label]) => html`<button aria-pressed=${tab === key} onClick=${() => setParams({ show: key, page: "" })}>${label}</button>`)}</div></div>
    <${List} key=${tab} tab=${tab} params=${params} />`;
}

// Keyed by tab, so that rows of connections are never shown with the columns of channels.
function List({ tab, params }) {
  const { data, error, reload } = usePage(`/api/${tab}`, { page: params.page, name: params.filter });
  const [closing, setClosing] = useState(null);
  const connections = [
    { key: "name", label: "Connection", wide: true, cell: (c) => html`<span class="name">${c.user_provided_name || c.name}</span>${c.user_provided_name && html`<br /><span class="muted name">${c.name}</span>`}` },
    { key: "protocol", label: "Protocol", cell: (c) => html`<${Badge} tone="blue">${c.protocol}<//>` },
    { key: "state", label: "State", cell: (c) => html`<${Badge} tone=${c.state === "running" ? "good" : "warn"}>${c.state}<//>` },
    { key: "user", label: "User", cell: (c) => html`<span class="name">${c.user || "–"}</span>` },
    { key: "client", label: "Client", wide: true, cell: (c) => html`<span class="name">${[c.client_properties.product, c.client_properties.version].filter((v) => typeof v === "string").join(" ")}</span>` },
    { key: "channels", label: "Channels", right: true, cell: (c) => count(c.channels) },
    { key: "in", label: "Messages in", right: true, cell: (c) => short(c.recv_cnt) },
    { key: "since", label: "Connected", cell: (c) => ago(c.connected_at) },
    { key: "close", label: "", cell: (c) => html`<button class="quiet danger" onClick=${() => setClosing(c)}>Close</button>` },
  ];
  const channels = [
    { key: "name", label: "Channel", wide: true, cell: (c) => html`<span class="name">${c.name}</span>` },
    { key: "mode", label: "Mode", cell: (c) => html`${c.confirm && html`<${Badge} tone="good">confirms<//>`}${c.transactional && html`<${Badge}>transactions<//>`}` },
    { key: "consumers", label: "Consumers", right: true, cell: (c) => count(c.consumer_count) },
    { key: "prefetch", label: "Prefetch", right: true, cell: (c) => c.prefetch_count || c.global_prefetch_count || "∞" },
    { key: "unacked", label: "Unacked", right: true, cell: (c) => count(c.messages_unacknowledged) },
    { key: "unconfirmed", label: "Unconfirmed", right: true, cell: (c) => count(c.messages_unconfirmed) },
  ];
  return html`
    <${Failure} error=${error} stale=${!!data} />
    ${data && data.items.length > 0 && html`<${Table} caption=${tab} rows=${data.items} keyOf=${(c) => c.name} columns=${tab === "channels" ? channels : connections} />
      <${Pager} page=${data.page} pages=${data.page_count} total=${data.total_count} filtered=${data.filtered_count} onPage=${(n) => setParams({ page: n })} />`}
    ${data && !data.items.length && params.filter && html`<${NoMatches} />`}
    ${data && !data.items.length && !params.filter && html`<${Empty} title="No connections."><p>AMQP and Kafka clients are listed while they are connected. HTTP clients are not listed.</p><//>`}
    ${closing && html`<${Dialog} title="Close the connection?" action="Close connection" tone="danger" onClose=${() => setClosing(null)}
      onDone=${async () => { const ok = await attempt(() => api(`/api/connections/${q(closing.name)}`, { method: "DELETE" }), "Closed."); reload(); return ok; }}>
      <p><b class="name">${closing.name}</b> is disconnected. Its unacknowledged messages return to their queues. Most clients reconnect by themselves.</p><//>`}`;
}
