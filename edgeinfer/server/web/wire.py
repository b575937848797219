"""JSON types of the chat page's requests. They are not a public API: only the page uses them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from edgeinfer.server.wire_types import Reply, Wire
from edgeinfer.tools.approval import Choice

Action = Literal[
    "regenerate", "continue", "stop", "decide", "set", "show", "fork", "delete", "undelete", "rename"
]


class SignIn(Wire, frozen=True, kw_only=True):
    """Body of a sign-in by a one-time `code` or by the first API key (`key`).

    Without both, the user who runs the endpoint signs in (`Access.may_sign_in`). If `announce` is true,
    the request sets no cookie; instead, the user who runs the endpoint may sign in once without code
    and key, within two minutes (`Access.announce`).
    """

    code: Annotated[str, Meta(max_length=512)] = ""
    announce: bool = False
    key: Annotated[str, Meta(max_length=4096)] = ""


class SentFile(Wire, frozen=True, kw_only=True):
    """A file to attach, in base64."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    data: bytes


class Settings(Wire, frozen=True, kw_only=True):
    """Settings of a conversation. None leaves a setting unchanged."""

    model: Annotated[str, Meta(max_length=256)] | None = None
    system_prompt: str | None = None
    sampling: dict[str, float | int] | None = None
    tools: bool | None = None


class Question(Settings, frozen=True, kw_only=True):
    """A question. `editing` is the id of the question to replace, 0 for none."""

    text: str = ""
    files: tuple[SentFile, ...] = ()
    editing: int = 0


class Change(Settings, frozen=True, kw_only=True):
    """A change of a conversation. `turn` is the id of the turn that `action` concerns.

    For "regenerate", "continue" and "fork", the `turn` 0 means the last one. "show" replaces `turn` by
    its previous (`step` -1) or next (1) alternative. "decide" allows or refuses (`choice`) the tool
    call with the number `card`; the model is told the `reason`. "rename" sets the `title`.
    """

    action: Action
    title: Annotated[str, Meta(max_length=400)] = ""
    turn: int = 0
    step: Literal[-1, 0, 1] = 0
    card: int = 0
    choice: Choice = "no"
    reason: Annotated[str, Meta(max_length=4000)] = ""


class PullModel(Wire, frozen=True, kw_only=True):
    """Pull a model of the catalogue or of Hugging Face, or `stop` pulling it."""

    name: Annotated[str, Meta(min_length=1, max_length=400)]
    stop: bool = False


class ListQuery(Wire, frozen=True, kw_only=True):
    """Query of the list of conversations. `q` has words to search for; "" lists all."""

    q: Annotated[str, Meta(max_length=1000)] = ""


class EventsQuery(Wire, frozen=True, kw_only=True):
    """Query of the event stream. `latest` is the number of turns to send, counted from the end."""

    latest: Annotated[int, Meta(ge=1, le=1_000_000)] = 60


ExportForm = Literal["markdown", "json", "curl", "python", "javascript", "text", "file"]


class ExportQuery(Wire, frozen=True, kw_only=True):
    """What to export. The forms "markdown" and "json" export the whole conversation.

    For other forms, `turn` is the id of the turn whose text, picture or request is exported. `file` is
    the index of the picture among the turn's attached files.
    """

    form: Annotated[ExportForm, Meta(description="Form of the export.")] = "markdown"
    turn: int = 0
    file: Annotated[int, Meta(ge=0)] = 0


class Opened(Reply, frozen=True, kw_only=True):
    """The id of the changed or created conversation. `note` is a text to show, "" for none."""

    id: int
    note: str = ""


class Report(Reply, frozen=True, kw_only=True):
    """A report of `edgeinfer eval`.

    In a list of reports, `written_at` (Unix time) is set; in the answer about one report, `blocks`.
    """

    name: str
    written_at: int = 0
    blocks: tuple[str, ...] = ()


class Pull(Reply, frozen=True, kw_only=True):
    """A running or failed pull. `text` is its stage or error.

    `done` is the number of downloaded bytes, `total` that of all bytes, 0 if unknown.
    """

    name: str
    text: str = "looking up"
    done: int = 0
    total: int = 0
    failed: bool = False


class Offer(Reply, frozen=True, kw_only=True):
    """A model to pull. `about` tells its size, licence and estimated speed on this machine."""

    name: str
    title: str
    about: str
