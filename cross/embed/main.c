/* main ARCHIVE PROMPT IDS: prints the prompt's ids, the ids generated, and the hash of the logits.
 * Everything lies in one static buffer. */
#include "k3_embed.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Alignas(64) uint8_t buffer[64 << 20];

static void line(const char *name, const uint32_t *ids, size_t count) {
    printf("%s", name);
    for (size_t i = 0; i < count; i++)
        printf(" %u", (unsigned)ids[i]);
    printf("\n");
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: %s ARCHIVE PROMPT IDS\n", argv[0]);
        return 2;
    }
    const uint8_t *prompt = (const uint8_t *)argv[2];
    size_t prompt_len = strlen(argv[2]), ids_len = strtoul(argv[3], NULL, 10);

    FILE *file = fopen(argv[1], "rb");
    if (!file) {
        perror(argv[1]);
        return 2;
    }
    size_t archive_len = fread(buffer, 1, sizeof buffer, file);
    int cut = fgetc(file) != EOF;
    fclose(file);
    if (cut) {
        fprintf(stderr, "%s: more than the %zu bytes there are\n", argv[1], sizeof buffer);
        return 1;
    }

    /* Behind the archive, on a border of 64: the ids, then the memory. */
    size_t at = archive_len + (64 - archive_len % 64) % 64, left = sizeof buffer - at;
    if (ids_len > left / sizeof(uint32_t)) {
        fprintf(stderr, "no room for %zu ids\n", ids_len);
        return 1;
    }
    size_t ids_bytes = ids_len * sizeof(uint32_t);
    ids_bytes += (64 - ids_bytes % 64) % 64;
    size_t needed = 0;
    int32_t fault = k3_memory_needed(buffer, archive_len, ids_len, prompt_len, &needed);
    if (fault == K3_OK && (ids_bytes > left || needed > left - ids_bytes))
        fault = K3_MEMORY;
    if (fault != K3_OK) {
        fprintf(stderr, "k3_memory_needed: %d (%zu bytes)\n", (int)fault, needed);
        return 1;
    }
    uint32_t *ids = (uint32_t *)(void *)(buffer + at);
    size_t counts[2];
    uint64_t bits;
    fault = k3_generate(buffer, archive_len, buffer + at + ids_bytes, needed, prompt, prompt_len, ids, ids_len,
                        counts, &bits);
    if (fault != K3_OK) {
        fprintf(stderr, "k3_generate: %d\n", (int)fault);
        return 1;
    }
    line("prompt", ids, counts[0]);
    line("generated", ids + counts[0], counts[1] - counts[0]);
    printf("bits %016llx\n", (unsigned long long)bits);
    fprintf(stderr, "%zu bytes of archive, %zu of memory\n", archive_len, needed);
    return 0;
}
