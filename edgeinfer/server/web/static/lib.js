// Requests, the stream of events, and the browser's own services.

const policy = window.trustedTypes?.createPolicy("edgeinfer", { createHTML: (markup) => markup });
/** HTML that the server rendered; nothing else is shown as HTML. */
export const trusted = (markup) => (policy ? policy.createHTML(markup) : markup);

/** GET, or POST with a body. Returns JSON or text; throws an Error with `status`. */
export async function api(path, body) {
  const post = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  const answer = await fetch(`/web${path}`, body === undefined ? {} : post);
  const is_json = answer.headers.get("content-type")?.startsWith("application/json");
  const value = is_json ? await answer.json() : await answer.text();
  if (!answer.ok) throw Object.assign(new Error(value?.error?.message ?? `The endpoint answered ${answer.status}.`), { status: answer.status });
  return value;
}

/** Stream a chat completion: `each` gets its chunks. Throws an Error. */
export async function completions(body, signal, each) {
  const post = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal };
  const answer = await fetch("/web/chat/completions", post);
  if (!answer.ok) throw new Error((await answer.json().catch(() => null))?.error?.message ?? `The endpoint answered ${answer.status}.`);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((one) => one.startsWith("data: {"))) {
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      each(chunk);
    }
  }
}

/** Follow events until the returned function is called. A handler's second argument: a stream's first event of its kind.
 *  The stream is closed while the page is hidden, because a browser opens six connections to an endpoint at most. */
export function follow(url, online, handlers) {
  let source = null, timer = 0, pause = 250;
  const close = () => { clearTimeout(timer); source?.close(); source = null; };
  const open = () => {
    close();
    if (document.hidden) return;
    const begun = new Set();
    source = new EventSource(url);
    source.onopen = () => { online(true); pause = 250; };
    source.onerror = () => { close(); online(false); timer = setTimeout(open, pause); pause = Math.min(2 * pause, 4000); };
    for (const [name, handler] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => { const first = !begun.has(name); begun.add(name); handler(JSON.parse(event.data), first); });
    }
  };
  document.addEventListener("visibilitychange", open);
  open();
  return () => { document.removeEventListener("visibilitychange", open); close(); };
}

/** Copy text; a page on plain HTTP beyond loopback has no clipboard. Throws an Error if the browser refuses. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = Object.assign(document.createElement("textarea"), { value: text });
  (document.querySelector("dialog[open]") ?? document.body).append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  if (!copied) throw new Error("refused");
}

/** A file's bytes, base64. */
export const base64 = (file) => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result.slice(reader.result.indexOf(",") + 1));
  reader.onerror = () => failed(reader.error);
  reader.readAsDataURL(file);
});

/** The words of rendered Markdown, for a screen reader. */
export const plain = (markup) => new DOMParser().parseFromString(trusted(markup), "text/html").body.textContent.trim();
