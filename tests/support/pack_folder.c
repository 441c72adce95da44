/* SPDX-License-Identifier: Apache-2.0 */
#include "pack_folder.h"

#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char folder[1024];

const char *pack_folder_make(void)
{
    const char *const parent = getenv("TMPDIR");
    snprintf(folder, sizeof(folder), "%s/attn-packs-XXXXXX", parent ? parent : "/tmp");
    return mkdtemp(folder);
}

int pack_folder_write(const char *const name, const void *const bytes, const size_t size)
{
    char path[2048];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    FILE *const file = fopen(path, "wb");
    if (!file) return -1;
    const size_t written = fwrite(bytes, 1, size, file);
    return fclose(file) == 0 && written == size ? 0 : -1;
}

unsigned char *fake_pack_read(const char *const kind, size_t *const size)
{
    char path[2048];
    snprintf(path, sizeof(path), "%s/fake_pack_%s.so", FAKE_PACK_FOLDER, kind);
    FILE *const file = fopen(path, "rb");
    if (!file) return NULL;
    unsigned char *bytes = NULL;
    if (fseek(file, 0, SEEK_END) == 0) {
        const long length = ftell(file);
        rewind(file);
        bytes = length > 0 ? malloc((size_t) length) : NULL;
        *size = bytes ? fread(bytes, 1, (size_t) length, file) : 0;
    }
    fclose(file);
    return bytes;
}

int pack_folder_add(const char *const kind, const char *const name, const size_t keep)
{
    size_t size;
    unsigned char *const bytes = fake_pack_read(kind, &size);
    if (!bytes) return -1;
    const int result = pack_folder_write(name, bytes, keep < size ? keep : size);
    free(bytes);
    return result;
}

const char *pack_folder_make_with(const char *const kind)
{
    const char *const made = pack_folder_make();
    if (!made || pack_folder_add(kind, "libattn-hopper.so", SIZE_MAX) == 0) return made;
    pack_folder_remove();
    return NULL;
}

void pack_folder_remove(void)
{
    DIR *const dir = opendir(folder);
    if (!dir) return;
    for (const struct dirent *entry; (entry = readdir(dir));) {
        char path[2048];
        snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
        if (entry->d_name[0] != '.') remove(path);
    }
    closedir(dir);
    rmdir(folder);
}
