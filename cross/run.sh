#!/bin/bash
# run.sh [TARGET...]: the core's tests on other processors, under emulation, without containers.
#
# Works on Debian 12 for amd64, as root, with rustup's stable cargo; see README.md beside this file.
# K3_CROSS_DIR keeps the unpacked compiler and the builds between runs.
set -euo pipefail
cd "$(dirname "$0")/.."

all=(s390x aarch64 i686 bare-metal)
[ $# -gt 0 ] && all=("$@")
dir=${K3_CROSS_DIR:-$PWD/target/cross}
export DEBIAN_FRONTEND=noninteractive

packages=(qemu-user)
for target in "${all[@]}"; do
    case $target in
    s390x) packages+=(gcc-s390x-linux-gnu libc6-dev-s390x-cross) ;;
    aarch64) packages+=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross) ;;
    i686) packages+=(gcc-i686-linux-gnu libc6-dev-i386-cross) ;;
    bare-metal) ;;
    *)
        echo "no such target: $target (known: s390x aarch64 i686 bare-metal)" >&2
        exit 2
        ;;
    esac
done
missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ] || [ ! -x "$dir/rust/rustc" ]; then
    apt-get update -qq
fi
if [ ${#missing[@]} -gt 0 ]; then
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
[ -x "$dir/rust/rustc" ] || cross/toolchain.sh "$dir/rust"

# For this script's builds only: an ordinary build must not meet these variables, nor share a folder.
export RUSTC=$dir/rust/rustc RUSTDOC=$dir/rust/rustdoc RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR=$dir/target
unset RUSTFLAGS RUSTDOCFLAGS

export CARGO_TARGET_S390X_UNKNOWN_LINUX_GNU_LINKER=s390x-linux-gnu-gcc
export CARGO_TARGET_S390X_UNKNOWN_LINUX_GNU_RUNNER="qemu-s390x -L /usr/s390x-linux-gnu"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
export CARGO_TARGET_I686_UNKNOWN_LINUX_GNU_LINKER=i686-linux-gnu-gcc
export CARGO_TARGET_I686_UNKNOWN_LINUX_GNU_RUNNER="qemu-i386 -L /usr/i686-linux-gnu"

for target in "${all[@]}"; do
    start=$SECONDS
    echo "-- $target"
    if [ "$target" = bare-metal ]; then
        # Targets for which there is no std at all; the first has 32-bit pointers, the second SIMD.
        for bare in thumbv7em-none-eabihf x86_64-unknown-none; do
            cargo -Zbuild-std=core build --quiet -p k3-core --target "$bare"
            echo "built for $bare"
        done
    else
        # The dev profile: overflow checks and debug assertions, and the core itself is optimised.
        # Examples of the documentation are left to the host: each would be a program of its own.
        cargo -Zbuild-std test --quiet -p k3-core --lib --tests --target "$target-unknown-linux-gnu"
    fi
    echo "-- $target: $((SECONDS - start)) s"
done
