/* SPDX-License-Identifier: Apache-2.0 */
// The kernels of a target, as they are, between two symbols. For any ELF machine.
    .section .rodata
    .balign 16
    .globl PACK_FATBIN
    .hidden PACK_FATBIN
    .type PACK_FATBIN, %object
PACK_FATBIN:
    .incbin PACK_FILE
    .size PACK_FATBIN, . - PACK_FATBIN
    .globl PACK_FATBIN_END
    .hidden PACK_FATBIN_END
PACK_FATBIN_END:
    .byte 0

    .section .note.GNU-stack, "", %progbits
