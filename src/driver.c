/* SPDX-License-Identifier: Apache-2.0 */
// The driver table, and with it the only state of the library that is not a handle's.
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static struct attn_driver table;
static enum attn_status table_status;
static char table_reason[384];
static pthread_once_t table_once = PTHREAD_ONCE_INIT;
static _Atomic(const struct attn_driver *) replacement;

static void open_driver(void)
{
    static const struct {
        const char *symbol;
        size_t offset;
        bool optional;
    } calls[] = {
#define CALL_ENTRY(name, symbol, parameters) { symbol, offsetof(struct attn_driver, name), false },
        ATTN_DRIVER_CALLS(CALL_ENTRY) ATTN_DRIVER_COPY_CALLS(CALL_ENTRY)
#undef CALL_ENTRY
#define CALL_ENTRY(name, symbol, parameters) { symbol, offsetof(struct attn_driver, name), true },
            ATTN_DRIVER_OPTIONAL_CALLS(CALL_ENTRY)
#undef CALL_ENTRY
    };
    // Never closed: the driver doesn't survive it.
    void *const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *const why = dlerror();
        table_status = ATTN_ERROR_NO_DEVICE;
        snprintf(table_reason, sizeof(table_reason),
                 "no NVIDIA driver: libcuda.so.1 cannot be opened (%s)",
                 why ? why : "unknown reason");
        return;
    }
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        void *const call = dlsym(library, calls[i].symbol);
        if (!call && !calls[i].optional) {
            table_status = ATTN_ERROR_DRIVER;
            snprintf(
                table_reason, sizeof(table_reason),
                "the NVIDIA driver is too old: its libcuda.so.1 has no %s; a driver for CUDA 13.0 "
                "or newer is needed",
                calls[i].symbol);
            return;
        }
        memcpy((char *) &table + calls[i].offset, &call, sizeof(call));
    }
}

const struct attn_driver *attn_driver_get(const char **const reason)
{
    const struct attn_driver *const given = atomic_load(&replacement);
    if (given) return given;
    pthread_once(&table_once, open_driver);
    if (table_status == ATTN_OK) return &table;
    *reason = table_reason;
    return NULL;
}

enum attn_status attn_driver_status(void)
{
    if (atomic_load(&replacement)) return ATTN_OK;
    pthread_once(&table_once, open_driver);
    return table_status;
}

void attn_driver_replace(const struct attn_driver *const given)
{
    atomic_store(&replacement, given);
}
