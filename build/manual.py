"""Generate the man page edgeinfer(1) from the parser and the table of errors."""

from __future__ import annotations

import argparse

from edgeinfer import __version__, error_text
from edgeinfer.cli.parser import build_parser

ENVIRONMENT = {
    "EDGEINFER_HOME": "One folder for configuration, models, snapshots, logs, unpacked application.",
    "EDGEINFER_CONFIG": "Another configuration file.",
    "EDGEINFER_OFFLINE": "1: never touch the network (HF_HUB_OFFLINE=1 does the same).",
    "EDGEINFER_DEBUG": "1: show where an error came from.",
    "HF_TOKEN": "Token for models whose licence has to be accepted.",
    "XDG_CONFIG_HOME, XDG_DATA_HOME, XDG_CACHE_HOME, XDG_STATE_HOME, "
    "XDG_RUNTIME_DIR": "Folders that are used without EDGEINFER_HOME.",
}
FILES = {
    "~/.config/edgeinfer/config.toml": "The configuration; `edgeinfer config` shows every key.",
    "~/.local/share/edgeinfer/models": "Pulled models.",
    "~/.local/share/edgeinfer/app": "The application, unpacked by the first start of the single file.",
    "~/.cache/edgeinfer/snapshots": "Snapshots of processes; they fit only this machine and user.",
}


def page() -> str:
    """Return the man page in man(7) markup."""
    parser = build_parser()
    lines = [
        f'.TH EDGEINFER 1 "" "edgeinfer {__version__}" "User Commands"',
        ".SH NAME",
        r"edgeinfer \- local language models that feel already loaded",
        ".SH SYNOPSIS",
        r".B edgeinfer",
        r"[\fIVERB\fR] [\fIOPTION\fR]...",
        ".SH DESCRIPTION",
        "Chat in the terminal, an HTTP endpoint and scripts over llama.cpp. A warmed process is kept "
        "as a snapshot, and the",
        "next launch resumes it instead of loading the model again. Without a verb,",
        r".B edgeinfer chat",
        "is meant. Results go to stdout, progress and messages to stderr.",
        ".SH VERBS",
    ]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            about = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, sub in action.choices.items():
                lines += _verb(name, about.get(name, ""), sub)
    lines += [".SH EXIT STATUS", *_exit_codes()]
    lines += [".SH ENVIRONMENT", *_table(ENVIRONMENT), ".SH FILES", *_table(FILES)]
    lines += [".SH SEE ALSO", r"\fBllama-server\fR(1), \fBcriu\fR(8)"]
    return "\n".join(lines) + "\n"


def _verb(name: str, about: str, parser: argparse.ArgumentParser) -> list[str]:
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    lines = [
        f".SS {_text(name)}",
        _text(about[:1].upper() + about[1:] + "."),
        ".PP",
        rf"\fB{_text(usage)}\fR",
    ]
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        if isinstance(action, argparse._SubParsersAction):
            names = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for sub in action.choices:
                lines += [".TP", rf"\fB{_text(sub)}\fR", _text(names.get(sub, ""))]
            continue
        lines += [".TP", _flags(action), _text((action.help or "").replace("%%", "%")) or r"\&"]
    return lines


def _flags(action: argparse.Action) -> str:
    choices = "|".join(str(choice) for choice in action.choices or ())
    value = choices or (action.metavar if isinstance(action.metavar, str) else action.dest.upper())
    if not action.option_strings:
        return rf"\fI{_text(value)}\fR"
    flags = ", ".join(rf"\fB{_text(flag)}\fR" for flag in action.option_strings)
    return flags if action.nargs == 0 else rf"{flags} \fI{_text(value)}\fR"


def _exit_codes() -> list[str]:
    meanings: dict[int, list[str]] = {}
    for error, (code, _hint) in error_text.TABLE.items():
        meanings.setdefault(code, []).append((error.__doc__ or "").split("\n")[0].rstrip("."))
    lines = [".TP", r"\fB0\fR", "Done."]
    for code, texts in sorted(meanings.items()):
        lines += [".TP", rf"\fB{code}\fR", _text("; ".join(texts) + ".")]
    return lines


def _table(rows: dict[str, str]) -> list[str]:
    return [
        line for name, about in rows.items() for line in (".TP", rf"\fB{_text(name)}\fR", _text(about))
    ]


def _text(text: str) -> str:
    """Escape plain text for roff: backslashes, typed hyphens, and lines that would start a macro."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-").replace("`", r"\(ga").replace("…", "...")
    return r"\&" + escaped if escaped.startswith((".", "'")) else escaped


if __name__ == "__main__":
    print(page(), end="")
