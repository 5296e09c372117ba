import { html, useData, api, attempt, q, count, rate, ms, ago, short } from "/ui/lib.js";
import { Badge, Failure, Empty, Snippet, Tile, Table } from "/ui/parts.js";

const TONES = { running: "good", starting: "blue", stopped: "", failed: "bad", lost: "warn" };
const list = (value) => (Array.isArray(value) ? value : value === undefined ? [] : [value]);
const words = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));

export function Pipelines() {
  const { data, error, reload } = useData("/pipelines");
  const pipelines = data ? data.pipelines : [];
  return html`
    <div class="head"><h1>Pipelines</h1><span class="muted">Spark jobs that read or write this log</span></div>
    <${Failure} error=${error} stale=${!!data} />
    ${pipelines.map((one) => html`<${Pipeline} key=${one.name} one=${one} reload=${reload} />`)}
    ${data && !pipelines.length && html`<${Empty} title="No pipeline has reported yet.">
      <p>A pipeline is a PySpark function; the broker's log is its source and its sink.</p>
      <div class="snippets"><${Snippet} title="Run the sample" code=${"headrace pipeline init orders.py\nheadrace pipeline run orders.py"} />
      <${Snippet} title="Read the log in Spark" code=${`spark.readStream.format("headrace").option("topic", "orders").load()`} /></div><//>`}`;
}

const KNOWN = new Set(["lag", "rows_per_second", "rows_total", "batch_ms", "last_error", "flows"]);

function Pipeline({ one, reload }) {
  const details = one.details || {};
  const flows = Object.entries(details.flows || {}).map(([flow, said]) => ({ flow, ...said }));
  const rest = Object.entries(details).filter(([name, value]) => !KNOWN.has(name) && value !== null && value !== "");
  return html`<section class="card">
    <div class="head"><h2 class="name">${one.name}</h2><${Badge} tone=${TONES[one.state]}>${one.state}<//>${one.stop_requested && one.state === "running" && html`<${Badge} tone="warn">asked to stop<//>`}
      <span class="muted">reported ${ago(one.updated)}, begun ${ago(one.started)}</span><span class="grow"></span>
      ${one.state === "running" && !one.stop_requested && html`<button class="quiet danger" onClick=${() => attempt(() => api(`/pipelines/${q(one.name)}/stop`, { method: "POST" }), "It stops after its batch.").then(reload)}>Stop</button>`}
      ${["stopped", "failed", "lost"].includes(one.state) && html`<button class="quiet" onClick=${() => attempt(() => api(`/pipelines/${q(one.name)}`, { method: "DELETE" })).then(reload)}>Forget</button>`}</div>
    <div class="tiles">
      <${Tile} label="Processed" value=${rate(details.rows_per_second)} unit="rows/s" />
      <${Tile} label="Behind" value=${short(details.lag)} />
      <${Tile} label="Batch time" value=${ms(details.batch_ms)} />
      <${Tile} label="Rows in all" value=${short(details.rows_total)} />
    </div>
    ${details.last_error && html`<div class="banner bad"><pre>${words(details.last_error)}</pre></div>`}
    ${flows.length > 0 && html`<${Table} caption=${"Flows of " + one.name} rows=${flows} keyOf=${(f) => f.flow} columns=${[
      { key: "flow", label: "Flow", wide: true, cell: (f) => html`<span class="name">${f.flow}</span>` },
      { key: "path", label: "From → to", wide: true, cell: (f) => html`<span class="name">${[list(f.sources).join(", "), f.sink].filter(Boolean).join(" → ")}</span>` },
      { key: "batch", label: "Batch", right: true, cell: (f) => count(f.batch) },
      { key: "rows", label: "Rows in it", right: true, cell: (f) => count(f.rows) },
      { key: "rate", label: "Rows /s", right: true, cell: (f) => rate(f.rows_per_second) },
      { key: "ms", label: "Time", right: true, cell: (f) => ms(f.batch_ms) },
      { key: "lag", label: "Behind", right: true, cell: (f) => count(f.lag) },
    ].filter((c) => c.key !== "path" || flows.some((f) => f.sources || f.sink))} />`}
    ${rest.length > 0 && html`<dl class="facts">${rest.map(([name, value]) => html`<dt>${name.replaceAll("_", " ")}</dt><dd class="name">${words(value)}</dd>`)}</dl>`}
    <p class="muted">Its cursors: ${flows.map((f, n) => html`${n > 0 && ", "}<a class="name" href=${"#/readers?filter=" + q(one.name)}>${one.name + "." + f.flow}</a>`)}</p>
  </section>`;
}
