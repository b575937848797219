#!/usr/bin/env bash
# sign.sh DIR: sign release.json and SHA256SUMS in DIR with the Ed25519 key (PEM) in RELEASE_KEY, without any program of ours, so
# that nothing built or installed sees the key. `build/publish.py --key FILE` does the same where the key is a file.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/debian.sh
key=$(mktemp)
trap 'rm -f "$key"' EXIT
printf '%s\n' "$RELEASE_KEY" >"$key"
public=$(openssl pkey -in "$key" -pubout -outform DER | tail -c 32 | od -An -v -tx1 | tr -d ' \n')
grep -q "\"$public\"" edgeinfer/data/release.toml ||
    die "the programs would not accept what this key signs" "name its public key in edgeinfer/data/release.toml: $public"
cd "$1"
sha256sum --check --quiet SHA256SUMS
for file in release.json SHA256SUMS; do openssl pkeyutl -sign -rawin -inkey "$key" -in $file -out $file.sig; done
