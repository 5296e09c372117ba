import { html, useData, api, attempt, q, count, rate, ms, ago, short } from "/ui/lib.js";
import { Act, Badge, Failure, Empty, Snippet, Tile } from "/ui/parts.js";

const TONES = { running: "good", starting: "blue", stopped: "", failed: "bad", lost: "warn" };
const list = (value) => (Array.isArray(value) ? value : value === undefined ? [] : [value]);
const words = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));

export function Pipelines() {
  const { data, error, reload } = useData("/pipelines");
  const pipelines = data ? data.pipelines : [];
  return html`
    <div class="head"><h1>Pipelines</h1><span class="muted">Spark jobs that read from or write to this broker</span></div>
    <${Failure} error=${error} stale=${!!data} />
    ${pipelines.map((one) => html`<${Pipeline} key=${one.name} one=${one} reload=${reload} />`)}
    ${data && !pipelines.length && html`<${Empty} title="No pipeline has reported yet.">
      <p>A pipeline is a PySpark function with topics as its source and sink.</p>
      <div class="snippets"><${Snippet} title="Run the sample" code=${"headrace pipeline init orders.py\nheadrace pipeline run orders.py"} />
      <${Snippet} title="Read a topic in Spark" code=${`spark.readStream.format("headrace") \\\n  .option("bootstrap", "${location.origin}").option("topic", "orders").load()`} /></div><//>`}`;
}

const KNOWN = new Set(["lag", "rows_per_second", "input_rows_per_second", "rows_total", "batch_ms", "last_error", "flows"]);
const PHASES = { latestOffset: "fetching end offsets", getBatch: "building the batch", queryPlanning: "query planning", addBatch: "reading, processing, writing", walCommit: "writing the offset log", commitOffsets: "committing offsets", commitBatch: "committing the batch" };

// Flows of one function share a diagram: its rows go to the sink, failed rows to the dead letters.
function diagrams(flows) {
  const found = new Map();
  for (const flow of flows) {
    const name = String(flow.function === undefined ? flow.flow : flow.function);
    if (!found.has(name)) found.set(name, { name, flows: [] });
    found.get(name).flows.push(flow);
  }
  return [...found.values()].map((one) => ({ ...one, main: one.flows.find((f) => !f.dead) || one.flows[0] }));
}

// A topic, a list of topics or a pattern; a single topic name becomes a link.
const Stream = ({ name }) => (/^[\w.-]+$/.test(name) ? html`<a class="name" href=${"#/stream/%2F/" + q(name)}>${name}</a>` : html`<span class="name">${name}</span>`);

function Drawing({ one, running }) {
  const { main } = one;
  const stages = list(main.stages);
  const sources = list(main.sources).map(words);
  return html`<figure class="flow-drawing" aria-label=${"Flow " + one.name}>
    <ol class="flow">
      <li class="flow-step"><div class="flow-kind">Source</div>
        ${sources.length ? sources.map((name) => html`<div key=${name}><${Stream} name=${name} /></div>`) : html`<span class="muted">unknown</span>`}
        <div class="flow-numbers">${rate(main.input_rows_per_second)} rows/s in${typeof main.lag === "number" && html`<br />lag ${count(main.lag)}`}</div></li>
      <li class=${"flow-step work" + (running ? " running" : "")}><div class="flow-kind">Function</div>
        <div class="name">${one.name}</div>
        ${stages.length > 0 && html`<ol class="stages" aria-label="Stages">${stages.map((stage, n) => html`<li key=${n}>${words(stage)}</li>`)}</ol>`}
        <div class="flow-numbers">${rate(main.rows_per_second)} rows/s processed, ${ms(main.batch_ms)} per batch${main.state_rows !== undefined && html`<br />${count(main.state_rows)} state rows`}</div></li>
      <li class="flow-step sinks">${one.flows.map((flow) => html`<div key=${flow.flow} class=${"flow-sink" + (flow.dead ? " dead" : "")}>
        <div class="flow-kind">${flow.dead ? "Dead letters" : "Sink"}</div>
        ${flow.sink ? html`<${Stream} name=${words(flow.sink)} />` : html`<span class="muted">topic column of each row</span>`}
        <div class="flow-numbers">${flow.batch === undefined ? "no batch yet" : `batch ${count(flow.batch)}`}</div></div>`)}</li>
    </ol>
    ${main.phases_ms && Object.keys(main.phases_ms).length > 0 && html`<details><summary>Duration of the last batch by phase</summary>
      <dl class="facts">${Object.entries(main.phases_ms).sort((a, b) => b[1] - a[1]).map(([name, took]) => html`<dt>${PHASES[name] || name}</dt><dd>${ms(took)}</dd>`)}
      ${main.watermark && html`<dt>watermark</dt><dd class="name">${words(main.watermark)}</dd>`}</dl></details>`}
  </figure>`;
}

function Pipeline({ one, reload }) {
  const details = one.details || {};
  const flows = Object.entries(details.flows || {}).map(([flow, said]) => ({ ...said, flow }));
  const rest = Object.entries(details).filter(([name, value]) => !KNOWN.has(name) && value !== null && value !== "");
  return html`<section class="card">
    <div class="head"><h2 class="name">${one.name}</h2><${Badge} tone=${TONES[one.state]}>${one.state}<//>${one.stop_requested && one.state === "running" && html`<${Badge} tone="warn">stopping<//>`}
      <span class="muted">reported ${ago(one.updated)}, started ${ago(one.started)}</span><span class="grow"></span>
      ${one.state === "running" && !one.stop_requested && html`<${Act} class="quiet danger" act=${() => attempt(() => api(`/pipelines/${q(one.name)}/stop`, { method: "POST" }), "It will stop after the current batch.").then(reload)}>Stop<//>`}
      ${["stopped", "failed", "lost"].includes(one.state) && html`<${Act} class="quiet" act=${() => attempt(() => api(`/pipelines/${q(one.name)}`, { method: "DELETE" })).then(reload)}>Remove<//>`}</div>
    ${details.last_error && html`<div class="banner bad" role="status"><b>Last error</b><pre>${words(details.last_error)}</pre></div>`}
    <div class="tiles">
      <${Tile} label="Input" value=${rate(details.input_rows_per_second)} unit="rows/s" />
      <${Tile} label="Processed" value=${rate(details.rows_per_second)} unit="rows/s" title="Throughput while a batch runs" />
      <${Tile} label="Lag" value=${short(details.lag)} />
      <${Tile} label="Batch time" value=${ms(details.batch_ms)} />
      <${Tile} label="Total rows" value=${short(details.rows_total)} />
    </div>
    ${diagrams(flows).map((diagram) => html`<${Drawing} key=${diagram.name} one=${diagram} running=${one.state === "running"} />`)}
    ${rest.length > 0 && html`<dl class="facts">${rest.map(([name, value]) => html`<dt>${name.replaceAll("_", " ")}</dt><dd class="name">${words(value)}</dd>`)}</dl>`}
    ${flows.length > 0 && html`<p class="muted">Cursors: <a class="name" href=${"#/readers?filter=" + q(one.name)}>${one.name}.*</a></p>`}
  </section>`;
}
