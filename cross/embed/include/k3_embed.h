/* k3-core for C: token ids from a checkpoint in memory. No allocation, no files, no threads, no
 * global state, no system calls; memcpy, memmove, memset and memcmp are all that must be linked.
 *
 * Building.   `cargo build --release` in this folder makes target/release/libk3_embed.a, which is linked
 *             like any other archive; for wasm, see run.sh. main.c and main.mjs are whole programs.
 * Ownership.  All memory is the caller's and stays so. Nothing is kept between two calls: when a
 *             function returns, every pointer it was given may be freed or used for something else.
 *             Calls that share no memory they write may run at the same time, with one archive too.
 * Alignment.  `memory` begins on a border of 64 bytes. `ids`, `counts`, `needed` and `bits` have the
 *             alignment of their types. `archive` and `prompt` may begin anywhere.
 * Overlap.    Memory that is written (`memory`, `ids`, `counts`, `bits`, `needed`) overlaps nothing else.
 * Sizes.      Lengths are in bytes, but `ids_len`, which is in ids. Whole units of 64 bytes of
 *             `memory` are used. Its contents do not matter before a call and mean nothing behind it.
 * Stack.      A call needs K3_STACK bytes of stack, in an optimised build. It does not depend on the model or
 *             the prompt: what does lies in `memory`, and nothing recurses. stack.c measures it: with AVX2 and
 *             the demo 60 kB for k3_generate and 9 kB for k3_memory_needed; the rest is for other compilers
 *             and processors. A thread with a small stack, or wasm's linker, has to be told.
 * Numbers.    The caller runs with round to nearest and without flush to zero (the default
 *             everywhere). Then the same archive and prompt give the same ids and bits on every machine.
 *
 * The archive is a tar file (ustar, of less than 4 GiB) with `config.json`, `tiktoken.model` and the
 * `.safetensors` files of a checkpoint, in any order and folder; other files are passed over.
 */
#ifndef K3_EMBED_H
#define K3_EMBED_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What the functions return. */
enum {
    K3_OK = 0,
    K3_ARCHIVE = 1,    /* not a tar archive, or a file is not in it */
    K3_CONFIG = 2,     /* config.json is refused */
    K3_TENSOR = 3,     /* a shard is damaged, or a tensor is missing, twice there, unknown or of another shape */
    K3_VOCABULARY = 4, /* tiktoken.model is refused, or has not as many ids as the config says */
    K3_MEMORY = 5,     /* `memory` is too small or not on a border of 64 bytes */
    K3_ROOM = 6,       /* the prompt has more ids than `ids_len` */
    K3_ARITHMETIC = 7, /* a logit is not finite: no id is made up */
    K3_ARGUMENT = 8    /* a null or misaligned pointer, or an empty prompt */
};

/* Bytes of stack that hold any call, see above. */
enum { K3_STACK = 128 * 1024 };

/* Writes to `needed` how many bytes of `memory` k3_generate wants for `ids_len` ids in all and a prompt
 * of `prompt_len` bytes. It reads the config and the vocabulary, not the weights. On failure `needed` is
 * unchanged. */
int32_t k3_memory_needed(const uint8_t *archive, size_t archive_len, size_t ids_len, size_t prompt_len,
                         size_t *needed);

/* Writes the ids of `prompt` to `ids` and the model's greedy continuation behind them, until `ids_len`
 * are there or an id ends the text, which is the last one then. Control spellings in the prompt are
 * ordinary text.
 *
 * counts[0]: ids of the prompt. counts[1]: ids in all. bits: a hash (FNV-1a, 64 bits) over the logits
 * that were looked at, for comparing machines. On failure `counts` and `bits` are unchanged, and `ids`
 * may hold anything. */
int32_t k3_generate(const uint8_t *archive, size_t archive_len, uint8_t *memory, size_t memory_len,
                    const uint8_t *prompt, size_t prompt_len, uint32_t *ids, size_t ids_len,
                    size_t counts[2], uint64_t *bits);

#ifdef __cplusplus
}
#endif

#endif
