"""`warm`, `snapshots`, `ps`, `stop`: snapshots and running processes."""

from __future__ import annotations

import argparse


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register this family's verbs."""
