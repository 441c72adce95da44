/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/emulator/emulator.h"

#include "common/ptx_copy.cuh"
#include "tests/support/fake_map.h"

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <numeric>
#include <string>
#include <ucontext.h>
#include <vector>

namespace
{
constexpr size_t STACK_BYTES = 256 << 10;
constexpr size_t SHARED_BYTES = 232448;

struct fiber {
    ucontext_t start;
    jmp_buf place;
    unsigned char *stack;
    // What it waits for; null: nothing.
    const std::function<bool()> *awaited;
    bool started, done;
};

struct barrier {
    uint32_t count, pending;
    int64_t bytes;
    uint32_t phase;
};

struct gathering {
    int count;
    unsigned turn;
};

template <class ARGS> using kernel = void (*)(const ARGS);

std::vector<fiber> fibers;
// Those that no block has. Kept: to map them anew for each launch would be most of the time of small
// ones.
std::vector<unsigned char *> stacks;
jmp_buf scheduler;
unsigned current;
// Steps since any thread got further than a wait.
uint64_t idle;
bool stuck;
std::map<uint32_t, barrier> barriers;
// Of each warp; of each barrier that a block has.
emulator::meeting meetings[32];
gathering gatherings[16];
std::function<void()> running;
// A thread of this block waits for other blocks, and does not wait in vain.
bool lets_blocks_run, may_let_blocks_run;

// A block that waits for others.
struct block_state {
    unsigned block, left;
    std::vector<fiber> fibers;
    std::vector<unsigned char> shared;
    std::map<uint32_t, barrier> barriers;
    emulator::meeting meetings[32];
    gathering gatherings[16];
};

// Which warps are left out.
struct shuffle {
    // 0: none.
    uint64_t state;
    // Until round `until` warp `slow` has its turn once in `patience` times.
    unsigned slow, patience, round, until;

    unsigned below(unsigned n)
    {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return (unsigned) (state >> 20) % n;
    }

    void begin_round(unsigned warps)
    {
        if (!state || round++ < until) return;
        slow = below(warps);
        patience = 2 + below(60);
        until = round + 20 + below(400);
    }

    bool leaves_out(unsigned warp)
    {
        return state && (warp == slow ? below(patience) != 0 : below(6) == 0);
    }
};

shuffle order;

// Without the system calls of swapcontext, which would be most of the time.
void leave()
{
    if (_setjmp(fibers[current].place) == 0) _longjmp(scheduler, 1);
}

void resume()
{
    if (_setjmp(scheduler) != 0) return;
    if (fibers[current].started) _longjmp(fibers[current].place, 1);
    fibers[current].started = true;
    setcontext(&fibers[current].start);
}

void enter()
{
    running();
    fibers[current].done = true;
    idle = 0;
    leave();
}

void settle(barrier &b)
{
    if (b.pending > 0 || b.bytes != 0) return;
    b.phase ^= 1;
    b.pending = b.count;
}
} // namespace

alignas(1024) unsigned char emulator_shared[SHARED_BYTES];

namespace emulator
{
index thread, block, grid;

meeting &own_meeting()
{
    return meetings[current / 32];
}

void wait(const std::function<bool()> &done)
{
    if (!done()) {
        fibers[current].awaited = &done;
        leave();
        fibers[current].awaited = nullptr;
    }
    idle = 0;
}

void let_blocks_run()
{
    if (!may_let_blocks_run) return;
    lets_blocks_run = true;
    wait([] { return !lets_blocks_run; });
}

void sync_block(int barrier, int threads)
{
    gathering &g = gatherings[barrier];
    const unsigned turn = g.turn;
    if (++g.count == (threads ? threads : (int) fibers.size())) {
        g.count = 0;
        g.turn++;
    }
    wait([&] { return g.turn != turn; });
}

void arrive_block(int barrier, int threads)
{
    gathering &g = gatherings[barrier];
    if (++g.count == threads) {
        g.count = 0;
        g.turn++;
    }
    idle = 0;
}

void barrier_init(uint32_t s_barrier, uint32_t count)
{
    barriers[s_barrier] = { count, count, 0, 0 };
}

void barrier_arrive(uint32_t s_barrier, int64_t bytes)
{
    barrier &b = barriers.at(s_barrier);
    b.bytes += bytes;
    b.pending--;
    settle(b);
}

void barrier_bring(uint32_t s_barrier, int64_t bytes)
{
    barrier &b = barriers.at(s_barrier);
    b.bytes -= bytes;
    settle(b);
}

bool barrier_passed(uint32_t s_barrier, uint32_t phase)
{
    return barriers.at(s_barrier).phase != phase;
}

int64_t copy_box(uint32_t s_target, const void *map, int row, int line_number, int head, int page)
{
    fake_map m;
    std::memcpy(&m, map, sizeof(m));
    const uint64_t element = m.type == 0 ? 1 : 2, line = m.box[0] * element;
    const uint64_t at[5] = { 0, (uint64_t) row, (uint64_t) line_number, (uint64_t) head,
                             (uint64_t) page };
    // By 16 bytes: bits 4 .. 6 of the address are mixed with bits 7 .. 9, as many as swizzled.
    const uint32_t mask = (1u << m.swizzle) - 1;
    uint32_t s_at = s_target;
    for (uint32_t l = 0; l < m.box[2]; l++)
        for (uint32_t r = 0; r < m.box[1]; r++) {
            const unsigned char *const g_line =
                static_cast<const unsigned char *>(m.address) + (at[1] + r) * m.strides[0] +
                (at[2] + l) * m.strides[1] + at[3] * m.strides[2] + at[4] * m.strides[3];
            const bool inside = at[1] + r < m.dims[1] && at[2] + l < m.dims[2] &&
                                at[3] < m.dims[3] && at[4] < m.dims[4];
            for (uint64_t i = 0; i < line; i += 16, s_at += 16) {
                unsigned char *const s_piece = emulator_shared + (s_at ^ (s_at >> 7 & mask) << 4);
                if (inside)
                    std::memcpy(s_piece, g_line + i, 16);
                else
                    std::memset(s_piece, 0, 16);
            }
        }
    return s_at - s_target;
}
} // namespace emulator

#define ROW(name, ...) extern "C" void name(const attn_decode_args args);
#include "emulated_groups.inc"
#include "emulated_rows.inc"
#undef ROW
#define ROW(name, ...) extern "C" void name(const attn_prefill_args args);
#include "emulated_prefill.inc"
#include "emulated_prefill_wgmma.inc"
#undef ROW
#define ROW(name, ...) extern "C" void name(const attn_tiled_args args);
#include "emulated_tiled.inc"
#undef ROW

namespace
{
void begin_block(unsigned block, unsigned threads)
{
    emulator::block.x = block;
    std::memset(emulator_shared, 0xFF, SHARED_BYTES);
    std::memset(meetings, 0, sizeof(meetings));
    std::memset(gatherings, 0, sizeof(gatherings));
    barriers.clear();
    fibers.assign(threads, {});
    for (fiber &f : fibers) {
        if (stacks.empty())
            stacks.push_back(static_cast<unsigned char *>(std::malloc(STACK_BYTES)));
        f.stack = stacks.back();
        stacks.pop_back();
        f.awaited = nullptr;
        f.started = f.done = false;
        getcontext(&f.start);
        f.start.uc_stack.ss_sp = f.stack;
        f.start.uc_stack.ss_size = STACK_BYTES;
        f.start.uc_link = nullptr;
        makecontext(&f.start, enter, 0);
    }
}

void end_block()
{
    for (const fiber &f : fibers) stacks.push_back(f.stack);
}

// Till it is done, or waits for others; returns the threads that are left.
unsigned run_block(unsigned threads, unsigned left)
{
    idle = 0;
    lets_blocks_run = false;
    while (left > 0 && !stuck && !lets_blocks_run) {
        bool is_left_out = false;
        order.begin_round(threads / 32);
        for (current = 0; current < threads; current++) {
            if (current % 32 == 0) is_left_out = order.leaves_out(current / 32);
            if (is_left_out || fibers[current].done) continue;
            emulator::thread.x = current;
            const std::function<bool()> *const awaited = fibers[current].awaited;
            if (!awaited || (*awaited)()) resume();
            left -= fibers[current].done;
            stuck = ++idle > (order.state ? 4096u : 4u) * threads;
            if (stuck) break;
        }
    }
    return left;
}

void set_aside(block_state &state)
{
    state.fibers.swap(fibers);
    state.barriers.swap(barriers);
    state.shared.assign(emulator_shared, emulator_shared + SHARED_BYTES);
    std::memcpy(state.meetings, meetings, sizeof(meetings));
    std::memcpy(state.gatherings, gatherings, sizeof(gatherings));
}

void take_back(block_state &state)
{
    emulator::block.x = state.block;
    fibers.swap(state.fibers);
    barriers.swap(state.barriers);
    std::memcpy(emulator_shared, state.shared.data(), SHARED_BYTES);
    std::memcpy(meetings, state.meetings, sizeof(meetings));
    std::memcpy(gatherings, state.gatherings, sizeof(gatherings));
}

// In which order blocks begin: that of their numbers, or of a launch in two any other.
std::vector<unsigned> begin_in_turn(unsigned grid)
{
    std::vector<unsigned> blocks(grid);
    std::iota(blocks.begin(), blocks.end(), 0u);
    if (order.state && order.below(2) > 0)
        for (unsigned i = grid; i > 1; i--) std::swap(blocks[i - 1], blocks[order.below(i)]);
    return blocks;
}

// One block after another; those that wait for others in turn, once all have begun.
int run_blocks(const char *name, unsigned grid, unsigned threads)
{
    const std::vector<unsigned> blocks = begin_in_turn(grid);
    std::deque<std::unique_ptr<block_state>> waiting;
    stuck = false;
    emulator::grid.x = grid;
    // Some launches find the chip taken: then no block sees another one.
    may_let_blocks_run = !order.state || order.below(4) > 0;
    for (unsigned begun = 0; (begun < grid || !waiting.empty()) && !stuck;) {
        std::unique_ptr<block_state> state;
        unsigned left = threads;
        if (begun < grid) {
            begin_block(blocks[begun++], threads);
        } else {
            state = std::move(waiting.front());
            waiting.pop_front();
            take_back(*state);
            left = state->left;
        }
        left = run_block(threads, left);
        if (left == 0) {
            end_block();
        } else if (!stuck) {
            if (!state) state = std::make_unique<block_state>();
            state->block = emulator::block.x;
            state->left = left;
            set_aside(*state);
            waiting.push_back(std::move(state));
        }
    }
    if (stuck) fprintf(stderr, "stuck %s block %u\n", name, emulator::block.x);
    return stuck ? -2 : 0;
}

template <class ARGS>
int run(const std::map<std::string, kernel<ARGS>> &kernels, const char *name, unsigned grid,
        unsigned threads, const ARGS *args)
{
    const auto found = kernels.find(name);
    if (found == kernels.end()) {
        fprintf(stderr, "no %s\n", name);
        return -1;
    }
    running = [=] { found->second(*args); };
    return run_blocks(name, grid, threads);
}
} // namespace

extern "C" void emulator_shuffle(uint64_t seed)
{
    order = { seed * 0x9E3779B97F4A7C15u, 0, 2, 0, 0 };
}

extern "C" int emulator_run(const char *name, unsigned grid, unsigned threads,
                            const attn_decode_args *args)
{
    static const std::map<std::string, kernel<attn_decode_args>> kernels = {
#define ROW(name, ...) { #name, name },
#include "emulated_groups.inc"
#include "emulated_rows.inc"
#undef ROW
    };
    return run(kernels, name, grid, threads, args);
}

extern "C" int emulator_run_prefill(const char *name, unsigned grid, unsigned threads,
                                    const attn_prefill_args *args)
{
    static const std::map<std::string, kernel<attn_prefill_args>> kernels = {
#define ROW(name, ...) { #name, name },
#include "emulated_prefill.inc"
#include "emulated_prefill_wgmma.inc"
#undef ROW
    };
    return run(kernels, name, grid, threads, args);
}

extern "C" int emulator_run_tiled(const char *name, unsigned grid, unsigned threads,
                                  const attn_tiled_args *args)
{
    static const std::map<std::string, kernel<attn_tiled_args>> kernels = {
#define ROW(name, ...) { #name, name },
#include "emulated_tiled.inc"
#undef ROW
    };
    return run(kernels, name, grid, threads, args);
}
