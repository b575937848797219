"""Bodies and replies of the page's requests. They may change: only the page uses them."""

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
    """Sign in with a one-time code or the endpoint's first API key, or with neither as the local user.

    `announce`: `edgeinfer web` sends it, and opens a browser next.
    """

    code: Annotated[str, Meta(max_length=512)] = ""
    announce: bool = False
    key: Annotated[str, Meta(max_length=4096)] = ""


class SentFile(Wire, frozen=True, kw_only=True):
    """A file to attach, in base64."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    data: bytes


class Settings(Wire, frozen=True, kw_only=True):
    """Settings for answers in a conversation; None leaves one unchanged."""

    model: Annotated[str, Meta(max_length=256)] | None = None
    system_prompt: str | None = None
    sampling: dict[str, float | int] | None = None
    tools: bool | None = None


class Question(Settings, frozen=True, kw_only=True):
    """A question in a new or stored conversation; `editing` is the question that it replaces."""

    text: str = ""
    files: tuple[SentFile, ...] = ()
    editing: int = 0


class Change(Settings, frozen=True, kw_only=True):
    """One change of a conversation. `show` selects the branch of `turn`, or the `step`th after it.

    `decide` is the user's decision about the call of `card`; the model is told `reason`.
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
    """Words to search for; "" lists all conversations."""

    q: Annotated[str, Meta(max_length=1000)] = ""


class EventsQuery(Wire, frozen=True, kw_only=True):
    """`latest` is the number of turns to send, counted from the end."""

    latest: Annotated[int, Meta(ge=1, le=1_000_000)] = 60


ExportForm = Literal["markdown", "json", "curl", "python", "javascript", "text", "file"]


class ExportQuery(Wire, frozen=True, kw_only=True):
    """The export's form. `turn` is the answer to export; `file` is the index of an attached file."""

    form: Annotated[ExportForm, Meta(description="Form of the export.")] = "markdown"
    turn: int = 0
    file: Annotated[int, Meta(ge=0)] = 0


class Opened(Reply, frozen=True, kw_only=True):
    """The changed or created conversation; the page shows `note`."""

    id: int
    note: str = ""


class ListedModel(Reply, frozen=True, kw_only=True):
    """A model to choose. `state` is "loaded", "loading", "warm" or "cold"."""

    name: str
    state: str
    size_bytes: int
    can_see: bool


class Report(Reply, frozen=True, kw_only=True):
    """A report of `edgeinfer eval`. A list gives `written_at` (Unix time), a single report `blocks`."""

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
    """Initial data of the page. `options`: minimum and maximum of each option."""

    version: str
    default_model: str
    models: list[ListedModel]
    presets: dict[str, dict[str, float | int | None]]
    options: dict[str, tuple[float, float]] = msgspec.field(default_factory=dict)
    has_tools: bool = False
