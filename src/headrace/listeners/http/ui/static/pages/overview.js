import { html, useEffect, useState, useRef, useLive, useData, short, rate, bytes, ms, count, ago } from "/ui/lib.js";
import { Tile, Plot, Snippet, Failure, Badge } from "/ui/parts.js";

const WINDOW = 600;
const GAP_S = 5;
const NAMES = ["at", "published", "delivered", "acked", "ready", "unacked", "sync_ms", "bytes_written"];

const address = (addresses, listener) => (addresses && addresses[listener] && addresses[listener][0]) || null;

export const kcat = (addresses, tls) => `kcat -b ${address(addresses, "kafka")}${(tls || []).includes("kafka") ? " -X security.protocol=ssl" : ""}`;

export const snippets = (addresses, tls) => {
  const at = (listener) => address(addresses, listener);
  const base = location.origin;
  const secure = (listener) => (tls || []).includes(listener);
  const orders = `${kcat(addresses, tls)} -t orders`;
  const found = [{
    title: "HTTP: publish and read",
    code: `curl ${base}/topics/orders/messages -H 'content-type: text/plain' -d 'hello'\ncurl ${base}/topics/orders/messages`,
  }];
  if (at("amqp")) found.unshift({
    title: "Python, AMQP (pika)",
    code: `import pika\nchannel = pika.BlockingConnection(pika.URLParameters("amqp${secure("amqp") ? "s" : ""}://guest:guest@${at("amqp")}/%2F")).channel()\nchannel.queue_declare("orders", durable=True)\nchannel.confirm_delivery()\nchannel.basic_publish("", "orders", b"hello")`,
  });
  if (at("kafka")) found.push({ title: "Kafka (kcat)", code: `echo hello | ${orders} -P\n${orders} -C -e` });
  return found;
};

const standing = (one) => one.state === "in step" ? `in sync, ${one.seconds_behind.toFixed(1)} s behind`
  : `copying, ${bytes(one.copied_bytes)} of ${bytes(one.copy_bytes)}`;

export function Overview() {
  const state = useLive();
  const first = useData("/api/headrace/overview", 30);
  const [columns, setColumns] = useState(null);
  const seen = useRef(0);
  useEffect(() => {
    if (first.data) setColumns(NAMES.map((name) => first.data.history[name]));
  }, [first.data]);
  useEffect(() => {
    const last = state.data && state.data.last;
    if (!columns || !last || !last.at.length || last.at[0] <= (columns[0].at(-1) || 0)) return;
    if (last.at[0] - columns[0].at(-1) > GAP_S) { first.reload(); return; }  // the tab was hidden, or the broker unreachable
    setColumns(columns.map((values, i) => [...values.slice(-WINDOW), last[NAMES[i]][0]]));
  }, [state.tick, columns === null]);
  const now = state.data || first.data;
  if (!now) return html`<h1>Overview</h1><${Failure} error=${first.error} />${!first.error && html`<p class="muted">Loading…</p>`}`;
  const about = first.data || {};
  const standbys = now.standby ? now.standby.standbys : [];
  const quiet = now.counts.streams === 0 && now.counts.queues === 0;
  return html`
    <div class="head"><h1>Overview</h1>
      ${about.durability && html`<${Badge} tone=${about.durability === "sync" ? "good" : "warn"}>${about.durability === "sync" ? "confirms after sync to disk" : "confirms before sync to disk"}<//>`}
      <span class="muted">${about.node} · started ${ago(about.started)}</span>
    </div>
    ${now.alarms.map((alarm) => html`<div class=${"banner " + (alarm.level === "error" ? "bad" : "warn")} role="alert">${alarm.text}</div>`)}
    <${Failure} error=${first.error} stale=${!!first.data} />
    <div class="tiles five">
      <${Tile} label="Published" value=${rate(now.rates.published)} unit="/s" />
      <${Tile} label="Delivered" value=${rate(now.rates.delivered + Math.max(0, now.rates.sent - now.rates.delivered))} unit="/s" />
      <${Tile} label="Acknowledged" value=${rate(now.rates.acked)} unit="/s" />
      <${Tile} label="Ready" value=${short(now.ready)} title=${count(now.ready)} />
      <${Tile} label="Unacked" value=${short(now.unacked)} title=${count(now.unacked)} />
      <${Tile} label="Connections" value=${count(now.connections)} />
      <${Tile} label="Sync p50" value=${ms(now.sync_ms.p50)} title="Median time of a sync to disk since the start" />
      <${Tile} label="Sync p99" value=${ms(now.sync_ms.p99)} title="99th percentile of the time of a sync to disk since the start" />
      <${Tile} label="Memory" value=${bytes(now.memory_bytes)} />
      <${Tile} label="Disk free" value=${bytes(now.disk_free_bytes)} />
    </div>
    ${quiet && html`<section class="card"><h2>No queues or topics yet. Send your first message:</h2>
      <div class="snippets">${snippets(about.addresses, about.tls).map((one) => html`<${Snippet} ...${one} />`)}</div></section>`}
    ${columns && html`<div class="plots">
      <${Plot} title="Messages per second" format=${rate} data=${[columns[0], columns[1], columns[2], columns[3]]}
        series=${[{ label: "published", color: "--one", fill: true }, { label: "delivered", color: "--two" }, { label: "acked", color: "--three" }]} />
      <${Plot} title="Messages in queues" format=${short} whole data=${[columns[0], columns[4], columns[5]]}
        series=${[{ label: "ready", color: "--four", fill: true }, { label: "unacked", color: "--five" }]} />
      <${Plot} title="Sync to disk (mean per second)" format=${ms} data=${[columns[0], columns[6]]} series=${[{ label: "sync", color: "--three", fill: true }]} />
      <${Plot} title="Bytes written per second" format=${bytes} data=${[columns[0], columns[7]]} series=${[{ label: "bytes", color: "--one", fill: true }]} />
    </div>`}
    <div class="columns">
      <section class="card"><h2>Listeners</h2>
        <dl class="facts">${Object.entries(about.addresses || {}).map(([listener, where]) => html`
          <dt>${listener.toUpperCase()}</dt><dd>${where.join("  ")}<br /><span class="muted">${count(now.listeners[listener]?.connections ?? 0)} connections · ${short(now.listeners[listener]?.in ?? 0)} in · ${short(now.listeners[listener]?.out ?? 0)} out</span></dd>`)}</dl>
      </section>
      <section class="card"><h2>Contents</h2>
        <dl class="facts">
          <dt><a href="#/streams">On disk</a></dt><dd>${count(now.counts.streams)} topics and durable queues, ${bytes(about.log_size_bytes)}</dd>
          <dt><a href="#/streams?kind=queue">Queues</a></dt><dd>${count(now.counts.queues)}</dd>
          <dt><a href="#/readers">Consumers</a></dt><dd>${count(now.counts.groups)} consumer groups, ${count(now.counts.cursors)} cursors</dd>
          <dt><a href="#/pipelines">Pipelines</a></dt><dd>${count(now.counts.pipelines)}</dd>
          ${standbys.length > 0 && html`<dt>Standbys</dt><dd>${standbys.map((one) => html`<div><span class="name">${one.name}</span> ${standing(one)}</div>`)}</dd>`}
          <dt>Data folder</dt><dd class="name">${about.data_dir}</dd>
          <dt>Last recovery</dt><dd>${about.recovery}</dd>
        </dl>
      </section>
    </div>`;
}
