import { html, useState, useData, api, attempt, hasTag, q, count } from "/ui/lib.js";
import { Table, Badge, Failure, Empty, Dialog, Field, parseJson } from "/ui/parts.js";

const KINDS = {
  policies: {
    one: "policy", about: "arguments for all queues and exchanges whose name matches a pattern", tag: "policymaker",
    empty: "A policy sets TTL, length limits, a dead-letter exchange or retention for every queue whose name matches, without declaring the queues again. Deleting the policy removes these settings.",
  },
  "operator-policies": {
    one: "operator policy", about: "limits set by administrators that policies and queue arguments cannot exceed", tag: "administrator",
    empty: "An operator policy applies in addition to other policies; the lower limit wins.",
  },
};

export function Policies() {
  return html`<${List} kind="policies" title=${html`<h1>Policies</h1>`} /><${List} kind="operator-policies" title=${html`<h2>Operator policies</h2>`} />`;
}

function List({ kind, title }) {
  const { one, about, tag, empty } = KINDS[kind];
  const { data, error, reload } = useData(`/api/${kind}`, 5);
  const [adding, setAdding] = useState(null);
  const [deleting, setDeleting] = useState(null);
  const change = (p) => html`<button class="quiet" onClick=${() => setAdding(p)}>Edit</button><button class="quiet danger" onClick=${() => setDeleting(p)}>Delete</button>`;
  return html`
    <div class="head">${title}<span class="muted">${about}</span><span class="grow"></span>${hasTag(tag) && html`<button class="primary" onClick=${() => setAdding({})}>New ${one}</button>`}</div>
    <${Failure} error=${error} stale=${!!data} />
    ${data && data.length > 0 && html`<${Table} caption=${kind.replace("-", " ")} rows=${data} keyOf=${(p) => p.vhost + p.name} columns=${[
      { key: "name", label: "Name", wide: true, cell: (p) => html`<span class="name">${p.name}</span>${p.vhost !== "/" && html` <${Badge}>${p.vhost}<//>`}` },
      { key: "pattern", label: "Pattern", wide: true, cell: (p) => html`<span class="name">${p.pattern}</span>` },
      { key: "apply", label: "Applies to", cell: (p) => p["apply-to"] },
      { key: "definition", label: "Definition", wide: true, cell: (p) => html`<span class="name">${JSON.stringify(p.definition)}</span>` },
      { key: "priority", label: "Priority", right: true, cell: (p) => count(p.priority) },
      { key: "actions", label: "", cell: (p) => hasTag(tag) && change(p) }]} />`}
    ${data && !data.length && html`<${Empty} title=${`No ${kind.replace("-", " ")}.`}><p>${empty}</p><//>`}
    ${adding && html`<${Editor} kind=${kind} policy=${adding} onClose=${() => setAdding(null)} onDone=${reload} />`}
    ${deleting && html`<${Dialog} title=${`Delete the ${one}?`} action="Delete" tone="danger" onClose=${() => setDeleting(null)}
      onDone=${async () => { const ok = await attempt(() => api(`/api/${kind}/${q(deleting.vhost)}/${q(deleting.name)}`, { method: "DELETE" }), "Deleted."); reload(); return ok; }}>
      <p>The settings of <b class="name">${deleting.name}</b> stop applying immediately.</p><//>`}`;
}

function Editor({ kind, policy, onClose, onDone }) {
  const [name, setName] = useState(policy.name || "");
  const [vhost, setVhost] = useState(policy.vhost || "/");
  const [pattern, setPattern] = useState(policy.pattern || "");
  const [apply, setApply] = useState(policy["apply-to"] || "queues");
  const [priority, setPriority] = useState(policy.priority || 0);
  const [definition, setDefinition] = useState(policy.definition ? JSON.stringify(policy.definition, null, 2) : '{"max-length": 10000}');
  const save = () => attempt(async () => {
    const parsed = parseJson(definition, "The definition");
    await api(`/api/${kind}/${q(vhost)}/${q(name)}`, { method: "PUT", body: { pattern, "apply-to": apply, priority: Number(priority), definition: parsed } });
    onDone();
    return true;
  }, "Saved.");
  return html`<${Dialog} title=${`${policy.name ? "Edit" : "New"} ${KINDS[kind].one}`} action="Save" onDone=${save} onClose=${onClose}>
    <${Field} label="Name"><input required value=${name} onInput=${(e) => setName(e.target.value)} readonly=${!!policy.name} /><//>
    <${Field} label="Virtual host"><input required value=${vhost} onInput=${(e) => setVhost(e.target.value)} readonly=${!!policy.name} /><//>
    <${Field} label="Pattern" hint="regular expression, matches anywhere in the name"><input required value=${pattern} onInput=${(e) => setPattern(e.target.value)} placeholder="^orders\\." /><//>
    <${Field} label="Applies to"><select value=${apply} onChange=${(e) => setApply(e.target.value)}>${["queues", "classic_queues", "quorum_queues", "streams", "exchanges", "all"].map((one) => html`<option>${one}</option>`)}</select><//>
    <${Field} label="Priority"><input type="number" value=${priority} onInput=${(e) => setPriority(e.target.value)} /><//>
    <${Field} label="Definition" hint="message-ttl, max-length, max-length-bytes, overflow, dead-letter-exchange, dead-letter-routing-key, expires, retry-limit, retry-delay, retry-backoff, max-age, retain-ms …"><textarea rows="5" value=${definition} onInput=${(e) => setDefinition(e.target.value)}></textarea><//>
  <//>`;
}
