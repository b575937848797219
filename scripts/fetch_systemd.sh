#!/usr/bin/env bash
# fetch_systemd.sh FOLDER: make the root file system of a small Debian 13 with systemd 257, in which tests run the units of
# docs/systemd. Packages are unpacked, not configured: no account but root, no machine id. FOLDER appears by one rename.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/debian.sh"

root=$(realpath -m "${1:?usage: fetch_systemd.sh FOLDER}")
[ ! -d "$root" ] || exit 0
mkdir -p "$(dirname "$root")"
work=$(mktemp -d "$(dirname "$root")/.systemd.XXXXXX")
trap 'rm -rf "$work"' EXIT
open_suite "$work" trixie
say "downloading systemd and its dependencies"
apt-get "${apt[@]}" install --download-only -y base-files systemd bash coreutils util-linux libc-bin >/dev/null ||
    die "the download failed" "run it again"
unpack_debs "$work/apt/cache/archives" "$work/root"
ln -sf bash "$work/root/usr/bin/sh" # dash's package makes this link when it is configured
chmod 755 "$work/root"
mv "$work/root" "$root"
