/* stack ARCHIVE PROMPT IDS: how much stack each call takes, and whether that is what k3_embed.h says.
 * The calls run on a stack of their own that is painted before. */
#include "k3_embed.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

enum { ROOM = 1 << 20, PAINT = 0xa5 };

static _Alignas(64) uint8_t buffer[64 << 20], stack[ROOM];
static size_t archive_len, ids_len, needed, counts[2];
static uint32_t ids[1 << 12];
static uint64_t bits;
static const uint8_t *prompt;
static int32_t fault;

static void ask(void) {
    fault = k3_memory_needed(buffer, archive_len, ids_len, strlen((const char *)prompt), &needed);
}

static void generate(void) {
    uint8_t *memory = buffer + (archive_len + 63) / 64 * 64;
    fault = k3_generate(buffer, archive_len, memory, needed, prompt, strlen((const char *)prompt), ids, ids_len,
                        counts, &bits);
}

/* Whether `call` succeeds within K3_STACK bytes of stack. */
static int measure(const char *name, void (*call)(void)) {
    ucontext_t here, there;
    memset(stack, PAINT, ROOM);
    if (getcontext(&there) != 0)
        return 0;
    there.uc_stack.ss_sp = stack;
    there.uc_stack.ss_size = ROOM;
    there.uc_link = &here;
    makecontext(&there, call, 0);
    if (swapcontext(&here, &there) != 0)
        return 0;
    size_t untouched = 0;
    while (untouched < ROOM && stack[untouched] == PAINT)
        untouched++;
    size_t used = ROOM - untouched;
    printf("%s: %zu bytes of stack of %d, fault %d\n", name, used, (int)K3_STACK, (int)fault);
    return fault == K3_OK && used <= K3_STACK;
}

int main(int argc, char **argv) {
    FILE *file = argc == 4 ? fopen(argv[1], "rb") : NULL;
    if (!file) {
        fprintf(stderr, "usage: %s ARCHIVE PROMPT IDS\n", argv[0]);
        return 2;
    }
    archive_len = fread(buffer, 1, sizeof buffer / 2, file);
    fclose(file);
    prompt = (const uint8_t *)argv[2];
    ids_len = strtoul(argv[3], NULL, 10);
    if (ids_len > sizeof ids / sizeof *ids)
        return 2;
    if (!measure("k3_memory_needed", ask) || needed > sizeof buffer / 2 || !measure("k3_generate", generate))
        return 1;
    return 0;
}
