/* SPDX-License-Identifier: Apache-2.0 */
// What the library and the program's parts say, for tests/messages. Host tests are linked with
// --wrap=vsnprintf, which all sentences go through; with ATTN_HEARD set each is added to that file.
#include <fcntl.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Names that the linker gives: the C library's own function, and what takes its place. The last is
// what it is called where _FORTIFY_SOURCE is set.
int __real_vsnprintf(char *text, size_t size, const char *format, va_list args);
int __wrap_vsnprintf(char *text, size_t size, const char *format, va_list args);
int __wrap___vsnprintf_chk(char *text, size_t size, int flag, size_t room, const char *format,
                           va_list args);

static void note(const char *const text)
{
    const char *const path = getenv("ATTN_HEARD");
    if (!path) return;
    char line[2048];
    const int size = snprintf(line, sizeof(line), "%s\n", text);
    const int file = open(path, O_WRONLY | O_APPEND | O_CREAT, 0644);
    // One write: tests run side by side.
    if (file < 0 || size < 0 || write(file, line, strnlen(line, sizeof(line))) < 0) abort();
    close(file);
}

int __wrap_vsnprintf(char *const text, const size_t size, const char *const format, va_list args)
{
    const int result = __real_vsnprintf(text, size, format, args);
    if (text && size > 0) note(text);
    return result;
}

int __wrap___vsnprintf_chk(char *const text, const size_t size, const int flag, const size_t room,
                           const char *const format, va_list args)
{
    (void) flag;
    (void) room;
    return __wrap_vsnprintf(text, size, format, args);
}
