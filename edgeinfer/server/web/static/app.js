// The chat page. The server holds every conversation and renders Markdown; this file shows and asks.
import { html, render, Component, useState, useEffect, useLayoutEffect, useRef } from "./preact.js";
import { Models } from "./models.js";
import { Playground } from "./playground.js";
import { Evaluations } from "./evaluations.js";
import { api, follow, copy, base64, trusted, plain } from "./lib.js";

const actions = {}; // set by App; the same object at every drawing, so unchanged turns are not drawn again
const tokens = (n) => n.toLocaleString("en");
/** Words of the endpoint: what stands between backticks is code. */
const marked = (text) => text.split("`").map((part, n) => (n % 2 ? html`<code>${part}</code>` : part));
const CODE_END = "</code></pre></div>\n";

class Block extends Component {
  shouldComponentUpdate({ markup }) {
    const shown = this.props.markup, grown = shown.slice(0, -CODE_END.length);
    if (!shown.endsWith(CODE_END) || !markup.endsWith(CODE_END) || !markup.startsWith(grown)) return markup !== shown;
    // a block of code that grows is not laid out anew
    this.base.querySelector("code").insertAdjacentHTML("beforeend", trusted(markup.slice(grown.length, -CODE_END.length)));
    return false;
  }
  render({ markup }) {
    return html`<div class="block" dir="auto" dangerouslySetInnerHTML=${{ __html: trusted(markup) }} />`;
  }
}

function Edit({ turn }) {
  const field = useRef();
  useEffect(() => { field.current.focus(); field.current.setSelectionRange(turn.text.length, turn.text.length); }, []);
  const send = (event) => { event.preventDefault(); actions.ask(field.current.value, [], turn.id); };
  const key = (event) => {
    if (event.key === "Escape") { event.stopPropagation(); actions.edit(0); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229) send(event);
  };
  return html`<form class="edit" onSubmit=${send}>
    <textarea ref=${field} aria-label="Edit the question" rows="4" dir="auto" style=${{ width: "100%" }}
      defaultValue=${turn.text} onKeyDown=${key} />
    <button class="primary">Send</button> <button type="button" onClick=${() => actions.edit(0)}>Cancel</button>
  </form>`;
}

function Stats({ turn }) {
  const s = turn.stats;
  if (!s.completion_tokens) return null;
  return html`<details class="stats"><summary aria-label="Speed and cache" title="Speed and cache">i</summary>
    ${s.tokens_per_s.toFixed(1)} tokens/s · first token after ${Math.round(s.ttft_ms)} ms · ${tokens(s.cached_tokens)} of ${tokens(s.prompt_tokens)} tokens of the prompt cached${turn.cost && ` · ${turn.cost}`}</details>`;
}

class Turn extends Component {
  shouldComponentUpdate(next) {
    return ["turn", "editing", "last", "target", "id", "words"].some((name) => next[name] !== this.props[name]);
  }
  render({ turn, editing, last, target, id, words }) {
    const user = turn.role === "user", streaming = turn.status === "streaming";
    const cut = last && ["stopped", "length", "failed", "interrupted"].includes(turn.status) && turn.blocks.length > 0;
    return html`<article id="turn-${turn.id}" class="turn ${user ? "user" : "answer"} ${streaming ? "streaming" : ""} ${target ? "target" : ""}"
        aria-label=${user ? "You" : turn.model || "Answer"} aria-busy=${streaming}>
      ${turn.files.length > 0 && html`<ul class="files" aria-label="Attached files">${turn.files.map((file, n) => html`<li>
        ${file.is_picture && html`<img alt="" loading="lazy" src="/web/conversations/${id}/export?form=file&turn=${turn.id}&file=${n}" />`}
        ${file.name}</li>`)}</ul>`}
      ${turn.reasoning && html`<details open=${streaming && !turn.blocks.length}><summary>Reasoning</summary><p dir="auto">${turn.reasoning}</p></details>`}
      ${editing ? html`<${Edit} turn=${turn} />` : html`<div class="body" dir="auto">
        ${user ? turn.text : turn.blocks.map((markup, n) => html`<${Block} key=${n} markup=${markup} />`)}
        ${streaming && html`<span class="wait" aria-hidden="true" />`}</div>`}
      ${turn.calls.map((call) => html`<details class="call"><summary>${call.name}: ${call.status === "pending" ? words?.[call.id] ?? "no result" : call.status}</summary>
        <pre tabindex="0" dir="auto">${call.arguments}</pre>${call.result && html`<pre tabindex="0" dir="auto">${call.result}</pre>`}</details>`)}
      <div class="foot">
        ${turn.page[1] > 1 && html`<span role="group" aria-label="Alternatives">
          <button aria-label="Earlier alternative" disabled=${turn.page[0] === 1} onClick=${() => actions.change({ action: "show", turn: turn.id, step: -1 })}>‹</button>
          ${turn.page[0]}/${turn.page[1]}
          <button aria-label="Later alternative" disabled=${turn.page[0] === turn.page[1]} onClick=${() => actions.change({ action: "show", turn: turn.id, step: 1 })}>›</button></span>`}
        ${!streaming && user && html`<button onClick=${() => actions.edit(turn.id)}>Edit</button>`}
        ${!streaming && !user && html`<button onClick=${(event) => actions.copyTurn(event.target, turn.id)}>Copy</button>`}
        ${!streaming && !user && last && html`<button onClick=${() => actions.change({ action: "regenerate" })}>Regenerate</button>`}
        ${cut && html`<button onClick=${() => actions.change({ action: "continue" })}>Continue</button>`}
        ${!streaming && html`<button onClick=${() => actions.fork(turn.id)}>Fork</button>
          <button onClick=${(event) => actions.link(event.target, turn.id)}>Link</button>`}
        ${!streaming && !user && html`<button onClick=${() => actions.show("export", turn.id)}>Code</button>`}
        <${Stats} turn=${turn} />
        ${turn.note && html`<span class="note">${marked(turn.note)}</span>`}
      </div>
    </article>`;
  }
}

function Card({ card }) {
  const box = useRef(), reason = useRef(), [seen, setSeen] = useState(false), name = `${card.server} · ${card.tool} wants to run`;
  const look = () => { // what scrolls must have been at its end before a yes
    if (!box.current) return; // an event of the card that was just answered
    const parts = [...box.current.querySelectorAll("dl, pre")];
    for (const part of parts) if (part.clientHeight && part.scrollTop + part.clientHeight >= part.scrollHeight - 2) part.dataset.ended = "1";
    setSeen(parts.every((part) => part.dataset.ended));
  };
  const decide = (choice) => actions.change({ action: "decide", card: card.number, choice, reason: reason.current.value });
  useEffect(() => { // not a button: what is being typed must not decide
    actions.say(`${name}: it waits for you.`);
    if (!document.activeElement?.value) box.current.focus();
    const sizes = new ResizeObserver(look);
    for (const part of box.current.querySelectorAll("dl, pre")) sizes.observe(part);
    look();
    return () => { sizes.disconnect(); if (box.current?.contains(document.activeElement)) actions.focus(); };
  }, [card.number]);
  return html`<form class="turn card" ref=${box} tabindex="-1" aria-label=${name} onSubmit=${(event) => { event.preventDefault(); decide("no"); }}>
    <strong dir="auto">${name}</strong> <small dir="auto">in ${card.folder}</small>
    ${Object.keys(card.arguments).length > 0 && html`<dl tabindex="0" aria-label="Call" onScroll=${look}>${Object.entries(card.arguments).map(([label, value]) => html`<dt dir="ltr">${label}</dt><dd dir="ltr">${value}</dd>`)}</dl>`}
    ${card.diff && html`<pre tabindex="0" aria-label="Change" dir="ltr" onScroll=${look}>${card.diff.split("\n").map((line) => html`<span class=${{ "+": "added", "-": "removed" }[line[0]]}>${line}${"\n"}</span>`)}</pre>`}
    ${card.warning && html`<p class="note">${card.warning}</p>`}
    ${!seen && html`<p class="note">Scroll to the end of the call to allow it.</p>`}
    <div class="row"><button type="button" class="primary" disabled=${!seen} onClick=${() => decide("once")}>Allow once</button>
      <button type="button" disabled=${!seen} onClick=${() => decide("conversation")}>Always in this conversation</button>
      ${card.pattern && html`<button type="button" disabled=${!seen} onClick=${() => decide("pattern")}>Always <code dir="ltr">${card.pattern}</code></button>`}</div>
    <div class="row"><input ref=${reason} aria-label="Reason, for the model" placeholder="Reason, for the model" maxlength="4000" /><button>No</button></div>
  </form>`;
}

const THEMES = { system: "◐", light: "☀", dark: "☾" };

function Theme() {
  const names = Object.keys(THEMES), [theme, setTheme] = useState(localStorage.getItem("theme") ?? "system");
  useLayoutEffect(() => {
    localStorage.setItem("theme", theme);
    document.documentElement.style.colorScheme = theme === "system" ? "" : theme;
  }, [theme]);
  return html`<button aria-label="Theme: ${theme}" title="Theme: ${theme}"
    onClick=${() => setTheme(names[(names.indexOf(theme) + 1) % names.length])}>${THEMES[theme]}</button>`;
}

function Sidebar({ list, id, query, shown, search }) {
  return html`<nav class="side ${shown ? "shown" : ""}" id="side" aria-label="Conversations">
    <div class="side-head">
      <div class="row">edgeinfer <button class="primary" onClick=${() => actions.open(0)} title="Alt+N">New</button></div>
      <div class="row"><a href="#playground">Playground</a><a href="#evaluations">Evaluations</a><${Theme} /></div>
      <input type="search" ref=${search} placeholder="Search" aria-label="Search conversations" title="Ctrl+K"
        value=${query} onInput=${(event) => actions.search(event.target.value)} />
    </div>
    <ul>${list.map((one) => html`<li key=${one.id} class=${one.id === id ? "open" : ""}>
      <a href="#/${one.id}" aria-current=${one.id === id ? "page" : null}>
        <span class="title" dir="auto">${one.title || "Untitled"}</span>
        <small dir="auto">${one.snippet ? one.snippet.split(/[\u0002\u0003]/).map((part, n) => (n % 2 ? html`<mark>${part}</mark>` : part)) : `${tokens(one.turns)} question${one.turns === 1 ? "" : "s"}`}</small>
      </a>
      <button aria-label="Delete ${one.title}" onClick=${() => actions.remove(one)}>×</button></li>`)}
      ${!list.length && html`<li><a>${query ? "Nothing found" : "No conversations yet"}</a></li>`}
    </ul>
  </nav>`;
}

function Composer({ id, answering, field }) {
  const [files, setFiles] = useState([]), [drop, setDrop] = useState(false), [text, setText] = useState("");
  const picker = useRef();
  useLayoutEffect(() => { setText(localStorage.getItem(`draft-${id}`) ?? ""); setFiles([]); field.current.focus(); }, [id]);
  const type = (value) => { setText(value); value ? localStorage.setItem(`draft-${id}`, value) : localStorage.removeItem(`draft-${id}`); };
  const add = async (found) => {
    const read = await Promise.all([...found].map(async (file) => ({ name: file.name || "pasted", data: await base64(file) })));
    setFiles((before) => [...before, ...read]);
  };
  const send = async (event) => {
    event.preventDefault();
    if (!text.trim() && !files.length) return;
    if (answering) return actions.note("The answer is still being written. Send this when it has ended, or stop it with Esc.", { waits: true });
    type(""); setFiles([]);
    if (!await actions.ask(text, files, 0)) { type(text); setFiles(files); }
  };
  const key = (event) => {
    if (event.isComposing || event.keyCode === 229) return; // Enter ends an input method's word
    if (event.key === "Enter" && !event.shiftKey) send(event);
    if (event.key === "ArrowUp" && !text) actions.editLast();
  };
  const paste = (event) => { if (event.clipboardData.files.length) { event.preventDefault(); add(event.clipboardData.files); } };
  return html`<div class="composer ${drop ? "drop" : ""}" onDragOver=${(event) => { event.preventDefault(); setDrop(true); }}
      onDragLeave=${() => setDrop(false)} onDrop=${(event) => { event.preventDefault(); setDrop(false); add(event.dataTransfer.files); }}>
    <form onSubmit=${send} aria-label="Message">
      ${files.length > 0 && html`<ul class="files" aria-label="Files to send">${files.map((file, n) => html`<li>${file.name}
        <button type="button" aria-label="Remove ${file.name}" onClick=${() => setFiles(files.filter((_, at) => at !== n))}>×</button></li>`)}</ul>`}
      <textarea ref=${field} id="message" rows="1" dir="auto" aria-label="Message" placeholder="Ask something" value=${text}
        onInput=${(event) => type(event.target.value)} onKeyDown=${key} onPaste=${paste} />
      <div class="row">
        <input type="file" class="hidden" multiple ref=${picker} tabindex="-1" aria-label="Files to attach"
          onChange=${(event) => { add(event.target.files); event.target.value = ""; }} />
        <button type="button" onClick=${() => picker.current.click()}>Attach</button>
        ${answering ? html`<button type="button" class="primary stop" onClick=${() => actions.change({ action: "stop" })}>Stop</button>`
          : html`<button class="primary send" disabled=${!text.trim() && !files.length}>Send</button>`}
      </div>
    </form></div>`;
}

function Dialog({ title, close, children }) {
  const box = useRef();
  useEffect(() => { box.current.showModal(); }, []);
  return html`<dialog ref=${box} aria-label=${title} onClose=${close}><h2>${title}</h2>${children}</dialog>`;
}

function Settings({ setup, settings, title, stored, close }) {
  const [error, setError] = useState("");
  const form = useRef(), preset = Object.entries(setup.presets).find(([, values]) => JSON.stringify(values) === JSON.stringify(settings.sampling));
  const choose = (event) => {
    for (const name of Object.keys(setup.options)) form.current.elements[name].value = setup.presets[event.target.value]?.[name] ?? "";
  };
  const save = async (event) => {
    event.preventDefault();
    const fields = form.current.elements, sampling = {};
    for (const name of Object.keys(setup.options)) if (fields[name].value !== "") sampling[name] = Number(fields[name].value);
    try {
      await actions.store({ system_prompt: fields.system.value, sampling }, stored && fields.title.value !== title ? fields.title.value : null);
      close();
    } catch (failure) { setError(failure.message); }
  };
  return html`<${Dialog} title="Settings of this conversation" close=${close}><form ref=${form} onSubmit=${save}>
    ${stored && html`<label for="title">Title</label><input id="title" name="title" dir="auto" defaultValue=${title} />`}
    <label for="system">System prompt</label><textarea id="system" name="system" rows="4" dir="auto" defaultValue=${settings.system_prompt} />
    <label for="preset">Preset</label><select id="preset" onChange=${choose}>
      <option value="">custom</option>${Object.keys(setup.presets).map((name) => html`<option value=${name} selected=${name === preset?.[0]}>${name}</option>`)}</select>
    <div class="grid">${Object.entries(setup.options).map(([name, [low, high]]) => html`<div><label for=${`o-${name}`}>${name.replace(/_/g, " ")}
        <small>${tokens(low)} to ${tokens(high)}</small></label>
      <input id=${`o-${name}`} name=${name} type="number" step="any" min=${low} max=${high} placeholder="model's own" defaultValue=${settings.sampling[name] ?? ""} /></div>`)}</div>
    ${error && html`<p role="alert" class="note">${marked(error)}</p>`}
    <div class="row"><button type="button" onClick=${close}>Cancel</button><button class="primary">Save</button></div>
  </form></${Dialog}>`;
}

function Export({ id, turn, close }) {
  const [code, setCode] = useState("");
  const path = (form) => `/conversations/${id}/export?form=${form}&turn=${turn || 0}`;
  const show = async (form) => setCode(await api(path(form)));
  return html`<${Dialog} title="Export" close=${close}>
    <p><a href="/web${path("markdown")}" download>Markdown</a> · <a href="/web${path("json")}" download>JSON with all branches</a></p>
    <p>The request as ${["curl", "python", "javascript"].map((form) => html`<button type="button" onClick=${() => show(form)}>${form}</button>`)}</p>
    ${code && html`<pre tabindex="0">${code}</pre>`}
    <div class="row">${code && html`<button onClick=${(event) => actions.copy(event.target, code)}>Copy</button>`}<button class="primary" onClick=${close}>Close</button></div>
  </${Dialog}>`;
}

function SignIn({ done }) {
  const [error, setError] = useState("");
  const send = async (event) => {
    event.preventDefault();
    const typed = event.target.elements.secret.value.trim();
    const code = typed.match(/^(?:.*#code=)?(\d+\.\d+-[0-9a-f]+-[0-9a-f]+)$/)?.[1];
    try { await api("/session", code ? { code } : { key: typed }); done(); } catch (failure) { setError(failure.message); }
  };
  return html`<main class="sign-in"><h1>edgeinfer</h1>
    <p>Type <code>edgeinfer web</code> in a terminal on the endpoint's machine: it opens this page signed in. Or paste its address, or the endpoint's first API key:</p>
    <form onSubmit=${send}><label for="secret">Address, code or API key</label><input id="secret" name="secret" type="password" autocomplete="off" />
    <button class="primary">Sign in</button></form><p role="alert" class="note">${error}</p></main>`;
}

const NO_CALLS = { card: null, words: {}, said: [] };
const NEW = { conversation: null, path: [], turns: new Map(), earlier: 0, answering: false, notice: "" };
const address = () => { const [, id, turn] = location.hash.match(/^#\/(\d+)(?:\/(\d+))?/) ?? []; return { id: +(id ?? 0), turn: +(turn ?? 0), screen: /^#(playground|evaluations)$/.test(location.hash) ? location.hash : "" }; };

function App({ setup: first }) {
  const [setup, setSetup] = useState(first), [place, setPlace] = useState(address), [list, setList] = useState([]);
  const [query, setQuery] = useState(""), [branch, setBranch] = useState(NEW), [latest, setLatest] = useState(60);
  const [message, setMessage] = useState(null), [editing, setEditing] = useState(0), [dialog, setDialog] = useState(null);
  const [shown, setShown] = useState(false), [online, setOnline] = useState(true);
  const [fresh, setFresh] = useState({ model: first.default_model, system_prompt: "", sampling: {}, tools: false });
  const [calls, setCalls] = useState(NO_CALLS);
  const log = useRef(), live = useRef(), field = useRef(), search = useRef(), sticks = useRef(true), top = useRef(0), words = useRef(""), awaited = useRef(false), now = useRef();
  const { id } = place, stored = branch.conversation?.id === id ? branch.conversation : null;
  now.current = { shown, answering: branch.answering, dialog };
  const settings = id ? stored ?? fresh : fresh;
  const say = (text) => { live.current.textContent = text.replaceAll("`", ""); };
  const reload = () => {
    const query = words.current; // an answer to an earlier query may come later
    return api(`/conversations?q=${encodeURIComponent(query)}`).then((found) => query === words.current && setList(found), () => {});
  };
  const note = (text, more) => setMessage({ text, ...more });
  const attempt = async (work) => { try { setMessage(null); return (await work()) ?? true; } catch (failure) { note(failure.message); return null; } };

  Object.assign(actions, {
    say, note, focus: () => field.current?.focus(),
    open: (to) => { location.hash = to ? `#/${to}` : "#/"; setShown(false); field.current?.focus(); },
    search: (text) => { setQuery(text); words.current = text; clearTimeout(actions.timer); actions.timer = setTimeout(reload, 120); },
    edit: setEditing,
    editLast: () => { const last = [...branch.turns.values()].filter((turn) => turn.role === "user" && branch.path.includes(turn.id)).pop(); if (last) setEditing(last.id); },
    ask: (text, files, replaced) => attempt(async () => {
      const question = { text, files, editing: replaced, ...(id ? {} : fresh) };
      const { id: at } = await api(`/conversations/${id || 0}/questions`, question);
      setEditing(0); sticks.current = awaited.current = true;
      if (at !== id) actions.open(at);
    }),
    change: (body) => attempt(() => { awaited.current = body.action === "regenerate" || body.action === "continue"; return api(`/conversations/${id}`, body); }),
    fork: (turn) => attempt(async () => actions.open((await api(`/conversations/${id}`, { action: "fork", turn })).id)),
    copy: async (button, text) => { try { await copy(text); } catch { return note("The browser did not allow copying: select the text and copy it by Ctrl+C."); } button.classList.add("copied"); setTimeout(() => button.classList.remove("copied"), 2000); say("Copied"); },
    link: (button, turn) => { const url = `${location.origin}/#/${id}/${turn}`; history.replaceState(null, "", url); setPlace({ id, turn }); actions.copy(button, url); },
    copyTurn: (button, turn) => attempt(async () => actions.copy(button, await api(`/conversations/${id}/export?form=text&turn=${turn}`))),
    show: (name, turn) => setDialog({ name, turn }),
    tools: () => setup.has_tools ? actions.set({ tools: !settings.tools }) : note("No tools yet. Add `[tools] builtin = [\"read\"]` to config.toml; `edgeinfer config` shows its path."),
    store: async (fields, title) => {
      if (!id) return setFresh({ ...fresh, ...fields });
      const { note: told } = await api(`/conversations/${id}`, { action: "set", ...fields });
      if (told) note(told);
      if (title != null) await api(`/conversations/${id}`, { action: "rename", title });
    },
    set: (fields) => attempt(() => actions.store(fields)),
    remove: (one) => attempt(async () => {
      await api(`/conversations/${one.id}`, { action: "delete" });
      if (one.id === id) actions.open(0);
      note(`Deleted “${one.title}”.`, { undo: () => attempt(() => api(`/conversations/${one.id}`, { action: "undelete" })) });
    }),
  });

  useEffect(() => {
    const moved = () => { setPlace(address()); setShown(false); };
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  useEffect(() => { setBranch(NEW); setCalls(NO_CALLS); setLatest(60); setEditing(0); sticks.current = true; }, [id]);
  useEffect(() => {
    let spoken = 0;
    return follow(`/web/conversations/${id}/events?latest=${latest}`, setOnline, {
      list: reload, // the stream is opened again, and begins with a list
      gone: () => actions.open(0),
      calls: setCalls,
      branch: (data, begins) => setBranch((before) => {
        const turns = begins ? new Map() : new Map(before.turns);
        for (const turn of data.turns) turns.set(turn.id, turn);
        const end = turns.get(data.path.at(-1));
        if (data.answering && !before.answering) { spoken = 0; say("Answering…"); }
        else if (end?.role === "assistant" && !data.answering && (before.answering || awaited.current)) {
          awaited.current = false;
          say(`${plain(end.blocks.slice(before.answering ? spoken : 0).join(" "))} ${end.note || "Answer complete."}`);
        }
        return { ...data, turns };
      }),
      piece: (data) => setBranch((before) => {
        const turns = new Map(before.turns), turn = turns.get(data.turn);
        if (!turn) return before;
        turns.set(turn.id, { ...turn, blocks: [...turn.blocks.slice(0, data.from), ...data.blocks], reasoning: turn.reasoning + data.reasoning });
        if (data.from > spoken) { say(plain(turn.blocks.slice(spoken, data.from).join(" "))); spoken = data.from; }
        return { ...before, turns };
      }),
    });
  }, [id, latest]);
  useEffect(() => { if (!branch.answering) api("/setup").then(setSetup, () => {}); }, [branch.answering, dialog]);
  useEffect(() => { if (!place.screen) document.title = stored?.title ? `${stored.title} · edgeinfer` : "edgeinfer"; }, [stored?.title, place.screen]);
  const toEnd = () => { log.current.scrollTop = log.current.scrollHeight; top.current = log.current.scrollTop; };
  const scrolled = () => { // a turn may get its height after it was drawn; only a reader scrolls up
    const box = log.current, gap = box.scrollHeight - box.scrollTop - box.clientHeight, isUp = box.scrollTop < top.current;
    sticks.current = isUp ? gap < 2 : sticks.current || gap < 80;
    top.current = box.scrollTop;
    if (sticks.current && gap >= 80) toEnd();
  };
  useLayoutEffect(() => { if (sticks.current && log.current) toEnd(); }, [branch, calls]);
  useEffect(() => { // a turn that has ended is measured anew, without an event of its own
    const sizes = new ResizeObserver(() => { if (sticks.current && log.current) toEnd(); });
    for (const turn of log.current?.children ?? []) sizes.observe(turn);
    return () => sizes.disconnect();
  }, [branch.path, branch.notice, calls]);
  useEffect(() => { // a link to one turn: on this branch, earlier on it, or on another one
    if (!place.turn || !stored) return;
    if (branch.path.includes(place.turn)) { sticks.current = false; document.getElementById(`turn-${place.turn}`)?.scrollIntoView({ block: "center" }); }
    else if (branch.earlier) setLatest(1000000);
    else actions.change({ action: "show", turn: place.turn });
  }, [place, stored?.id, branch.path.length]);
  useEffect(() => {
    const key = (event) => {
      if (event.isComposing) return;
      const { shown, answering, dialog } = now.current;
      if (event.key === "Escape" && shown) setShown(false);
      else if (event.key === "Escape" && answering && !dialog) actions.change({ action: "stop" });
      else if ((event.ctrlKey || event.metaKey) && event.key === "k") { event.preventDefault(); setShown(true); search.current.focus(); }
      else if (event.altKey && event.key === "n") { event.preventDefault(); actions.open(0); }
    };
    const click = (event) => { if (event.target.matches?.(".copy")) actions.copy(event.target, event.target.closest(".code").querySelector("code").textContent); };
    addEventListener("keydown", key); addEventListener("click", click);
    return () => { removeEventListener("keydown", key); removeEventListener("click", click); };
  }, []);

  const failed = !branch.answering && branch.turns.get(branch.path.at(-1))?.status === "failed"; // and says why
  const models = setup.models.some((model) => model.name === settings.model) || !settings.model ? setup.models : [{ name: settings.model, state: "missing" }, ...setup.models];
  const menu = html`<button class="menu" aria-label="Conversations" aria-expanded=${shown} aria-controls="side" onClick=${(event) => { event.stopPropagation(); setShown(!shown); }}>☰</button>`;
  return html`<a class="hidden skip" href="#message" onClick=${(event) => { event.preventDefault(); document.querySelector("#message").focus(); }}>To the message field</a>
    <${Sidebar} list=${list} id=${id} query=${query} shown=${shown} search=${search} />
    <main class="main" onClick=${() => shown && setShown(false)}>
      ${place.screen ? (place.screen === "#playground" ? html`<${Playground} setup=${setup} model=${settings.model} menu=${menu} />` : html`<${Evaluations} menu=${menu} />`) : html`<header class="bar">
        ${menu}
        <h1 dir="auto">${stored?.title || "New conversation"}</h1>
        <select aria-label="Model" value=${settings.model} onChange=${(event) => { if (event.target.value) actions.set({ model: event.target.value }); else { event.target.value = settings.model; actions.show("models"); } }}>
          ${models.map((model) => html`<option value=${model.name}>${model.name}${model.state === "cold" ? "" : ` · ${model.state}`}</option>`)}<option value="">More models…</option></select>
        <button aria-pressed=${!!settings.tools} onClick=${actions.tools}>Tools</button>
        <button onClick=${() => actions.show("settings")}>Settings</button>
        ${id > 0 && html`<button onClick=${() => actions.show("export")}>Export</button>`}
      </header>
      <div class="log" ref=${log} role="log" aria-live="off" aria-label="Conversation" tabindex="0" onScroll=${scrolled}>
        ${branch.earlier > 0 && html`<p class="turn"><button onClick=${() => { sticks.current = false; setLatest(1000000); }}>Show ${tokens(branch.earlier)} earlier turns</button></p>`}
        ${!id && html`<div class="empty"><h2>What can I help with?</h2><p>${settings.model} runs on this machine. The terminal has the same conversations.</p></div>`}
        ${branch.path.map((turn, n) => html`<${Turn} key=${turn} id=${id} turn=${branch.turns.get(turn)} editing=${editing === turn} last=${n === branch.path.length - 1} words=${n === branch.path.length - 1 && branch.answering ? calls.words : null} target=${place.turn === turn} />`)}
        ${calls.said.map((words) => html`<p class="turn note">${words}</p>`)}
        ${calls.card && html`<${Card} key=${calls.card.number} card=${calls.card} />`}
        ${branch.notice && !failed && html`<p class="turn note notice" role="status">${marked(branch.notice)}
          ${!branch.answering && !branch.notice.startsWith("Loading") && html`<button onClick=${() => actions.change({ action: "regenerate" })}>Try again</button>`}</p>`}
      </div>
      <div class="composer-place">
        ${((message && (branch.answering || !message.waits)) || !online) && html`<p class="error" role="alert"><span>${online ? marked(message.text) : "The endpoint does not answer. Trying again…"}</span>
          ${online && html`<span>${message.undo && html`<button onClick=${message.undo}>Undo</button>`}<button aria-label="Dismiss" onClick=${() => setMessage(null)}>×</button></span>`}</p>`}
        <${Composer} id=${id} answering=${branch.answering} field=${field} />
      </div>`}
      <div class="hidden" role="status" aria-live="polite" ref=${live} id="live" />
    </main>
    ${dialog?.name === "settings" && html`<${Settings} setup=${setup} settings=${settings} title=${stored?.title} stored=${!!stored} close=${() => setDialog(null)} />`}
    ${dialog?.name === "models" && html`<${Dialog} title="Models" close=${() => setDialog(null)}><${Models} use=${(model) => actions.set({ model })} close=${() => setDialog(null)} /></${Dialog}>`}
    ${dialog?.name === "export" && html`<${Export} id=${id} turn=${dialog.turn} close=${() => setDialog(null)} />`}`;
}

async function start() {
  const root = document.getElementById("app"), code = location.hash.match(/^#code=([\w.-]+)$/)?.[1];
  if (code) {
    history.replaceState(null, "", "/");
    await api("/session", { code }).catch(() => {});
  }
  const begin = async () => {
    try {
      const setup = await api("/setup").catch(async (failure) => {
        if (failure.status !== 401) throw failure;
        await api("/session", {}); // this machine's user needs no code
        return api("/setup");
      });
      root.replaceChildren();
      render(html`<${App} setup=${setup} />`, root);
    } catch (failure) {
      root.replaceChildren();
      if (failure.status === 401) render(html`<${SignIn} done=${() => location.reload()} />`, root);
      else { root.textContent = failure.message; setTimeout(() => location.reload(), 2000); }
    }
  };
  await begin();
}
start();
