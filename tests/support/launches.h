/* SPDX-License-Identifier: Apache-2.0 */
// A device of the fake pack "hopper" on the fake driver, and what it has launched: for tests of
// what the library asks of a driver.
#ifndef ATTN_TESTS_LAUNCHES_H
#define ATTN_TESTS_LAUNCHES_H

#include "attn/attn.h"
#include "tests/support/fake_driver.h"

#include <stdint.h>

// Device memory that nobody looks into: any address will do, as long as the buffers are apart.
#define AT(i) ((void *) (uintptr_t) (((uint64_t) (i) << 40) + 4096))
#define STREAM ((attn_stream) AT(99))

// Around each test, without the environment of whoever runs it. The driver has to have everything
// back at its end.
void launches_set_up(void);
void launches_tear_down(struct attn_device **device);

// Closes `*device` and opens the one of these parameters, whose pack_dir and target are set here.
void launches_open(struct attn_device **device, struct attn_device_open_params params);

const struct fake_launch *last_launch(void);

// The row of the device's pack that was launched last.
const struct attn_pack_row *last_row(const struct attn_device *device);

// Of a call that was refused: what it returned, a part of its message, and no launch since there
// were `launches`.
void expect_no_launch(int launches, enum attn_status status, enum attn_status expected,
                      const char *part);

#endif
