import { html, useState, useEffect, useRef, usePage, q, setParams, go, streamLink, api, attempt, count, short, rate, bytes } from "/ui/lib.js";
import { Table, Pager, Badge, Failure, Empty, NoMatches, Snippet, Dialog, Field, parseJson } from "/ui/parts.js";
import { snippets } from "/ui/pages/overview.js";

const COLUMNS = [
  { key: "name", label: "Name", sortable: true, wide: true, cell: (row) => html`<a class="name" href=${streamLink(row.vhost, row.name)}>${row.name}</a>${row.vhost !== "/" && html` <${Badge}>${row.vhost}<//>`}` },
  { key: "kind", label: "Kind", sortable: true, cell: (row) => html`<${Badge} tone=${row.kind === "topic" ? "blue" : ""}>${row.kind === "topic" ? "topic" : row.type + " queue"}<//>${!row.durable && html` <${Badge} tone="warn">memory<//>`}` },
  { key: "ready", label: "Ready", right: true, sortable: true, cell: (row) => (row.kind === "topic" ? "–" : short(row.ready)) },
  { key: "unacked", label: "Unacked", right: true, sortable: true, cell: (row) => (row.kind === "topic" ? "–" : short(row.unacked)) },
  { key: "records", label: "Stored", right: true, sortable: true, cell: (row) => short(row.records) },
  { key: "in", label: "Publish /s", right: true, cell: (row) => rate(row.rates.publish) },
  { key: "out", label: "Ack /s", right: true, cell: (row) => rate(row.rates.ack) },
  { key: "consumers", label: "Consumers", right: true, sortable: true, cell: (row) => count(row.consumers) },
  { key: "partitions", label: "Partitions", right: true, sortable: true, cell: (row) => count(row.partitions) },
  { key: "size_bytes", label: "Size", right: true, sortable: true, cell: (row) => bytes(row.size_bytes) },
  { key: "policy", label: "Policy", cell: (row) => row.policy || "" },
];

export function Streams({ params }) {
  const sort = params.sort || "name";
  const reverse = params.reverse === "1";
  const filter = params.filter || "";
  const [text, setText] = useState(filter);
  const asked = useRef(filter);
  const [adding, setAdding] = useState(false);
  useEffect(() => {
    const timer = setTimeout(() => { if (text !== filter) { asked.current = text; setParams({ filter: text, page: "" }); } }, 200);
    return () => clearTimeout(timer);
  }, [text]);
  useEffect(() => { if (filter !== asked.current) { asked.current = filter; setText(filter); } }, [filter]);  // changed by a link
  const { data, error, reload } = usePage("/api/headrace/streams", { page: params.page, name: params.filter, sort, sort_reverse: reverse, kind: params.kind });
  const sortBy = (key) => setParams({ sort: key, reverse: key === sort ? (reverse ? "" : "1") : key === "name" || key === "kind" ? "" : "1", page: "" });
  return html`
    <div class="head"><h1>Queues and topics</h1><span class="grow"></span><button class="primary" onClick=${() => setAdding(true)}>New queue or topic</button></div>
    <div class="bar">
      <input type="search" data-filter placeholder="Filter by name  ( / )" aria-label="Filter by name" value=${text} onInput=${(e) => setText(e.target.value)} />
      <div class="choice" role="group" aria-label="Kind">${[["", "All"], ["topic", "Topics"], ["queue", "Queues"]].map(([kind, label]) => html`
        <button aria-pressed=${(params.kind || "") === kind} onClick=${() => setParams({ kind, page: "" })}>${label}</button>`)}</div>
    </div>
    <${Failure} error=${error} stale=${!!data} />
    ${data && data.items.length > 0 && html`
      <${Table} caption="Queues and topics" columns=${COLUMNS} rows=${data.items} sort=${sort} reverse=${reverse} onSort=${sortBy}
        keyOf=${(row) => row.vhost + "/" + row.name} onOpen=${(row) => { location.hash = streamLink(row.vhost, row.name); }} />
      <${Pager} page=${data.page} pages=${data.page_count} total=${data.total_count} filtered=${data.filtered_count} onPage=${(n) => setParams({ page: n })} />`}
    ${data && !data.items.length && (params.filter || params.kind
      ? html`<${NoMatches} />`
      : html`<${Empty} title="No queues or topics yet."><p>They appear as soon as a client declares a queue or publishes to a topic:</p>
          <div class="snippets">${snippets().map((one) => html`<${Snippet} ...${one} />`)}</div><//>`)}
    ${adding && html`<${NewStream} onClose=${() => setAdding(false)} onMade=${reload} />`}`;
}

function NewStream({ onClose, onMade }) {
  const [kind, setKind] = useState("classic");
  const [name, setName] = useState("");
  const [vhost, setVhost] = useState("/");
  const [partitions, setPartitions] = useState(1);
  const [args, setArgs] = useState("");
  const make = () => attempt(async () => {
    if (kind === "topic") {
      const config = parseJson(args, "Settings");
      await api("/topics", { method: "POST", body: { name, partitions: Number(partitions), config } });
      go(`stream/${q("/")}/${q(name)}`);
    } else {
      const given = parseJson(args, "Arguments");
      await api(`/api/queues/${q(vhost)}/${q(name)}`, { method: "PUT", body: { durable: true, arguments: { "x-queue-type": kind, ...given } } });
      go(`stream/${q(vhost)}/${q(name)}`);
    }
    onMade();
    return true;
  }, "Created.");
  return html`<${Dialog} title="New queue or topic" action="Create" onDone=${make} onClose=${onClose}>
    <${Field} label="Kind"><select value=${kind} onChange=${(e) => setKind(e.target.value)}>
      <option value="classic">Classic queue</option><option value="quorum">Quorum queue (counts deliveries)</option><option value="stream">RabbitMQ stream</option><option value="topic">Topic (Kafka, HTTP)</option></select><//>
    <${Field} label="Name"><input required value=${name} onInput=${(e) => setName(e.target.value)} autocomplete="off" /><//>
    ${kind === "topic"
      ? html`<${Field} label="Partitions"><input type="number" min="1" value=${partitions} onInput=${(e) => setPartitions(e.target.value)} /><//>`
      : html`<${Field} label="Virtual host"><input required value=${vhost} onInput=${(e) => setVhost(e.target.value)} /><//>`}
    <${Field} label=${kind === "topic" ? "Settings" : "Arguments"} hint="JSON, optional"><textarea rows="3" value=${args} onInput=${(e) => setArgs(e.target.value)}
      placeholder=${kind === "topic" ? '{"retention_ms": "7d"}' : '{"x-max-length": 10000}'}></textarea><//>
  <//>`;
}
