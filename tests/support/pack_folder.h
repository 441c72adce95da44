/* SPDX-License-Identifier: Apache-2.0 */
// A folder of fake packs for one test.
#ifndef ATTN_TESTS_PACK_FOLDER_H
#define ATTN_TESTS_PACK_FOLDER_H

#include <stddef.h>

// Makes an empty folder; its path is returned, and stays valid until pack_folder_remove. NULL if
// that failed.
const char *pack_folder_make(void);

// Copies the fake pack `kind` ("hopper": see meson.build beside this file) into the folder as
// `name` ("libattn-hopper.so"). `keep` is how many of its bytes: SIZE_MAX for all. Returns 0 or -1.
int pack_folder_add(const char *kind, const char *name, size_t keep);

// The two in one: a folder with the fake pack `kind` as the one for an H200. NULL if that failed.
const char *pack_folder_make_with(const char *kind);

// Writes a file of these bytes. Returns 0 or -1.
int pack_folder_write(const char *name, const void *bytes, size_t size);

// Reads the fake pack `kind` into memory that the caller frees; NULL if that failed.
unsigned char *fake_pack_read(const char *kind, size_t *size);

// Removes the folder and what is in it.
void pack_folder_remove(void);

#endif
