"""Lines that agents change per request are dropped, or moved after the shared prefix."""

from datetime import date

import pytest
from fake_engine import FakeEngine

from edgeinfer.agents.prompt_normalization import (
    NAMES,
    PromptNormalizer,
    Reminders,
    normalize,
    predict_prefix,
)
from edgeinfer.config.config_file import ServeConfig
from edgeinfer.runtime.requests import Message

TOOL = {"name": "read", "description": "Read a file.", "input_schema": {"type": "object"}}
CLAUDE = "claude-cli/2.1.330 (external, sdk-cli)"
RULES = "Follow the house rules, every one of them, in the order in which they are written here. " * 12


def _claude(billing: str, text: str) -> dict[str, object]:
    """Return a request of Claude Code."""
    header = f"x-anthropic-billing-header: cc_version=2.1.330.{billing};"
    system = [{"type": "text", "text": block} for block in (header, RULES)]
    messages = [{"role": "user", "content": text}]
    return {"max_tokens": 1, "system": system, "messages": messages, "tools": [TOOL]}


@pytest.mark.model
def test_sessions_with_other_billing_lines_share_their_prefix(real):
    sent = {"headers": {"user-agent": CLAUDE}}
    real.client.post("/v1/messages", json=_claude("0e0", "hello"), **sent).raise_for_status()
    answer = real.client.post("/v1/messages", json=_claude("f8c", "bye"), **sent)
    usage = answer.raise_for_status().json()["usage"]
    assert usage["cache_read_input_tokens"] > 150
    assert usage["input_tokens"] < 16
    assert answer.headers["x-edgeinfer-normalized"] == "billing-header"
    body = {key: value for key, value in _claude("f8c", "bye").items() if key != "max_tokens"}
    count = real.client.post("/v1/messages/count_tokens", json=body, **sent).json()
    assert count["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_folder_and_day_move_before_the_first_user_text():
    system = """Rules.
<env>
  Working directory: /w
  Workspace root folder: /
  Is directory a git repo: no
  Platform: linux
  Today's date: Sun Nov 22 2026
</env>
Skills."""
    turns = (("system", system), ("user", "hi"), ("assistant", "ho"), ("user", "on"))
    normalized, applied = normalize(tuple(_turn(*turn) for turn in turns))
    assert applied == ("day", "environment")
    moved = "Today's date: Sun Nov 22 2026\nWorking directory: /w\nWorkspace root folder: /\n"
    rules = "Rules.\n<env>\n  Platform: linux\n</env>\nSkills."
    said = [turn.content for turn in normalized]
    assert said == [rules, f"{moved}Is directory a git repo: no\n\nhi", "ho", "on"]


def test_standing_system_turn_moves_before_the_first_user_text():
    said = "# Environment\n - Primary working directory: /w\n - Platform: linux\n\nAgents: many."
    reminder = "<system-reminder>\nSign commits.\n</system-reminder>\n\n"
    turns = (_turn("system", "Rules."), _turn("user", f"{reminder}hi"), _turn("system", said))
    normalized, applied = normalize((*turns, _turn("assistant", "ho"), _turn("system", "later")))
    assert applied == ("standing", "environment")
    assert [(turn.role, turn.content) for turn in normalized] == [
        ("system", "Rules.\n\n# Environment\n - Platform: linux\n\nAgents: many."),
        ("user", f"{reminder}- Primary working directory: /w\n\nhi"),
        ("assistant", "ho"),
        ("system", "later"),
    ]


def test_codex_context_names_its_folder_last():
    """<cwd> and <workspace_roots> move after what is the same in every folder."""
    roots = "<workspace_roots><root>/w</root></workspace_roots>"
    profile = '<permission_profile type="managed"></permission_profile>'
    said = f"""<environment_context>
  <cwd>/w</cwd>
  <shell>bash</shell>
  <filesystem>{roots}{profile}</filesystem>
</environment_context>"""
    turns = (_turn("developer", "Rules."), _turn("user", said), _turn("user", "hi"))
    normalized, applied = normalize(turns)
    moved = f"""<environment_context>
  <shell>bash</shell>
  <filesystem>{profile}{roots}</filesystem>
  <cwd>/w</cwd>
</environment_context>"""
    assert applied == ("environment",)
    assert [turn.content for turn in normalized] == ["Rules.", moved, "hi"]


@pytest.mark.parametrize(
    ("line", "following"),
    [
        ("Current working directory: /w", ""),
        ("You have a persistent file-based memory at `/h/-w/memory/`.", "Each is a file:"),
        (
            "You have a persistent file-based memory at `/w/m/`.",
            "This directory already exists — write to it (do not look). Each is a file:",
        ),
        ("- PROJECT memory (this project only): `/h/-w/memory`", ""),
        ("## /h/-w/memory/MEMORY.md", ""),
    ],
)
def test_project_line_moves_to_the_first_user_turn(line, following):
    system = f"Rules.\n{line}{' ' if following else ''}{following}\nBe brief."
    normalized, applied = normalize((_turn("system", system), _turn("user", "hi")))
    assert applied == ("environment",)
    assert normalized[0].content == f"Rules.\n{following}{chr(10) if following else ''}Be brief."
    assert normalized[1].content == f"{line}\n\nhi"


NOTE = "<info-msg>\nIt is currently 2026-11-22 13:06:00\nWorking directory: /w\n\n</info-msg>"


@pytest.mark.parametrize(
    "said",
    [
        (("user", f"{NOTE}\nMake a file."),),
        (("user", f"Make a file.\n{NOTE}"),),
        (("user", "Make a file."), ("assistant", "Done."), ("user", NOTE)),
    ],
)
def test_goose_note_moves_behind_the_last_turn(said):
    turns = [_turn(role, text) for role, text in (("system", "Rules."), *said, ("user", "And now?"))]
    normalized, applied = normalize(turns)
    assert applied == ("note",)
    assert normalized[1].content == "Make a file."
    assert normalized[-1].content == f"And now?\n\n{NOTE}"
    assert not any(NOTE in turn.content for turn in normalized[:-1])


LOOK_ALIKES = (
    "Today's date is a day on which nobody works, and everybody knows it: the twenty-second.",
    "Working directory: of a council, not of opencode",
    "mentions x-anthropic-billing-header: in a line",
    "writes about <info-msg>It is currently</info-msg>",
)
#: Incomplete parts of the turn in which Codex describes the folder.
TORN = ("<cwd>/w</cwd>\n", "<workspace_roots></workspace_roots>", "</filesystem>")


@pytest.mark.parametrize(
    "turns",
    [
        *(("system", text, "hi") for text in LOOK_ALIKES),
        *(("user", f"<environment_context>\n{text}") for text in TORN),
        ("user", "x-anthropic-billing-header: a\nCurrent date: 2026-11-22"),
        ("system", "Current date: 2026-11-22"),  # there is no user turn to which it could move
    ],
)
def test_other_turns_stay_as_they_are(turns):
    role, text, *more = turns
    fixed_turns = (_turn(role, text), *(_turn("user", said) for said in more))
    assert normalize(fixed_turns) == (fixed_turns, ())


def test_emptied_system_turn_is_dropped():
    turns = (_turn("system", "x-anthropic-billing-header: a"), _turn("user", "hi"))
    assert normalize(turns) == ((_turn("user", "hi"),), ("billing-header",))


@pytest.mark.parametrize(
    ("rules", "user_agent"),
    [
        (tuple(name for name in NAMES if name != "billing-header"), CLAUDE),
        (NAMES, "Anthropic/Python 2.12.0"),  # no known agent
    ],
)
def test_prompt_stays_without_a_rule_or_a_known_agent(serve, rules, user_agent):
    engine = FakeEngine()
    live_server = serve(engine)
    live_server.endpoint.normalizer = PromptNormalizer(rules)
    sent = {"headers": {"user-agent": user_agent}}
    answer = live_server.post("/v1/messages", _claude("0e0", "hello"), **sent)
    assert engine.requests[0].messages[0].content.startswith("x-anthropic-billing-header")
    assert "x-edgeinfer-normalized" not in answer.headers
    reported = live_server.get("/props").json()["prompt_normalization"]
    assert (reported["rules"], "claude" in reported["agents"]) == (list(rules), True)


def test_configuration_has_every_rule():
    assert ServeConfig().normalize_prompts == NAMES


def _turn(role: str, content: str) -> Message:
    return Message(role=role, content=content)


PLAN = "<system-reminder>\nPlan only.\n</system-reminder>\n"
BUILD = "<system-reminder>\nBuild now.\n</system-reminder>\n"


def _modes(*said: str) -> tuple[Message, ...]:
    """Return a conversation with these user turns; all but the last one have an answer."""
    turns = [turn for text in said for turn in (_turn("user", text), _turn("assistant", "done"))]
    return (_turn("system", "Rules."), *turns[:-1])


def test_reminder_that_moves_to_the_newest_turn_stays_where_it_stood():
    reminders = Reminders()
    first = _modes(f"one{PLAN}")
    assert reminders.restore(first, "") == first
    second = (f"one{PLAN}", f"two{PLAN}")
    assert reminders.restore(_modes("one", f"two{PLAN}"), "") == _modes(*second)
    third = _modes(*second, f"three{BUILD}")
    assert reminders.restore(_modes("one", "two", f"three{BUILD}"), "") == third


@pytest.mark.parametrize(
    ("turns", "owner"),
    [
        (_modes("one", "two"), ""),  # the newest turn has no reminder
        (_modes("one", f"two{PLAN}"), "another key"),
        (_modes("other", f"two{PLAN}"), ""),
    ],
)
def test_reminder_is_put_back_nowhere_else(turns, owner):
    reminders = Reminders()
    reminders.restore(_modes(f"one{PLAN}"), "")
    assert reminders.restore(turns, owner) == turns


def test_restored_reminders_are_named_in_the_header(serve):
    engine = FakeEngine()
    live_server = serve(engine)
    sent = {"user-agent": "opencode/1.18.33"}

    def ask(*said, **fields):
        turns = [{"role": turn.role, "content": turn.content} for turn in _modes(*said)]
        return live_server.post("/v1/chat/completions", {"messages": turns, **fields}, headers=sent)

    ask(f"one{PLAN}", cache_prompt=False)
    # `cache_prompt: false` let the endpoint remember nothing
    assert "x-edgeinfer-normalized" not in ask("one", f"two{PLAN}").headers
    ask(f"one{PLAN}")
    assert ask("one", f"two{PLAN}").headers["x-edgeinfer-normalized"] == "reminder"
    assert engine.requests[-1].messages == _modes(f"one{PLAN}", f"two{PLAN}")


DAY = date(2026, 11, 23)
CLAUDE_CODE = (
    "Rules of /usr/lib.\nToday's date is {iso}.\nYou have a persistent file-based memory at "
    "`/h/.claude/projects/{name}/memory/`.\n- Primary working directory: {folder}\n"
    " - Is a git repository: {git}\n\n"
)
CODEX = (
    "<environment_context>\n  <current_date>{iso}</current_date>\n  <root>{folder}</root>\n"
    "  <cwd>{folder}</cwd>\n</environment_context><|im_end|>\n<|im_start|>user\n"
)
OPENCODE = (
    "Today's date: {short}\nWorking directory: {folder}\nWorkspace root folder: /\n"
    "Is directory a git repo: {yes}\n\n"
)
PI = "Current date: {iso}\nCurrent working directory: {folder}\n\n"


def _said(form: str, folder: str, day: date, git: bool) -> str:
    return form.format(
        iso=day.isoformat(),
        short=f"{day:%a %b %d %Y}",
        folder=folder,
        name=folder.replace("/", "-").replace("_", "-"),
        git=str(git).lower(),
        yes="yes" if git else "no",
    )


@pytest.mark.parametrize("form", [CLAUDE_CODE, CODEX, OPENCODE, PI])
def test_predicted_prefix_has_the_new_folder_and_day_and_no_words(form):
    said = _said(form, "/home/ada/old_one", date(2026, 11, 22), False) + "fix it, please"
    launched = _said(form, "/srv/new", DAY, True)
    predicted = predict_prefix(said, "/srv/new", DAY, is_repository=True)
    assert predicted == launched if form is not CODEX else predicted.startswith(launched)


def test_prefix_without_a_folder_stays():
    said = "You are an agent. Today's date is 2026-11-22."
    assert predict_prefix(said, "/srv/new", DAY, is_repository=False) == said
