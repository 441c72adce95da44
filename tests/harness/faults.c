/* SPDX-License-Identifier: Apache-2.0 */
// Faults that the harness has to catch, each in a test of its own: `--filter faults/leak` runs one.
// They pass as far as Criterion can see.
#include <criterion/criterion.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

// Read through volatile, so that no compiler sees the fault coming.
static volatile int three = 3;
static volatile int largest = INT_MAX;
static void *volatile kept;

Test(faults, none)
{
    kept = malloc((size_t) three);
    cr_expect(kept);
    free(kept);
}

Test(faults, leak)
{
    kept = malloc((size_t) three);
    cr_expect(kept);
    kept = NULL;
}

Test(faults, overrun)
{
    char *const bytes = malloc((size_t) three);
    cr_assert(bytes);
    memset(bytes, 0, 3);
    kept = bytes;
    bytes[three] = 1;
    free(kept);
}

Test(faults, undefined)
{
    const int sum = largest + three;
    cr_expect(sum != 0);
}
