"""Aliases of models in every API; names of models with slashes in paths."""

from urllib.parse import quote

import pytest
from fake_engine import FakeEngine
from least_requests import GENERATING, OLLAMA

from edgeinfer.cli.endpoint_setup import ModelAdmin
from edgeinfer.models.catalog import user_path
from edgeinfer.server.model_entry import LoadedEngine
from edgeinfer.server.model_pool import AvailableModel, ModelPool

SLASHED = "ollama/someone/tiny:1b"
ALIASES = {"gpt-4o": SLASHED, "claude-opus-*": SLASHED, "small": "default", "claude-*": "default"}
ALIASES |= {"gone": "not-here", "gpt-*": "not-here"}


@pytest.fixture(scope="module")
def live_server(serve_module):
    names = ("main", SLASHED)
    return serve_module(load=lambda *_: LoadedEngine(engine=FakeEngine()), names=names, aliases=ALIASES)


ROUTES = GENERATING | OLLAMA | {"/tokenize": {"content": "hi"}, "/api/embed": {"input": "hi"}}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("gpt-4o", SLASHED),
        ("GPT-4o:latest", SLASHED),
        ("small", "main"),
        ("Main", "main"),
        ("Someone/tiny:1B", SLASHED),
        ("claude-haiku-9", "main"),
        ("Claude-Opus-5", SLASHED),
    ],
)
def test_an_alias_is_honoured_on_every_dialect(live_server, route: str, name: str, target: str) -> None:
    reply = live_server.post(route, ROUTES[route] | {"model": name}, status=200)
    assert reply.headers["x-edgeinfer-model"] == target
    if route not in OLLAMA and not route.startswith("/api/"):  # Ollama repeats the name that was sent
        assert reply.json().get("model", target) == target


def test_aliases_of_missing_models_are_listed() -> None:
    models = [AvailableModel(name=SLASHED)]
    pool = ModelPool(
        load=lambda *_: LoadedEngine(engine=FakeEngine()),
        list_pulled=lambda: models,
        default="main",
        keep_alive_s=1,
        aliases=ALIASES,
    )
    assert pool.aliases_without_model() == {"gone": "not-here", "gpt-*": "not-here"}


def test_a_models_own_name_needs_no_header(live_server) -> None:
    assert "x-edgeinfer-model" not in live_server.chat(model="main").headers
    assert "x-edgeinfer-model" not in live_server.chat().headers


def test_only_model_answers_to_any_name(serve) -> None:
    live_server = serve(FakeEngine())
    for route, body in ROUTES.items():
        reply = live_server.post(route, body | {"model": "gpt-9"}, status=200)
        assert reply.headers["x-edgeinfer-model"] == "fake"
    assert live_server.get("/v1/models/gpt-9").status_code == 404


def test_unknown_name_is_refused_in_every_api_where_clients_may_pull(serve) -> None:
    live_server = serve(FakeEngine(), model_admin=ModelAdmin())
    for route, body in ROUTES.items():
        assert live_server.post(route, body | {"model": "gpt-9"}).status_code == 404, route


@pytest.mark.parametrize("setup", [{"aliases": {"*": ""}}, {"names": ("fake", "other")}])
def test_unknown_name_is_refused_if_switched_off_or_among_several_models(serve, setup) -> None:
    reply = serve(FakeEngine(), **setup).chat(model="gpt-9")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(("name", "target"), [("gone", "not-here"), ("gpt-5", "not-here")])
def test_alias_of_a_missing_model_is_explained(live_server, name: str, target: str) -> None:
    reply = live_server.chat(model=name)
    assert reply.status_code == 404
    said = reply.json()["error"]["message"]
    assert f"There is no model '{target}' ('{name}' is an alias of it)" in said


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("qwen3-4b", "`edgeinfer pull qwen3-4b`"),
        ("owner/repo:q8_0", "`edgeinfer pull owner/repo:q8_0`"),
        ("o3-mini", '`"*" = "default"` in `[serve.aliases]` accepts any name'),
        ("qwen3:4b", "did you mean qwen3-4b (not pulled)? GET /v1/models"),
    ],
)
def test_unknown_model_error_names_pull_only_for_pullable_models(
    live_server, name: str, hint: str
) -> None:
    reply = live_server.chat(model=name)
    assert reply.status_code == 404
    assert hint in reply.json()["error"]["message"]


def test_aliases_are_listed_as_such(live_server) -> None:
    cards = {card["id"]: card for card in live_server.get("/v1/models").json()["data"]}
    aliases = {name: card["alias_of"] for name, card in cards.items()}
    assert aliases == {"main": "", SLASHED: "", "gpt-4o": SLASHED, "small": "main"}


@pytest.mark.parametrize("name", [SLASHED, quote(SLASHED, safe=""), "gpt-4o", "claude-opus-5"])
def test_model_card_is_found_by_a_name_with_slashes_or_an_alias(live_server, name: str) -> None:
    live_server.chat(model=SLASHED)
    card = live_server.get(f"/v1/models/{name}").json()
    assert card["state"] == "loaded"
    assert SLASHED in (card["id"], card["alias_of"])


def test_a_model_with_slashes_is_unloaded(live_server, until) -> None:
    live_server.chat(model=SLASHED)
    reply = live_server.post(f"/v1/models/{SLASHED}/unload").json()
    assert (reply["id"], reply["state"]) == (SLASHED, "unloaded")
    assert live_server.get("/v1/models/no/such/model").status_code == 404
    assert live_server.post("/v1/models/no/such/unload").status_code == 404


def test_mistake_in_the_users_catalogue_fails_no_request(live_server, serve):
    user_path().parent.mkdir(parents=True, exist_ok=True)
    user_path().write_text("[models.x]\nsize = 1\n")
    live_server.post("/v1/messages", GENERATING["/v1/messages"] | {"model": "nobody"}, status=404)
    alone = serve(FakeEngine())
    alone.post("/v1/messages", GENERATING["/v1/messages"] | {"model": "claude-9"}, status=200)
