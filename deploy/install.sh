#!/bin/sh
# Installs fornax for this user, or below $PREFIX:
#   sh install.sh FROM
# FROM is the address or the folder that holds the archives and SHA256SUMS of a release. Nothing is unpacked whose checksum is
# not in that list.
set -eu

fail() {
    echo "error: $1" >&2
    exit 1
}

[ $# -eq 1 ] || fail "where from? sh install.sh https://host/folder, or a folder"
from=${1%/}
prefix=${PREFIX:-$HOME/.local}

[ "$(uname -s)" = Linux ] || fail "there is a binary for Linux alone; build it from source"
arch=$(uname -m)
archive=fornax-$arch-linux.tar.gz

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

fetch() {
    case $from in
    https://* | http://127.0.0.1* | http://localhost*)
        if command -v curl >/dev/null; then
            curl --fail --silent --show-error --location --output "$work/$1" "$from/$1"
        else
            wget --quiet --output-document "$work/$1" "$from/$1"
        fi
        ;;
    *://*) fail "$from is not https" ;;
    *) cp "$from/$1" "$work/$1" ;;
    esac || fail "cannot get $1 from $from"
}

fetch SHA256SUMS
fetch "$archive"
grep "^[0-9a-f]\{64\}  $archive\$" "$work/SHA256SUMS" >"$work/sum" || fail "SHA256SUMS has no checksum of $archive"
(cd "$work" && sha256sum --check --status sum) || fail "$archive has another checksum than SHA256SUMS says; nothing was installed"

tar -xzf "$work/$archive" -C "$work"
mkdir -p "$prefix/bin"
# Into place in one step: a fornax that runs is not cut short.
install -m 755 "$work"/fornax-*-linux/fornax "$prefix/bin/.fornax.new"
mv "$prefix/bin/.fornax.new" "$prefix/bin/fornax"
"$prefix/bin/fornax" --version | head -1
case :$PATH: in
*:"$prefix/bin":*) ;;
*) echo "$prefix/bin is not on your PATH; add it" ;;
esac
