"""Routes of the chat page. Only its files are served without the cookie of a sign-in (`access.py`)."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
import shlex
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response, StreamingResponse

from edgeinfer import __version__
from edgeinfer.chat import formats, presets
from edgeinfer.chat.answer import AnswerWriter
from edgeinfer.chat.attachments import from_bytes
from edgeinfer.chat.history.store import ConversationStore
from edgeinfer.chat.history.values import Conversation, Summary, branch_to
from edgeinfer.chat.session import ChatSession
from edgeinfer.errors import UsageError
from edgeinfer.media import pictures
from edgeinfer.media.pictures import split_at_pictures
from edgeinfer.platform import paths
from edgeinfer.server.context import RequestContext, json_reply
from edgeinfer.server.dialect import Dialect, RouteTable
from edgeinfer.server.model_pool import AvailableModel
from edgeinfer.server.openai.chat import ERRORS, chat_completions
from edgeinfer.server.problems import Problem
from edgeinfer.server.web import wire
from edgeinfer.server.web.access import PATH, Access, Web, user_of
from edgeinfer.server.web.conversations import Conversations, no_conversation
from edgeinfer.server.web.models import Pulls, list_offers
from edgeinfer.server.web.render import blocks
from edgeinfer.tools.approval import Decision

_PYTHON = """from openai import OpenAI

client = OpenAI(base_url="{base}/v1", api_key="none")
answer = client.chat.completions.create(
    model={model},
    messages={messages},{options}
)
print(answer.choices[0].message.content)
"""
_JAVASCRIPT = """const answer = await fetch("{base}/v1/chat/completions", {{
  method: "POST",
  headers: {{"content-type": "application/json"}},
  body: JSON.stringify({body}),
}});
console.log((await answer.json()).choices[0].message.content);
"""


def as_code(session: ChatSession, turn_id: int, form: str, base: str, system: str) -> str:
    """Return the request behind an answer as a curl command, or as Python or JavaScript code.

    `turn_id` is the answer or its question (0: the latest question), `form` is "curl", "python" or
    "javascript", `base` is the endpoint's URL, and `system` the model's own system prompt. Pictures are
    left out. Raises UsageError if the conversation has no such turn, or no question.
    """
    question = session.question
    if turn_id:
        turn = session.turn(turn_id)
        question = turn if turn.role == "user" else session.turn(turn.parent_id or 0)
    if question is None:
        raise UsageError(
            "the conversation has no question yet, so there is no request to show as code",
            hint="ask something first",
        )
    messages = session.prompt.messages(branch_to({t.id: t for t in session.all_turns()}, question.id))
    sampling = session.conversation.sampling.items()
    options: dict[str, Any] = {name: value for name, value in sampling if value is not None}
    texts = ("".join(split_at_pictures(m.content, m.pictures)) for m in messages)
    turns = [{"role": m.role, "content": text} for m, text in zip(messages, texts, strict=True)]
    if system and messages[0].role != "system":
        turns.insert(0, {"role": "system", "content": system})
    body = {"model": session.conversation.model, "messages": turns, **options}
    pretty = msgspec.json.format(msgspec.json.encode(body), indent=2).decode()
    if form == "curl":
        address = f"{base}/v1/chat/completions"
        return f"curl {address} -H 'content-type: application/json' -d {shlex.quote(pretty)}\n"
    if form == "javascript":
        return _JAVASCRIPT.format(base=base, body=pretty.replace("\n", "\n  "))
    return _PYTHON.format(
        base=base,
        model=repr(body["model"]),
        messages=repr(body["messages"]),
        options="".join(f"\n    {name}={value!r}," for name, value in options.items()),
    )


ROUTES = RouteTable()
_STATIC = Path(__file__).with_name("static")
_FORWARDED = {"forwarded", "via", "x-forwarded-for", "x-real-ip"}
#: With these headers, browsers run no script from model output and load nothing from other hosts.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; connect-src 'self'; manifest-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types edgeinfer",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def _conversations(context: RequestContext) -> Conversations:
    web: Web = context.endpoint.web
    return web.conversations


def _id(context: RequestContext) -> int:
    if not context.path_id.isdecimal() or len(context.path_id) > 18:
        raise no_conversation()
    return int(context.path_id)


class _File(NamedTuple):
    raw: bytes
    packed: bytes
    tag: str
    kind: str


@cache
def _files() -> dict[str, _File]:
    return {path.name: _read(path) for path in _STATIC.iterdir() if path.is_file()}


def _read(path: Path) -> _File:
    raw = path.read_bytes()
    kind = mimetypes.guess_type(path.name)[0] or "text/plain"
    kind = "text/javascript" if path.suffix == ".js" else kind
    return _File(raw, gzip.compress(raw, 9, mtime=0), hashlib.sha256(raw).hexdigest()[:16], kind)


def _page_file(context: RequestContext, name: str) -> Response:
    file = _files().get(name)
    if file is None:
        raise Problem(404, "The page has no such file.", code="not_found")
    caching = {"etag": f'"{file.tag}"', "cache-control": "no-cache", "vary": "Accept-Encoding"}
    headers = _HEADERS | caching
    if context.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    body = file.raw
    if "gzip" in context.headers.get("accept-encoding", ""):
        body, headers["content-encoding"] = file.packed, "gzip"
    return Response(body, headers=headers, media_type=file.kind)


@ROUTES.get(PATH, reply_type="text/html", web="open")
async def page(context: RequestContext) -> Response:
    """Return the HTML of the chat page."""
    return _page_file(context, "index.html")


@ROUTES.get(f"{PATH}/static/{{id}}", reply_type="text/plain", web="open")
async def static(context: RequestContext) -> Response:
    """Return a script, style or picture of the page."""
    return _page_file(context, context.path_id)


@ROUTES.post(f"{PATH}/session", uses_model=False, web="open")
async def sign_in(context: RequestContext, body: wire.SignIn) -> Response:
    """Exchange a one-time code or the first API key for a cookie.

    The user who runs the endpoint needs neither if `Access.may_sign_in` says so.
    """
    access: Access = context.endpoint.web.access
    user = user_of(context.request.scope.get("connection"))
    if body.key:
        is_valid = access.accepts_key(body.key)
        message = "This is not the endpoint's first API key."
    elif body.code:
        is_valid = access.redeem(body.code, user)
        message = "This code was used already or has expired: `edgeinfer web` makes a new one."
    else:  # behind a reverse proxy, every client would seem to be the user who runs the proxy
        is_valid = not _FORWARDED.intersection(context.headers) and access.may_sign_in(user)
        message = "Sign in first: `edgeinfer web` opens the page."
    if not is_valid:
        raise Problem(401, message, code="not_signed_in")
    if body.announce:
        access.announce()
        return json_reply({})
    cookie = access.cookie(user, secure=context.request.url.scheme == "https")
    return Response(status_code=204, headers={"set-cookie": cookie})


@ROUTES.get(f"{PATH}/setup", web="cookie")
async def setup(context: RequestContext) -> dict[str, object]:
    """Return what the page loads first: models, presets, and ranges of the sampling options.

    A model's `state` is "loaded", "loading", "warm" (it has a snapshot) or "cold".
    """
    endpoint, models = context.endpoint, context.endpoint.models
    pulled = await endpoint.in_thread(models.list_available)
    warm = await endpoint.in_thread(endpoint.host.warm_models)
    all_presets: dict[str, object] = {**presets.PRESETS, **endpoint.host.config.chat.presets}

    def describe(model: AvailableModel) -> dict[str, object]:
        state = models.state(model.name)
        return {
            "name": model.name,
            "state": "warm" if state == "cold" and model.name in warm else state,
            "size_bytes": model.size_bytes,
            "can_see": model.can_see,
        }

    return {
        "version": __version__,
        "default_model": models.default,
        "models": [describe(model) for model in pulled if not model.alias_of],
        "presets": all_presets,
        "options": {name: (option.low, option.high) for name, option in presets.OPTIONS.items()},
        "has_tools": endpoint.host.config.tools.has_tools,
    }


@ROUTES.get(f"{PATH}/models", web="cookie")
async def pullable_models(context: RequestContext) -> list[wire.Offer]:
    """List the catalogue's models that are not pulled."""
    return await context.endpoint.in_thread(list_offers)


@ROUTES.get(f"{PATH}/pulls", web="cookie")
async def pulls(context: RequestContext) -> list[wire.Pull]:
    """List the running and failed pulls."""
    return list(context.endpoint.web.pulls.now.values())


@ROUTES.post(f"{PATH}/pulls", uses_model=False, web="cookie")
async def pull(context: RequestContext, body: wire.PullModel) -> list[wire.Pull]:
    """Begin or stop a pull; list the running and failed pulls."""
    pulls: Pulls = context.endpoint.web.pulls
    if body.stop:
        pulls.stop(body.name)
    else:
        pulls.start(body.name, context.key)
    return list(pulls.now.values())


@ROUTES.get(f"{PATH}/evaluations", web="cookie")
async def evaluations(context: RequestContext) -> list[wire.Report]:
    """List the reports of `edgeinfer eval`, the newest first."""
    reports = await context.endpoint.in_thread(_reports)
    return [wire.Report(name=path.stem, written_at=int(time_s)) for time_s, path in reports]


@ROUTES.get(f"{PATH}/evaluations/{{id}}", web="cookie")
async def evaluation(context: RequestContext) -> wire.Report:
    """Return the report `{id}` as HTML. Raises Problem 404 if there is no such report."""
    reports = await context.endpoint.in_thread(_reports)
    path = next((path for _, path in reports if path.stem == context.path_id), None)
    if path is None:
        raise Problem(404, "There is no such report.", code="not_found")
    text = await context.endpoint.in_thread(lambda: path.read_text("utf-8"))
    return wire.Report(name=path.stem, blocks=blocks(text, _conversations(context).report))


def _reports() -> list[tuple[float, Path]]:
    reports = (paths.data_dir() / "evaluations").glob("*.md")
    return sorted(((path.stat().st_mtime, path) for path in reports), reverse=True)


# for the playground of the page: OpenAI's route with the cookie in place of an API key
ROUTES.post(f"{PATH}/chat/completions", web="cookie")(chat_completions)


@ROUTES.get(f"{PATH}/conversations", web="cookie")
async def conversations(context: RequestContext, query: wire.ListQuery) -> list[Summary]:
    """List the conversations, or search them."""
    return await _conversations(context).use(
        lambda store: store.search(query.q) if query.q else store.listing()
    )


@ROUTES.get(f"{PATH}/conversations/{{id}}/events", reply_type="text/event-stream", web="cookie")
async def events(context: RequestContext, query: wire.EventsQuery) -> Response:
    """Stream changes of the list of conversations and of one conversation (id 0: only the list)."""
    stream: AsyncIterator[bytes] = _conversations(context).follow(_id(context), query.latest)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(stream, headers=headers, media_type="text/event-stream")


@ROUTES.get(f"{PATH}/conversations/{{id}}/export", reply_type="text/plain", web="cookie")
async def export(context: RequestContext, query: wire.ExportQuery) -> Response:
    """Return a conversation, a request as code, a turn's text, or an attached picture."""
    base = str(context.request.base_url).rstrip("/")

    def work(session: ChatSession) -> Response:
        if query.form == "file":
            return _attachment(session, query)
        if query.form == "text":
            return Response(session.turn(query.turn).content, media_type="text/plain")
        conversation = session.conversation
        if query.form == "markdown":
            return _download(conversation, formats.to_markdown(conversation, session.path), ".md")
        if query.form == "json":
            return _download(conversation, formats.to_json(conversation, session.all_turns()), ".json")
        info = context.endpoint.models.info(conversation.model)
        system = info.system_prompt if info else ""
        code = as_code(session, query.turn, query.form, base, system)
        return Response(code, media_type="text/plain")

    return await _conversations(context).change(_id(context), work)


def _attachment(session: ChatSession, query: wire.ExportQuery) -> Response:
    files = session.turn(query.turn).attachments
    if query.file >= len(files) or not files[query.file].is_picture:
        raise Problem(404, "There is no such picture.", code="not_found")
    data = files[query.file].data
    kind = pictures.format_of(data).lower()
    return Response(data, media_type=f"image/{kind}", headers=_HEADERS)


def _download(conversation: Conversation, text: str, suffix: str) -> Response:
    name = formats.file_name(conversation, suffix).encode("ascii", "ignore").decode() or "conversation"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(text, media_type="text/plain", headers=headers)


@ROUTES.post(f"{PATH}/conversations/{{id}}/questions", uses_model=False, web="cookie")
async def ask(context: RequestContext, body: wire.Question) -> wire.Opened:
    """Ask or edit a question in a conversation (id 0: ask in a new conversation)."""
    conversation_id = _id(context)
    if body.tools:
        await context.endpoint.use_tools()
    files = await context.endpoint.in_thread(
        lambda: [from_bytes(file.name, file.data) for file in body.files]
    )

    def update_session(session: ChatSession) -> None:
        _apply_settings(context, session, body)
        if body.editing:
            session.edit(body.editing, body.text)
        else:
            session.ask(body.text, files)

    answering = _conversations(context).answer(context, conversation_id, update_session, _answer)
    return wire.Opened(id=await answering)


def _answer(session: ChatSession) -> AnswerWriter:
    """Begin an answer to the last question, or an alternative if the question has an answer."""
    head = session.head
    return session.begin_answer() if head is None or head.role == "user" else session.regenerate()


def _apply_settings(context: RequestContext, session: ChatSession, body: wire.Settings) -> None:
    """Apply settings to a conversation. Raises UsageError and UnknownModelError."""
    fields: dict[str, object] = {}
    if body.model is not None:
        fields["model"] = context.endpoint.models.resolve(body.model)
    elif not session.conversation.model:
        fields["model"] = context.endpoint.models.default
    if body.system_prompt is not None:
        fields["system_prompt"] = body.system_prompt
    if body.sampling is not None:
        fields["sampling"] = {
            presets.option(name): presets.value(presets.option(name), repr(value))
            for name, value in body.sampling.items()
        }
    if body.tools is not None:
        fields["tools"] = body.tools
    if fields:
        session.set(**fields)


@ROUTES.post(f"{PATH}/conversations/{{id}}", uses_model=False, web="cookie")
async def change(context: RequestContext, body: wire.Change) -> wire.Opened:
    """Regenerate, continue or stop an answer, decide about a tool call, or change the conversation."""
    conversation_id, all_conversations = _id(context), _conversations(context)
    if body.action == "stop":
        all_conversations.stop(conversation_id)
        return wire.Opened(id=conversation_id)
    if body.action == "decide":
        decision = Decision(body.choice, body.reason)
        all_conversations.latest_answer(conversation_id).take(body.card, decision)
        return wire.Opened(id=conversation_id)
    if body.action in ("regenerate", "continue"):
        begin: Callable[[ChatSession], AnswerWriter]
        begin = ChatSession.regenerate if body.action == "regenerate" else ChatSession.continue_answer

        def update_session(session: ChatSession) -> None:
            _apply_settings(context, session, body)
            if body.turn:
                session.back_to(body.turn)

        return wire.Opened(
            id=await all_conversations.answer(context, conversation_id, update_session, begin)
        )
    if body.action in ("delete", "undelete"):
        method = ConversationStore.delete if body.action == "delete" else ConversationStore.undelete
        await all_conversations.use(lambda store: method(store, conversation_id))
        return wire.Opened(id=conversation_id)

    note = await _tools_text(context) if body.tools else ""

    def work(session: ChatSession) -> wire.Opened:
        if body.action == "rename":
            session.set(title=body.title)
        elif body.action == "set":
            _apply_settings(context, session, body)
        elif body.action == "fork":
            session.back_to(session.turn(body.turn).id if body.turn else session.conversation.head_id)
            session.fork()
        else:
            session.show_alternative(session.turn(body.turn).id, body.step)
        return wire.Opened(id=session.conversation.id, note=note)

    return await all_conversations.change(conversation_id, work)


async def _tools_text(context: RequestContext) -> str:
    """List the tools as text, after another attempt to start failed servers. Raises UsageError."""
    tools = await context.endpoint.use_tools()
    notices = await context.endpoint.in_thread(tools.prepare)
    return "\n".join([tools.describe(), f"Tools work in the folder {tools.toolbox.folder}.", *notices])


WEB = Dialect(name="web", operations=ROUTES, prefix=PATH, **ERRORS)
