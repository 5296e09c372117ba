import { html, useState, useData, api, attempt, q, query, setParams, count, short, ago, streamLink } from "/ui/lib.js";
import { Act, Table, Badge, Failure, Empty, Field, Snippet, Tile } from "/ui/parts.js";
import { Damage, Message, inPlace } from "/ui/pages/messages.js";

const link = (row) => `#/dead-letter/${q(row.vhost)}/${q(row.name)}`;
const REASONS = { rejected: "rejected by a consumer", expired: "TTL expired", maxlen: "queue length limit", delivery_limit: "delivery limit reached" };

export function DeadLetters() {
  const { data, error } = useData("/api/headrace/dead-letters");
  return html`
    <div class="head"><h1>Dead letters</h1><span class="muted">messages that were rejected, expired or dropped; replay them to their queues</span></div>
    <${Failure} error=${error} stale=${!!data} />
    ${data && data.length > 0 && html`<${Table} caption="Dead-letter queues" rows=${data} keyOf=${(r) => r.vhost + r.name} onOpen=${(row) => { location.hash = link(row); }} columns=${[
      { key: "name", label: "Queue", wide: true, cell: (r) => html`<a class="name" href=${link(r)}>${r.name}</a>` },
      { key: "messages", label: "Dead letters", right: true, cell: (r) => html`<b>${short(r.messages)}</b>` },
      { key: "sources", label: "From", wide: true, cell: (r) => html`<span class="name">${r.sources.join(", ")}</span>` },
      { key: "consumers", label: "Consumers", right: true, cell: (r) => count(r.consumers) },
      { key: "state", label: "", cell: (r) => r.replaying && html`<${Badge} tone="good">replaying<//>` }]} />`}
    ${data && !data.length && html`<${Empty} title="No queue has a dead-letter exchange.">
      <p>Set a dead-letter exchange with a queue argument or a policy to keep rejected, expired and dropped messages:</p>
      <${Snippet} title="By policy" code=${`headrace policy set dead '^orders$' '{"dead-letter-exchange": "", "dead-letter-routing-key": "orders.dead"}'`} /><//>`}`;
}

export function DeadLetterQueue({ parts, params }) {
  const [vhost, name] = parts;
  const base = `/api/headrace/dead-letters/${q(vhost)}/${q(name)}`;
  const { data, error, reload } = useData(base, 2);
  const wanted = { reason: params.reason, origin: params.origin, contains: params.contains };
  const peek = useData(`${base}/messages${query({ ...wanted, limit: 25 })}`, 3);
  const [plan, setPlan] = useState(null);
  const [countMax, setCount] = useState("");
  const [rate, setRate] = useState("");
  const [to, setTo] = useState("");
  if (!data) return html`<div class="head"><h1 class="name">${name}</h1></div><${Failure} error=${error} />`;
  const body = (dry) => ({ ...wanted, dry_run: dry, count: countMax ? Number(countMax) : undefined, rate: rate ? Number(rate) : undefined, to: to || undefined });
  const ask = (dry) => api(`${base}/replay`, { method: "POST", body: body(dry) });
  const narrow = (changes) => { setPlan(null); setParams(changes); };
  const set = (setter) => (event) => { setPlan(null); setter(event.target.value); };
  const replays = data.replays.slice(0, 5);
  const letters = peek.data ? inPlace(peek.data.messages, peek.data.gaps).sort((a, b) => b.partition - a.partition || a.offset - b.offset) : [];
  return html`
    <div class="head"><h1 class="name">${name}</h1><${Badge} tone="warn">dead letters<//><span class="grow"></span><a class="button" href=${streamLink(vhost, name)}>Open queue</a></div>
    <${Failure} error=${error} stale=${true} />
    <section class="card"><h2>By origin and reason</h2>
      ${data.groups.length ? html`<${Table} caption="Dead letters by origin and reason" rows=${data.groups} keyOf=${(g) => g.origin + g.reason} columns=${[
        { key: "origin", label: "Original queue", wide: true, cell: (g) => (g.origin ? html`<a class="name" href=${streamLink(vhost, g.origin)}>${g.origin}</a>` : html`<span class="muted">published here directly</span>`) },
        { key: "reason", label: "Reason", cell: (g) => html`<${Badge} tone=${g.reason === "rejected" ? "bad" : "warn"}>${g.reason || "–"}<//> <span class="muted">${REASONS[g.reason] || ""}</span>` },
        { key: "messages", label: "Messages", right: true, cell: (g) => html`<b>${count(g.messages)}</b>` },
        { key: "deaths", label: "Max. deaths", right: true, cell: (g) => `${count(g.deaths_max)}×` },
        { key: "last", label: "Last", cell: (g) => ago(g.last) },
        { key: "pick", label: "", cell: (g) => (g.reason || g.origin) && html`<button class="quiet" onClick=${() => narrow({ reason: g.reason, origin: g.origin })}>Filter</button>` }]} />
        ${data.looked_at < data.ready && html`<p class="muted">Counted over the first ${count(data.looked_at)} of ${count(data.ready)} ready messages.</p>`}`
        : !data.gaps.length && html`<p class="muted">No dead letters.</p>`}
      ${data.gaps.length > 0 && html`<p class="warn-text">Some messages cannot be read because the log is damaged. All others are shown, counted and replayed.</p>`}
    </section>
    <section class="card"><h2>Replay</h2>
      <form class="grid" onSubmit=${async (e) => { e.preventDefault(); setPlan(await attempt(() => ask(true))); }}>
        <${Field} label="Reason"><select value=${params.reason || ""} onChange=${(e) => narrow({ reason: e.target.value })}><option value="">any</option>${Object.keys(REASONS).map((r) => html`<option>${r}</option>`)}</select><//>
        <${Field} label="Original queue"><input value=${params.origin || ""} onChange=${(e) => narrow({ origin: e.target.value })} placeholder="any queue" /><//>
        <${Field} label="Containing"><input data-filter value=${params.contains || ""} onChange=${(e) => narrow({ contains: e.target.value })} placeholder="any text" /><//>
        <${Field} label="Maximum count"><input type="number" min="1" value=${countMax} onInput=${set(setCount)} placeholder="all" /><//>
        <${Field} label="Messages per second"><input type="number" min="1" value=${rate} onInput=${set(setRate)} placeholder="unlimited" /><//>
        <${Field} label="To"><input value=${to} onInput=${set(setTo)} placeholder="original queues" /><//>
        <div class="actions"><button type="submit">Preview</button>
          ${plan && html`<${Act} class="primary" disabled=${!plan.matched} act=${async () => { if (await attempt(() => ask(false), "Replay started.")) { setPlan(null); reload(); } }}>Replay ${count(plan.matched)} messages<//>`}</div>
      </form>
      ${plan && html`<p data-plan>${plan.matched ? "Would be published to " : "No matching messages."}${Object.entries(plan.targets).map(([target, n], i) => html`${i > 0 && ", "}<b class="name">${target}</b> (${count(n)})`)}
        ${Object.entries(plan.missing).map(([target, n]) => html`<br /><span class="warn-text">${count(n)} stay here: their queue <b class="name">${target || "(unknown)"}</b> does not exist.</span>`)}</p>`}
      ${replays.length > 0 && html`<h3>Replays</h3><${Table} caption="Replays" rows=${replays} keyOf=${(r) => r.id} columns=${[
        { key: "state", label: "State", cell: (r) => html`<${Badge} tone=${{ running: "blue", done: "good", failed: "bad" }[r.state]}>${r.state}<//>${r.error && html` <span class="warn-text">${r.error}</span>`}` },
        { key: "moved", label: "Moved", wide: true, cell: (r) => html`<progress max=${Math.max(1, r.matched)} value=${r.moved}></progress> ${count(r.moved)} of ${count(r.matched)}` },
        { key: "started", label: "Started", cell: (r) => ago(r.started) },
        { key: "stop", label: "", cell: (r) => r.state === "running" && html`<button class="quiet danger" onClick=${() => attempt(() => api(`/api/headrace/replays/${r.id}`, { method: "DELETE" }), "Stopped.").then(reload)}>Stop</button>` }]} />`}
    </section>
    <section class="card"><h2>Messages</h2>
      <${Failure} error=${peek.error} stale=${!!peek.data} />
      <ol class="messages">${letters.map((message) => message.gap ? html`<${Damage} key=${"gap:" + message.partition + ":" + message.offset} gap=${message.gap} />` : html`<${Message} key=${message.partition + ":" + message.offset} message=${message} vhost=${vhost} name=${name}
        extra=${message.death && html`<${Badge} tone="warn">${message.death.reason} in ${message.death.queue}, ${message.death.deaths}×<//>`} />`)}</ol>
      ${peek.data && !letters.length && html`<p class="muted">No ${params.reason || params.origin || params.contains ? "matching " : ""}messages${peek.data.next ? " among the first; use headrace dlq peek to search all" : ""}.</p>`}
    </section>`;
}
