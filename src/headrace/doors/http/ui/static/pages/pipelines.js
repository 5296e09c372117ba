import { html, useData, api, attempt, q, count, rate, ms, ago, short } from "/ui/lib.js";
import { Badge, Failure, Empty, Snippet, Tile } from "/ui/parts.js";

const TONES = { running: "good", starting: "blue", stopped: "", failed: "bad", lost: "warn" };
const first = (details, ...names) => { for (const name of names) if (details[name] !== undefined && details[name] !== null) return details[name]; return undefined; };
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
      <div class="snippets"><${Snippet} title="Run the sample" code="headrace pipeline run revenue" />
      <${Snippet} title="Read the log in Spark" code=${`spark.readStream.format("headrace").option("topic", "orders").load()`} /></div><//>`}`;
}

function Pipeline({ one, reload }) {
  const details = one.details || {};
  const used = new Set(["source", "sources", "topic", "stages", "steps", "sink", "sinks", "dead_letters", "input_rows_per_second", "processed_rows_per_second", "input_rate", "processing_rate", "batch_ms", "batch_duration_ms", "lag", "error", "last_error", "batch", "batch_id", "rows"]);
  const stages = [...list(first(details, "source", "sources", "topic")), ...list(first(details, "stages", "steps")), ...list(first(details, "sink", "sinks"))];
  const failure = first(details, "error", "last_error");
  const rest = Object.entries(details).filter(([name, value]) => !used.has(name) && value !== null && value !== "");
  return html`<section class="card">
    <div class="head"><h2 class="name">${one.name}</h2><${Badge} tone=${TONES[one.state]}>${one.state}<//>${one.stop_requested && one.state === "running" && html`<${Badge} tone="warn">asked to stop<//>`}
      <span class="muted">reported ${ago(one.updated)}</span><span class="grow"></span>
      ${one.state === "running" && !one.stop_requested && html`<button class="quiet danger" onClick=${() => attempt(() => api(`/pipelines/${q(one.name)}/stop`, { method: "POST", body: {} }), "It stops after its batch.").then(reload)}>Stop</button>`}
      ${["stopped", "failed", "lost"].includes(one.state) && html`<button class="quiet" onClick=${() => attempt(() => api(`/pipelines/${q(one.name)}`, { method: "DELETE" })).then(reload)}>Forget</button>`}</div>
    ${stages.length > 0 && html`<ol class="flow" aria-label="Stages">${stages.map((stage) => html`<li class="name">${words(stage)}</li>`)}</ol>`}
    <div class="tiles">
      <${Tile} label="Rows in" value=${rate(first(details, "input_rows_per_second", "input_rate"))} unit="/s" />
      <${Tile} label="Processed" value=${rate(first(details, "processed_rows_per_second", "processing_rate"))} unit="/s" />
      <${Tile} label="Batch time" value=${ms(first(details, "batch_ms", "batch_duration_ms"))} />
      <${Tile} label="Behind" value=${short(first(details, "lag"))} />
      <${Tile} label="Batches" value=${count(first(details, "batch", "batch_id"))} />
    </div>
    ${failure && html`<div class="banner bad"><pre>${words(failure)}</pre></div>`}
    ${rest.length > 0 && html`<dl class="facts">${rest.map(([name, value]) => html`<dt>${name.replaceAll("_", " ")}</dt><dd class="name">${words(value)}</dd>`)}</dl>`}
  </section>`;
}
