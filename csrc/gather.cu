// Planned blocks from the store's pages, in host memory that the device can read, into their slots.
//
// Floor: 2*16*D*element bytes a planned pair over the link; no arithmetic. PCIe Gen5 x16 gives about 51 GB/s to a
// kernel's 128-byte reads, and a read takes about 2 us, so some 110 KB must be on their way at any time.
//
// What it must not do is slow the model beside which it runs (eval/interference.py, eval/decode.py):
// - A matrix product of a decode step takes all registers and shared memory of an SM, on 128 of an H200's 132, and its
//   CTAs come in clusters of two on one GPC. So the whole grid is one cluster of four: it takes two such pairs and
//   leaves 64, where four CTAs that stand alone can break four pairs and make every product run twice as long.
// - An SM reads about 25 GB/s from the host when nothing else runs, and 15 beside attention: four are enough, two not.
// - Its warps fill an SM's shared memory: a CTA of attend on the same SM would end long after all others.
// A warp takes 32 pairs of the plan at once, one a lane, so that the latencies of plan, slot and page are paid once for
// all of them; then piece after piece goes through shared memory, which takes no registers: while one is stored, the
// next is on its way.
#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cstdint>

#include "device.cuh"
#include "oasis.h"

namespace oasis {
namespace {

constexpr int PIECE = 4096;  // bytes; a warp has two in flight: a page of D = 128 in two bytes
constexpr int MOST_WARPS = 24;  // a CTA
constexpr int CLUSTER = 4;

struct Plan {
    GatherLayer layers[GATHER_LAYERS];
    int64_t table_row, table_head;
    int count, H, S, C, line_bytes;
    unsigned pairs, heads;  // of a layer: B*H*C and B*H
};

// Where a piece goes that is on its way: `half` is where values begin in a page.
struct Piece {
    char *keys, *values;
    int first, bytes;
};

// A lane stores what it has brought itself.
__device__ __forceinline__ void store(const Piece& piece, const unsigned char* from, int half) {
#pragma unroll 4
    for (int i = threadIdx.x % 32 * 16; i < piece.bytes; i += 512) {
        const int at = piece.first + i;
        char* const out = at < half ? piece.keys + at : piece.values + (at - half);
        __stcs(reinterpret_cast<uint4*>(out), *reinterpret_cast<const uint4*>(from + i));
    }
}

// Pairs go to the warps in turn, layer by layer. In a layer the candidate is outermost and the row and head are shifted
// by it, since plans are filled from the front: whatever row, head or candidates hold the misses, all warps get some.
__global__ void __launch_bounds__(MOST_WARPS * 32) gather_kernel(const char* __restrict__ pages,
                                                                 const __grid_constant__ Plan plan) {
    extern __shared__ __align__(16) unsigned char pieces[];
    const unsigned lane = threadIdx.x % 32, warps = gridDim.x * (blockDim.x / 32);
    const unsigned warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const unsigned char* const mine = pieces + threadIdx.x / 32 * (2 * PIECE);
    const uint32_t mine_at = shared_address(mine);
    const int half = BLOCK * plan.line_bytes;
    Piece coming = {};
    int buffer = 0;  // of the piece to come next
    const uint64_t total = static_cast<uint64_t>(plan.pairs) * plan.count;
    for (uint64_t first = warp; first < total; first += 32ull * warps) {
        const uint64_t at = first + static_cast<uint64_t>(lane) * warps;
        int layer = 0, page = -1, line = 0;  // 2^31 pages are at least 4 TiB
        if (at < total) {
            layer = static_cast<int>(at / plan.pairs);
            const unsigned j = static_cast<unsigned>(at - static_cast<uint64_t>(layer) * plan.pairs);
            const unsigned c = j / plan.heads, head = (j + c) % plan.heads, row = head / plan.H;
            const GatherLayer& own = plan.layers[layer];
            const int64_t pair = static_cast<int64_t>(head) * plan.C + c, block = __ldg(own.plan_block + pair);
            line = static_cast<int>(head * (TAIL + plan.S * BLOCK) + TAIL + __ldg(own.plan_slot + pair) * BLOCK);
            if (block >= 0) {
                page = static_cast<int>(__ldg(own.page_table + row * plan.table_row +
                                              (head - row * plan.H) * plan.table_head + block));
            }
        }
        for (unsigned left = __ballot_sync(ALL, page >= 0); left != 0; left &= left - 1) {
            const int source = __ffs(left) - 1;
            const char* from = pages + static_cast<int64_t>(__shfl_sync(ALL, page, source)) * 2 * half;
            const int64_t to = static_cast<int64_t>(__shfl_sync(ALL, line, source)) * plan.line_bytes;
            const GatherLayer& own = plan.layers[__shfl_sync(ALL, layer, source)];
            for (int first = 0; first < 2 * half; first += PIECE) {
                const Piece next = {static_cast<char*>(own.keys) + to, static_cast<char*>(own.values) + to, first,
                                    min(PIECE, 2 * half - first)};
#pragma unroll 4
                for (int i = lane * 16; i < next.bytes; i += 512)
                    copy16(mine_at + buffer + i, from + first + i, true);
                copy_commit();
                copy_wait<1>();
                store(coming, mine + (buffer ^ PIECE), half);
                coming = next;
                buffer ^= PIECE;
            }
        }
    }
    copy_wait<0>();
    store(coming, mine + (buffer ^ PIECE), half);
}

bool takes(int count, int B, int H, int S, int C, int D, int element) {
    const int64_t heads = static_cast<int64_t>(B) * H;
    return count >= 0 && count <= GATHER_LAYERS && B >= 0 && H > 0 && S > 0 && C >= 0 && D > 0 &&
           (element == 2 || element == 4) && D * element % 16 == 0 && heads * C < INT_MAX &&
           heads * (TAIL + static_cast<int64_t>(S) * BLOCK) < INT_MAX;
}

}  // namespace

cudaError_t gather(const void* pages, const GatherLayer* layers, int count, int64_t table_row, int64_t table_head,
                   int B, int H, int S, int C, int D, int element, int ctas, cudaStream_t stream) {
    bool odd = misaligned(pages, 16);
    for (int i = 0; i < count; ++i) odd = odd || misaligned(layers[i].keys, 16) || misaligned(layers[i].values, 16);
    if (odd || !takes(count, B, H, S, C, D, element)) return cudaErrorInvalidValue;
    if (count == 0 || B == 0 || C == 0) return cudaSuccess;
    Plan plan = {{}, table_row, table_head, count, H, S, C, D * element, static_cast<unsigned>(B) * H * C,
                 static_cast<unsigned>(B) * H};
    std::copy(layers, layers + count, plan.layers);

    Limits limits;
    int device = 0, clusters = 0;
    cudaError_t error = read_limits(limits);
    if (error == cudaSuccess) error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, device);
    if (error != cudaSuccess) return error;
    const int warps = std::min(MOST_WARPS, limits.cta_shared / (2 * PIECE)), bytes = warps * 2 * PIECE;
    // Whatever ran on an SM before, its carve-out is the one that products and attend want.
    error = cudaFuncSetAttribute(gather_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
    if (error == cudaSuccess) {
        error = cudaFuncSetAttribute(gather_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    }
    if (error != cudaSuccess) return error;
    cudaLaunchConfig_t config = {};
    config.gridDim = std::min(ctas > 0 ? ctas : GATHER_CTAS, 1024);
    config.blockDim = warps * 32;
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {CLUSTER, 1, 1};
    config.attrs = &cluster;
    config.numAttrs = clusters && config.gridDim.x % CLUSTER == 0;
    return cudaLaunchKernelEx(&config, gather_kernel, static_cast<const char*>(pages), plan);
}

}  // namespace oasis
