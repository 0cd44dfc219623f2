// select: top-K blocks, difference against the residents, victims, capped admission (reference: `select`).
//
// Floor: scores and tables once, integer comparisons only. For 512 (row, head) pairs of 1,024 blocks and 129 slots that
// is 3.7 MB, 1 us: latency decides. One CTA does a (row, head) from end to end in shared memory, four of them share a
// multiprocessor, and barriers stand only where a step needs another warp's result.
//
// All lists hold words that differ from each other, and the smallest comes first:
//   a block's word: its score as a 32-bit key, the best smallest, then its index: ties go to the lower block;
//   a slot's word: its age (40 bits), `order`, the slot itself (12 bits each): the first to be evicted is the smallest.
// Lists are filled in whatever order warps arrive, then sorted, so that the order of arrival never shows.
//
// 1. Two radix searches over the blocks' words share their passes of 8 bits: the bound of the K best blocks, and the
//    bound of the C best that are not resident. A search ends when its bin holds just as many as it still wants: three
//    passes mostly, seven where scores are equal.
// 2. A slot whose block is within the first bound is a hit. One that is neither that nor open is a victim. A block
//    within both bounds and not resident is a miss that may be admitted; misses beyond C are only counted.
// 3. Both lists, mostly a handful, are sorted, and the i-th miss goes to the i-th victim.
// Where no block scores above -inf, as in heads that a correction lane leaves alone, that is seen as scores arrive.
// Where a budget is shared out (`Sharing`), scores are averaged as they are read, and the sorted misses tell what they
// promise. It is nothing but a few branches where it is not.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "oasis.h"

namespace oasis {
namespace {

constexpr int THREADS = 256;
constexpr unsigned ALL = 0xffffffffu;

constexpr int INDEX_BITS = 24;
constexpr int FIRST_SHIFT = 32 + INDEX_BITS - 8;
constexpr int MAX_BLOCKS = 1 << 18;     // a bit each in shared memory
constexpr int STAGED_BLOCKS = 1 << 14;  // up to here keys are kept in shared memory; beyond, scores are read again

constexpr uint32_t NEVER = 0xffffffffu;  // the key of -inf and NaN: nothing to predict
constexpr uint64_t LAST_WORD = (uint64_t{0xff7fffffu} << INDEX_BITS) | ((1u << INDEX_BITS) - 1);  // of the lowest float

constexpr int SLOT_BITS = 12;
constexpr int MAX_SLOTS = 1 << SLOT_BITS;       // with MAX_BLOCKS and C = S, 147 KB: sm_80 has 163
constexpr int64_t AGE_BIAS = int64_t{1} << 39;  // steps are within +-2^39
constexpr int STATIC_ROOM = 8 << 10;            // shared memory left for what the kernel declares itself

__device__ uint32_t block_key(float score) {
    const uint32_t bits = __float_as_uint(score);
    uint32_t key = bits >> 31 ? bits : bits ^ 0x7fffffffu;
    if (bits == 0x80000000u) key = 0x7fffffffu;  // -0 equals +0
    return score > -INFINITY ? key : NEVER;
}

__device__ float score_of_key(uint32_t key) { return __uint_as_float(key >> 31 ? key : key ^ 0x7fffffffu); }

// What a block promises by its average of fourth roots.
__device__ float promise(float mean) {
    const float square = __fmul_rn(mean, mean);
    return __fmul_rn(square, square);
}

// What a score makes of its block's average (reference: `smoothed`, to the bit).
__device__ float smooth(float score, float* mean, float rate) {
    if (!(fabsf(score) < INFINITY)) return score;
    const float root = __fsqrt_rn(__fsqrt_rn(score)), old = *mean;
    const float now = old < 0.0f ? root : __fadd_rn(old, __fmul_rn(__fsub_rn(root, old), rate));
    *mean = now;
    return promise(now);
}

__device__ uint64_t slot_word(int64_t block, int64_t last_selected, int64_t order, int slot) {
    const uint64_t age = static_cast<uint64_t>((block < 0 ? -1 : last_selected) + AGE_BIAS);
    return (((age << SLOT_BITS) | static_cast<uint32_t>(order)) << SLOT_BITS) | static_cast<uint32_t>(slot);
}

// The bound of the `found` smallest words, found from the top 8 bits at a time. In shared memory, one warp's to change.
struct Search {
    static constexpr uint64_t DONE = ~uint64_t{0} << 8;
    uint64_t prefix;  // the bound's digits so far and 8 zero bits; DONE, which no word has, once the bound is known
    uint64_t bound;
    int need;   // how many of the words with the prefix are within the bound
    int found;  // how many are in all: as many as wanted, or all there are

    __device__ void start(int wanted) {
        prefix = 0;
        bound = LAST_WORD;
        need = found = wanted;
    }

    __device__ bool open() const { return prefix != DONE; }

    // Takes one more digit from the counts of its 256 values, which it leaves zero.
    __device__ void narrow(int* bins, int shift, int lane) {
        const int wanted = need;
        const uint64_t before_digit = prefix;
        int4* const mine = reinterpret_cast<int4*>(bins) + 2 * lane;
        const int4 low = mine[0], high = mine[1];
        mine[0] = mine[1] = make_int4(0, 0, 0, 0);
        const int counts[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        const int sum = (low.x + low.y + low.z + low.w) + (high.x + high.y + high.z + high.w);
        int upto = sum;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int below = __shfl_up_sync(ALL, upto, d);
            if (lane >= d) upto += below;
        }
        int digit = 8 * lane, before = upto - sum, at = counts[0];
#pragma unroll
        for (int i = 1; i < 8; ++i) {
            if (before + at < wanted) {
                before += at;
                at = counts[i];
                ++digit;
            }
        }
        const unsigned reached = __ballot_sync(ALL, upto >= wanted);
        if (reached == 0) {  // fewer words than wanted, seen at the first digit: all are within the bound
            if (lane == 31) {
                found = upto;
                prefix = DONE;
            }
        } else if (lane == __ffs(reached) - 1) {
            const uint64_t longer = before_digit | static_cast<uint32_t>(digit);
            need = wanted - before;
            const bool whole = at == wanted - before;  // nothing left to tell apart
            if (whole) bound = min(((longer + 1) << shift) - 1, LAST_WORD);
            prefix = whole ? DONE : longer << 8;
        }
    }
};

// The place in a list of each lane that has something for it. `voters`: which lanes these are.
__device__ int place(int* counter, bool mine, int lane, unsigned& voters) {
    voters = __ballot_sync(ALL, mine);
    if (voters == 0) return 0;
    int first = 0;
    if (lane == 0) first = atomicAdd(counter, __popc(voters));
    return __shfl_sync(ALL, first, 0) + __popc(voters & ((1u << lane) - 1));
}

// One step of a bitonic merge of n words: pair `pair` is put in order. Each merge's first step is mirrored, so that all
// steps order the same way and no padding is needed.
__device__ __forceinline__ void order_pairs(uint64_t* words, int n, int pair, int size, int apart) {
#pragma unroll 1
    for (;; pair += THREADS) {
        const int a = 2 * pair - (pair & (apart - 1));
        if (a >= n) return;
        const int b = apart == size / 2 ? a ^ (size - 1) : a + apart;
        if (b >= n) continue;
        const uint64_t x = words[a], y = words[b];
        if (y < x) {
            words[a] = y;
            words[b] = x;
        }
    }
}

// Sorts both lists, smallest first, the first from the lowest warp on and the second from the highest. 32 neighbouring
// pairs at most 32 apart are 64 neighbouring words, the same warp's in each such step: the CTA meets only around wider
// steps.
__device__ void sort_words(uint64_t* first, int n_first, uint64_t* second, int n_second) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, back = (THREADS / 32 - 1 - warp) * 32 + lane;
    const int most = max(n_first, n_second);
    for (int size = 2; size < 2 * most; size *= 2) {
        for (int apart = size / 2; apart > 0; apart /= 2) {
            if (size < 2 * n_first) order_pairs(first, n_first, threadIdx.x, size, apart);
            if (size < 2 * n_second) order_pairs(second, n_second, back, size, apart);
            const int next = apart > 1 ? apart / 2 : size;
            if (most > 64 && max(apart, next) > 32)
                __syncthreads();
            else
                __syncwarp();
        }
    }
}

__device__ void copy_async(uint32_t* to_shared, const float* from) {
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(to_shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ void copies_arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__host__ __device__ constexpr int mask_words(int bits) { return (bits + 31) >> 5; }

__device__ bool has_bit(const unsigned* mask, int i) { return mask[i >> 5] >> (i & 31) & 1; }

int64_t dynamic_bytes(int N, int S, int C, bool staged) {
    return 8LL * (C + 2 * S) + 4LL * (S + mask_words(S) + mask_words(N) + (staged ? N : 0));
}

template <bool STAGED>
__global__ void __launch_bounds__(THREADS, 4)
    select_kernel(const float* __restrict__ scores, int64_t* __restrict__ table, int64_t* __restrict__ last_selected,
                  const int64_t* __restrict__ lengths, const int64_t* __restrict__ order,
                  const int64_t* __restrict__ step, bool* __restrict__ fresh, int H, int N, int S, int C,
                  int64_t* __restrict__ plan_block, int64_t* __restrict__ plan_slot, int64_t* __restrict__ counts,
                  int64_t* __restrict__ wasted, const Sharing sharing) {
    extern __shared__ uint64_t shared[];
    uint64_t* misses = shared;                                        // [C] words of the blocks to admit
    uint64_t* victims = misses + C;                                   // [S] words of the slots that may be given up
    uint64_t* ages = victims + S;                                     // [S] words of all slots
    int* block_of = reinterpret_cast<int*>(ages + S);                 // [S]
    unsigned* is_victim = reinterpret_cast<unsigned*>(block_of + S);  // [S] bits
    unsigned* is_resident = is_victim + mask_words(S);                // [N] bits
    uint32_t* keys = is_resident + mask_words(N);                     // [N] scores at first
    __shared__ __align__(16) int bins[2][256];
    __shared__ Search searches[2];  // of the K best, of the C best that are not resident
    __shared__ int n_misses, n_victims, n_hits;

    const int tid = threadIdx.x, lane = tid & 31, warp = tid / 32, head = blockIdx.x % H, row = blockIdx.x / H;
    const size_t outer = blockIdx.x;
    scores += outer * N;
    table += outer * S;
    last_selected += outer * S;
    plan_block += outer * C;
    plan_slot += outer * C;
    float* const means = sharing.means == nullptr ? nullptr : sharing.means + outer * sharing.mean_stride;

    if (STAGED)
        for (int i = tid; i < N; i += THREADS) copy_async(&keys[i], &scores[i]);
    const int64_t now = *step, length = lengths[row];
#pragma unroll 1
    for (int i = tid; i < mask_words(N); i += THREADS) is_resident[i] = 0;
#pragma unroll 1
    for (int i = tid; i < 2 * 256; i += THREADS) bins[0][i] = 0;
    if (tid == 0) {
        searches[0].start(min(S - 1, N));
        searches[1].start(C);
        n_misses = n_victims = n_hits = 0;
    }
    __syncthreads();

#pragma unroll 1
    for (int s = tid; s < S; s += THREADS) {
        const int64_t block = table[s];
        ages[s] = slot_word(block, last_selected[s], order[s], s);
        block_of[s] = block < 0 ? -1 : static_cast<int>(block);
        if (block >= 0 && block < N) atomicOr(&is_resident[block >> 5], 1u << (block & 31));
    }
    bool any = !STAGED;
    if (STAGED) {
        copies_arrived();
#pragma unroll 4
        for (int i = tid; i < N; i += THREADS) {  // what this thread copied
            const float score = __uint_as_float(keys[i]);
            keys[i] = block_key(means == nullptr ? score : smooth(score, &means[i], sharing.rate));
            any = any || keys[i] != NEVER;
        }
    } else if (means != nullptr) {
#pragma unroll 1
        for (int i = tid; i < N; i += THREADS) smooth(scores[i], &means[i], sharing.rate);
    }
    if (!__syncthreads_or(any)) {
#pragma unroll 1
        for (int c = tid; c < C; c += THREADS) plan_block[c] = -1, plan_slot[c] = c;
        return;
    }

    const auto word_of = [&](int block) {
        uint32_t key;
        if (STAGED) {
            key = keys[block];
        } else {
            const float score = scores[block];
            key = block_key(means != nullptr && fabsf(score) < INFINITY ? promise(means[block]) : score);
        }
        return (uint64_t{key} << INDEX_BITS) | static_cast<uint32_t>(block);
    };

    for (int shift = FIRST_SHIFT; searches[0].open() || searches[1].open(); shift -= 8) {
        const uint64_t top = searches[0].prefix, missing = searches[1].prefix;
#pragma unroll 4
        for (int i = tid; i < N; i += THREADS) {
            const uint64_t word = word_of(i), digits = word >> shift;
            if (word > LAST_WORD) continue;
            if ((digits ^ top) < 256) atomicAdd(&bins[0][digits ^ top], 1);
            if ((digits ^ missing) < 256 && !has_bit(is_resident, i)) atomicAdd(&bins[1][digits ^ missing], 1);
        }
        __syncthreads();
        if (warp < 2 && searches[warp].open()) searches[warp].narrow(bins[warp], shift, lane);
        __syncthreads();
    }
    const uint64_t top = searches[0].bound, bound = min(top, searches[1].bound);

    const int open_block = length % BLOCK > 0 ? static_cast<int>(length / BLOCK) : -2;
#pragma unroll 1
    for (int base = 0; base < S; base += THREADS) {
        const int s = base + tid, block = s < S ? block_of[s] : -1;
        const bool hit = block >= 0 && block < N && word_of(block) <= top;
        const bool victim = s < S && !hit && block != open_block;
        if (hit) last_selected[s] = now;
        const unsigned hits = __ballot_sync(ALL, hit);
        if (lane == 0 && hits) atomicAdd(&n_hits, __popc(hits));
        unsigned voters;
        const int at = place(&n_victims, victim, lane, voters);
        if (victim) victims[at] = ages[s];
        if (lane == 0 && s < S) is_victim[s >> 5] = voters;
    }
#pragma unroll 1
    for (int base = 0; base < N; base += THREADS) {
        const int i = base + tid;
        const uint64_t word = i < N ? word_of(i) : ~uint64_t{0};
        const bool miss = word <= bound && !has_bit(is_resident, i);
        unsigned voters;
        const int at = place(&n_misses, miss, lane, voters);
        if (miss) misses[at] = word;
    }
    __syncthreads();

    const int limit = sharing.caps == nullptr ? C : sharing.caps[outer];
    const int given = n_victims, admitted = min(n_misses, min(given, limit));
    // The last warps sort the one while the first sort the other.
    sort_words(victims, given, misses, n_misses);
    __syncthreads();

#pragma unroll 1
    for (int c = tid; c < C; c += THREADS) {
        const int slot = c < given ? static_cast<int>(victims[c] & (MAX_SLOTS - 1)) : -1;
        const int64_t block = c < admitted ? static_cast<int64_t>(misses[c] & ((1u << INDEX_BITS) - 1)) : -1;
        plan_block[c] = block;
        if (slot >= 0) plan_slot[c] = slot;
        if (block < 0) continue;
        table[slot] = block;
        last_selected[slot] = now;
        if (fresh == nullptr) continue;
        bool& flag = fresh[outer * S + slot];
        if (flag && wasted != nullptr) atomicAdd(reinterpret_cast<unsigned long long*>(&wasted[head]), 1ULL);
        flag = true;
    }
    if (sharing.gains != nullptr && searches[0].found > 0) {
        float* const gains = sharing.gains + outer * sharing.gain_width;
#pragma unroll 1
        for (int c = tid; c < sharing.gain_width; c += THREADS)
            gains[c] = c < n_misses ? fminf(score_of_key(static_cast<uint32_t>(misses[c] >> INDEX_BITS)), 1.0f) : 0.0f;
    }
    if (C > given) {  // pairs beyond the victims name the other slots, in their order: all slots of a plan differ
#pragma unroll 1
        for (int s = tid; s < S; s += THREADS) {
            if (has_bit(is_victim, s)) continue;
            int others = s - __popc(is_victim[s >> 5] & ((1u << (s & 31)) - 1));
#pragma unroll 1
            for (int i = 0; i < s >> 5; ++i) others -= __popc(is_victim[i]);
            if (given + others < C) plan_slot[given + others] = s;
        }
    }
    if (tid == 0) {
        const int seen[3] = {n_hits, admitted, searches[0].found - n_hits - admitted};
        for (int i = 0; i < 3; ++i)
            if (seen[i] != 0) {
                const auto to = reinterpret_cast<unsigned long long*>(&counts[i * H + head]);
                atomicAdd(to, static_cast<unsigned long long>(static_cast<int64_t>(seen[i])));
            }
    }
}

}  // namespace

cudaError_t select(const float* scores, int64_t* table, int64_t* last_selected, const int64_t* lengths,
                   const int64_t* order, const int64_t* step, bool* fresh, int B, int H, int N, int S, int C,
                   int64_t* plan_block, int64_t* plan_slot, int64_t* counts, int64_t* wasted, const Sharing& sharing,
                   cudaStream_t stream) {
    if (B < 0 || H < 0 || N < 0 || N > MAX_BLOCKS || S < 1 || S > MAX_SLOTS || C < 0 || C > S)
        return cudaErrorInvalidValue;
    if ((sharing.means != nullptr && sharing.mean_stride < N) || (sharing.gains != nullptr && sharing.gain_width < C))
        return cudaErrorInvalidValue;
    if (B == 0 || H == 0) return cudaSuccess;
    int device = 0, room = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error != cudaSuccess) return error;
    room -= STATIC_ROOM;
    const bool staged = N <= STAGED_BLOCKS && dynamic_bytes(N, S, C, true) <= room;
    const int64_t bytes = dynamic_bytes(N, S, C, staged);
    if (bytes > room) return cudaErrorInvalidValue;
    const auto kernel = staged ? select_kernel<true> : select_kernel<false>;
    // Always all the room: a smaller later limit could refuse a larger launch that was captured before.
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, room);
    if (error != cudaSuccess) return error;
    kernel<<<B * H, THREADS, bytes, stream>>>(scores, table, last_selected, lengths, order, step, fresh, H, N, S, C,
                                              plan_block, plan_slot, counts, wasted, sharing);
    return cudaGetLastError();
}

}  // namespace oasis
