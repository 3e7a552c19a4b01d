#!/bin/bash
# run.sh [TARGET...]: the core's tests on other processors, under emulation, without containers.
# Without arguments: those that .ci/run asks for.
#
# Works on Debian 12 for amd64, as root, with rustup's stable cargo; see README.md beside this file.
# K3_CROSS_DIR keeps the unpacked compiler and the builds between runs.
set -euo pipefail
cd "$(dirname "$0")/.."

all=(s390x aarch64 i686 avx512 bare-metal)
[ $# -gt 0 ] && all=("$@")
dir=${K3_CROSS_DIR:-$PWD/target/cross}
export DEBIAN_FRONTEND=noninteractive

packages=()
for target in "${all[@]}"; do
    case $target in
    s390x) packages+=(qemu-user gcc-s390x-linux-gnu libc6-dev-s390x-cross) ;;
    aarch64) packages+=(qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross) ;;
    i686) packages+=(qemu-user gcc-i686-linux-gnu libc6-dev-i386-cross) ;;
    armv7) packages+=(qemu-user gcc-arm-linux-gnueabihf libc6-dev-armhf-cross) ;;
    riscv64) packages+=(qemu-user gcc-riscv64-linux-gnu libc6-dev-riscv64-cross) ;;
    windows) packages+=(gcc-mingw-w64-x86-64-win32 wine64) ;;
    wasm32)
        packages+=(wasi-libc)
        # Whatever Node is there will do.
        command -v node >/dev/null || packages+=(nodejs)
        ;;
    avx512) packages+=(gcc libc6-dev binutils bochs bochs-term vgabios cpio lz4) ;;
    bare-metal) ;;
    *)
        echo "no such target: $target (known: s390x aarch64 i686 avx512 armv7 riscv64 windows wasm32 bare-metal)" >&2
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

# wasm's linker is the one that rustup's Rust brings.
lld=$(rustc --print sysroot)/lib/rustlib/x86_64-unknown-linux-gnu/bin/rust-lld

# For this script's builds only: an ordinary build must not meet these variables, nor share a folder.
export RUSTC=$dir/rust/rustc RUSTDOC=$dir/rust/rustdoc RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR=$dir/target
unset RUSTFLAGS RUSTDOCFLAGS

export CARGO_TARGET_S390X_UNKNOWN_LINUX_GNU_LINKER=s390x-linux-gnu-gcc
export CARGO_TARGET_S390X_UNKNOWN_LINUX_GNU_RUNNER="qemu-s390x -L /usr/s390x-linux-gnu"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
export CARGO_TARGET_I686_UNKNOWN_LINUX_GNU_LINKER=i686-linux-gnu-gcc
export CARGO_TARGET_I686_UNKNOWN_LINUX_GNU_RUNNER="qemu-i386 -L /usr/i686-linux-gnu"
export CARGO_TARGET_ARMV7_UNKNOWN_LINUX_GNUEABIHF_LINKER=arm-linux-gnueabihf-gcc
export CARGO_TARGET_ARMV7_UNKNOWN_LINUX_GNUEABIHF_RUNNER="qemu-arm -L /usr/arm-linux-gnueabihf"
export CARGO_TARGET_RISCV64GC_UNKNOWN_LINUX_GNU_LINKER=riscv64-linux-gnu-gcc
export CARGO_TARGET_RISCV64GC_UNKNOWN_LINUX_GNU_RUNNER="qemu-riscv64 -L /usr/riscv64-linux-gnu"
export CARGO_TARGET_X86_64_PC_WINDOWS_GNU_LINKER=x86_64-w64-mingw32-gcc
export CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER=$PWD/cross/windows/run.sh
export K3_WINE_DIR=$dir/wine
export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=$PWD/cross/bochs/run.sh
export K3_BOCHS_DIR=$dir/bochs
# Debian's C library is the one to link. It lacks the joining of threads, which is never called where
# there are none: such a call would trap.
export CARGO_TARGET_WASM32_WASIP1_LINKER=$lld
export CARGO_TARGET_WASM32_WASIP1_RUSTFLAGS="-Clink-self-contained=no -L/usr/lib/wasm32-wasi
    -Clink-arg=/usr/lib/wasm32-wasi/crt1-command.o -Clink-arg=--unresolved-symbols=ignore-all"
# Node 20 ends in "unreachable code" if the memory of a program grows in the middle of its collector's marking.
export CARGO_TARGET_WASM32_WASIP1_RUNNER="node --no-warnings --no-incremental-marking $PWD/cross/wasm/run.mjs"

# The dev profile: overflow checks and debug assertions, and the core itself is optimised.
# Examples of the documentation are left to the host: each would be a program of its own.
tests() { cargo "-Zbuild-std=$1" test --quiet -p k3-core --lib --tests --target "$2"; }
# The compiler of this machine, whose target it is; where the program runs there are no libraries to load.
avx512() {
    env -u RUSTC -u RUSTDOC -u RUSTC_BOOTSTRAP CARGO_TARGET_DIR="$dir/host" RUSTFLAGS=-Ctarget-feature=+crt-static \
        K3_TEST_BACKEND=avx512 cargo test --quiet -p k3-core --target x86_64-unknown-linux-gnu "$@"
}

for target in "${all[@]}"; do
    start=$SECONDS
    echo "-- $target"
    case $target in
    bare-metal)
        # Targets for which there is no std at all; the first has 32-bit pointers, the second SIMD.
        for bare in thumbv7em-none-eabihf x86_64-unknown-none; do
            cargo -Zbuild-std=core build --quiet -p k3-core --target "$bare"
            echo "built for $bare"
        done
        ;;
    armv7) tests std armv7-unknown-linux-gnueabihf ;;
    riscv64) tests std riscv64gc-unknown-linux-gnu ;;
    windows)
        cross/windows/prepare.sh "$K3_WINE_DIR"
        tests std x86_64-pc-windows-gnu
        ;;
    avx512)
        cross/bochs/prepare.sh "$K3_BOCHS_DIR"
        avx512 --test golden
        avx512 --lib backend::
        ;;
    # A panic ends the program there, so the first test that fails is the last one that runs.
    wasm32) tests std,panic_abort wasm32-wasip1 ;;
    *) tests std "$target-unknown-linux-gnu" ;;
    esac
    echo "-- $target: $((SECONDS - start)) s"
done
