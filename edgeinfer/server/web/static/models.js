// The dialog of models: those here, and the catalogue to pull from.
import { html, useState, useEffect, useRef } from "./preact.js";
import { api } from "./lib.js";

const size = (bytes) => (bytes ? `${(bytes / 1e9).toFixed(1)} GB` : "");

export function Models({ use, close }) {
  const [found, setFound] = useState(null), [pulls, setPulls] = useState([]), [error, setError] = useState(""), other = useRef();
  const attempt = async (work) => { try { setError(""); return await work(); } catch (failure) { setError(failure.message); } };
  const pull = (name, stop = false) => { other.current.scrollIntoView({ block: "end" }); return attempt(async () => setPulls(await api("/pulls", { name, stop }))); };
  const running = pulls.filter((one) => !one.failed).length;
  useEffect(() => { attempt(async () => { setPulls(await api("/pulls")); setFound({ ...await api("/setup"), offered: await api("/models") }); }); }, [running]);
  useEffect(() => {
    if (!running) return undefined;
    const timer = setInterval(() => attempt(async () => setPulls(await api("/pulls"))), 500);
    return () => clearInterval(timer);
  }, [running]);
  const send = (event) => { event.preventDefault(); if (other.current.value.trim()) pull(other.current.value.trim()); };
  const pulled = (name) => pulls.some((one) => one.name === name);
  return html`
    <form onSubmit=${send}><label for="other">Another model from Hugging Face</label><div class="pair">
      <input id="other" ref=${other} placeholder="hf.co/OWNER/REPOSITORY:QUANTIZATION" autocomplete="off" spellcheck=${false} /><button>Pull</button></div></form>
    ${error && html`<p role="alert" class="note">${error}</p>`}
    <ul class="models" aria-label="Being pulled">${pulls.map((one) => html`<li key=${one.name}><span><strong>${one.name}</strong>
      ${one.failed ? html`<small role="alert" class="note">${one.text}</small>` : html`<small>${one.text}</small>
        <progress aria-label="Pulling ${one.name}" max=${one.total || 1} value=${one.total ? one.done : null} />`}</span>
      ${one.failed && html`<button onClick=${() => pull(one.name)}>Try again</button>`}
      <button onClick=${() => pull(one.name, true)}>${one.failed ? "Dismiss" : "Stop"}</button></li>`)}</ul>
    ${found ? html`<h3>Here</h3><ul class="models">${found.models.map((one) => html`<li key=${one.name}><span><strong>${one.name}</strong>
        <small>${[one.state === "cold" ? "" : one.state, size(one.size_bytes), one.can_see && "reads pictures"].filter(Boolean).join(" · ")}</small></span>
        <button onClick=${() => { use(one.name); close(); }}>Use</button></li>`)}</ul>
      <h3>To pull</h3><ul class="models">${found.offered.filter((one) => !pulled(one.name)).map((one) => html`<li key=${one.name}><span><strong>${one.title}</strong>
        <small>${one.about}</small></span>
        <button aria-label="Pull ${one.name}" onClick=${() => pull(one.name)}>Pull</button></li>`)}</ul>`
      : html`<p class="loading">Looking for models…</p>`}
    <div class="row"><button class="primary" onClick=${close}>Close</button></div>`;
}
