#!/usr/bin/env bash
# reproduce.sh: build this commit twice and compare every byte of what is published; diffoscope shows a difference. The second
# build has another folder, home, umask, language and time zone, an environment and our own C++ made anew, and where root calls,
# another user. What compiles for minutes is an input of both, from the build cache: llama.cpp's wheel, its Vulkan backend, libmtmd.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/debian.sh

readonly WHO=65534 # a number: no user is added to this machine
[ -z "$(git status --porcelain)" ] || die "there are uncommitted changes" "commit them: the second build is of a clone"
cache=${EDGEINFER_BUILD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/edgeinfer-build}
make binary

place=$(mktemp -d /var/tmp/edgeinfer-reproduce.XXXXXX)
trap 'rm -rf "$place"' EXIT
git clone -q . "$place/another-folder"
mkdir -p "$place/cache"
for part in wheels backends mtmd criu; do cp -a --reflink=auto "$cache/$part" "$place/cache/"; done
as=(env)
if [ "$(id -u)" = 0 ]; then
    chown -R $WHO:$WHO "$place" && chmod 755 "$place"
    as=(setpriv --reuid=$WHO --regid=$WHO --clear-groups env)
fi
(cd "$place/another-folder" && umask 077 &&
    "${as[@]}" HOME="$place" EDGEINFER_BUILD_CACHE="$place/cache" LC_ALL=C TZ=Asia/Tokyo make binary)

difference=0
for file in $(cut -c67- "$place/another-folder/dist/SHA256SUMS"); do
    cmp "dist/$file" "$place/another-folder/dist/$file" || difference=1
done
if [ $difference = 0 ]; then
    say "equal: $(grep ' edgeinfer$' dist/SHA256SUMS)"
    exit
fi
[ -x "$cache/diffoscope/bin/diffoscope" ] ||
    { python3 -m venv "$cache/diffoscope" && "$cache/diffoscope/bin/pip" install -q diffoscope==332; }
"$cache/diffoscope/bin/diffoscope" --text reproduce.txt work/tree "$place/another-folder/work/tree" || true
die "two builds of one commit differ" "reproduce.txt has what differs in the packed folder"
