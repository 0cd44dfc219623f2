// correct: which KV heads select again before they attend; the scores of the others become -inf (reference: `correct`).
//
// Floor: scores and table once: for 64 rows of 8 heads, 1,024 blocks and 129 slots 2.6 MB, 1 us: latency decides. It
// stands between a score and a selection on the model's own way, so it is one launch for a dozen small ones: a CTA a
// row and KV head, so that all scores are on their way at once.
//
// What the best K blocks hold beyond the residents is at most what all others hold. That is one sum, which ends it
// nearly always. Only where it is above the threshold the K-th best score is looked for, by a radix search, 8 bits a
// pass; what is above it is summed, and the rest of the K are as good as it is.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "oasis.h"

namespace oasis {
namespace {

constexpr int THREADS = 256;
constexpr unsigned ALL = 0xffffffffu;

struct Args {
    float* scores;
    const bool* heads;
    const int64_t *table, *closed, *step;
    int64_t *counts, *fired;
    float above;
    int H, N, S;
};

struct Room {
    int bins[256];
    float sums[2][THREADS / 32];
    uint32_t prefix;  // of the K-th best score, as far as it is known
    int need;         // how many of the scores with the prefix are among the best
};

// Shares are not negative, so their bits order them. What is not predicted at all has none.
__device__ __forceinline__ uint32_t key_of(float score) { return score > 0.0f ? __float_as_uint(score) : 0u; }

// Blocks that are always kept score +inf: they are among the best, and their mass is not asked.
__device__ __forceinline__ float mass_of(float score) { return score > 0.0f && score < INFINITY ? score : 0.0f; }

// Two sums over the CTA. Each thread gets both.
__device__ float2 sum_of(float x, float y, Room& room) {
#pragma unroll
    for (int d = 16; d; d /= 2) {
        x += __shfl_xor_sync(ALL, x, d);
        y += __shfl_xor_sync(ALL, y, d);
    }
    if (threadIdx.x % 32 == 0) room.sums[0][threadIdx.x / 32] = x, room.sums[1][threadIdx.x / 32] = y;
    __syncthreads();
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < THREADS / 32; ++i) sum.x += room.sums[0][i], sum.y += room.sums[1][i];
    __syncthreads();
    return sum;
}

// One more digit of the K-th best score, by one warp.
__device__ void narrow(Room& room, int lane) {
    const int wanted = room.need;
    // Lane 0 has the 8 largest digits.
    int own[8], sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += own[i] = room.bins[255 - 8 * lane - i];
    int upto = sum;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(ALL, upto, d);
        if (lane >= d) upto += other;
    }
    const int who = __ffs(__ballot_sync(ALL, upto >= wanted)) - 1;  // K <= N, so there is one
    if (lane != who) return;
    int digit = 255 - 8 * lane, left = wanted - (upto - sum);
#pragma unroll
    for (int i = 0; i < 7; ++i) {
        if (left > own[i] && digit == 255 - 8 * lane - i) {
            left -= own[i];
            --digit;
        }
    }
    room.need = left;
    room.prefix = room.prefix << 8 | static_cast<uint32_t>(digit);
}

// The mass of the K best of N scores.
__device__ float best_mass(const float* scores, int N, int K, Room& room) {
    const int tid = threadIdx.x;
    if (tid == 0) room.prefix = 0, room.need = K;
#pragma unroll 1
    for (int shift = 24; shift >= 0; shift -= 8) {
        room.bins[tid] = 0;
        __syncthreads();
        const uint32_t prefix = room.prefix;
#pragma unroll 4
        for (int i = tid; i < N; i += THREADS) {
            const uint32_t key = key_of(scores[i]);
            if (shift == 24 || key >> (shift + 8) == prefix) atomicAdd(&room.bins[key >> shift & 255], 1);
        }
        __syncthreads();
        if (tid < 32) narrow(room, tid);
        __syncthreads();
    }
    float above = 0.0f;
#pragma unroll 4
    for (int i = tid; i < N; i += THREADS) {
        const float score = scores[i];
        if (key_of(score) > room.prefix) above += mass_of(score);
    }
    const float rest = static_cast<float>(room.need) * mass_of(__uint_as_float(room.prefix));
    return sum_of(above, 0.0f, room).x + rest;
}

__global__ void __launch_bounds__(THREADS) correct_kernel(const Args a) {
    __shared__ Room room;
    const int tid = threadIdx.x, row = blockIdx.x / a.H, head = blockIdx.x - row * a.H;
    const int64_t pair = blockIdx.x, closed = a.closed[row];
    if (closed <= 0) return;
    float* const scores = a.scores + pair * a.N;
    bool corrects;
    if (a.heads != nullptr) {
        corrects = a.heads[pair];
    } else {
        const int64_t* const table = a.table + pair * a.S;
        const int64_t known = min(closed, static_cast<int64_t>(a.N));
        float all = 0.0f, held = 0.0f;
#pragma unroll 4
        for (int i = tid; i < a.N; i += THREADS) all += mass_of(scores[i]);
        for (int s = tid; s < a.S; s += THREADS) {
            const int64_t block = table[s];
            if (block >= 0 && block < known) held += mass_of(scores[block]);
        }
        const float2 sums = sum_of(all, held, room);
        corrects = sums.x - sums.y > a.above && best_mass(scores, a.N, min(a.S - 1, a.N), room) - sums.y > a.above;
    }
    if (!corrects)
        for (int i = tid; i < a.N; i += THREADS) scores[i] = -INFINITY;
    if (tid != 0) return;
    auto* const counts = reinterpret_cast<unsigned long long*>(a.counts);
    auto* const fired = reinterpret_cast<unsigned long long*>(a.fired);
    const auto step = static_cast<unsigned long long>(*a.step);
    atomicAdd(&counts[head], 1ULL);
    if (!corrects) return;
    atomicAdd(&counts[a.H + head], 1ULL);
    if (atomicExch(&fired[1 + row], step) != step) atomicAdd(fired, 1ULL);
}

}  // namespace

cudaError_t correct(float* scores, const bool* heads, const int64_t* table, const int64_t* closed, float above,
                    const int64_t* step, int64_t* counts, int64_t* fired, int B, int H, int N, int S,
                    cudaStream_t stream) {
    if (B < 0 || H < 1 || N < 0 || S < 1) return cudaErrorInvalidValue;
    if (B == 0 || N == 0) return cudaSuccess;
    const Args a = {scores, heads, table, closed, step, counts, fired, above, H, N, S};
    correct_kernel<<<B * H, THREADS, 0, stream>>>(a);
    return cudaGetLastError();
}

}  // namespace oasis
