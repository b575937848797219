"""`doctor`, `version`, `config`, `completion`, …: this machine and this program."""

from __future__ import annotations

import argparse

from edgeinfer.arguments.verb import Verbs, add_verb


def add(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Register this family's verbs."""
    add_verb(
        verbs,
        "doctor",
        "doctor:doctor",
        "what works on this machine, and what to type for what doesn't",
    )
    add_verb(verbs, "version", "version:version", "versions of edgeinfer and of what it is built on")
    add_verb(
        verbs, "config", "config:show_config", "the configuration in force and where it comes from"
    )
    _add_completion(verbs)
    _add_licenses(verbs)
    _add_bundle(verbs)
    add_verb(
        verbs,
        "self-check",
        "self_check:self_check",
        "whether every byte of this program is what was built",
    )
    _add_uninstall(verbs)


def _add_completion(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "completion",
        "completion:completion",
        "a script that completes command lines in bash, zsh or fish",
    )
    parser.add_argument(
        "shell",
        choices=("bash", "zsh", "fish", "models"),
        help="the shell; `models` prints names, for the scripts",
    )


def _add_licenses(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs, "licenses", "licenses:licenses", "what this program is made of, under which licences"
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the whole text of this component's")


def _add_bundle(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs, "bundle", "bundle:bundle", "this program as one file with a pulled model inside"
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
        "uninstall:uninstall",
        "list everything edgeinfer has on this machine, ask, remove it",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--keep-data", action="store_true", help="keep models, conversations and configuration"
    )
