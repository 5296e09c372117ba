import { html, useState, useData, api, attempt, q, go, who, setParams } from "/ui/lib.js";
import { Table, Badge, Failure, Empty, Dialog, Field } from "/ui/parts.js";

const TAGS = [
  ["administrator", "full access, including users"],
  ["monitoring", "may see everything"],
  ["policymaker", "may edit policies of its virtual hosts"],
  ["management", "may use the dashboard for its virtual hosts"],
];
const link = (name) => `#/user/${q(name)}`;
const Tags = ({ tags }) => (tags.length ? tags.map((tag) => html`<${Badge} key=${tag} tone=${tag === "administrator" ? "warn" : "blue"}>${tag}<//> `) : html`<span class="muted">none</span>`);
const You = ({ name }) => name === who.name && html` <${Badge} tone="good">you<//>`;

export function Users({ params }) {
  const { data, error, reload } = useData("/api/users", 5);
  const permissions = useData("/api/permissions", 5);
  const [adding, setAdding] = useState(false);
  const text = (params.filter || "").toLowerCase();
  const rows = (data || []).filter((user) => !text || user.name.toLowerCase().includes(text));
  const homes = (name) => (permissions.data || []).filter((one) => one.user === name).map((one) => one.vhost).join(", ");
  return html`
    <div class="head"><h1>Users</h1><span class="muted">accounts, tags and permissions</span><span class="grow"></span><button class="primary" onClick=${() => setAdding(true)}>New user</button></div>
    <${Failure} error=${error} stale=${!!data} />
    ${data && data.length === 1 && data[0].name === "guest" && html`<${Empty} title="guest is the only user and has full access from this machine.">
      <p>As soon as you create a user, all requests need a login, except health checks and <span class="name">/metrics</span>. Create an administrator first; then change guest's password or delete guest.</p><//>`}
    ${data && data.length > 1 && data.some((user) => user.name === "guest" && user.password_hash) && html`<div class="banner warn">guest still has its default password: local clients get guest's permissions without a login.</div>`}
    <div class="bar"><input type="search" data-filter placeholder="Filter by name  ( / )" aria-label="Filter by name" value=${params.filter || ""} onInput=${(e) => setParams({ filter: e.target.value })} /></div>
    ${data && html`<${Table} caption="Users" rows=${rows} keyOf=${(u) => u.name} onOpen=${(u) => { location.hash = link(u.name); }} columns=${[
      { key: "name", label: "Name", wide: true, cell: (u) => html`<a class="name" href=${link(u.name)}>${u.name}</a><${You} name=${u.name} />` },
      { key: "tags", label: "Tags", cell: (u) => html`<${Tags} tags=${u.tags} />` },
      { key: "vhosts", label: "Virtual hosts", wide: true, cell: (u) => html`<span class="name">${homes(u.name) || "–"}</span>` },
      { key: "password", label: "Password", cell: (u) => (u.password_hash ? "set" : html`<${Badge} tone="warn">cannot log in<//>`) }]} />`}
    ${adding && html`<${NewUser} onClose=${() => setAdding(false)} onDone=${() => { reload(); permissions.reload(); }} />`}`;
}

function TagBoxes({ tags, setTags }) {
  const flip = (tag) => setTags(tags.includes(tag) ? tags.filter((other) => other !== tag) : [...tags, tag]);
  return html`<fieldset class="boxes"><legend>Tags</legend>${TAGS.map(([tag, meaning]) => html`
    <label key=${tag}><input type="checkbox" checked=${tags.includes(tag)} onChange=${() => flip(tag)} /> ${tag} <small class="muted">${meaning}</small></label>`)}</fieldset>`;
}

const Password = ({ value, set, label, required }) => html`<${Field} label=${label}>
  <input type="password" autocomplete="new-password" required=${required} value=${value} onInput=${(e) => set(e.target.value)} /><//>`;

function NewUser({ onClose, onDone }) {
  const [name, setName] = useState("");
  const [password, setPassword] = useState("");
  const [tags, setTags] = useState([]);
  const [home, setHome] = useState(true);
  const save = () => attempt(async () => {
    await api(`/api/users/${q(name)}`, { method: "PUT", body: { password, tags } });
    if (home) await api(`/api/permissions/${q("/")}/${q(name)}`, { method: "PUT", body: { configure: ".*", write: ".*", read: ".*" } });
    onDone();
    return true;
  }, "Created.");
  return html`<${Dialog} title="New user" action="Create" onDone=${save} onClose=${onClose}>
    <${Field} label="Name"><input required autofocus autocomplete="off" value=${name} onInput=${(e) => setName(e.target.value)} /><//>
    <${Password} label="Password" required=${true} value=${password} set=${setPassword} />
    <${TagBoxes} tags=${tags} setTags=${setTags} />
    <label class="check"><input type="checkbox" checked=${home} onChange=${() => setHome(!home)} /> full permissions in the virtual host <span class="name">/</span></label>
  <//>`;
}

export function User({ parts }) {
  const name = parts[0];
  const at = `/api/users/${q(name)}`;
  const { data, error, reload } = useData(at, 5);
  const permissions = useData(`${at}/permissions`, 5);
  const topics = useData(`${at}/topic-permissions`, 5);
  const [asked, ask] = useState(null);
  const close = () => ask(null);
  if (!data) return html`<div class="head"><h1 class="name">${name}</h1></div><${Failure} error=${error} />`;
  const save = (body, done) => attempt(async () => { await api(at, { method: "PUT", body }); reload(); return true; }, done);
  const remove = (path, again, done) => attempt(async () => { await api(path, { method: "DELETE" }); again(); return true; }, done);
  return html`
    <div class="head"><h1 class="name">${name}</h1><${Tags} tags=${data.tags} /><${You} name=${name} /><span class="grow"></span>
      <button onClick=${() => ask("password")}>Change password</button><button onClick=${() => ask("tags")}>Change tags</button>
      <button class="quiet danger" onClick=${() => ask("delete")}>Delete</button></div>
    <${Failure} error=${error} stale=${true} />
    <section class="card"><div class="head"><h2>Permissions</h2><span class="grow"></span><button onClick=${() => ask({ permission: {} })}>Set permissions</button></div>
      ${permissions.data && permissions.data.length > 0 ? html`<${Table} caption="Permissions" rows=${permissions.data} keyOf=${(p) => p.vhost} columns=${[
        { key: "vhost", label: "Virtual host", cell: (p) => html`<span class="name">${p.vhost}</span>` },
        ...["configure", "write", "read"].map((right) => ({ key: right, label: right[0].toUpperCase() + right.slice(1), wide: true, cell: (p) => html`<span class="name">${p[right] || "–"}</span>` })),
        { key: "actions", label: "", cell: (p) => html`<button class="quiet" onClick=${() => ask({ permission: p })}>Edit</button><button class="quiet danger" onClick=${() => ask({ clearing: p })}>Clear</button>` }]} />`
        : html`<p class="muted">None: this user cannot access any virtual host.</p>`}
    </section>
    <section class="card"><div class="head"><h2>Topic permissions</h2><span class="grow"></span><button onClick=${() => ask({ topic: {} })}>Set topic permissions</button></div>
      ${topics.data && topics.data.length > 0 ? html`<${Table} caption="Topic permissions" rows=${topics.data} keyOf=${(p) => p.vhost + " " + p.exchange} columns=${[
        { key: "vhost", label: "Virtual host", cell: (p) => html`<span class="name">${p.vhost}</span>` },
        { key: "exchange", label: "Exchange", wide: true, cell: (p) => html`<span class="name">${p.exchange || "amq.default"}</span>` },
        { key: "write", label: "Write", wide: true, cell: (p) => html`<span class="name">${p.write || "–"}</span>` },
        { key: "read", label: "Read", wide: true, cell: (p) => html`<span class="name">${p.read || "–"}</span>` },
        { key: "actions", label: "", cell: (p) => html`<button class="quiet danger" onClick=${() => ask({ clearingTopic: p })}>Clear</button>` }]} />`
        : html`<p class="muted">None: all routing keys are allowed.</p>`}
    </section>
    ${asked === "password" && html`<${NewPassword} save=${(password) => save({ password, tags: data.tags }, "Changed.")} own=${name === who.name} onClose=${close} />`}
    ${asked === "tags" && html`<${NewTags} user=${data} save=${(tags) => save({ tags }, "Changed.")} onClose=${close} />`}
    ${asked === "delete" && html`<${Dialog} title="Delete the user?" action="Delete" tone="danger" confirm=${name} onClose=${close}
      onDone=${async () => { const ok = await attempt(() => api(at, { method: "DELETE" }), "Deleted."); if (ok !== null) go("users"); return ok; }}>
      <p><b class="name">${name}</b> loses its permissions, and its connections are closed.${name === who.name ? " This is your own account: you will have to log in as another user." : ""}</p><//>`}
    ${asked && asked.permission && html`<${PermissionEditor} name=${name} permission=${asked.permission} onDone=${permissions.reload} onClose=${close} />`}
    ${asked && asked.topic && html`<${TopicEditor} name=${name} onDone=${topics.reload} onClose=${close} />`}
    ${asked && asked.clearing && html`<${Dialog} title="Clear these permissions?" action="Clear" tone="danger" onClose=${close}
      onDone=${() => remove(`/api/permissions/${q(asked.clearing.vhost)}/${q(name)}`, permissions.reload, "Cleared.")}>
      <p><b class="name">${name}</b> loses access to the virtual host <b class="name">${asked.clearing.vhost}</b>.</p><//>`}
    ${asked && asked.clearingTopic && html`<${Dialog} title="Clear these topic permissions?" action="Clear" tone="danger" onClose=${close}
      onDone=${() => remove(`/api/topic-permissions/${q(asked.clearingTopic.vhost)}/${q(name)}?exchange=${q(asked.clearingTopic.exchange)}`, topics.reload, "Cleared.")}>
      <p>All routing keys of <b class="name">${asked.clearingTopic.exchange || "amq.default"}</b> become allowed for <b class="name">${name}</b>.</p><//>`}`;
}

function NewPassword({ save, own, onClose }) {
  const [password, setPassword] = useState("");
  return html`<${Dialog} title="Change password" action="Change password" onDone=${() => save(password)} onClose=${onClose}>
    <p>The old password stops working immediately; open connections stay.${own ? " Your browser will ask for the new one." : ""}</p>
    <${Password} label="New password" required=${true} value=${password} set=${setPassword} /><//>`;
}

function NewTags({ user, save, onClose }) {
  const [tags, setTags] = useState(user.tags);
  return html`<${Dialog} title="Change tags" action="Change tags" onDone=${() => save(tags)} onClose=${onClose}><${TagBoxes} tags=${tags} setTags=${setTags} /><//>`;
}

function Vhosts({ value, set, fixed }) {
  const { data } = useData("/api/vhosts?columns=name", 0);
  const names = data ? data.map((vhost) => vhost.name) : [value];
  return html`<${Field} label="Virtual host"><select value=${value} disabled=${fixed} onChange=${(e) => set(e.target.value)}>${names.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select><//>`;
}

const Pattern = ({ label, hint, value, set }) => html`<${Field} label=${label} hint=${hint}><input value=${value} onInput=${(e) => set(e.target.value)} autocomplete="off" spellcheck=${false} /><//>`;

function PermissionEditor({ name, permission, onDone, onClose }) {
  const known = permission.vhost !== undefined;
  const [vhost, setVhost] = useState(known ? permission.vhost : "/");
  const [configure, setConfigure] = useState(known ? permission.configure : ".*");
  const [write, setWrite] = useState(known ? permission.write : ".*");
  const [read, setRead] = useState(known ? permission.read : ".*");
  const save = () => attempt(async () => {
    await api(`/api/permissions/${q(vhost)}/${q(name)}`, { method: "PUT", body: { configure, write, read } });
    onDone();
    return true;
  }, "Set.");
  return html`<${Dialog} title="Permissions" action="Set" onDone=${save} onClose=${onClose}>
    <${Vhosts} value=${vhost} set=${setVhost} fixed=${known} />
    <p class="muted">Regular expressions that match anywhere in the name of a queue, exchange or topic. Empty allows nothing.</p>
    <${Pattern} label="Configure" hint="declare, delete" value=${configure} set=${setConfigure} />
    <${Pattern} label="Write" hint="publish, bind to" value=${write} set=${setWrite} />
    <${Pattern} label="Read" hint="consume, get, purge, bind from" value=${read} set=${setRead} /><//>`;
}

function TopicEditor({ name, onDone, onClose }) {
  const [vhost, setVhost] = useState("/");
  const [exchange, setExchange] = useState("amq.topic");
  const [write, setWrite] = useState(".*");
  const [read, setRead] = useState(".*");
  const save = () => attempt(async () => {
    await api(`/api/topic-permissions/${q(vhost)}/${q(name)}`, { method: "PUT", body: { exchange, write, read } });
    onDone();
    return true;
  }, "Set.");
  return html`<${Dialog} title="Topic permissions" action="Set" onDone=${save} onClose=${onClose}>
    <${Vhosts} value=${vhost} set=${setVhost} />
    <${Field} label="Exchange" hint="of type topic"><input required value=${exchange} onInput=${(e) => setExchange(e.target.value)} /><//>
    <${Pattern} label="Write" hint="routing keys to publish with" value=${write} set=${setWrite} />
    <${Pattern} label="Read" hint="routing keys to bind with" value=${read} set=${setRead} /><//>`;
}
