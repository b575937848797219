// One prompt, two models or settings beside each other, and the probability of each token. Nothing is stored.
import { html, useState, useEffect, useLayoutEffect, useRef } from "./preact.js";
import { completions } from "./lib.js";

const share = (logprob) => { const p = Math.exp(logprob); return p < 0.001 ? "< 0.1 %" : `${(100 * p).toFixed(1)} %`; };
const quoted = (text) => JSON.stringify(text);

/** The tokens of one answer as elements; the words on show are the page's own work, not drawn again. */
class Tokens {
  constructor(box, said) {
    this.box = box; this.said = said; this.at = -1; this.decoder = new TextDecoder();
    box.replaceChildren(); said("");
  }
  add(choice) {
    const { content, reasoning_content: reasoning } = choice.delta;
    const tokens = choice.logprobs?.content ?? [];
    for (const token of tokens) this.put(this.decoder.decode(new Uint8Array(token.bytes), { stream: true }), token);
    if (reasoning) this.put(reasoning).className = "reasoning";
    else if (content && !tokens.length) this.put(content);
  }
  put(text, token) {
    const one = document.createElement("span");
    one.textContent = text;
    if (token) {
      const others = token.top_logprobs.filter((other) => String(other.bytes) !== String(token.bytes)).map((other) => `${quoted(other.token)} ${share(other.logprob)}`);
      one.title = `${quoted(token.token)} ${share(token.logprob)}${others.length ? `; else ${others.join(", ")}` : ""}`;
      one.className = `p${Math.min(4, Math.floor(5 * Math.exp(token.logprob)))}`;
    }
    this.box.append(one);
    return one;
  }
  show(index) {
    const all = this.box.children, next = all[Math.max(0, Math.min(index, all.length - 1))];
    if (!next) return;
    all[this.at]?.classList.remove("current");
    this.at = [...all].indexOf(next);
    next.classList.add("current");
    next.scrollIntoView({ block: "nearest" });
    this.said(next.title);
  }
  key(event) {
    const to = { ArrowRight: this.at + 1, ArrowLeft: this.at - 1, Home: 0, End: this.box.children.length - 1 }[event.key];
    if (to !== undefined) { event.preventDefault(); this.show(to); }
  }
}

function Side({ name, setup, model, job }) {
  const [figures, setFigures] = useState(""), [error, setError] = useState(""), [said, setSaid] = useState("");
  const form = useRef(), box = useRef(), tokens = useRef(null);
  useEffect(() => {
    if (!job) return;
    const fields = form.current.elements, body = { model: fields.model.value, stream: true, logprobs: true, top_logprobs: 5, messages: job.messages };
    for (const option of Object.keys(setup.options)) if (fields[option].value !== "") body[option] = Number(fields[option].value);
    setError(""); setFigures("waiting…");
    tokens.current = new Tokens(box.current, setSaid);
    job.done(completions(body, job.signal, (chunk) => {
      if (chunk.choices[0]) tokens.current.add(chunk.choices[0]);
      if (chunk.timings) setFigures(`${chunk.timings.predicted_n} tokens · ${chunk.timings.predicted_per_second.toFixed(1)} tokens/s · first after ${Math.round(chunk.timings.ttft_ms)} ms`);
    }).catch((failure) => { setFigures(""); setError(job.signal.aborted ? "stopped" : failure.message); }));
  }, [job]);
  return html`<section aria-label=${name}><form ref=${form} onSubmit=${(event) => event.preventDefault()}>
      <select name="model" aria-label="Model, ${name}">${setup.models.map((one) => html`<option value=${one.name} selected=${one.name === model}>${one.name}${one.state === "cold" ? "" : ` · ${one.state}`}</option>`)}</select>
      <details><summary>Options</summary><div class="grid">${Object.entries(setup.options).map(([option, [low, high]]) => html`<div><label for="${name}-${option}">${option.replace(/_/g, " ")}</label>
        <input id="${name}-${option}" name=${option} type="number" step="any" min=${low} max=${high} title="${low} to ${high}" placeholder="model's own" /></div>`)}</div></details></form>
    <div class="tokens" ref=${box} tabindex="0" role="group" dir="auto" aria-label="Answer, ${name}; the arrow keys go from token to token"
      onKeyDown=${(event) => tokens.current?.key(event)} onMouseOver=${(event) => { if (event.target.parentNode === box.current) setSaid(event.target.title); }} />
    <p class="said" role="status">${said || "Point at a token, or go to it by the arrow keys."}</p>
    <p class="stats">${figures}</p>${error && html`<p role="alert" class="note">${error}</p>`}</section>`;
}

export function Playground({ setup, model, menu }) {
  const [job, setJob] = useState(null), [running, setRunning] = useState(0), form = useRef(), stop = useRef(null);
  useLayoutEffect(() => { document.title = "Playground · edgeinfer"; form.current.elements.prompt.focus(); return () => stop.current?.abort(); }, []);
  const run = (event) => {
    event.preventDefault();
    const { system, prompt } = form.current.elements;
    if (running || !prompt.value.trim()) return;
    const messages = [...(system.value.trim() ? [{ role: "system", content: system.value }] : []), { role: "user", content: prompt.value }];
    stop.current = new AbortController();
    setRunning(2);
    setJob({ messages, signal: stop.current.signal, done: (work) => work.finally(() => setRunning((n) => n - 1)) });
  };
  const key = (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229) run(event); };
  return html`<header class="bar">${menu}<h1>Playground</h1></header>
    <div class="log playground"><form ref=${form} onSubmit=${run} aria-label="Prompt">
        <input name="system" aria-label="System prompt" placeholder="System prompt: the model's own" dir="auto" />
        <textarea name="prompt" id="message" rows="3" aria-label="Prompt" placeholder="One prompt for both" dir="auto" onKeyDown=${key} />
        ${running ? html`<button type="button" class="primary" onClick=${() => stop.current.abort()}>Stop</button>` : html`<button class="primary">Run</button>`}
      </form>
      <div class="sides">${["left", "right"].map((name) => html`<${Side} key=${name} name=${name} setup=${setup} model=${model} job=${job} />`)}</div>
    </div>`;
}
