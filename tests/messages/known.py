# SPDX-License-Identifier: Apache-2.0
"""Sentences that no host test provokes: a part of each, and why."""

MEMORY = "needs memory to run out"
GPU = "needs a GPU, or one that fails"
WRONG = "needs a kernel that is wrong"
SYSTEM = "needs the system to refuse what it does not refuse"

UNHEARD = {
    "out of memory": MEMORY,
    "out of host memory": MEMORY,
    "out of GPU memory": GPU,
    "; %.2f times as fast as without": GPU,
    "%s for up to %d query tokens": GPU,
    "GPU %d cannot be opened": GPU,
    "do not fit the GPU's memory": GPU,
    "driver   %s; %d SMs": GPU,
    "does not describe": GPU,
    "driver for CUDA %d.%d": GPU,
    "largest step between neighbours": GPU,
    "more than 2^30 - 1 pages": GPU,
    "the CUDA driver failed": GPU,
    "elements of the first call are beyond the error bound": WRONG,
    "gave other bits than the checked ones": WRONG,
    "not timed, as": WRONG,
    "cannot be mapped": SYSTEM,
    "%s cannot be read: %s": SYSTEM,
    "the result cannot be written as JSON": SYSTEM,
    "this library was built without liburing": "needs a build without it",
    "are more than ctm can count": "other limits of a plan come first",
}
