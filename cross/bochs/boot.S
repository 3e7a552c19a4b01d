# All the firmware there is: reads a Linux kernel and an initramfs from the disk, gives the kernel its
# parameters and jumps to it. A BIOS, a boot loader and the kernel's own unpacking would add packages and time.
#
# run.sh includes this behind the values that it knows: KERNEL_CHUNKS and INITRD_CHUNKS are lengths on disk
# in chunks of 64 KiB, INITRD_LEN is in bytes, MEMORY is the end of memory, and the macro `setup_header` is
# what the kernel's file says of itself. Field offsets are those of the x86 boot protocol.

        .set    ROM, 0xf0000
        .set    PARAMS, 0x10000         # struct boot_params
        .set    PARAMS_LEN, 4096
        .set    TABLES, 0x20000         # two levels of page tables: the first GiB is where it is
        .set    KERNEL_AT, 0x1000000
        .set    INITRD_AT, 0x10000000   # behind all that the kernel clears
        .set    CHUNK, 128              # sectors

        .section .text
        .code16
start:  cli
        mov     %cs, %ax
        mov     %ax, %ds
        lgdtl   gdt_at - start
        mov     %cr0, %eax
        or      $1, %al
        mov     %eax, %cr0
        ljmpl   $0x08, $ROM + (flat - start)

        .code32
flat:   mov     $0x18, %eax
        mov     %eax, %ds
        mov     %eax, %es
        mov     %eax, %ss
        cld

        xor     %ebx, %ebx              # the sector
        mov     $KERNEL_AT, %edi
        mov     $KERNEL_CHUNKS, %esi
        mov     $ROM + (0f - start), %ebp
        jmp     read
0:      mov     $INITRD_AT, %edi
        mov     $INITRD_CHUNKS, %esi
        mov     $ROM + (0f - start), %ebp
        jmp     read

0:      mov     $ROM + (params - start), %esi
        mov     $PARAMS, %edi
        mov     $PARAMS_LEN / 4, %ecx
        rep movsl
        movb    $0xff, PARAMS + 0x210           # type_of_loader: one without a number
        movl    $INITRD_AT, PARAMS + 0x218      # ramdisk_image
        movl    $INITRD_LEN, PARAMS + 0x21c     # ramdisk_size
        movl    $ROM + (command - start), PARAMS + 0x228        # cmd_line_ptr

        movl    $TABLES + 4096 + 3, TABLES
        movl    $0x83, TABLES + 4096            # one page of 1 GiB
        mov     $TABLES, %eax
        mov     %eax, %cr3
        mov     $0x20, %eax                     # PAE
        mov     %eax, %cr4
        mov     $0xc0000080, %ecx               # EFER: long mode
        rdmsr
        or      $0x100, %eax
        wrmsr
        mov     %cr0, %eax
        or      $0x80000000, %eax               # paging
        mov     %eax, %cr0
        mov     $PARAMS, %esi
        ljmp    $0x10, $KERNEL_AT

# Reads esi chunks from sector ebx on to edi, moves both behind them and goes to ebp: there is no stack.
read:   mov     $0x1f2, %edx
        mov     $CHUNK, %al
        out     %al, %dx
        inc     %edx
        mov     %ebx, %eax
        out     %al, %dx
        inc     %edx
        mov     %ah, %al
        out     %al, %dx
        inc     %edx
        shr     $16, %eax
        out     %al, %dx
        inc     %edx
        mov     $0xe0, %al              # the first disk, by sector number
        out     %al, %dx
        inc     %edx
        mov     $0x20, %al              # read
        out     %al, %dx
        mov     %ebx, %esp
        add     $CHUNK, %ebx
sector: mov     $0x1f7, %edx
wait:   in      %dx, %al
        and     $0x89, %al              # busy, data, error
        cmp     $0x08, %al
        jne     wait
        mov     $0x1f0, %edx
        mov     $256, %ecx
        rep insw
        inc     %esp
        cmp     %ebx, %esp
        jne     sector
        dec     %esi
        jnz     read
        jmp     *%ebp

        .balign 8
gdt:    .quad   0
        .quad   0x00cf9a000000ffff      # 0x08: code of 32 bits
        .quad   0x00af9a000000ffff      # 0x10: code of 64 bits, as the kernel wants it
        .quad   0x00cf92000000ffff      # 0x18: data
gdt_at: .word   gdt_at - gdt - 1
        .long   ROM + (gdt - start)

command:
        # No looking for hardware that is not there, no measuring of clocks, no tests of ciphers, no names for
        # tracing, no defence against attacks that nobody makes: most of the time. A panic starts the machine
        # again, which is its end. Bochs counts the compacted area of registers (xsavec, xsaves) larger than
        # the kernel does, and a kernel that disagrees goes without AVX.
        .ascii  "console=ttyS0,115200 quiet loglevel=3 panic=-1 reboot=t nokaslr mitigations=off nosmp acpi=off "
        .ascii  "noapic nolapic pci=off tsc=reliable lpj=4000000 random.trust_cpu=on cryptomgr.notests "
        .asciz  "initcall_blacklist=trace_eval_init clearcpuid=xsaves,xsavec rdinit=/init"

        .balign 16
params: .org    params + 0x1e8
        .byte   2                       # e820_entries
        .org    params + 0x1f1
        setup_header
        .org    params + 0x2d0
        .quad   0, 0x9f000
        .long   1
        .quad   0x100000, MEMORY - 0x100000
        .long   1
        .org    params + PARAMS_LEN

        .org    start + 0xfff0          # where the processor begins
        .code16
        jmp     start
        .org    start + 0x10000
