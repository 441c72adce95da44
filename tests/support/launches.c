/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/launches.h"

#include "device.h"
#include "tests/support/pack_folder.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

static const char *folder;

void launches_set_up(void)
{
    unsetenv("METRALE_ATTN_DECODE_SPLITK");
    unsetenv("METRALE_ATTN_DECODE_GQA_PACK");
    fake_driver_install();
    folder = pack_folder_make_with("hopper");
    cr_assert_not_null(folder);
}

void launches_tear_down(struct attn_device **device)
{
    attn_device_close(device);
    cr_expect(fake_driver_balanced());
    pack_folder_remove();
}

void launches_open(struct attn_device **device, struct attn_device_open_params params)
{
    attn_device_close(device);
    params.pack_dir = folder;
    params.target = "hopper";
    cr_assert_eq(attn_device_open(device, &params), ATTN_OK, "%s", attn_last_error());
}

const struct fake_launch *last_launch(void)
{
    cr_assert_gt(fake.num_launches, 0);
    return &fake.launches[(fake.num_launches - 1) % FAKE_MAX_LAUNCHES];
}

const struct attn_pack_row *last_row(const struct attn_device *device)
{
    const struct attn_pack *const pack = device->pack;
    for (uint32_t i = 0; i < pack->num_rows; i++)
        if (!strcmp(pack->rows[i].name, last_launch()->kernel)) return &pack->rows[i];
    cr_assert_fail("no row %s", last_launch()->kernel);
    return NULL;
}

void expect_no_launch(int launches, enum attn_status status, enum attn_status expected,
                      const char *part)
{
    cr_expect_eq(status, expected, "%s: %s", attn_status_name(status), attn_last_error());
    cr_expect(strstr(attn_last_error(), part), "'%s' is not in: %s", part, attn_last_error());
    cr_expect_eq(fake.num_launches, launches);
    cr_expect_eq(fake.pushes, fake.pops);
}
