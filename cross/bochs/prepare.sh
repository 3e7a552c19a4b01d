#!/bin/bash
# prepare.sh DIR: what every machine of run.sh is made of: Debian's smallest kernel, unpacked from its package
# and not installed, and the first process.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
cd "$1"
[ -e init ] && [ -e kernel ] && [ init -nt "$here/init.c" ] && [ init -nt "$here/prepare.sh" ] && exit 0

if [ ! -e vmlinuz ]; then
    apt-get update -qq
    rm -rf package
    mkdir package
    (
        cd package
        name=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image-/ { print $2; exit }')
        apt-get download -q "$name"
        dpkg --fsys-tarfile ./*.deb | tar -x --wildcards './boot/vmlinuz-*'
    )
    mv package/boot/vmlinuz-* vmlinuz
    rm -r package
fi

# A packed kernel holds its ELF file in LZ4's legacy format, four bytes of length behind it. Here it is
# unpacked in a moment, in the machine in half a minute.
number() { od -An "-tu$2" -j "$1" -N "$2" vmlinuz | tr -d ' '; }
start=$((($(number 0x1f1 1) + 1) * 512 + $(number 0x248 4)))
[ "$(number $start 4)" = $((0x184c2102)) ] || { echo "the kernel is not packed with LZ4" >&2; exit 1; }
tail -c +$((start + 1)) vmlinuz > packed
truncate -s $(($(number 0x24c 4) - 4)) packed
lz4 -dcq packed > kernel.elf
objcopy -O binary kernel.elf kernel
rm packed kernel.elf
# The setup header says itself where it ends.
tail -c +$((0x1f1 + 1)) vmlinuz > header
truncate -s $((0x202 + $(number 0x201 1) - 0x1f1)) header

gcc -std=gnu11 -O1 -Wall -Wextra -Werror -static -s -o init "$here/init.c"
