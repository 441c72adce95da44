/* SPDX-License-Identifier: Apache-2.0 */
// Whether a file can be given to dlopen without harm. The dynamic linker trusts what it maps: a
// shared object that was cut short, or whose tables point outside of it, kills the process.
#ifndef ATTN_SRC_ELF_CHECK_H
#define ATTN_SRC_ELF_CHECK_H

#include <stdbool.h>
#include <stddef.h>

// True if the file at `path` is a whole shared object for this machine's processor. Else `why` gets
// half a sentence ("is cut short: ...").
bool attn_elf_check(const char *path, char *why, size_t why_size);

#endif
