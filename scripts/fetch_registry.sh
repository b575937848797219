#!/usr/bin/env bash
# fetch_registry.sh FILE: fetch Debian's docker-registry, from which some tests pull. Only FILE is written; nothing is installed.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/debian.sh"

file=$(realpath -m "${1:?usage: fetch_registry.sh FILE}")
if [ -x "$file" ]; then exit; fi
mkdir -p "$(dirname "$file")"
work=$(mktemp -d "$(dirname "$file")/.registry.XXXXXX")
trap 'rm -rf "$work"' EXIT
open_suite "$work" "$(. /etc/os-release && echo "$VERSION_CODENAME")"
say "downloading docker-registry"
(cd "$work" && apt-get "${apt[@]}" download docker-registry >/dev/null) || die "the download failed" "run it again"
unpack_debs "$work" "$work/root"
mv "$work/root/usr/bin/docker-registry" "$file"
