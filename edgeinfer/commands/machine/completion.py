"""`edgeinfer completion`: a shell's script to complete our command lines, made from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import ClassVar

import msgspec

from edgeinfer.host import Host
from edgeinfer.result import Result

#: Positionals with this metavar are names of models; anything that ends in FILE or DIR is a path.
_MODELS = "MODEL"
#: The command with which a script asks for the models' names.
_LIST_MODELS = "edgeinfer completion models 2>/dev/null"


class CompletionResult(Result, frozen=True, kw_only=True):
    """A script for the shell, or one name a line."""

    kind: ClassVar[str] = "completion"

    shell: str
    text: str

    def human(self) -> str:
        return self.text


class Option(msgspec.Struct, frozen=True):
    """One option of a verb.

    `values` are its choices; `takes` says what follows: "", "word", "file" or "model".
    """

    flags: tuple[str, ...]
    help: str
    takes: str
    values: tuple[str, ...]


class Verb(msgspec.Struct, frozen=True):
    """One verb.

    `operand` is what its positionals are: "", "word", "file" or "model"; `words` are their choices.
    """

    name: str
    help: str
    options: tuple[Option, ...]
    operand: str
    words: tuple[str, ...]


def completion(options: argparse.Namespace, _host: Host) -> CompletionResult:
    """Write the script for `options.shell`, or the models' names for the scripts (`models`)."""
    shell: str = options.shell
    text = "\n".join(_model_names()) if shell == "models" else script(shell, options.parser)
    return CompletionResult(shell=shell, text=text)


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Write the script that completes the command lines of `parser` in bash, zsh or fish."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](list(verbs(parser))).rstrip("\n")


def _model_names() -> list[str]:
    from edgeinfer.catalog.found import stores
    from edgeinfer.catalog.models import load_catalog
    from edgeinfer.catalog.store import list_pulled

    found = (model.name for model in stores.usable())
    return sorted({*load_catalog().models, *(model.name for model in list_pulled()), *found})


def verbs(parser: argparse.ArgumentParser) -> Iterator[Verb]:
    """Every verb of the parser, those of a verb (`snapshots list`) included as words of it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, sub in action.choices.items():
                yield _verb(name, helps.get(name, ""), sub)


def _verb(name: str, about: str, parser: argparse.ArgumentParser) -> Verb:
    options: list[Option] = []
    words: list[str] = []
    operand = ""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words += list(action.choices)
            for sub in action.choices.values():
                inner = _verb("", "", sub)
                options += inner.options
                operand = operand or inner.operand
        elif action.option_strings:
            options.append(_option(action))
        elif action.help != argparse.SUPPRESS:
            words += [str(choice) for choice in action.choices or ()]
            operand = operand or _takes(action)
    unique = {option.flags: option for option in options}
    return Verb(name, about, tuple(unique.values()), operand or "word", tuple(words))


def _option(action: argparse.Action) -> Option:
    takes = "" if action.nargs == 0 else _takes(action)
    values = tuple(str(choice) for choice in action.choices or ())
    return Option(tuple(action.option_strings), (action.help or "").replace("%%", "%"), takes, values)


def _takes(action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if metavar.startswith(_MODELS):
        return "model"
    return "file" if metavar.endswith(("FILE", "DIR", "PATH")) else "word"


# --- bash


def _bash(found: list[Verb]) -> str:
    cases = "".join(_bash_case(verb) for verb in found)
    names = " ".join(verb.name for verb in found)
    return f"""# edgeinfer completion for bash: eval "$(edgeinfer completion bash)", or a file in
# ~/.local/share/bash-completion/completions named edgeinfer
_edgeinfer() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}}
    local verb=${{COMP_WORDS[1]}} words= takes=
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{names} --help --version" -- "$current"))
        return
    fi
    case $verb in
{cases}    *) return ;;
    esac
    case $current in -*) takes= ;; *) words= ;; esac
    case $takes in
    model) words="$words $({_LIST_MODELS})" ;;
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
    lines = [f"    {verb.name})", f'        local flags="{flags}"', "        case $previous in"]
    for option in verb.options:
        if option.values:
            answer = f'COMPREPLY=($(compgen -W "{" ".join(option.values)}" -- "$current")); return'
        elif option.takes == "file":
            answer = 'COMPREPLY=($(compgen -f -- "$current")); return'
        elif option.takes == "model":
            answer = f'COMPREPLY=($(compgen -W "$({_LIST_MODELS})" -- "$current")); return'
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


def _zsh(found: list[Verb]) -> str:
    names = "\n".join(f"        {_quoted(f'{verb.name}:{verb.help}')}" for verb in found)
    cases = "".join(_zsh_case(verb) for verb in found)
    return f"""#compdef edgeinfer
# edgeinfer completion for zsh: a file named _edgeinfer in a folder of $fpath,
# or eval "$(edgeinfer completion zsh)"
_edgeinfer_models() {{
    local -a models
    models=(${{(f)"$({_LIST_MODELS})"}})
    compadd -a models
    _files -g '*.gguf'
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
    case $verb in
{cases}    esac
}}
if [ "$funcstack[1]" = _edgeinfer ]; then _edgeinfer "$@"; else compdef _edgeinfer edgeinfer; fi
"""


def _zsh_case(verb: Verb) -> str:
    specs = [_quoted(spec) for option in verb.options for spec in _zsh_option(option)]
    if verb.words:
        specs.append(_quoted(f"1: :({' '.join(verb.words)})"))
    specs.append(
        _quoted(f"*: :{ {'model': '_edgeinfer_models', 'file': '_files'}.get(verb.operand, '') }")
    )
    return (
        f"    {verb.name})\n        _arguments \\\n"
        + " \\\n".join(f"            {spec}" for spec in specs)
        + " ;;\n"
    )


def _zsh_option(option: Option) -> Iterator[str]:
    about = option.help.replace("[", "(").replace("]", ")").replace(":", "\\:")
    for flag in option.flags:
        action = (
            f"({' '.join(option.values)})"
            if option.values
            else {"model": "_edgeinfer_models", "file": "_files"}.get(option.takes, "")
        )
        yield f"{flag}[{about}]" + (f":value:{action}" if option.takes else "")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# --- fish


def _fish(found: list[Verb]) -> str:
    lines = [
        "# edgeinfer completion for fish: edgeinfer completion fish > "
        "~/.config/fish/completions/edgeinfer.fish",
        "complete -c edgeinfer -f",
    ]
    for verb in found:
        lines.append(
            f"complete -c edgeinfer -n __fish_use_subcommand -a {verb.name} -d "
            f"{_fish_quoted(verb.help)}"
        )
        inside = f"-n '__fish_seen_subcommand_from {verb.name}'"
        if verb.words:
            lines.append(f"complete -c edgeinfer {inside} -a {_fish_quoted(' '.join(verb.words))}")
        if verb.operand == "model":
            lines.append(f"complete -c edgeinfer {inside} -a '({_LIST_MODELS})'")
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
    elif option.takes == "model":
        parts.append(f"-x -a '({_LIST_MODELS})'")
    elif option.takes:
        parts.append("-x")
    return " ".join(parts)


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
