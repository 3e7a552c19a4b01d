#!/bin/bash
# Builds, links, inspects and runs the proof of this folder. Needs stable Rust and gcc on x86-64 Linux.
set -euo pipefail
cd "$(dirname "$0")"

target=${CARGO_TARGET_DIR:-$PWD/target}
cargo build --release --target-dir "$target" --quiet
program=$target/k3-no-std.elf

# Nothing but the archive: whatever the core would need from outside is an error here.
gcc -nostdlib -nostartfiles -static -no-pie -Wl,--gc-sections -Wl,--no-undefined -Wl,-e,_start -Wl,-u,k3_main \
    -o "$program" "$target/release/libk3_no_std.a"

if nm "$program" | grep -E 'rust_alloc|rust_dealloc|rust_realloc|malloc|calloc|realloc|mmap|brk'; then
    echo "the linked program has symbols of an allocator" >&2
    exit 1
fi
[ -z "$(nm -u "$program")" ] || { echo "the linked program has undefined symbols" >&2; exit 1; }
symbols=$(nm "$program" | wc -l)

"$program" || { echo "step $? of k3_main went wrong" >&2; exit 1; }
echo "k3-core linked with nothing: $symbols symbols, none of an allocator, and it runs"
