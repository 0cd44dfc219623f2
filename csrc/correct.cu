// correct: which KV heads select again before they attend; the scores of the others become -inf (reference: `correct`).
//
// Floor: scores and table once: for 64 rows of 8 heads, 1,024 blocks and 129 slots 2.6 MB, 1 us: latency decides. It
// stands between a score and a selection on the model's own way, so it is one launch: a CTA a row, a warp a KV head, and
// no barrier but the last. It stands for a dozen small launches a layer.
//
// The mass of the best K blocks needs no order among them: a radix search finds the K-th best score, 8 bits a pass; what
// is above it is summed, and the rest of the K are as good as it is.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "oasis.h"

namespace oasis {
namespace {

constexpr unsigned ALL = 0xffffffffu;
constexpr int MAX_HEADS = 32;

struct Args {
    float* scores;
    const bool* heads;
    const int64_t *table, *closed, *step;
    int64_t *counts, *fired;
    float above;
    int H, N, S;
};

// Shares are not negative, so their bits order them. What is not predicted at all has none.
__device__ __forceinline__ uint32_t key_of(float score) { return score > 0.0f ? __float_as_uint(score) : 0u; }

// Blocks that are always kept score +inf: they are among the best, and their mass is not asked.
__device__ __forceinline__ float mass_of(float score) { return score > 0.0f && score < INFINITY ? score : 0.0f; }

__device__ __forceinline__ float sum_of(float x) {
#pragma unroll
    for (int d = 16; d; d /= 2) x += __shfl_xor_sync(ALL, x, d);
    return x;
}

// The mass of the K best of N scores. bins: 256, this warp's own.
__device__ float best_mass(const float* scores, int N, int K, int* bins, int lane) {
    uint32_t prefix = 0;
    int need = K;
#pragma unroll 1
    for (int shift = 24; shift >= 0; shift -= 8) {
#pragma unroll
        for (int i = 0; i < 8; ++i) bins[32 * i + lane] = 0;
        __syncwarp();
#pragma unroll 4
        for (int i = lane; i < N; i += 32) {
            const uint32_t key = key_of(scores[i]);
            if (shift == 24 || key >> (shift + 8) == prefix) atomicAdd(&bins[key >> shift & 255], 1);
        }
        __syncwarp();
        // Lane 0 has the 8 largest digits.
        int own[8], sum = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += own[i] = bins[255 - 8 * lane - i];
        int upto = sum;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(ALL, upto, d);
            if (lane >= d) upto += other;
        }
        const int who = __ffs(__ballot_sync(ALL, upto >= need)) - 1;  // K <= N, so there is one
        int digit = 255 - 8 * lane, left = need - (upto - sum);
#pragma unroll
        for (int i = 0; i < 7; ++i) {
            if (left > own[i] && digit == 255 - 8 * lane - i) {
                left -= own[i];
                --digit;
            }
        }
        need = __shfl_sync(ALL, left, who);
        prefix = prefix << 8 | static_cast<uint32_t>(__shfl_sync(ALL, digit, who));
        __syncwarp();  // the bins are read before they are zeroed again
    }
    float above = 0.0f;
#pragma unroll 4
    for (int i = lane; i < N; i += 32) {
        const float score = scores[i];
        if (key_of(score) > prefix) above += mass_of(score);
    }
    return sum_of(above) + static_cast<float>(need) * mass_of(__uint_as_float(prefix));
}

__global__ void __launch_bounds__(32 * MAX_HEADS) correct_kernel(const Args a) {
    extern __shared__ int bins[];  // [H, 256]
    const int lane = threadIdx.x & 31, head = threadIdx.x / 32, row = blockIdx.x;
    const int64_t pair = static_cast<int64_t>(row) * a.H + head, closed = a.closed[row];
    float* scores = a.scores + pair * a.N;
    bool corrects = false;
    if (closed > 0 && a.heads != nullptr) {
        corrects = a.heads[pair];
    } else if (closed > 0) {
        const float best = best_mass(scores, a.N, min(a.S - 1, a.N), bins + 256 * head, lane);
        const int64_t* table = a.table + pair * a.S;
        const int64_t known = min(closed, static_cast<int64_t>(a.N));
        float held = 0.0f;
        for (int s = lane; s < a.S; s += 32) {
            const int64_t block = table[s];
            if (block >= 0 && block < known) held += mass_of(scores[block]);
        }
        corrects = best - sum_of(held) > a.above;
    }
    __syncwarp();
    if (closed > 0 && !corrects) {
        for (int i = lane; i < a.N; i += 32) scores[i] = -INFINITY;
    }
    if (closed > 0 && lane == 0) {
        auto* counts = reinterpret_cast<unsigned long long*>(a.counts);
        atomicAdd(&counts[head], 1ULL);
        if (corrects) atomicAdd(&counts[a.H + head], 1ULL);
    }
    const bool any = __syncthreads_or(corrects);
    if (threadIdx.x == 0 && any && a.fired[1 + row] != *a.step) {
        a.fired[1 + row] = *a.step;
        atomicAdd(reinterpret_cast<unsigned long long*>(a.fired), 1ULL);
    }
}

}  // namespace

cudaError_t correct(float* scores, const bool* heads, const int64_t* table, const int64_t* closed, float above,
                    const int64_t* step, int64_t* counts, int64_t* fired, int B, int H, int N, int S,
                    cudaStream_t stream) {
    if (B < 0 || H < 1 || H > MAX_HEADS || N < 0 || S < 1) return cudaErrorInvalidValue;
    if (B == 0 || N == 0) return cudaSuccess;
    const Args a = {scores, heads, table, closed, step, counts, fired, above, H, N, S};
    correct_kernel<<<B, 32 * H, 256 * sizeof(int) * H, stream>>>(a);
    return cudaGetLastError();
}

}  // namespace oasis
