#!/usr/bin/env bash
# release.sh VERSION: check that this commit can be released as VERSION, and write the release to dist/release. Creates no tag.
# docs/development/release-checklist.md has the steps before and after.
#
# EDGEINFER_RELEASE_KEY   the Ed25519 key (PEM) that signs; `edgeinfer update` refuses a release without a signature
# BASE                    the base image of the OCI image, which is built only if podman is installed
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/debian.sh
version=${1:?usage: release.sh X.Y.Z}
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-1577836800}

[ -z "$(git status --porcelain)" ] || die "there are uncommitted changes" "commit them, or work in a clean clone"
grep -q "^version = \"$version\"$" pyproject.toml && grep -q "__version__ = \"$version\"" edgeinfer/__init__.py ||
    die "this is not version $version" "set it in pyproject.toml and edgeinfer/__init__.py"
notes=$(sed -n "/^## $version\b/,/^## /{/^## /d;p}" CHANGELOG.md)
[ -n "$notes" ] || die "CHANGELOG.md has no section $version" "rename the section Unreleased, and group its entries"

make lint
make binary
.venv/bin/pip install -q --no-deps --require-hashes -r requirements/release.txt
rm -f dist/edgeinfer-oci.tar
if command -v podman >/dev/null; then
    podman build -q --timestamp "$SOURCE_DATE_EPOCH" ${BASE:+--build-arg "BASE=$BASE"} -t "edgeinfer:$version" \
        -f docs/kubernetes/Containerfile . >&2
    podman save -q --format oci-archive -o dist/edgeinfer-oci.tar "edgeinfer:$version"
fi
.venv/bin/python build/publish.py ${EDGEINFER_RELEASE_KEY:+--key "$EDGEINFER_RELEASE_KEY"}
printf '%s\n' "$notes" >dist/NOTES.md
(cd dist/release && sha256sum --check --quiet SHA256SUMS)
[ -n "${EDGEINFER_RELEASE_KEY:-}" ] || say "unsigned: set EDGEINFER_RELEASE_KEY to sign"
say "dist/release contains edgeinfer $version; next: git tag v$version"
