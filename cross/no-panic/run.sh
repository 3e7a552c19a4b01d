#!/bin/bash
# Builds the library of this folder and links each entry point on its own; one from which a panic can be
# reached does not link, unless the panic is in code that is not ours and is listed here. Needs stable
# Rust, gcc and binutils on x86-64 Linux.
set -euo pipefail
cd "$(dirname "$0")"

# Functions outside the core that keep a panic the optimiser could not remove, and why it never comes:
#   dec2flt     text -> f64: indices into a buffer of fixed size, kept below its length by the algorithm
#   CharSearcher the encoding of the character it looks for, in four bytes, up to that encoding's length
#   slice::sort panics if an order contradicts itself; the order of integers does not
#   unicode_*   tables that are indexed by what a binary search of the same tables found
allowed='^<?core::num::dec2flt::|^<core::str::pattern::CharSearcher |^core::slice::sort::|^<char as unicode_(properties|script)::'
# What a panic goes through.
machinery='^__rustc::rust_begin_unwind|^core::panicking::|^core::(slice|str|option|result|cell)::.*(fail|panic)'

target=${CARGO_TARGET_DIR:-$PWD/target}
cargo build --release --target-dir "$target" --quiet
archive=$target/release/libk3_no_panic.a

# What may be called by name for copies and comparisons stands for nothing here: it only has to link.
printf '%s\n' '.globl _start, memcpy, memmove, memset, memcmp, bcmp' _start: memcpy: memmove: memset: memcmp: bcmp: \
    ' ret' '.section .note.GNU-stack' | gcc -c -x assembler -o "$target/k3-no-panic-start.o" -

link() {
    gcc -nostdlib -nostartfiles -static -no-pie -Wl,--gc-sections -Wl,--no-undefined -Wl,-e,_start -Wl,-u,"$1" \
        "${@:2}" -o "$target/k3-no-panic.elf" "$target/k3-no-panic-start.o" "$archive" 2> "$target/k3-no-panic.log"
}

# The functions of the linked program that can panic themselves, `caller <tab> what it calls`.
panicking() {
    objdump -d --no-show-raw-insn "$target/k3-no-panic.elf" |
        awk '/^[0-9a-f]+ <.*>:$/ { gsub(/[<>:]/, "", $2); caller = $2 }
            $2 ~ /^(call|j)/ && match($0, /<[^>+]*>$/) { print caller "\t" substr($0, RSTART + 1, RLENGTH - 2) }' |
        sort -u | c++filt | sed -E 's/\[[0-9a-f]{6,16}\]//g' |
        awk -F '\t' -v machinery="$machinery" '$2 ~ machinery && $1 !~ machinery'
}

mapfile -t entries < <(grep -oE 'fn entry_[a-z0-9_]+' src/lib.rs | cut -d ' ' -f 2)
[ ${#entries[@]} -gt 0 ] || { echo "no entry points found" >&2; exit 1; }
failed=0 excused=0
for entry in "${entries[@]}"; do
    if link "$entry"; then
        nm "$target/k3-no-panic.elf" | grep -q " $entry$" || { echo "$entry was not linked" >&2; exit 1; }
        continue
    fi
    grep -q k3_panic_is_reachable "$target/k3-no-panic.log" || { cat "$target/k3-no-panic.log" >&2; exit 1; }
    link "$entry" -Wl,--defsym,k3_panic_is_reachable=0
    found=$(panicking)
    [ -n "$found" ] || { echo "$entry: a panic can be reached, and nobody calls it" >&2; exit 1; }
    ours=$(awk -F '\t' -v allowed="$allowed" '$1 !~ allowed' <<< "$found")
    if [ -n "$ours" ]; then
        failed=$((failed + 1))
        echo "-- $entry can panic in" >&2
        sed 's/\t/, by /; s/^/   /' <<< "$ours" >&2
    else
        excused=$((excused + 1))
    fi
done
# The check itself: what does panic must neither link nor be excused.
if link control_panics; then
    echo "the control was linked: this proof proves nothing" >&2
    exit 1
fi
link control_panics -Wl,--defsym,k3_panic_is_reachable=0
panicking | grep -q ^control_panics || { echo "the control was not found: this proof proves nothing" >&2; exit 1; }

[ "$failed" -eq 0 ] || exit 1
echo "${#entries[@]} entry points: no panic can be reached from $((${#entries[@]} - excused)), and from $excused only listed ones"
