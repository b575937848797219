"""`doctor`, `backend`, `version`, `config`, `completion`, …: this machine and this program."""

from __future__ import annotations

import argparse

from edgeinfer.arguments.verb import Verbs, add_verb, json_option


def add(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Register this family's verbs."""
    add_verb(
        verbs,
        "doctor",
        "machine.doctor:doctor",
        "what works on this machine, and what to type for what doesn't",
    )
    _add_backend(verbs)
    add_verb(
        verbs, "version", "machine.version:version", "versions of edgeinfer and of what it is built on"
    )
    add_verb(
        verbs,
        "config",
        "machine.config:show_config",
        "the configuration in force and where it comes from",
    )
    _add_completion(verbs)
    _add_licenses(verbs)
    _add_bundle(verbs)
    add_verb(
        verbs,
        "self-check",
        "machine.self_check:self_check",
        "whether every byte of this program is what was built",
    )
    _add_uninstall(verbs)


def _add_backend(verbs: Verbs[argparse.ArgumentParser]) -> None:
    from edgeinfer.runtime.backends.files import NAMES  # 1 ms

    parser = add_verb(
        verbs,
        "backend",
        "machine.backend:backend",
        "list, add and remove libraries for GPUs",
        linux_only=True,
    )
    parser.set_defaults(action="list")
    actions = parser.add_subparsers(dest="action", metavar="list|add|remove")

    def add_action(name: str, about: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=about, parents=[json_option()])

    named = f"one of {', '.join(NAMES)}"
    adding = add_action("add", "fetch and verify a library")
    adding.add_argument("name", metavar="NAME", help=named)
    adding.add_argument(
        "--from",
        dest="source",
        default="",
        metavar="FOLDER|URL",
        help="where the library and its JSON file are; left out: `source` under [gpu] in config.toml",
    )
    adding.add_argument("--sha256", default="", metavar="HEX", help="what the library's digest must be")
    adding.add_argument("--quiet", action="store_true", help="no progress on stderr")
    add_action("remove", "remove an added library").add_argument("name", metavar="NAME", help=named)
    add_action("list", "every backend and its devices (what `edgeinfer backend` does)")


def _add_completion(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "completion",
        "machine.completion:completion",
        "a script that completes command lines in bash, zsh or fish",
    )
    parser.add_argument(
        "shell",
        choices=("bash", "zsh", "fish", "models"),
        help="the shell; `models` prints names, for the scripts",
    )


def _add_licenses(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "licenses",
        "machine.licenses:licenses",
        "what this program is made of, under which licences",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the whole text of this component's")


def _add_bundle(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs, "bundle", "machine.bundle:bundle", "this program as one file with a pulled model inside"
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a pulled model; left out: the default"
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the file to write")
    parser.add_argument(
        "--binary", metavar="FILE", help="start from this shipped file instead of the running one"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def _add_uninstall(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "uninstall",
        "machine.uninstall:uninstall",
        "list everything edgeinfer has on this machine, ask, remove it",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--keep-data", action="store_true", help="keep models, conversations and configuration"
    )
