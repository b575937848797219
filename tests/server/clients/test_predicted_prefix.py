"""Predict the first lines of an agent's session in another folder from those of its last session."""

from __future__ import annotations

from datetime import date

import pytest

from edgeinfer.agents.predicted_prefix import predict_prefix

DAY = date(2026, 11, 23)
CLAUDE = (
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


@pytest.mark.parametrize("form", [CLAUDE, CODEX, OPENCODE, PI])
def test_predicted_prefix_has_the_new_folder_and_day_and_no_words(form):
    said = _said(form, "/home/ada/old_one", date(2026, 11, 22), False) + "fix it, please"
    there = _said(form, "/srv/new", DAY, True)
    found = predict_prefix(said, "/srv/new", DAY, is_repository=True)
    assert found == there if form is not CODEX else found.startswith(there)


def test_prefix_without_a_folder_stays():
    said = "You are an agent. Today's date is 2026-11-22."
    assert predict_prefix(said, "/srv/new", DAY, is_repository=False) == said
