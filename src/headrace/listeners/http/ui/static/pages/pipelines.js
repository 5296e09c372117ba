import { html, useData, api, attempt, q, count, rate, ms, ago, short } from "/ui/lib.js";
import { Act, Badge, Failure, Empty, Snippet, Tile } from "/ui/parts.js";

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
      <${Snippet} title="Read the log in Spark" code=${`spark.readStream.format("headrace") \\\n  .option("bootstrap", "${location.origin}").option("topic", "orders").load()`} /></div><//>`}`;
}

const KNOWN = new Set(["lag", "rows_per_second", "input_rows_per_second", "rows_total", "batch_ms", "last_error", "flows"]);
const PHASES = { latestOffset: "asking for offsets", getBatch: "getting the batch", queryPlanning: "planning", addBatch: "reading, working, writing", walCommit: "noting the plan", commitOffsets: "noting the end", commitBatch: "committing" };

// Flows of one function are one drawing: its rows go to the sink, those that failed to the dead letters.
function drawings(flows) {
  const found = new Map();
  for (const flow of flows) {
    const name = String(flow.function === undefined ? flow.flow : flow.function);
    if (!found.has(name)) found.set(name, { name, flows: [] });
    found.get(name).flows.push(flow);
  }
  return [...found.values()].map((one) => ({ ...one, main: one.flows.find((f) => !f.dead) || one.flows[0] }));
}

// A topic, a list of them, or a pattern: what is plainly one name is a link.
const Stream = ({ name }) => (/^[\w.-]+$/.test(name) ? html`<a class="name" href=${"#/stream/%2F/" + q(name)}>${name}</a>` : html`<span class="name">${name}</span>`);

function Drawing({ one, running }) {
  const { main } = one;
  const stages = list(main.stages);
  const sources = list(main.sources).map(words);
  return html`<figure class="flow-drawing" aria-label=${"Flow " + one.name}>
    <ol class="flow">
      <li class="flow-step"><div class="flow-kind">Source</div>
        ${sources.length ? sources.map((name) => html`<div key=${name}><${Stream} name=${name} /></div>`) : html`<span class="muted">not said</span>`}
        <div class="flow-numbers">${rate(main.input_rows_per_second)} rows/s in${typeof main.lag === "number" && html`<br />${count(main.lag)} behind`}</div></li>
      <li class=${"flow-step work" + (running ? " running" : "")}><div class="flow-kind">Function</div>
        <div class="name">${one.name}</div>
        ${stages.length > 0 && html`<ol class="stages" aria-label="What Spark does">${stages.map((stage, n) => html`<li key=${n}>${words(stage)}</li>`)}</ol>`}
        <div class="flow-numbers">${rate(main.rows_per_second)} rows/s done, ${ms(main.batch_ms)} a batch${main.state_rows !== undefined && html`<br />${count(main.state_rows)} rows of state`}</div></li>
      <li class="flow-step sinks">${one.flows.map((flow) => html`<div key=${flow.flow} class=${"flow-sink" + (flow.dead ? " dead" : "")}>
        <div class="flow-kind">${flow.dead ? "Dead letters" : "Sink"}</div>
        ${flow.sink ? html`<${Stream} name=${words(flow.sink)} />` : html`<span class="muted">the topic each row names</span>`}
        <div class="flow-numbers">${flow.batch === undefined ? "no batch yet" : `batch ${count(flow.batch)}`}</div></div>`)}</li>
    </ol>
    ${main.phases_ms && Object.keys(main.phases_ms).length > 0 && html`<details><summary>Where the time of the last batch went</summary>
      <dl class="facts">${Object.entries(main.phases_ms).sort((a, b) => b[1] - a[1]).map(([name, took]) => html`<dt>${PHASES[name] || name}</dt><dd>${ms(took)}</dd>`)}
      ${main.watermark && html`<dt>watermark</dt><dd class="name">${words(main.watermark)}</dd>`}</dl></details>`}
  </figure>`;
}

function Pipeline({ one, reload }) {
  const details = one.details || {};
  const flows = Object.entries(details.flows || {}).map(([flow, said]) => ({ ...said, flow }));
  const rest = Object.entries(details).filter(([name, value]) => !KNOWN.has(name) && value !== null && value !== "");
  return html`<section class="card">
    <div class="head"><h2 class="name">${one.name}</h2><${Badge} tone=${TONES[one.state]}>${one.state}<//>${one.stop_requested && one.state === "running" && html`<${Badge} tone="warn">asked to stop<//>`}
      <span class="muted">reported ${ago(one.updated)}, begun ${ago(one.started)}</span><span class="grow"></span>
      ${one.state === "running" && !one.stop_requested && html`<${Act} class="quiet danger" act=${() => attempt(() => api(`/pipelines/${q(one.name)}/stop`, { method: "POST" }), "It stops after its batch.").then(reload)}>Stop<//>`}
      ${["stopped", "failed", "lost"].includes(one.state) && html`<${Act} class="quiet" act=${() => attempt(() => api(`/pipelines/${q(one.name)}`, { method: "DELETE" })).then(reload)}>Forget<//>`}</div>
    ${details.last_error && html`<div class="banner bad" role="status"><b>Last error</b><pre>${words(details.last_error)}</pre></div>`}
    <div class="tiles">
      <${Tile} label="Comes in" value=${rate(details.input_rows_per_second)} unit="rows/s" />
      <${Tile} label="Processed" value=${rate(details.rows_per_second)} unit="rows/s" title="While a batch runs: how fast it could go." />
      <${Tile} label="Behind" value=${short(details.lag)} />
      <${Tile} label="Batch time" value=${ms(details.batch_ms)} />
      <${Tile} label="Rows in all" value=${short(details.rows_total)} />
    </div>
    ${drawings(flows).map((drawn) => html`<${Drawing} key=${drawn.name} one=${drawn} running=${one.state === "running"} />`)}
    ${rest.length > 0 && html`<dl class="facts">${rest.map(([name, value]) => html`<dt>${name.replaceAll("_", " ")}</dt><dd class="name">${words(value)}</dd>`)}</dl>`}
    ${flows.length > 0 && html`<p class="muted">Its cursors: <a class="name" href=${"#/readers?filter=" + q(one.name)}>${one.name}.*</a></p>`}
  </section>`;
}
