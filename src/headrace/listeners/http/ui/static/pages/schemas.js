import { html, useState, useData, usePage, api, attempt, q, go, setParams, copy, indented, count } from "/ui/lib.js";
import { Table, Badge, Failure, Empty, NoMatches, Dialog, Field, Snippet, Pager } from "/ui/parts.js";

const LEVELS = [
  ["BACKWARD", "can read data written with the latest schema"],
  ["BACKWARD_TRANSITIVE", "can read data written with all earlier schemas"],
  ["FORWARD", "writes data that the latest schema can read"],
  ["FORWARD_TRANSITIVE", "writes data that all earlier schemas can read"],
  ["FULL", "is backward and forward compatible with the latest schema"],
  ["FULL_TRANSITIVE", "is backward and forward compatible with all earlier schemas"],
  ["NONE", "is not checked"],
];
const link = (subject, version) => `#/schema/${q(subject)}${version ? `?version=${version}` : ""}`;
const ORDER = `{"type": "record", "name": "Order",
 "fields": [{"name": "id", "type": "int"}]}`;

export function Schemas({ params }) {
  const deleted = params.deleted === "true";
  const { data, error } = usePage("/api/headrace/schemas", { page: params.page, name: params.filter, deleted });
  const registry = useData("/api/headrace/registry", 5);
  const [asking, setAsking] = useState(false);
  const all = registry.data;
  const filtered = params.filter || deleted;
  return html`
    <div class="head"><h1>Schemas</h1><span class="muted">schema registry: subjects, versions and compatibility</span><span class="grow"></span>
      ${all && all.mode !== "READWRITE" && html`<${Badge} tone="warn">${all.mode}<//>`}
      ${all && html`<span><span class="muted">default compatibility </span><${Badge}>${all.compatibility}<//></span>`}
      ${all && all.may_write && html`<button onClick=${() => setAsking(true)}>Set compatibility</button>`}</div>
    <div class="bar"><input type="search" data-filter placeholder="Filter by name  ( / )" aria-label="Filter by name" value=${params.filter || ""} onInput=${(e) => setParams({ filter: e.target.value, page: "" })} />
      <label><input type="checkbox" checked=${deleted} onChange=${() => setParams({ deleted: deleted ? "" : "true", page: "" })} /> show deleted</label></div>
    <${Failure} error=${error} stale=${!!data} />
    ${data && data.items.length > 0 && html`<${Table} caption="Subjects" rows=${data.items} keyOf=${(s) => s.subject} onOpen=${(s) => { location.hash = link(s.subject); }} columns=${[
      { key: "subject", label: "Subject", wide: true, cell: (s) => html`<a class="name" href=${link(s.subject)}>${s.subject}</a>${s.deleted && html` <${Badge} tone="bad">deleted<//>`}` },
      { key: "type", label: "Type", cell: (s) => html`<${Badge} tone="blue">${s.type}<//>` },
      { key: "versions", label: "Versions", right: true, cell: (s) => count(s.versions) },
      { key: "version", label: "Latest", right: true, cell: (s) => s.version },
      { key: "id", label: "Id", right: true, cell: (s) => s.id },
      { key: "compatibility", label: "Compatibility", cell: (s) => html`${s.compatibility}${!s.own_compatibility && html` <span class="muted">(default)</span>`}` }]} />
      <${Pager} page=${data.page} pages=${data.page_count} total=${data.total_count} filtered=${data.filtered_count} onPage=${(n) => setParams({ page: n })} />`}
    ${data && !data.items.length && filtered && html`<${NoMatches} />`}
    ${data && !data.items.length && !filtered && html`<${Empty} title="No schemas yet.">
      <p>Producers register the schema of their messages and get an id; consumers look the schema up by that id. The registry implements Confluent's API at <span class="name">${location.origin}/registry</span>.</p>
      <div class="snippets"><${Snippet} title="Command line" code=${`cat > order.avsc <<'END'\n${ORDER}\nEND\nheadrace schema register orders-value order.avsc`} />
      <${Snippet} title="Confluent's serializers (Python)" code=${`registry = SchemaRegistryClient({\n  "url": "${location.origin}/registry"})\nserializer = AvroSerializer(registry, open("order.avsc").read())`} />
      <${Snippet} title="curl" code=${`curl ${location.origin}/registry/subjects/orders-value/versions \\\n  -d '{"schema": "\\"string\\""}'`} /></div><//>`}
    ${asking && html`<${Compatibility} level=${all.compatibility} path="/registry/config" about="For all subjects without a level of their own. Applies to new schemas; registered ones are not affected." onDone=${registry.reload} onClose=${() => setAsking(false)} />`}`;
}

// `inherited`: the level of a subject that has none of its own.
function Compatibility({ level, inherited, path, about, onDone, onClose }) {
  const [chosen, setChosen] = useState(level || "");
  const save = () => attempt(async () => {
    if (chosen) await api(path, { method: "PUT", body: { compatibility: chosen } });
    else if (level) await api(path, { method: "DELETE" });
    onDone();
    return true;
  }, "Set.");
  return html`<${Dialog} title="Compatibility" action="Set" onDone=${save} onClose=${onClose}>
    <p>${about}</p>
    <${Field} label="Level"><select value=${chosen} onChange=${(e) => setChosen(e.target.value)}>
      ${inherited && html`<option value="" selected=${!chosen}>default (${inherited})</option>`}
      ${LEVELS.map(([name]) => html`<option key=${name} value=${name} selected=${name === chosen}>${name}</option>`)}</select><//>
    <p class="muted">A new schema ${LEVELS.find(([name]) => name === (chosen || inherited))[1]}.</p>
  <//>`;
}

export function Subject({ parts, params }) {
  const name = parts[0];
  const at = `/api/headrace/schemas/${q(name)}`;
  const { data, error, reload } = useData(at, 3);
  const versions = usePage(`${at}/versions`, { page: params.page });
  const [asked, ask] = useState(null);
  const close = () => ask(null);
  if (!data) return html`<div class="head"><h1 class="name">${name}</h1></div><${Failure} error=${error} />${!error && html`<p class="muted">Loading…</p>`}`;
  const shown = Number(params.version) || data.version;
  const again = () => { reload(); versions.reload(); };
  const remove = (version) => async (permanent) => {
    const path = `/registry/subjects/${q(name)}${version ? `/versions/${version.version}` : ""}${permanent ? "?permanent=true" : ""}`;
    return attempt(async () => {
      await api(path, { method: "DELETE" });
      if (version && !(permanent && versions.data.total_count === 1)) again(); else go("schemas");
      return true;
    }, "Deleted.");
  };
  return html`
    <div class="head"><h1 class="name">${name}</h1><${Badge} tone="blue">${data.type}<//>
      ${data.deleted && html`<${Badge} tone="bad">deleted<//>`}
      ${data.mode !== "READWRITE" && html`<${Badge} tone="warn">${data.mode}<//>`}
      <span><span class="muted">compatibility </span><${Badge}>${data.compatibility}<//>${!data.own_compatibility && html`<span class="muted"> (default)</span>`}</span>
      <span class="grow"></span>
      ${data.may_write && !data.deleted && html`<button onClick=${() => ask("level")}>Set compatibility</button>`}
      ${data.may_write && html`<button class="quiet danger" onClick=${() => ask({ removing: null, permanent: data.deleted })}>${data.deleted ? "Delete permanently" : "Delete"}</button>`}</div>
    <${Failure} error=${error} stale=${true} />
    <div class="columns narrow-first">
      <section class="card"><h2>Versions</h2>
        <${Failure} error=${versions.error} stale=${!!versions.data} />
        ${versions.data && html`<${Table} caption="Versions" rows=${versions.data.items} keyOf=${(v) => v.version} columns=${[
          { key: "version", label: "Version", cell: (v) => html`<a href=${link(name, v.version) + (params.page ? `&page=${q(params.page)}` : "")} aria-current=${v.version === shown ? "true" : undefined}>${v.version}</a>${v.deleted && html` <${Badge} tone="bad">deleted<//>`}` },
          { key: "id", label: "Id", right: true, cell: (v) => v.id },
          { key: "referred", label: "Referenced by", right: true, cell: (v) => count(v.referred_by) },
          { key: "actions", label: "", cell: (v) => data.may_write && html`<button class="quiet danger" aria-label=${`Delete version ${v.version}${v.deleted ? " permanently" : ""}`} onClick=${() => ask({ removing: v, permanent: v.deleted })}>${v.deleted ? "Delete permanently" : "Delete"}</button>` }]} />
          ${versions.data.page_count > 1 && html`<${Pager} page=${versions.data.page} pages=${versions.data.page_count} total=${versions.data.total_count} filtered=${versions.data.filtered_count} onPage=${(n) => setParams({ page: n })} />`}`}
      </section>
      <${Version} key=${shown} path=${`${at}/versions/${shown}`} number=${shown} />
    </div>
    ${asked === "level" && html`<${Compatibility} level=${data.own_compatibility} inherited=${data.default_compatibility} path=${`/registry/config/${q(name)}`}
      about=${html`For <b class="name">${name}</b>. Applies to new schemas; registered ones are not affected.`} onDone=${reload} onClose=${close} />`}
    ${asked && asked.removing !== undefined && html`<${Removal} name=${name} version=${asked.removing} permanent=${asked.permanent} remove=${remove(asked.removing)} onClose=${close} />`}`;
}

function Removal({ name, version, permanent, remove, onClose }) {
  const what = version ? html`Version ${version.version} of <b class="name">${name}</b>` : html`<b class="name">${name}</b>`;
  return html`<${Dialog} title=${`Delete the ${version ? "version" : "subject"}${permanent ? " permanently" : ""}?`} action=${permanent ? "Delete permanently" : "Delete"} tone="danger" confirm=${permanent ? name : undefined} onClose=${onClose}
    onDone=${() => remove(permanent)}>
    ${permanent ? html`<p>${what} is deleted permanently. Consumers can no longer decode messages with its id, unless another subject has the same schema.</p>`
      : html`<p>${what} is no longer listed or used for compatibility checks. Consumers can still look it up by id, and it can be deleted permanently afterwards.</p>`}<//>`;
}

const Place = ({ one }) => html`<a class="name" href=${link(one.subject, one.version)}>${one.subject}</a> <span class="muted">version ${one.version}</span>`;

function Version({ path, number }) {
  const { data, error } = useData(path, 5);
  const shown = data && (data.type === "PROTOBUF" ? data.schema : indented(data.schema) ?? data.schema);
  return html`<section class="card"><div class="head"><h2>Version ${number}</h2>
      ${data && html`<span class="muted">id ${data.id}</span>${data.deleted && html`<${Badge} tone="bad">deleted<//>`}<span class="grow"></span><button class="quiet" onClick=${() => copy(data.schema)}>Copy</button>`}</div>
    <${Failure} error=${error} stale=${!!data} />
    ${data && html`<pre class="payload schema" tabindex="0" role="region" aria-label="Schema">${shown}</pre>
      <dl class="facts">
        ${data.references.length > 0 && html`<dt>references</dt><dd>${data.references.map((one) => html`<div key=${one.name}><${Place} one=${one} /> <span class="muted">as</span> <span class="name">${one.name}</span></div>`)}</dd>`}
        ${data.referred_by.length > 0 && html`<dt>referenced by</dt><dd>${data.referred_by.map((one) => html`<div key=${one.subject + " " + one.version}><${Place} one=${one} /></div>`)}
          ${data.referred_by_total > data.referred_by.length && html`<span class="muted">and ${count(data.referred_by_total - data.referred_by.length)} more</span>`}</dd>`}
      </dl>`}
  </section>`;
}
