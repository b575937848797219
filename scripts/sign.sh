#!/usr/bin/env bash
# sign.sh DIR: sign release.json and SHA256SUMS in DIR with the Ed25519 key (PEM) in the variable RELEASE_KEY. Only OpenSSL sees
# the key, no program of this project. `build/publish.py --key FILE` does the same with a key in a file.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/debian.sh
key=$(mktemp)
trap 'rm -f "$key"' EXIT
printf '%s\n' "$RELEASE_KEY" >"$key"
public=$(openssl pkey -in "$key" -pubout -outform DER | tail -c 32 | od -An -v -tx1 | tr -d ' \n')
grep -q "\"$public\"" edgeinfer/data/release.toml ||
    die "the shipped programs would not accept signatures by this key" "add its public key to edgeinfer/data/release.toml: $public"
cd "$1"
sha256sum --check --quiet SHA256SUMS
for file in release.json SHA256SUMS; do openssl pkeyutl -sign -rawin -inkey "$key" -in $file -out $file.sig; done
