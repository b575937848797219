#!/usr/bin/env bash
# reproduce.sh: build this commit twice and compare every byte of the release, packages and wheel included; diffoscope shows
# differences. The second build has another folder, home, umask, language and time zone, a new virtual environment, newly compiled
# C++ of our own, and, if root runs this, another user. Both builds use llama.cpp's wheel, its Vulkan backend and libmtmd from the
# build cache. Not compared: release.json and SHA256SUMS, which contain the time, and the OCI archive, which podman makes.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/debian.sh

readonly WHO=65534 # a number that needs no entry in /etc/passwd
[ -z "$(git status --porcelain)" ] || die "there are uncommitted changes" "commit them: the second build uses a clone"
cache=${EDGEINFER_BUILD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/edgeinfer-build}
make packages

place=$(mktemp -d /var/tmp/edgeinfer-reproduce.XXXXXX)
trap 'rm -rf "$place"' EXIT
another=$place/another-folder
git clone -q . "$another"
mkdir -p "$place/cache"
for part in wheels backends mtmd criu; do cp -a --reflink=auto "$cache/$part" "$place/cache/"; done
[ ! -d dist/backends ] || { mkdir "$another/dist" && cp -a dist/backends "$another/dist/"; } # made by `make cuda`; also an input of both builds
as=(env)
if [ "$(id -u)" = 0 ]; then
    chown -R $WHO:$WHO "$place" && chmod 755 "$place"
    as=(setpriv --reuid=$WHO --regid=$WHO --clear-groups env)
fi
(cd "$another" && umask 077 &&
    "${as[@]}" HOME="$place" EDGEINFER_BUILD_CACHE="$place/cache" LC_ALL=C TZ=Asia/Tokyo make packages)

[ -x "$cache/diffoscope/bin/diffoscope" ] ||
    { python3 -m venv "$cache/diffoscope" && "$cache/diffoscope/bin/pip" install -q diffoscope==332; }
different=()
while read -r file; do
    cmp "dist/$file" "$another/dist/$file" && "$cache/diffoscope/bin/diffoscope" "dist/$file" "$another/dist/$file" ||
        different+=("$file")
done < <(for at in dist "$another/dist"; do find "$at" -type f ! -name release.json ! -name SHA256SUMS -printf '%P\n'; done | sort -u)
if [ ${#different[@]} = 0 ]; then
    say "equal in every byte: $(cut -c67- "$another"/dist/{,release/}SHA256SUMS | grep -v '^release.json$' | sort -u | tr '\n' ' ')"
    say "$(grep ' edgeinfer$' dist/SHA256SUMS)"
    exit
fi
say "different: ${different[*]}"
"$cache/diffoscope/bin/diffoscope" --text reproduce.txt work/tree "$another/work/tree" || true
die "two builds of one commit differ" "reproduce.txt shows the differences in the packed folder"
