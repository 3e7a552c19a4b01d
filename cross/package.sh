#!/bin/bash
# What would be published: the three crates are packed, and what they need at build time and by law must
# be inside. Nothing is uploaded. Without a network, cargo's own copy of the registry's index is used.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-$PWD/target}
rm -rf "$target/package"
pack() { cargo package --workspace --exclude k3-tests --no-verify --allow-dirty --quiet "$@"; }
pack || pack --offline

version=$(cargo pkgid -p k3-core | grep -oE '[0-9.]+$')
for name in k3-core k3-platform k3-bin; do
    list=$(tar -tzf "$target/package/$name-$version.crate")
    for file in README.md LICENSE Cargo.toml Cargo.lock; do
        grep -qx "$name-$version/$file" <<< "$list" || { echo "$name lacks $file" >&2; exit 1; }
    done
    echo "$name $version: $(wc -l <<< "$list") files"
done
# The command embeds the demo, which lies in fixtures/ and comes by a link.
list=$(tar -tzf "$target/package/k3-bin-$version.crate")
for path in fixtures/demo/{config.json,tiktoken.model,tokenizer_config.json,model.safetensors.index.json} \
    fixtures/demo/*.safetensors; do
    grep -qx "k3-bin-$version/demo/$(basename "$path")" <<< "$list" || { echo "k3-bin lacks $path" >&2; exit 1; }
done
# The core's example includes this file.
tar -tzf "$target/package/k3-core-$version.crate" | grep -qx "k3-core-$version/tests/tiny/mod.rs"
