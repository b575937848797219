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
    _add_completion(verbs)
    _add_licenses(verbs)
    _add_bundle(verbs)
    _add_self_check(verbs)
    _add_uninstall(verbs)


def _add_doctor(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "doctor", help="what works on this machine, and what to type for what doesn't"
    )
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


def _add_completion(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "completion", help="a script that completes command lines in bash, zsh or fish"
    )
    parser.add_argument(
        "shell",
        choices=("bash", "zsh", "fish", "models"),
        help="the shell; `models` prints names, for the scripts",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(command=_cmd_completion)


def _cmd_completion(options: argparse.Namespace, _host: Host) -> Result:
    from edgeinfer.cli import build_parser
    from edgeinfer.commands.completion import completion

    return completion(options.shell, build_parser())


def _add_licenses(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser("licenses", help="what this program is made of, under which licences")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the whole text of this component's")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(command=_cmd_licenses)


def _cmd_licenses(options: argparse.Namespace, _host: Host) -> Result:
    from edgeinfer.commands.licenses import licenses

    return licenses(options)


def _add_bundle(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser("bundle", help="this program as one file with a pulled model inside")
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a pulled model; left out: the default"
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the file to write")
    parser.add_argument(
        "--binary", metavar="FILE", help="start from this shipped file instead of the running one"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(command=_cmd_bundle)


def _cmd_bundle(options: argparse.Namespace, host: Host) -> Result:
    from edgeinfer.commands.bundle import bundle

    return bundle(options, host.config.default_model)


def _add_self_check(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser("self-check", help="whether every byte of this program is what was built")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(command=_cmd_self_check)


def _cmd_self_check(_options: argparse.Namespace, _host: Host) -> Result:
    from edgeinfer.commands.self_check import self_check

    return self_check()


def _add_uninstall(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "uninstall", help="list everything edgeinfer has on this machine, ask, remove it"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--keep-data", action="store_true", help="keep models, conversations and configuration"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(command=_cmd_uninstall)


def _cmd_uninstall(options: argparse.Namespace, _host: Host) -> Result:
    from edgeinfer.commands.uninstall import uninstall

    return uninstall(options)
