#!/usr/bin/env bash
# release.sh VERSION: check that this commit can be released as VERSION, and build what is published into dist/. Tags nothing.
# docs/development/release-checklist.md says what comes before and after.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:?usage: release.sh X.Y.Z}
die() { printf 'error: %s\n\nhint: %s\n' "$1" "$2" >&2; exit 1; }

[ -z "$(git status --porcelain)" ] || die "there are uncommitted changes" "commit them, or work in a clean clone"
grep -q "^version = \"$version\"$" pyproject.toml && grep -q "__version__ = \"$version\"" edgeinfer/__init__.py ||
    die "this is not version $version" "set it in pyproject.toml and edgeinfer/__init__.py"
notes=$(sed -n "/^## $version\b/,/^## /{/^## /d;p}" CHANGELOG.md)
[ -n "$notes" ] || die "CHANGELOG.md has no section $version" "rename Unreleased, and group it"

make lint
make binary
printf '%s\n' "$notes" >dist/NOTES.md
(cd dist && sha256sum --check --quiet --ignore-missing SHA256SUMS)
printf 'release: dist/ holds edgeinfer %s; next: git tag v%s\n' "$version" "$version" >&2
