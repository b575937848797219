"""Bodies and replies of the page's requests. No other client is promised them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from edgeinfer.server.wire_types import Reply, Wire
from edgeinfer.tools.approval import Choice

Action = Literal[
    "regenerate", "continue", "stop", "decide", "set", "show", "fork", "delete", "undelete", "rename"
]


class SignIn(Wire, frozen=True, kw_only=True):
    """A one-time code, or the endpoint's first API key; nothing asks as this machine's user.

    `announce`: the code is `edgeinfer web`'s own, which opens a browser next.
    """

    code: Annotated[str, Meta(max_length=512)] = ""
    announce: bool = False
    key: Annotated[str, Meta(max_length=4096)] = ""


class SentFile(Wire, frozen=True, kw_only=True):
    """A file to attach, base64."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    data: bytes


class Settings(Wire, frozen=True, kw_only=True):
    """Settings with which a conversation is answered; None leaves one unchanged."""

    model: Annotated[str, Meta(max_length=256)] | None = None
    system_prompt: str | None = None
    sampling: dict[str, float | int] | None = None
    tools: bool | None = None


class Question(Settings, frozen=True, kw_only=True):
    """A question to a new or a stored conversation; `editing` is the question that it replaces."""

    text: str = ""
    files: tuple[SentFile, ...] = ()
    editing: int = 0


class Change(Settings, frozen=True, kw_only=True):
    """One change of a conversation. `show`: the branch through `turn`, or its alternative `step` on.

    `decide`: what the user says to the call of `card`; `reason` is told to the model.
    """

    action: Action
    title: Annotated[str, Meta(max_length=400)] = ""
    turn: int = 0
    step: Literal[-1, 0, 1] = 0
    card: int = 0
    choice: Choice = "no"
    reason: Annotated[str, Meta(max_length=4000)] = ""


class PullModel(Wire, frozen=True, kw_only=True):
    """Pull a model of the catalogue or of Hugging Face, or stop pulling it."""

    name: Annotated[str, Meta(min_length=1, max_length=400)]
    stop: bool = False


class ListQuery(Wire, frozen=True, kw_only=True):
    """Words to search for; none lists all."""

    q: Annotated[str, Meta(max_length=1000)] = ""


class EventsQuery(Wire, frozen=True, kw_only=True):
    """The turns from the end that are wanted."""

    latest: Annotated[int, Meta(ge=1, le=1_000_000)] = 60


ExportForm = Literal["markdown", "json", "curl", "python", "javascript", "text", "file"]


class ExportQuery(Wire, frozen=True, kw_only=True):
    """The form; `turn` is the answer whose request, text or file is wanted, `file` the file's index."""

    form: Annotated[ExportForm, Meta(description="What to export.")] = "markdown"
    turn: int = 0
    file: Annotated[int, Meta(ge=0)] = 0


class Opened(Reply, frozen=True, kw_only=True):
    """The conversation that a request was about, or made; `note` is to be shown."""

    id: int
    note: str = ""


class ListedModel(Reply, frozen=True, kw_only=True):
    """A model to choose. `state` is "loaded", "loading", "warm" or "cold"."""

    name: str
    state: str
    size_bytes: int
    can_see: bool


class Report(Reply, frozen=True, kw_only=True):
    """A report of `edgeinfer eval`: in a list with `written_at` (Unix time), opened with `blocks`."""

    name: str
    written_at: int = 0
    blocks: tuple[str, ...] = ()


class Pull(Reply, frozen=True, kw_only=True):
    """A running or failed pull; `total` (bytes) is 0 if unknown."""

    name: str
    text: str = "looking up"
    done: int = 0
    total: int = 0
    failed: bool = False


class Offer(Reply, frozen=True, kw_only=True):
    """A model to pull. `about`: size, licence and estimated speed on this machine."""

    name: str
    title: str
    about: str


class Setup(Reply, frozen=True, kw_only=True):
    """Initial data of the page. `options`: least and greatest value of each option."""

    version: str
    default_model: str
    models: list[ListedModel]
    presets: dict[str, dict[str, float | int | None]]
    options: dict[str, tuple[float, float]] = msgspec.field(default_factory=dict)
    has_tools: bool = False
