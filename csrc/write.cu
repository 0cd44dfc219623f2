// Tokens of one row to their pages, in host memory that the device can write.
//
// Floor: 2*H*n*D*element bytes over the link, which takes about 55 GB/s (PCIe Gen5 x16); no arithmetic. HBM gives them
// some 80 times faster, and stores to the host are posted, so what a warp waits for is its loads: a few hundred KB of
// them on their way cover HBM's latency with room to spare.
//
// A few CTAs, so that the layers that compute beside it keep the GPU. A warp takes a block at a time: what there is of
// it is K's lines, then V's, each run contiguous in the page, whatever the strides they come with.
#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cstdint>

#include "oasis.h"

namespace oasis {
namespace {

constexpr int WARPS = 8;
constexpr int LOADS = 8;  // vectors of 16 bytes a lane has in flight: 128 KB with all CTAs
constexpr int DEFAULT_CTAS = 4;  // as fast as more

struct Tokens {  // [H, n, D]; strides in vectors
    const uint4* at;
    int64_t head, token;
};

struct Span {
    int64_t start, stop;     // tokens of the row
    unsigned blocks, items;  // that hold them; heads * blocks
};

// The vectors of one line (D elements), and what divides by their number: x / width == x * inverse >> SHIFT, exact for
// the vectors of a block's K, x < 16 * width, as long as 16 * width^2 < 2^SHIFT.
constexpr int SHIFT = 26;
constexpr int MAX_WIDTH = 2047;
struct Line {
    unsigned width, inverse;
};

__global__ void __launch_bounds__(WARPS * 32)
write_kernel(const Tokens keys, const Tokens values, const Span span, const int64_t* page_table, int64_t table_head,
             uint4* pages, const Line line) {
    const unsigned lane = threadIdx.x % 32;
    for (unsigned item = blockIdx.x * WARPS + threadIdx.x / 32; item < span.items; item += gridDim.x * WARPS) {
        const unsigned head = item / span.blocks;
        const int64_t block = span.start / BLOCK + item % span.blocks;
        const int64_t page = __ldg(page_table + head * table_head + block);
        const int64_t first = max(span.start, block * BLOCK), stop = min(span.stop, (block + 1) * BLOCK);
        const unsigned half = static_cast<unsigned>(stop - first) * line.width;  // vectors of K, and as many of V
        const unsigned gap = BLOCK * line.width - half;                          // of the page, between the two
        const uint4* const key = keys.at + head * keys.head + (first - span.start) * keys.token;
        const uint4* const value = values.at + head * values.head + (first - span.start) * values.token;
        uint4* const to = pages + (page * 2 * BLOCK + first % BLOCK) * line.width;
        for (unsigned base = lane; base < 2 * half; base += 32 * LOADS) {
            uint4 part[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const unsigned at = base + 32 * i, within = at < half ? at : at - half;
                const unsigned token = within * line.inverse >> SHIFT;
                const uint4* const from = (at < half ? key : value) + token * (at < half ? keys.token : values.token);
                if (at < 2 * half) part[i] = __ldcs(from + (within - token * line.width));
            }
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const unsigned at = base + 32 * i;
                if (at < 2 * half) __stcs(to + (at < half ? at : at + gap), part[i]);
            }
        }
    }
}

// A stride that is never taken may be anything.
bool aligned(const void* at, int64_t head, int64_t token, int H, int64_t n, int element) {
    return reinterpret_cast<uintptr_t>(at) % 16 == 0 && (H <= 1 || head * element % 16 == 0) &&
           (n <= 1 || token * element % 16 == 0);
}

}  // namespace

cudaError_t write(const void* keys, int64_t key_head, int64_t key_token, const void* values, int64_t value_head,
                  int64_t value_token, int64_t start, int64_t n, const int64_t* page_table, int64_t table_head,
                  void* pages, int H, int D, int element, int ctas, cudaStream_t stream) {
    if (H < 0 || n < 0 || start < 0 || D <= 0 || (element != 2 && element != 4) || D * element % 16 != 0 ||
        !aligned(keys, key_head, key_token, H, n, element) || !aligned(values, value_head, value_token, H, n, element))
        return cudaErrorInvalidValue;
    const int vector = 16 / element;
    const Line line = {static_cast<unsigned>(D / vector), ((1u << SHIFT) - 1) / (D / vector) + 1};
    if (line.width > MAX_WIDTH) return cudaErrorInvalidValue;
    if (H == 0 || n == 0) return cudaSuccess;
    const int64_t blocks = (start + n - 1) / BLOCK - start / BLOCK + 1;
    if (blocks * H > INT_MAX) return cudaErrorInvalidValue;
    const Tokens from_keys = {static_cast<const uint4*>(keys), key_head / vector, key_token / vector};
    const Tokens from_values = {static_cast<const uint4*>(values), value_head / vector, value_token / vector};
    const Span span = {start, start + n, static_cast<unsigned>(blocks), static_cast<unsigned>(blocks * H)};
    const unsigned wanted = std::min(ctas > 0 ? ctas : DEFAULT_CTAS, 1024);
    write_kernel<<<std::min(wanted, (span.items + WARPS - 1) / WARPS), WARPS * 32, 0, stream>>>(
        from_keys, from_values, span, page_table, table_head, static_cast<uint4*>(pages), line);
    return cudaGetLastError();
}

}  // namespace oasis
