import { html, useState, useEffect, useRef, useData, query, parse, q, setParams, copy, say, shellQuote, indented, who, clock, time, bytes, count } from "/ui/lib.js";
import { Badge, Failure, Empty } from "/ui/parts.js";

const KEPT = 500;
const toBytes = (part) => {
  if (!part) return new Uint8Array();
  if (part.text !== undefined) return new TextEncoder().encode(part.text);
  return Uint8Array.from(atob(part.base64), (c) => c.charCodeAt(0));
};
export const asText = (part) => (!part ? "" : part.text !== undefined ? part.text : `(${toBytes(part).length} bytes)`);
const asHex = (part) => {
  const data = toBytes(part).slice(0, 4096);
  const lines = [];
  for (let at = 0; at < data.length; at += 16) {
    const row = [...data.slice(at, at + 16)];
    const hex = row.map((b) => b.toString(16).padStart(2, "0")).join(" ").padEnd(47);
    lines.push(`${at.toString(16).padStart(6, "0")}  ${hex}  ${row.map((b) => (b > 31 && b < 127 ? String.fromCharCode(b) : "·")).join("")}`);
  }
  return lines.join("\n");
};
const TONES = { ready: "blue", unacked: "warn", settled: "" };

export function Message({ message, vhost, name, extra }) {
  const key = message.death ? null : message.key;
  const [open, setOpen] = useState(false);
  const json = open && message.value && message.value.text !== undefined ? indented(message.value.text) : null;
  const [form, setForm] = useState(null);
  const shown = form || (json ? "json" : message.value && message.value.text !== undefined ? "text" : "hex");
  const curl = () => {
    const base = message.at_topics ? `/topics/${q(name)}` : `/api/headrace/streams/${q(vhost)}/${q(name)}`;
    const login = who.is_logged_in ? `-u ${shellQuote(who.name)} ` : "";  // curl prompts for the password
    return `curl ${login}${shellQuote(`${location.origin}${base}/messages${query({ partition: message.partition, offset: message.offset, limit: 1 })}`)}`;
  };
  const properties = message.amqp ? Object.entries(message.amqp.properties).filter(([k]) => k !== "headers") : [];
  const headers = [...message.headers.map(([k, v]) => [k, asText(v)]), ...(message.amqp ? Object.entries(message.amqp.properties.headers || {}).map(([k, v]) => [k, typeof v === "object" ? JSON.stringify(v) : String(v)]) : [])];
  return html`<li class=${"message" + (open ? " open" : "")}>
    <button class="message-line" aria-expanded=${open} onClick=${() => setOpen(!open)}>
      <span class="offset">${message.partition}:${message.offset}</span>
      <span class="when" title=${time(message.timestamp)}>${clock(message.timestamp)}</span>
      ${message.state && html`<${Badge} tone=${TONES[message.state]}>${message.state}<//>`}
      ${extra}
      ${key && html`<span class="key name">${asText(key)}</span>`}
      <span class="preview name">${message.value ? asText(message.value).slice(0, 300) : "(tombstone)"}</span>
      <span class="muted">${bytes(message.value_bytes)}</span>
    </button>
    ${open && html`<div class="message-body">
      <div class="bar"><div class="choice" role="group" aria-label="Show as">
        ${["json", "text", "hex"].map((one) => html`<button aria-pressed=${shown === one} disabled=${one === "json" && !json} onClick=${() => setForm(one)}>${one}</button>`)}</div>
        <span class="grow"></span><button class="quiet" onClick=${() => copy(curl())}>Copy as curl</button><button class="quiet" onClick=${() => copy(asText(message.value))}>Copy value</button></div>
      <pre class="payload">${shown === "json" && json ? json : shown === "hex" ? asHex(message.value) : asText(message.value)}</pre>
      ${message.truncated && html`<p class="muted">Only the beginning of ${bytes(message.value_bytes)} is shown.</p>`}
      <dl class="facts">
        <dt>time</dt><dd>${time(message.timestamp)}</dd>
        ${message.amqp && html`<dt>exchange</dt><dd class="name">${message.amqp.exchange || "(default exchange)"}</dd><dt>routing key</dt><dd class="name">${message.amqp.routing_key}</dd>`}
        ${properties.map(([k, v]) => html`<dt>${k}</dt><dd class="name">${String(v)}</dd>`)}
        ${headers.map(([k, v]) => html`<dt class="name">${k}</dt><dd class="name">${v}</dd>`)}
      </dl></div>`}
  </li>`;
}

// Gaps of unreadable messages, sorted in among the messages.
export const inPlace = (messages, gaps, partition) =>
  [...messages, ...(gaps || []).map((gap) => ({ gap, partition: gap.partition ?? partition, offset: gap.start }))];
export const Damage = ({ gap }) => html`<li class="message gap" role="note"><p>
    <strong>${gap.end === null ? `Messages from offset ${count(gap.start)} on cannot be read.`
      : gap.end - gap.start === 1 ? `Offset ${count(gap.start)} cannot be read.`
      : `Offsets ${count(gap.start)} to ${count(gap.end - 1)} cannot be read.`}</strong>
    ${" "}<span class="name">${gap.reason}.</span>${gap.end === null ? "" : ` Reading continues at offset ${count(gap.end)}.`}
    ${" "}Run <code>headrace log verify</code> to list all damage.</p></li>`;

export function Messages({ vhost, name, partitions, indexed, params }) {
  const base = `/api/headrace/streams/${q(vhost)}/${q(name)}`;
  const partition = Number(params.partition) || 0;
  const from = params.from || "newest";
  const [at, setAt] = useState(params.at || "");
  const [tail, setTail] = useState(false);
  const [tailed, setTailed] = useState([]);
  const [skipped, setSkipped] = useState(0);
  const start = params.next ? { offset: params.next } : from === "offset" ? { offset: params.at || 0 } : from === "oldest" ? { offset: 0 }
    : from === "time" && params.at ? { timestamp: Date.parse(params.at) } : {};
  const isLast = from === "last";
  const lacksKey = isLast && !params.at;
  const isLive = isLast || (from === "newest" && !params.contains);
  const wanted = isLast ? { key: params.at, last: true }
    : { partition, limit: 50, contains: params.contains, key: from === "key" ? params.at : "", ...start };
  const search = (changes) => setParams({ ...changes, next: "" });
  const { data, error, reload } = useData(tail || lacksKey ? null : `${base}/messages${query(wanted)}`, isLive ? 2 : 0);
  useEffect(() => {
    if (!tail) return undefined;
    const source = new EventSource(`${base}/stream`);
    source.onmessage = (event) => {
      const news = parse(event.data);
      setSkipped((n) => n + news.skipped);
      setTailed((old) => [...inPlace(news.messages, news.gaps, news.partition).sort((a, b) => b.offset - a.offset), ...old].slice(0, KEPT));
    };
    source.onerror = (event) => {
      if (!event.data && source.readyState !== EventSource.CLOSED) return;  // the browser reconnects by itself
      say(event.data ? parse(event.data).detail : "The broker ended the live view.", "bad");
      setTail(false);
    };
    return () => source.close();
  }, [tail, base]);
  const found = data && !lacksKey ? inPlace(data.messages, data.gaps, data.partition).sort((a, b) => a.offset - b.offset) : [];
  const list = tail ? tailed : from === "newest" && !params.contains ? found.reverse() : found;
  const apply = (event) => { event.preventDefault(); search({ at }); };
  return html`
    <form class="bar" onSubmit=${apply}>
      ${partitions > 1 && !isLast && html`<select aria-label="Partition" value=${partition} onChange=${(e) => search({ partition: e.target.value })} disabled=${tail}>
        ${Array.from({ length: partitions }, (_, n) => html`<option value=${n}>partition ${n}</option>`)}</select>`}
      <select aria-label="Start at" value=${from} onChange=${(e) => { setAt(""); search({ from: e.target.value, at: "" }); }} disabled=${tail}>
        <option value="newest">newest first</option><option value="oldest">oldest first</option><option value="offset">from offset</option><option value="time">from time</option><option value="key">with key</option>
        ${(indexed || isLast) && html`<option value="last">last of key</option>`}</select>
      ${["offset", "time", "key", "last"].includes(from) && html`<input aria-label="Where" type=${from === "time" ? "datetime-local" : from === "offset" ? "number" : "text"} placeholder=${from === "key" || isLast ? "key" : ""} value=${at} onInput=${(e) => setAt(e.target.value)} onChange=${() => search({ at })} disabled=${tail} />`}
      ${!isLast && html`<input type="search" data-filter placeholder="Containing  ( / )" aria-label="Containing" value=${params.contains || ""} onChange=${(e) => search({ contains: e.target.value })} disabled=${tail} />`}
      <span class="grow"></span>
      <button type="button" aria-pressed=${tail} class=${tail ? "primary" : ""} onClick=${() => { setTailed([]); setSkipped(0); setTail(!tail); }}>${tail ? "Stop following" : "Follow live"}</button>
    </form>
    <p class="muted">Browsing does not consume messages or mark them as delivered.
      ${tail && (skipped ? ` Too many to show: ${count(skipped)} skipped.` : tailed.length ? "" : " Waiting for new messages.")}</p>
    <${Failure} error=${error} stale=${!!data} />
    <ol class="messages">${list.map((message) => message.gap ? html`<${Damage} key=${"gap:" + message.partition + ":" + message.offset} gap=${message.gap} />` : html`<${Message} key=${message.partition + ":" + message.offset} message=${message} vhost=${vhost} name=${name} />`)}</ol>
    ${!tail && lacksKey && html`<${Empty} title="Enter a key."><p>The key index finds its last message in any partition.</p><//>`}
    ${!tail && isLast && !lacksKey && data && !list.length && html`<${Empty} title="No message with this key."><p>It was never published, or its last message is a tombstone.</p><//>`}
    ${!tail && !isLast && data && !list.length && html`<${Empty} title="No messages found."><p>${data.end > data.start ? `The partition has offsets ${data.start} to ${data.end}; ${count(data.scanned)} messages were scanned.` : "The partition is empty."}</p><//>`}
    ${!tail && !isLast && data && (from !== "newest" || params.contains) && (params.next || data.next < data.end) && html`
      <nav class="pager" aria-label="More messages"><span>scanned to offset ${count(data.next)} of ${count(data.end)}</span>
      ${params.next && html`<button onClick=${() => search({})}>Back to the start</button>`}
      <button onClick=${() => setParams({ next: data.next })} disabled=${data.next >= data.end}>Continue</button></nav>`}`;
}
