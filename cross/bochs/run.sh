#!/bin/bash
# run.sh PROGRAM [ARGUMENT...]: the runner of x86-64 programs that ask for AVX-512. Boots a machine that has it,
# in Bochs, with PROGRAM (linked statically) and a first process as all there is in it; prints what the program
# prints and ends as it ends, or with 124 if it does not end.
#
# K3_BOCHS_DIR is what prepare.sh has filled. K3_BOCHS_SECONDS bounds the emulator's computing time.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

memory=512
machine=$(mktemp -d "$K3_BOCHS_DIR/machine.XXXXXX")
trap 'rm -rf "$machine"' EXIT

# All there is: the program, the first process, and what that one starts. A folder for temporary files.
root=$machine/root
mkdir -p "$root/tmp"
strip --strip-debug -o "$root/program" "$1"
cp "$K3_BOCHS_DIR/init" "$root/init"
shift
{
    env | grep -E '^(K3_TEST_BACKEND|RUST_TEST_[A-Z]*)=' | tr '\n' '\0' || true
    printf '\0'
    printf '%s\0' /program "$@"
} > "$root/command"
(cd "$root" && find . | cpio --quiet -o -H newc) > "$machine/initramfs"

# The disk: the kernel, and behind it the initramfs, in chunks of 64 KiB.
pad() { truncate -s "%$((1 << 16))" "$1" && echo $(($(stat -c %s "$1") >> 16)); }
initrd_len=$(stat -c %s "$machine/initramfs")
cp "$K3_BOCHS_DIR/kernel" "$machine/disk"
kernel_chunks=$(pad "$machine/disk")
initrd_chunks=$(pad "$machine/initramfs")
cat "$machine/initramfs" >> "$machine/disk"
# 16 heads and 63 sectors a track.
cylinders=$(($(stat -c %s "$machine/disk") / 516096 + 1))
truncate -s $((cylinders * 516096)) "$machine/disk"

cat > "$machine/boot.S" <<S
        .set    KERNEL_CHUNKS, $kernel_chunks
        .set    INITRD_CHUNKS, $initrd_chunks
        .set    INITRD_LEN, $initrd_len
        .set    MEMORY, $memory << 20
        .macro  setup_header
        .incbin "$K3_BOCHS_DIR/header"
        .endm
        .include "$here/boot.S"
S
as --32 -o "$machine/boot.o" "$machine/boot.S"
objcopy -O binary -j .text "$machine/boot.o" "$machine/rom"

cat > "$machine/bochsrc" <<RC
config_interface: textconfig
display_library: term
plugin_ctrl: unmapped=1, biosdev=0, speaker=0, extfpuirq=0, parallel=0, gameport=0, iodebug=0
cpu: model=corei7_skylake_x, count=1, ips=400000000, reset_on_triple_fault=1
memory: guest=$memory, host=$memory
romimage: file=rom
vgaromimage: file=/usr/share/vgabios/vgabios.bin
pci: enabled=0
clock: sync=none, time0=946684800
com1: enabled=1, mode=file, dev=serial
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=disk, mode=flat, path=disk, cylinders=$cylinders, heads=16, spt=63
log: log
panic: action=fatal
error: action=ignore
info: action=ignore
debug: action=ignore
RC
# Debian's Bochs has a debugger, which stops where the machine starts again: the init's last act, or a panic's.
printf 'continue\nquit\n' > "$machine/debugger"
# A machine that waits computes too, so a bound of computing time ends what hangs, on a busy host as well.
(
    cd "$machine"
    ulimit -t "${K3_BOCHS_SECONDS:-3600}"
    TERM=vt100 exec bochs-bin -q -f bochsrc -rc debugger
) > "$machine/screen" 2>&1 < /dev/null || true

touch "$machine/serial"
said=$(tr -d '\r' < "$machine/serial")
code=$(sed -n 's/^k3: exit \([0-9]*\)$/\1/p' <<< "$said")
sed '/^k3: exit [0-9]*$/,$d' <<< "$said"
if [ -z "$code" ]; then
    echo "the machine has not said how the program ended; the emulator's last words:" >&2
    tail -n 5 "$machine/screen" "$machine/log" >&2
    code=124
fi
exit "$code"
