import { html, useState, useData, api, attempt, q, go, streamLink, count, short, rate, bytes, time } from "/ui/lib.js";
import { Tile, Tabs, Table, Badge, Failure, Empty, Dialog, Field, parseJson } from "/ui/parts.js";
import { Messages } from "/ui/pages/messages.js";

export function Stream({ parts, params }) {
  const [vhost, name, tab = "about"] = parts;
  const { data, error, reload } = useData(`/api/headrace/streams/${q(vhost)}/${q(name)}`);
  const [asking, setAsking] = useState(null);
  if (!data) return html`<div class="head"><h1 class="name">${name}</h1></div><${Failure} error=${error} />${!error && html`<p class="muted">Loading…</p>`}`;
  const isQueue = data.kind === "queue";
  const holds = isQueue && data.type !== "stream";
  const tabs = [["about", "Details"], ["messages", "Messages"], ["publish", "Publish"]];
  return html`
    <div class="head">
      <h1 class="name">${data.name}</h1>
      <${Badge} tone=${isQueue ? "" : "blue"}>${isQueue ? data.type + " queue" : "topic"}<//>
      ${!data.durable && html`<${Badge} tone="warn">memory<//>`}
      ${data.exclusive && html`<${Badge}>exclusive<//>`}
      ${data.vhost !== "/" && html`<${Badge}>${data.vhost}<//>`}
      ${data.policy && html`<a href="#/policies"><${Badge} tone="blue">policy ${data.policy}<//></a>`}
      <span class="grow"></span>
      ${holds && html`<button class="quiet danger" onClick=${() => setAsking("purge")} disabled=${data.ready === 0}>Purge</button>`}
      <button class="quiet danger" onClick=${() => setAsking("delete")}>Delete</button>
    </div>
    <${Failure} error=${error} stale=${true} />
    <div class="tiles">
      ${holds && html`<${Tile} label="Ready" value=${short(data.ready)} title=${count(data.ready)} /><${Tile} label="Unacked" value=${short(data.unacked)} title=${count(data.unacked)} />`}
      <${Tile} label="Stored" value=${short(data.records)} title=${count(data.records)} />
      <${Tile} label="Published" value=${rate(data.rates.publish)} unit="/s" />
      ${isQueue && html`<${Tile} label="Acknowledged" value=${rate(data.rates.ack)} unit="/s" />`}
      <${Tile} label="Consumers" value=${count(data.consumers)} />
      <${Tile} label="Size" value=${bytes(data.size_bytes)} />
    </div>
    <${Tabs} tabs=${tabs} active=${tab} link=${(key) => streamLink(vhost, name, key === "about" ? "" : key)} />
    ${tab === "messages" ? html`<${Messages} vhost=${vhost} name=${name} partitions=${data.partitions} indexed=${data.settings.key_index === "true"} params=${params} />`
      : tab === "publish" ? html`<${Publish} data=${data} />` : html`<${About} data=${data} />`}
    ${asking === "purge" && html`<${Dialog} title="Purge the queue?" action=${`Purge ${count(data.ready)} messages`} tone="danger" onClose=${() => setAsking(null)}
      onDone=${async () => { const ok = await attempt(() => api(`/api/queues/${q(vhost)}/${q(name)}/contents`, { method: "DELETE" }), "Purged."); reload(); return ok; }}>
      <p>All ready messages of <b class="name">${name}</b> are deleted. Unacknowledged messages stay.</p><//>`}
    ${asking === "delete" && html`<${Dialog} title=${isQueue ? "Delete the queue?" : "Delete the topic?"} action="Delete" tone="danger" confirm=${name} onClose=${() => setAsking(null)}
      onDone=${() => attempt(async () => {
        await api(isQueue ? `/api/queues/${q(vhost)}/${q(name)}` : `/topics/${q(name)}`, { method: "DELETE" });
        go("streams");
        return true;
      }, "Deleted.")}>
      <p><b class="name">${name}</b>, its ${count(data.records)} messages and its bindings are deleted permanently.</p><//>`}`;
}

const plain = (value) => (typeof value === "object" && value !== null ? JSON.stringify(value) : String(value));

function About({ data }) {
  const queue = data.queue;
  const effective = queue ? Object.entries(queue.effective_policy_definition) : [];
  return html`<div class="columns">
    <section class="card"><h2>Readers</h2>
      ${data.views.length ? html`<${Table} caption="Readers" rows=${data.views} keyOf=${(v) => v.kind + v.name} columns=${[
        { key: "name", label: "Reader", wide: true, cell: (v) => (v.kind === "queue" ? html`<span class="name">this queue</span>` : html`<a class="name" href=${`#/reader/${v.kind}/${q(v.name)}`}>${v.name}</a>`) },
        { key: "kind", label: "Kind", cell: (v) => html`<${Badge}>${v.kind}<//>` },
        { key: "lag", label: "Lag", right: true, cell: (v) => count(v.lag) },
        { key: "pin", label: "Pins retention", cell: (v) => (v.pin ? "yes" : "no") }]} />` : html`<p class="muted">No consumer groups or cursors.</p>`}
    </section>
    <section class="card"><h2>Partitions</h2>
      <${Table} caption="Partitions" rows=${data.logs} keyOf=${(l) => l.partition} columns=${[
        { key: "partition", label: "Partition", cell: (l) => html`<a href=${streamLink(data.vhost, data.name, "messages") + "?partition=" + l.partition}>${l.partition}</a>` },
        { key: "start", label: "Start", right: true, cell: (l) => count(l.start) },
        { key: "end", label: "End", right: true, cell: (l) => count(l.end) },
        { key: "segments", label: "Segments", right: true, cell: (l) => count(l.segments) },
        { key: "size", label: "Size", right: true, cell: (l) => bytes(l.size_bytes) }]} />
    </section>
    ${queue && html`<section class="card"><h2>Consumers</h2>
      ${data.consumer_details.length ? html`<${Table} caption="Consumers" rows=${data.consumer_details} keyOf=${(c) => c.channel_details.name + c.consumer_tag} columns=${[
        { key: "tag", label: "Tag", wide: true, cell: (c) => html`<span class="name">${c.consumer_tag}</span>` },
        { key: "channel", label: "Channel", wide: true, cell: (c) => c.channel_details.name },
        { key: "prefetch", label: "Prefetch", right: true, cell: (c) => c.prefetch_count || "∞" },
        { key: "flight", label: "Unacked", right: true, cell: (c) => count(c.in_flight) },
        { key: "ack", label: "Manual ack", cell: (c) => (c.ack_required ? "yes" : "no") }]} />` : html`<p class="muted">No consumers.</p>`}
    </section>
    <section class="card"><h2>Bindings</h2>
      <${Table} caption="Bindings" rows=${data.bindings} keyOf=${(b) => b.source + b.properties_key} columns=${[
        { key: "source", label: "Exchange", cell: (b) => html`<span class="name">${b.source || "(default exchange)"}</span>` },
        { key: "key", label: "Routing key", cell: (b) => html`<span class="name">${b.routing_key}</span>` },
        { key: "arguments", label: "Arguments", cell: (b) => (Object.keys(b.arguments).length ? html`<span class="name">${JSON.stringify(b.arguments)}</span>` : "") }]} />
    </section>`}
    <section class="card"><h2>${queue ? "Arguments and policy" : "Settings"}</h2>
      <dl class="facts">
        ${queue && Object.entries(queue.arguments).map(([name, value]) => html`<dt class="name">${name}</dt><dd class="name">${plain(value)}</dd>`)}
        ${effective.map(([name, value]) => html`<dt class="name">${name}</dt><dd class="name">${plain(value)} <span class="muted">by policy ${queue.policy || queue.operator_policy}</span></dd>`)}
        ${queue && queue.headrace.dead_letter_exchange !== null && html`<dt>dead-letter exchange</dt><dd class="name">${queue.headrace.dead_letter_exchange || "(default exchange)"} ${queue.headrace.dead_letter_routing_key || ""}</dd>`}
        ${Object.entries(data.overrides).map(([name, value]) => html`<dt class="name">${name}</dt><dd class="name">${value}</dd>`)}
        <dt>retention</dt><dd>${data.settings.retention || data.settings.retention_ms || "–"}</dd>
        ${data.created && html`<dt>created</dt><dd>${time(data.created)}</dd>`}
      </dl>
    </section>
  </div>`;
}

function Publish({ data }) {
  const isQueue = data.kind === "queue";
  const [text, setText] = useState('{"hello": "world"}');
  const [key, setKey] = useState("");
  const [headers, setHeaders] = useState("");
  const [busy, setBusy] = useState(false);
  const send = async (event) => {
    event.preventDefault();
    setBusy(true);
    await attempt(async () => {
      const given = parseJson(headers, "Headers");
      if (isQueue || data.vhost !== "/") {
        const body = { routing_key: data.name, payload: text, payload_encoding: "string", properties: { delivery_mode: 2, headers: given } };
        const published = await api(`/api/exchanges/${q(data.vhost)}/amq.default/publish`, { method: "POST", body });
        if (!published.routed) throw new Error("The message was not routed to the queue.");
      } else {
        await api(`/topics/${q(data.name)}/messages`, { method: "POST", body: [{ value: text, key: key || null, headers: given }] });
      }
      return true;
    }, "Published.");
    setBusy(false);
  };
  return html`<section class="card"><form class="stack" onSubmit=${send}>
    ${!isQueue && html`<${Field} label="Key" hint="determines the partition"><input value=${key} onInput=${(e) => setKey(e.target.value)} /><//>`}
    <${Field} label="Message"><textarea rows="6" value=${text} onInput=${(e) => setText(e.target.value)}></textarea><//>
    <${Field} label="Headers" hint="JSON, optional"><textarea rows="2" value=${headers} onInput=${(e) => setHeaders(e.target.value)} placeholder='{"source": "dashboard"}'></textarea><//>
    <div class="actions"><button class="primary" type="submit" disabled=${busy}>Publish</button></div>
  </form></section>`;
}
