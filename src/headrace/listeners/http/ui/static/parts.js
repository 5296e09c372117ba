// Components of pages: tables, tiles, dialogs, charts, snippets.
import { html, useState, useEffect, useRef, copy, toasts } from "/ui/lib.js";
import uPlot from "/ui/vendor/uplot.js";

export const Tile = ({ label, value, unit, tone, title }) => html`
  <div class=${"tile" + (tone ? " " + tone : "")} title=${title || ""}>
    <div class="tile-label">${label}</div>
    <div class="tile-value">${value}${unit && html`<span class="unit"> ${unit}</span>`}</div>
  </div>`;

export const Badge = ({ children, tone }) => html`<span class=${"badge" + (tone ? " " + tone : "")}>${children}</span>`;

export const Empty = ({ title, children }) => html`<div class="empty"><h3>${title}</h3>${children}</div>`;

export const NoMatches = () => html`<${Empty} title="No matches."><p>Nothing matches the filter.</p><//>`;

export const Failure = ({ error, stale }) => error && html`
  <div class="banner bad" role="alert">${stale ? "This may be out of date: " : ""}${error.message}</div>`;

// A button that is disabled while its action runs, so that a double click runs it once.
export function Act({ act, disabled, children, ...rest }) {
  const [busy, setBusy] = useState(false);
  const click = async () => { setBusy(true); try { await act(); } finally { setBusy(false); } };
  return html`<button type="button" ...${rest} disabled=${disabled || busy} onClick=${click}>${children}</button>`;
}

export const Snippet = ({ title, code }) => html`
  <figure class="snippet">
    <figcaption>${title}<button class="quiet" onClick=${() => copy(code)} aria-label=${"Copy " + title}>Copy</button></figcaption>
    <pre><code>${code}</code></pre>
  </figure>`;

// columns: {key, label, cell(row), right, sortable, wide}
export function Table({ columns, rows, sort, reverse, onSort, keyOf, onOpen, caption }) {
  return html`
    <div class="table-box" tabindex="0" role="region" aria-label=${caption}>
      <table>
        <caption class="hidden">${caption}</caption>
        <thead><tr>${columns.map((column) => html`
          <th key=${column.key} scope="col" class=${column.right ? "right" : ""}
              aria-sort=${sort === column.key ? (reverse ? "descending" : "ascending") : undefined}>
            ${column.sortable && onSort
              ? html`<button class="sorter" onClick=${() => onSort(column.key)}>${column.label}${sort === column.key ? (reverse ? " ↓" : " ↑") : ""}</button>`
              : column.label}
          </th>`)}</tr></thead>
        <tbody>${rows.map((row) => html`
          <tr key=${keyOf ? keyOf(row) : undefined} class=${onOpen ? "link" : ""}
              onClick=${onOpen ? (event) => { if (!event.target.closest("a,button,input")) onOpen(row); } : undefined}>
            ${columns.map((column) => html`<td key=${column.key} data-label=${column.label} class=${(column.right ? "right " : "") + (column.wide ? "wide" : "")}>${column.cell(row)}</td>`)}
          </tr>`)}</tbody>
      </table>
    </div>`;
}

export const Pager = ({ page, pages, total, filtered, onPage }) => html`
  <nav class="pager" aria-label="Pages">
    <span>${filtered === total ? `${total} total` : `${filtered} of ${total}`}</span>
    ${pages > 1 && html`
      <button disabled=${page <= 1} onClick=${() => onPage(page - 1)}>Previous</button>
      <span>page ${page} of ${pages}</span>
      <button disabled=${page >= pages} onClick=${() => onPage(page + 1)}>Next</button>`}
  </nav>`;

export function Tabs({ tabs, active, link }) {
  return html`<nav class="tabs" aria-label="Views">${tabs.map(([key, label]) => html`
    <a key=${key} href=${link(key)} aria-current=${key === active ? "page" : undefined}>${label}</a>`)}</nav>`;
}

export function Toasts() {
  const [, redraw] = useState(0);
  useEffect(() => {
    const listener = () => redraw((n) => n + 1);
    toasts.listeners.add(listener);
    return () => toasts.listeners.delete(listener);
  }, []);
  return html`<div class="toasts" role="status" aria-live="polite">${toasts.list.map((one) => html`<div key=${one.id} class=${"toast " + one.kind}>${one.text}</div>`)}</div>`;
}

// A name as it can be typed into one line: queues with line breaks in their name must be deletable, too.
const typeable = (name) => name.replace(/\s+/g, " ").trim();

// A form or confirmation. `confirm` must be typed before a destructive action. The dialog has toasts of its own: those of
// the page are behind it, and screen readers skip them.
export function Dialog({ title, children, action, tone, confirm, onDone, onClose }) {
  const ref = useRef();
  const [typed, setTyped] = useState("");
  const [busy, setBusy] = useState(false);
  useEffect(() => {
    const before = document.activeElement;
    ref.current.showModal();
    return () => queueMicrotask(() => before.focus());  // the element is removed, not closed, so the browser would not restore the focus
  }, []);
  const act = async (event) => {
    event.preventDefault();
    setBusy(true);
    const ok = await onDone();
    setBusy(false);
    if (ok !== null) onClose();
  };
  return html`
    <dialog ref=${ref} onClose=${onClose} onCancel=${onClose}>
      <form onSubmit=${act}>
        <h2>${title}</h2>
        ${children}
        ${confirm && html`<label>Type <b class="name">${confirm}</b> to confirm
          <input value=${typed} onInput=${(e) => setTyped(e.target.value)} autocomplete="off" autofocus /></label>`}
        <div class="actions">
          <button type="button" class="quiet" onClick=${onClose}>Cancel</button>
          <button type="submit" class=${tone || "primary"} disabled=${busy || (confirm && typeable(typed) !== typeable(confirm))}>${action}</button>
        </div>
      </form>
      <${Toasts} />
    </dialog>`;
}

const shade = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Axis steps for counts: there are no 0.3 messages.
const WHOLE = Array.from({ length: 13 }, (_, i) => [1, 2, 5].map((n) => n * 10 ** i)).flat();

// series: {label, color, fill, format}; data: columns as uPlot takes them, the first is the time in seconds.
export function Plot({ title, data, series, format, whole, height = 190 }) {
  const box = useRef();
  const plot = useRef();
  useEffect(() => {
    const draw = () => {
      if (plot.current) plot.current.destroy();
      const grid = shade("--line");
      const ink = shade("--muted");
      const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui" };
      plot.current = new uPlot({
        width: Math.max(200, box.current.clientWidth), height,
        padding: [8, 28, 0, 0],  // room for half of a time label
        legend: { show: true, live: true },
        cursor: { y: false, points: { size: 6 } },
        scales: { x: { time: true }, y: { range: (u, min, max) => [0, Math.max(max * 1.15, 1)] } },
        axes: [
          { ...axis, space: 80, size: 30, values: (u, times, i, space, step) => times.map((at) => new Date(at * 1000).toLocaleTimeString("en-GB", step < 60 ? {} : { hour: "2-digit", minute: "2-digit" })) },
          { ...axis, size: 56, incrs: whole ? WHOLE : undefined, values: (u, values) => values.map((v) => format(v)) },
        ],
        series: [
          { value: (u, v) => (v === null ? "" : new Date(v * 1000).toLocaleTimeString("en-GB")) },
          ...series.map((one) => ({
            label: one.label, stroke: shade(one.color), width: 1.75, points: { show: false }, spanGaps: true,
            fill: one.fill ? shade(one.color) + "22" : undefined,
            value: (u, v) => (v === null || v === undefined ? "–" : format(v)),
          })),
        ],
      }, data, box.current);
    };
    draw();
    const resize = new ResizeObserver(() => plot.current && plot.current.setSize({ width: Math.max(200, box.current.clientWidth), height }));
    resize.observe(box.current);
    const theme = new MutationObserver(draw);
    theme.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    return () => { resize.disconnect(); theme.disconnect(); plot.current && plot.current.destroy(); plot.current = null; };
  }, []);
  useEffect(() => { if (plot.current) plot.current.setData(data); }, [data]);
  return html`<section class="card plot"><h2>${title}</h2><div ref=${box} role="img" aria-label=${title}></div></section>`;
}

export function Field({ label, hint, children }) {
  return html`<label class="field"><span>${label}${hint && html` <small>${hint}</small>`}</span>${children}</label>`;
}

export const parseJson = (text, what) => {
  if (!text.trim()) return {};
  try { return JSON.parse(text); } catch { throw new Error(`${what} is not valid JSON.`); }
};
