"""One parser family a file: `add(subparsers)` registers `_add_x`/`_cmd_x` pairs, each pair one verb."""
