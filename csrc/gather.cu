// Planned blocks from the store's pages, in host memory that the device can read, into their slots.
//
// Floor: 2*16*D*element bytes a planned pair over the link; no arithmetic. PCIe Gen5 x16 gives about 51 GB/s to a
// kernel's 128-byte reads, and a read takes about 2 us, so some 110 KB must be on their way at any time.
//
// A few CTAs, so that the rest of the GPU keeps computing, and two things that keep the link busy with so few:
// - Each CTA first turns its share of the plan into a list of moves in shared memory: plan, slot and page of all its
//   pairs are read at once, so their latencies are paid once and not once a block, and a skipped pair is never a move.
// - Then each warp takes whole pages, a page in flight at a time: a lane loads up to 16 vectors of 16 bytes before it
//   stores the first. (A ring of bulk copies by one thread was measured beside it on an H200: no faster at any size.)
#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cstdint>

#include "oasis.h"

namespace oasis {
namespace {

constexpr int WARPS = 8;
constexpr int LOADS = 16;              // vectors a lane has in flight: 16 is a page of D = 128 in two bytes a warp
constexpr int LIST = 1024;             // moves a CTA lists at a time
constexpr int DEFAULT_CTAS = 8;        // more move no more, and keep a matrix product from as many multiprocessors

struct Plan {
    const int64_t* page_table;
    int64_t table_row, table_head;
    const int64_t* block;
    const int64_t* slot;
    int H, S, C;
    unsigned pairs, heads;  // B*H*C and B*H
};

struct Move {
    int page;  // 2^31 pages are at least 8 TiB
    int line;  // of keys and values, D elements each: the slot's first
};

// Pairs first ... first + LIST - 1 of this CTA's share, as moves in any order. `count` is 0 before.
// CTA x has the pairs j = x, x + grid, ...; j runs over the rows and heads with the candidate c outermost and shifted
// by c, since plans are filled from the front: whatever row, head or candidates hold the misses, all CTAs get some.
template <int THREADS>
__device__ void list_moves(const Plan& plan, unsigned first, Move* moves, int* count) {
    constexpr int EACH = LIST / THREADS;
    int64_t block[EACH], slot[EACH], page[EACH];
    unsigned head[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const unsigned j = (first + i * THREADS + threadIdx.x) * gridDim.x + blockIdx.x;
        block[i] = -1;
        if (j < plan.pairs) {
            const unsigned c = j / plan.heads;
            head[i] = (j + c) % plan.heads;
            const int64_t at = static_cast<int64_t>(head[i]) * plan.C + c;
            block[i] = __ldg(plan.block + at);
            slot[i] = __ldg(plan.slot + at);
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        page[i] = -1;
        if (block[i] >= 0) {
            const unsigned row = head[i] / plan.H;
            page[i] = __ldg(plan.page_table + row * plan.table_row + (head[i] - row * plan.H) * plan.table_head +
                            block[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (page[i] >= 0) {
            const int64_t line = static_cast<int64_t>(head[i]) * (TAIL + plan.S * BLOCK) + TAIL + slot[i] * BLOCK;
            moves[atomicAdd(count, 1)] = {static_cast<int>(page[i]), static_cast<int>(line)};
        }
    }
}

// Host memory: read once, never to be found in a cache again. Nothing writes a page while a gather reads it.
__device__ __forceinline__ uint4 load_once(const uint4* from) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from));
    return x;
}

// One page by one warp: 32 * width vectors of 16 bytes, K then V. keys, values: the slot's first line.
template <int IN_FLIGHT>
__device__ __forceinline__ void copy_page(const uint4* page, uint4* keys, uint4* values, int width) {
    const int lane = threadIdx.x % 32, half = BLOCK * width;
    for (int first = 0; first < width; first += IN_FLIGHT) {
        uint4 part[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            if (first + i < width) part[i] = load_once(page + (first + i) * 32 + lane);
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const int at = (first + i) * 32 + lane;
            if (first + i < width) __stcs((at < half ? keys : values - half) + at, part[i]);
        }
    }
}

// width: 16-byte vectors of one line (D elements).
template <int CTA_WARPS, int IN_FLIGHT>
__global__ void __launch_bounds__(CTA_WARPS * 32)
gather_kernel(const uint4* __restrict__ pages, uint4* __restrict__ keys, uint4* __restrict__ values, const Plan plan,
              const int width) {
    __shared__ Move moves[LIST];
    __shared__ int count;
    for (unsigned first = 0; first * gridDim.x < plan.pairs; first += LIST) {
        if (threadIdx.x == 0) count = 0;
        __syncthreads();
        list_moves<CTA_WARPS * 32>(plan, first, moves, &count);
        __syncthreads();
        for (int i = threadIdx.x / 32; i < count; i += CTA_WARPS) {
            const Move move = moves[i];
            const int64_t to = static_cast<int64_t>(move.line) * width;
            copy_page<IN_FLIGHT>(pages + static_cast<int64_t>(move.page) * 2 * BLOCK * width, keys + to, values + to,
                                 width);
        }
        __syncthreads();
    }
}

bool takes(int B, int H, int S, int C, int D, int element) {
    const int64_t heads = static_cast<int64_t>(B) * H;
    return B >= 0 && H > 0 && S > 0 && C >= 0 && D > 0 && (element == 2 || element == 4) && D * element % 16 == 0 &&
           heads * C < INT_MAX && heads * (TAIL + static_cast<int64_t>(S) * BLOCK) < INT_MAX;
}

Plan make_plan(const int64_t* page_table, int64_t table_row, int64_t table_head, const int64_t* block,
               const int64_t* slot, int B, int H, int S, int C) {
    return {page_table, table_row, table_head, block, slot, H, S, C, static_cast<unsigned>(B) * H * C,
            static_cast<unsigned>(B) * H};
}

int grid_of(int ctas, const Plan& plan) {
    const unsigned wanted = std::min(ctas > 0 ? ctas : DEFAULT_CTAS, 1024);
    return static_cast<int>(std::min(wanted, plan.pairs));
}

template <int CTA_WARPS, int IN_FLIGHT>
cudaError_t launch_gather(const void* pages, void* keys, void* values, const Plan& plan, int D, int element, int ctas,
                          cudaStream_t stream) {
    gather_kernel<CTA_WARPS, IN_FLIGHT><<<grid_of(ctas, plan), CTA_WARPS * 32, 0, stream>>>(
        static_cast<const uint4*>(pages), static_cast<uint4*>(keys), static_cast<uint4*>(values), plan,
        D * element / 16);
    return cudaGetLastError();
}

}  // namespace

cudaError_t gather(const void* pages, const int64_t* page_table, int64_t table_row, int64_t table_head, void* keys,
                   void* values, const int64_t* plan_block, const int64_t* plan_slot, int B, int H, int S, int C, int D,
                   int element, int ctas, cudaStream_t stream) {
    if (!takes(B, H, S, C, D, element)) return cudaErrorInvalidValue;
    if (B == 0 || C == 0) return cudaSuccess;
    const Plan plan = make_plan(page_table, table_row, table_head, plan_block, plan_slot, B, H, S, C);
    return launch_gather<WARPS, LOADS>(pages, keys, values, plan, D, element, ctas, stream);
}

}  // namespace oasis
