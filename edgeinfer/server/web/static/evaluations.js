// The reports of `edgeinfer eval`.
import { html, useState, useEffect, useLayoutEffect } from "./preact.js";
import { api, trusted } from "./lib.js";

export function Evaluations({ menu }) {
  const [list, setList] = useState(null), [shown, setShown] = useState(null), [error, setError] = useState("");
  const attempt = async (work) => { try { setError(""); await work(); } catch (failure) { setError(failure.message); } };
  const open = (name) => attempt(async () => setShown(await api(`/evaluations/${encodeURIComponent(name)}`)));
  useLayoutEffect(() => { document.title = "Evaluations · edgeinfer"; }, []);
  useEffect(() => { attempt(async () => { const found = await api("/evaluations"); setList(found); if (found.length) await open(found[0].name); }); }, []);
  return html`<header class="bar">${menu}<h1>Evaluations</h1>
      ${list?.length > 0 && html`<select aria-label="Report" onChange=${(event) => open(event.target.value)}>${list.map((one) => html`<option value=${one.name}>${one.name} · ${new Date(1000 * one.written_at).toLocaleString("en")}</option>`)}</select>`}</header>
    <div class="log" id="message" tabindex="0" role="region" aria-label="Report">
      ${error && html`<p role="alert" class="note">${error}</p>`}
      ${list?.length === 0 && html`<div class="empty"><p>No reports yet. <code>edgeinfer eval basics MODEL</code> in a terminal writes one.</p></div>`}
      ${shown?.blocks.map((markup) => html`<div class="block" dir="auto" dangerouslySetInnerHTML=${{ __html: trusted(markup) }} />`)}
    </div>`;
}
