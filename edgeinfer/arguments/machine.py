"""`doctor`, `version`, `config`, `completion`, …: this machine and this program."""

from __future__ import annotations

import argparse

from edgeinfer.host import Host
from edgeinfer.result import Result

Verbs = argparse._SubParsersAction  # the name argparse has for what add_subparsers returns


def add(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Register this family's verbs."""
    _add_doctor(verbs)
    _add_version(verbs)
    _add_config(verbs)


def _add_doctor(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser("doctor", help="what works on this machine, and what to type for what doesn't")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(command=_cmd_doctor)


def _cmd_doctor(_options: argparse.Namespace, _host: Host) -> Result:
    from edgeinfer.commands.doctor import doctor

    return doctor()


def _add_version(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser("version", help="versions of edgeinfer and of what it is built on")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(command=_cmd_version)


def _cmd_version(_options: argparse.Namespace, _host: Host) -> Result:
    from edgeinfer.commands.version import version

    return version()


def _add_config(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser("config", help="the configuration in force and where it comes from")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(command=_cmd_config)


def _cmd_config(_options: argparse.Namespace, _host: Host) -> Result:
    from edgeinfer.commands.config import show_config

    return show_config()
