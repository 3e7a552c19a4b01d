#!/bin/bash
# run.sh [c] [wasm]: the core embedded in a C program and in a wasm module, which must give the demo's
# ids and each other's bits; without arguments both. With K3 naming a built `k3`, its ids are compared too.
#
# c needs stable Rust and gcc on x86-64 Linux. wasm takes the compiler that ../run.sh unpacks, since
# rustup may be unable to add targets, and Node.
set -euo pipefail
cd "$(dirname "$0")"

ways=("$@")
[ $# -gt 0 ] || ways=(c wasm)
target=${CARGO_TARGET_DIR:-$PWD/target}
mkdir -p "$target"
export DEBIAN_FRONTEND=noninteractive

archive=$target/demo.tar
(cd ../../fixtures/demo && tar --format=ustar -cf "$archive" config.json tiktoken.model ./*.safetensors)
prompt="In the beginning"
ids=28
# Of the logits, on any machine: a hash that differs is a broken promise and not a number to update.
golden="bits 2d895b5806cac97f"

for way in "${ways[@]}"; do
    case $way in
    c)
        cargo build --release --quiet --target-dir "$target"
        gcc -std=c11 -Wall -Wextra -Werror -O2 -Iinclude -o "$target/embed-c" main.c "$target/release/libk3_embed.a"
        "$target/embed-c" "$archive" "$prompt" "$ids" > "$target/c.txt"
        gcc -std=gnu11 -Wall -Wextra -Werror -O2 -Iinclude -o "$target/embed-stack" stack.c \
            "$target/release/libk3_embed.a"
        "$target/embed-stack" "$archive" "$prompt" "$ids"
        ;;
    wasm)
        if ! command -v node >/dev/null; then
            apt-get update -qq
            apt-get install -y -qq --no-install-recommends nodejs >/dev/null
        fi
        cross=${K3_CROSS_DIR:-$(cd ../.. && pwd)/target/cross}
        rust=$cross/rust
        if [ ! -x "$rust/rustc" ]; then
            apt-get update -qq
            ../toolchain.sh "$rust"
        fi
        lld=$(rustc --print sysroot)/lib/rustlib/x86_64-unknown-linux-gnu/bin/rust-lld
        RUSTC=$rust/rustc RUSTC_BOOTSTRAP=1 CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER=$lld \
            CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_RUSTFLAGS="-Clink-arg=--export=__heap_base" \
            cargo -Zbuild-std=core build --release --quiet --target wasm32-unknown-unknown --target-dir "$cross/target"
        module=$cross/target/wasm32-unknown-unknown/release/k3_embed.wasm
        node main.mjs "$module" "$archive" "$prompt" "$ids" > "$target/wasm.txt"
        ;;
    *)
        echo "no such way: $way (known: c wasm)" >&2
        exit 2
        ;;
    esac
done

# What the project's own reference says of this prompt, then what the command does.
numbers() { tr -d ' \n' | grep -oE "\"$1\":\[[0-9,]*" | head -n 1 | cut -d '[' -f 2 | tr ',' ' '; }
{
    echo "prompt $(numbers ids < ../../fixtures/demo/expected.json)"
    echo "generated $(numbers greedy_ids < ../../fixtures/demo/expected.json)"
} > "$target/expected.txt"
if [ -n "${K3:-}" ]; then
    "$K3" run --quiet --json --ignore-eos --prompt "$prompt" --max-tokens 24 > "$target/k3.json"
    {
        echo "prompt $(numbers prompt_ids < "$target/k3.json")"
        echo "generated $(numbers generated_ids < "$target/k3.json")"
    } > "$target/k3.txt"
    diff "$target/expected.txt" "$target/k3.txt"
fi
echo "$golden" >> "$target/expected.txt"
for way in "${ways[@]}"; do
    diff "$target/expected.txt" "$target/$way.txt"
    echo "$way: the same ids, the same bits"
done
