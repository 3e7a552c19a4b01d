#!/bin/bash
# prepare.sh DIR: what Debian's Wine 8 lacks for a Rust program. The standard library takes random numbers
# from bcryptprimitives.dll; without it a program ends at once, with code 53 and no word.
set -euo pipefail
mkdir -p "$1"
[ -e "$1/bcryptprimitives.dll" ] && exit 0
cat > "$1/random.c" <<'C'
#include <stddef.h>

/* RtlGenRandom, under the name by which advapi32 exports it. */
unsigned char __stdcall SystemFunction036(void *to, unsigned long len);

__declspec(dllexport) int __stdcall ProcessPrng(unsigned char *to, size_t len) {
    while (len > 0) {
        unsigned long part = len > 1UL << 24 ? 1UL << 24 : (unsigned long)len;
        if (!SystemFunction036(to, part))
            return 0;
        to += part;
        len -= part;
    }
    return 1;
}
C
x86_64-w64-mingw32-gcc -O1 -shared -o "$1/bcryptprimitives.dll" "$1/random.c" -ladvapi32
