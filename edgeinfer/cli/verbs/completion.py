"""`edgeinfer completion`: a shell's script to complete our command lines, made from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import msgspec

from edgeinfer.cli.parser import build_parser
from edgeinfer.cli.result import Result
from edgeinfer.host import Host
from edgeinfer.platform import paths

#: What an option or word takes, by how its metavar begins; anything that ends in FILE or DIR is a path.
_KINDS = {"MODEL": "models", "SNAPSHOT": "snapshots", "ADAPTER": "adapters"}


def _names_of(kind: str) -> str:
    return f"edgeinfer completion {kind} 2>/dev/null"


class CompletionResult(Result, frozen=True, kw_only=True):
    """A script for the shell, or one name per line."""

    kind: ClassVar[str] = "completion"

    shell: str
    text: str

    def human(self) -> str:
        return self.text


class Option(msgspec.Struct, frozen=True):
    """An option. `values` are its choices; `takes` is "", "word", "file", or a kind of names."""

    flags: tuple[str, ...]
    help: str
    takes: str
    values: tuple[str, ...]


class Verb(msgspec.Struct, frozen=True):
    """A verb, or an action of one (`snapshots rm`).

    `operand` is the kind of its positionals ("word", "file", or of names), `words` their choices.
    """

    name: str
    help: str
    options: tuple[Option, ...]
    operand: str
    words: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell",
        choices=("bash", "zsh", "fish", "models", "snapshots", "adapters"),  # names, for the scripts
        metavar="bash|zsh|fish",
        help="the shell",
    )


def run(options: argparse.Namespace, _host: Host) -> CompletionResult:
    """Write the script for `options.shell`, or the names of a kind, which the scripts complete."""
    shell: str = options.shell
    is_kind = shell in _KINDS.values()
    text = "\n".join(_known(shell)) if is_kind else script(shell, build_parser())
    return CompletionResult(shell=shell, text=text)


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Write the script that completes the command lines of `parser` in bash, zsh or fish."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](list(verbs(parser))).rstrip("\n")


def _known(kind: str) -> list[str]:
    from edgeinfer.models.catalog import load_catalog
    from edgeinfer.models.external_stores import stores
    from edgeinfer.models.store import list_pulled
    from edgeinfer.snapshots.format import generations

    if kind == "snapshots":
        return sorted(generations())
    if kind == "adapters":
        return sorted(path.stem for path in Path(paths.adapters_path()).glob("*.gguf"))
    all_verbs = (model.name for model in stores.usable())
    return sorted({*load_catalog().models, *(model.name for model in list_pulled()), *all_verbs})


def verbs(parser: argparse.ArgumentParser, of: str = "") -> Iterator[Verb]:
    """List every verb of the parser, each followed by its actions."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, sub in action.choices.items():
                yield _verb(f"{of} {name}".lstrip(), helps.get(name, ""), sub)
                yield from verbs(sub, name)


def _verb(name: str, summary: str, parser: argparse.ArgumentParser) -> Verb:
    options: list[Option] = []
    words: list[str] = []
    operand = ""
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        if action.option_strings:
            options.append(_option(action))
        else:
            words += [str(one) for one in action.choices or () if one not in _KINDS.values()]
            operand = operand or _takes(action)
    return Verb(name, summary, tuple(options), operand or "word", tuple(words))


def _option(action: argparse.Action) -> Option:
    takes = "" if action.nargs == 0 else _takes(action)
    values = tuple(str(choice) for choice in action.choices or ())
    return Option(tuple(action.option_strings), (action.help or "").replace("%%", "%"), takes, values)


def _takes(action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    for start, kind in _KINDS.items():
        if metavar.startswith(start):
            return kind
    return "file" if metavar.endswith(("FILE", "DIR", "PATH")) else "word"


def _patterns(all_verbs: list[Verb]) -> str:
    return " | ".join(f'"{verb.name}"' for verb in all_verbs if " " in verb.name)


# --- bash


def _bash(all_verbs: list[Verb]) -> str:
    cases = "".join(_bash_case(verb) for verb in all_verbs)
    names = " ".join(verb.name for verb in all_verbs if " " not in verb.name)
    kinds = " | ".join(_KINDS.values())
    return f"""# edgeinfer completion for bash: eval "$(edgeinfer completion bash)", or a file in
# ~/.local/share/bash-completion/completions named edgeinfer
_edgeinfer() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}}
    local verb=${{COMP_WORDS[1]}} words= takes=
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{names} --help --version" -- "$current"))
        return
    fi
    if [ "$COMP_CWORD" -gt 2 ]; then
        case "$verb ${{COMP_WORDS[2]}}" in
        {_patterns(all_verbs)}) verb="$verb ${{COMP_WORDS[2]}}" ;;
        esac
    fi
    case $verb in
{cases}    *) return ;;
    esac
    case $current in -*) takes= ;; *) words= ;; esac
    case $takes in
    {kinds}) words="$words $({_names_of("$takes")})" ;;
    file) COMPREPLY=($(compgen -f -- "$current")); return ;;
    esac
    [ -n "$words" ] || words=$flags
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    case $verb in
    pull | run | chat | serve | warm) COMPREPLY+=($(compgen -f -X '!*.gguf' -- "$current")) ;;
    esac
}}
complete -o filenames -F _edgeinfer edgeinfer
"""


def _bash_case(verb: Verb) -> str:
    flags = " ".join(flag for option in verb.options for flag in option.flags)
    lines = [f'    "{verb.name}")', f'        local flags="{flags}"', "        case $previous in"]
    for option in verb.options:
        if option.values:
            answer = f'COMPREPLY=($(compgen -W "{" ".join(option.values)}" -- "$current")); return'
        elif option.takes == "file":
            answer = 'COMPREPLY=($(compgen -f -- "$current")); return'
        elif option.takes in _KINDS.values():
            answer = f'COMPREPLY=($(compgen -W "$({_names_of(option.takes)})" -- "$current")); return'
        elif option.takes:
            answer = "return"
        else:
            continue
        lines.append(f"        {' | '.join(option.flags)}) {answer} ;;")
    lines.append("        esac")
    if verb.words:
        lines.append(
            f'        case $current in -*) ;; *) COMPREPLY=($(compgen -W "{" ".join(verb.words)}" -- '
            f'"$current")) ;; esac'
        )
        lines.append('        [ "$COMP_CWORD" -eq 2 ] && [ ${#COMPREPLY[@]} -gt 0 ] && return')
    lines.append(f"        takes={verb.operand} ;;")
    return "\n".join(lines) + "\n"


# --- zsh


def _zsh(all_verbs: list[Verb]) -> str:
    top = [verb for verb in all_verbs if " " not in verb.name]
    names = "\n".join(f"        {_quoted(f'{verb.name}:{verb.help}')}" for verb in top)
    cases = "".join(_zsh_case(verb) for verb in all_verbs)
    return f"""#compdef edgeinfer
# edgeinfer completion for zsh: a file named _edgeinfer in a folder of $fpath,
# or eval "$(edgeinfer completion zsh)"
_edgeinfer_names() {{
    local -a names
    names=(${{(f)"$({_names_of("$1")})"}})
    compadd -a names
    [ "$1" = snapshots ] || _files -g '*.gguf'
}}
_edgeinfer() {{
    local -a verbs
    verbs=(
{names}
    )
    if (( CURRENT == 2 )); then
        _describe verb verbs
        return
    fi
    local verb=$words[2]
    shift words
    (( CURRENT-- ))
    if (( CURRENT > 2 )); then
        case "$verb $words[2]" in
        {_patterns(all_verbs)}) verb="$verb $words[2]"; shift words; (( CURRENT-- )) ;;
        esac
    fi
    case $verb in
{cases}    esac
}}
if [ "$funcstack[1]" = _edgeinfer ]; then _edgeinfer "$@"; else compdef _edgeinfer edgeinfer; fi
"""


def _zsh_case(verb: Verb) -> str:
    specs = [_quoted(spec) for option in verb.options for spec in _zsh_option(option)]
    if verb.words:
        specs.append(_quoted(f"1: :({' '.join(verb.words)})"))
    if _zsh_action(verb.operand):
        specs.append(_quoted(f"*: :{_zsh_action(verb.operand)}"))
    return (
        f'    "{verb.name}")\n        _arguments \\\n'
        + " \\\n".join(f"            {spec}" for spec in specs)
        + " ;;\n"
    )


def _zsh_option(option: Option) -> Iterator[str]:
    summary = option.help.replace("[", "(").replace("]", ")").replace(":", "\\:")
    for flag in option.flags:
        action = f"({' '.join(option.values)})" if option.values else _zsh_action(option.takes)
        yield f"{flag}[{summary}]" + (f":value:{action}" if option.takes else "")


def _zsh_action(takes: str) -> str:
    names = f" _edgeinfer_names {takes}" if takes in _KINDS.values() else ""
    return "_files" if takes == "file" else names


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# --- fish


def _fish(all_verbs: list[Verb]) -> str:
    lines = [
        "# edgeinfer completion for fish: edgeinfer completion fish > "
        "~/.config/fish/completions/edgeinfer.fish",
        "complete -c edgeinfer -f",
    ]
    for verb in all_verbs:
        name, _, action = verb.name.partition(" ")
        inside = f"-n '__fish_seen_subcommand_from {name}"
        if action:
            inside += f"; and __fish_seen_subcommand_from {action}'"
        else:
            lines.append(
                f"complete -c edgeinfer -n __fish_use_subcommand -a {name} -d {_fish_quoted(verb.help)}"
            )
            inside += "'"
        if verb.words:
            lines.append(f"complete -c edgeinfer {inside} -a {_fish_quoted(' '.join(verb.words))}")
        if verb.operand in _KINDS.values():
            lines.append(f"complete -c edgeinfer {inside} -a '({_names_of(verb.operand)})'")
        if verb.operand == "models":
            lines.append(f"complete -c edgeinfer {inside} -a '(__fish_complete_suffix .gguf)'")
        elif verb.operand == "file":
            lines.append(f"complete -c edgeinfer {inside} -F")
        lines += [f"complete -c edgeinfer {inside} {_fish_option(option)}" for option in verb.options]
    return "\n".join(lines)


def _fish_option(option: Option) -> str:
    flags = [f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags]
    parts = [*flags, f"-d {_fish_quoted(option.help)}"]
    if option.values:
        parts.append(f"-x -a {_fish_quoted(' '.join(option.values))}")
    elif option.takes == "file":
        parts.append("-r -F")
    elif option.takes in _KINDS.values():
        parts.append(f"-x -a '({_names_of(option.takes)})'")
    elif option.takes:
        parts.append("-x")
    return " ".join(parts)


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
