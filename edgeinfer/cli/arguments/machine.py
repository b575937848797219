"""`doctor`, `backend`, `version`, `config`, …: this machine and this program."""

from __future__ import annotations

import argparse

from edgeinfer.cli.parser import Verbs, add_verb, add_yes


def add(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Register this family's verbs."""
    _add_doctor(verbs)
    add_verb(
        verbs,
        "backend",
        "backend:backend",
        "list libraries for GPUs, and the devices each finds",
        "backend",
        linux_only=True,
    )
    _add_version(verbs)
    add_verb(
        verbs,
        "config",
        "config:show_config",
        "show every configuration key with its value, and the file they come from",
        "config",
    )
    _add_completion(verbs)
    _add_uninstall(verbs)


def _add_doctor(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "doctor",
        "doctor:doctor",
        "check this machine and show how to fix what is missing",
        "doctor",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="instead compare every byte of the unpacked program with what was built",
    )


def _add_version(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "version",
        "version:version",
        "show the versions of edgeinfer and of what it is built on",
        "version --licenses",
    )
    parser.add_argument(
        "--licenses", action="store_true", help="instead list the parts of this program by licence"
    )


def _add_completion(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "completion",
        "completion:completion",
        "print a script that completes command lines in bash, zsh or fish",
        "completion bash > ~/.local/share/bash-completion/completions/edgeinfer",
    )
    parser.add_argument(
        "shell",
        choices=("bash", "zsh", "fish", "models", "snapshots", "adapters"),  # names, for the scripts
        metavar="bash|zsh|fish",
        help="the shell",
    )


def _add_uninstall(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "uninstall",
        "uninstall:uninstall",
        "list everything edgeinfer has on this machine, ask, and remove it",
        "uninstall --keep-data",
    )
    add_yes(parser)
    parser.add_argument(
        "--keep-data", action="store_true", help="keep models, conversations and configuration"
    )
