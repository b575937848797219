"""`doctor`, `version`, `config`, `completion`: this machine and this program."""

from __future__ import annotations

import argparse


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register this family's verbs."""
