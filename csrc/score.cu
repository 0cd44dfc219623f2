// score: what the next step wants of every closed block (oasis_hf/ops/reference.py: score).
//
// Floor: the summaries of closed blocks once. B=64, H=8, N=1,024, D=128, P=2, int8: 268 MB, 63 us at 4.27 TB/s; bf16
// with P=1 the same, int8 with P=1 half. Operations: 4*D a part and query row, 4 GFLOP at 4 query rows: negligible on
// tensor cores, and what has to be watched is the instructions that widen int8 (5 for 4 values, to fp16).
//
// Both scorers are two dot products with exact operands: q+ . max + q- . min, or q . mid + lambda * |q| . half. Parts
// are the 16 rows of an mma, query rows (active token x head of the group) its 8 columns, and each vector has its own
// accumulator, so that scales, lambda and the attention's scaling are applied to fp32 sums. int8 is widened to fp16,
// and a query row of bf16 is then scaled by a power of two: what that rounds off is 2^-35 of the row's largest.
//
// A dot product does not mind a permutation of k that both operands share, so a thread's share of a vector is 16
// contiguous bytes, and it multiplies exactly the bytes that it has copied itself: the ring of cp.async stages in
// shared memory is private to each thread, and the stream needs no barrier. Warps take tiles of 16 parts in turn.
// The grid is persistent: while a CTA finishes one item, a (row, KV head) or a split of it, the copies of its next item
// are on their way.
//
// One value a query row and block is kept until the row's sum is known: its best part's score, or (softmax-mean) the
// sum of its parts' exp2(x - m). m is a warp's own, follows the scores only where one passes it by SLACK, in practice
// in the warp's first tile, and is made good when the warps' sums are joined: one exp2 a part and query row.
// Values stay in shared memory as far as they fit when one CTA has the whole (row, KV head), otherwise they go to
// scratch. With several splits the last CTA to arrive finishes.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "oasis.h"

namespace oasis {
namespace {

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int CTAS_PER_SM = 2;
constexpr int STAGES = 4;
constexpr int TILE = 16;          // parts: rows of an mma
constexpr int CHUNK = 64;         // bytes of a vector in one stage: 16 for each thread of a quad
constexpr int PASS = 32;          // most query rows in one pass over the summaries
constexpr int ITEM_COST = 6;      // what an item costs besides its tiles, in tiles
constexpr float SLACK = 40.0f;    // in log2: sums stay far from infinity, and what matters far from 0
constexpr float LOWEST = -1e30f;  // below any score, and still a number when subtracted from itself
constexpr float LOG2E = 1.4426950408889634f;

struct Args {
    const char* query;
    int64_t q_row, q_head, q_token;
    const char* summaries;
    const uint32_t* scales;  // pairs of fp16
    const int64_t* closed;
    const float* weights;
    int H, G, T, D, N, P, log_p, tiles_n;
    int splits, items;  // items: rows * heads * splits
    int64_t cap;
    float first_factor, second_factor;  // of the two dot products
    Reduction reduction;
    int sink_blocks, recent_blocks;
    float* out;
    unsigned* counters;
    float2* stats;   // [B*H, splits, WARPS, G*T]: m and sum
    float* values;   // [B*H, G*T, pitch(N)]
    int room;        // floats of shared memory for values
    int scales_at, queries_at, stats_at, factors_at, near_at;  // places in shared memory, in bytes; the ring is first
    uint32_t magic;  // see widen
};

// Floats between the values of two query rows: 4 rows (a quad's stores) fall in different banks.
__host__ __device__ inline int pitch_of(int blocks) { return (blocks + 15) / 16 * 16 + 4; }

// -- PTX --------------------------------------------------------------------------------------------------------------

// Copies 16 (4) bytes, or zeros where nothing is there: then `from` is not read, and may be any address.
__device__ __forceinline__ void copy16(void* to, const void* from, bool there) {
    uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;"
                 :: "r"(at), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy4(void* to, const void* from, bool there) {
    uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(at), "l"(from), "r"(there ? 4 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

template <typename E2>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma<__nv_bfloat162>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<__half2>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// threadIdx.x, read anew: what follows from it is not kept in registers through the whole kernel.
__device__ __forceinline__ int thread_index() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// -- Numbers ----------------------------------------------------------------------------------------------------------

template <typename E2>
__device__ __forceinline__ E2 as(uint32_t bits) { return *reinterpret_cast<E2*>(&bits); }
template <typename E2>
__device__ __forceinline__ uint32_t bits_of(E2 x) { return *reinterpret_cast<uint32_t*>(&x); }

// Bytes 0 and 2 of a word of int8 as fp16, exactly: 1,024 + 128 + x, less 1,152. `magic` holds that number; it is an
// argument of the kernel, since ptxas splits a bitwise operation with two constants that it knows in two.
__device__ __forceinline__ uint32_t widen(uint32_t x, uint32_t magic) {
    return bits_of(__hsub2(as<__half2>((x & 0x00ff00ffu) ^ magic), as<__half2>(magic)));
}

// bf16 times a power of two as fp16.
__device__ __forceinline__ uint32_t to_half(uint32_t x, float scale) {
    const float2 pair = __bfloat1622float2(as<__nv_bfloat162>(x));
    return bits_of(__floats2half2_rn(pair.x * scale, pair.y * scale));
}

// The query's side of the two dot products.
template <typename E2, bool MINMAX>
__device__ __forceinline__ void expand(uint32_t q, uint32_t& first, uint32_t& second) {
    if constexpr (MINMAX) {
        first = bits_of(__hmax2(as<E2>(q), as<E2>(0u)));
        second = bits_of(__hmin2(as<E2>(q), as<E2>(0u)));
    } else {
        first = q;
        second = q & 0x7fff7fffu;
    }
}

// Sums of exp2(x - m) of two sets, each with its own m.
__device__ __forceinline__ float2 merge(float2 x, float2 y) {
    float high = fmaxf(x.x, y.x);
    return make_float2(high, x.y * exp2_fast(x.x - high) + y.y * exp2_fast(y.x - high));
}

__device__ float sum_threads(float x) {
    __shared__ float partial[WARPS];
    for (int mask = 1; mask < 32; mask *= 2) x += __shfl_xor_sync(~0u, x, mask);
    __syncthreads();
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
    for (int w = 0; w < WARPS; ++w) sum += partial[w];
    return sum;
}

// -- The kernel -------------------------------------------------------------------------------------------------------

extern __shared__ uint4 shared[];
template <typename X>
__device__ __forceinline__ X* at(int bytes) { return reinterpret_cast<X*>(reinterpret_cast<char*>(shared) + bytes); }

// Tiles of one (row, KV head) that an item has.
struct Item {
    int pair, split, closed, first_tile, end_tile;
};
__device__ __forceinline__ int tiles_of(const Args& a, int closed) { return (closed * a.P + TILE - 1) / TILE; }
__device__ __forceinline__ Item item_of(const Args& a, int index) {
    Item item;
    item.pair = index / a.splits, item.split = index - item.pair * a.splits;
    item.closed = static_cast<int>(max(int64_t(0), min(__ldg(a.closed + item.pair / a.H), int64_t(a.N))));
    const int tiles = tiles_of(a, item.closed);
    item.first_tile = tiles * item.split / a.splits, item.end_tile = tiles * (item.split + 1) / a.splits;
    return item;
}

// This thread's copies: the chunks of its warp's tiles, item after item. Its rows of a tile are the neighbouring parts
// 2 * quad and 2 * quad + 1 (rows `quad` and `quad + 8` of the mma): with two parts a block they are one block's.
template <bool INT8>
struct Feed {
    int index, tiles, parts, chunk;  // tiles: of the item that this warp has still to copy; parts: from here to the end
    const char* from;
    const uint32_t* scales;

    __device__ __forceinline__ void open(const Args& a) {
        const Item item = item_of(a, index);
        const int tid = thread_index(), quad = tid % 32 / 4, in_quad = tid % 4, vector = a.D * (INT8 ? 1 : 2);
        const int tile = item.first_tile + tid / 32, first = tile * TILE + 2 * quad;
        tiles = (item.end_tile - tile + WARPS - 1) / WARPS, parts = item.closed * a.P - first, chunk = 0;
        const int64_t part = item.pair * a.cap * a.P + first;
        from = a.summaries + part * 2 * vector + in_quad * 16;
        scales = a.scales + part;
    }

    // One chunk, or nothing at the end of all; always one group of copies.
    __device__ __forceinline__ void next(const Args& a, int stage) {
        const int in_quad = threadIdx.x % 4, vector = a.D * (INT8 ? 1 : 2);
        const int chunks = (vector + CHUNK - 1) / CHUNK;
        while (tiles <= 0 && index < a.items) {
            index += gridDim.x;
            if (index < a.items) open(a);
        }
        if (tiles > 0) {
            const bool inside = chunk * CHUNK + in_quad * 16 < vector;
            uint4* to = shared + stage * 4 * THREADS + threadIdx.x;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const bool there = half < parts;
#pragma unroll
                for (int v = 0; v < 2; ++v)
                    copy16(to + (2 * v + half) * THREADS, from + (2 * half + v) * vector, there && inside);
                if (INT8 && chunk == chunks - 1)
                    copy4(at<uint32_t>(a.scales_at) + (2 * stage + half) * THREADS + threadIdx.x, scales + half, there);
            }
            from += CHUNK;
            if (++chunk == chunks) {
                chunk = 0, --tiles, parts -= WARPS * TILE, scales += WARPS * TILE;
                from += WARPS * TILE * 2 * vector - chunks * CHUNK;
            }
        }
        commit_copies();
    }
};

// An item and its query rows, in shared memory.
struct Work {
    Item item;
    const char* query;         // of the row and the group's first head
    int rows, tokens;          // tokens: active ones, whose weight is not 0
    int token[MAX_TOKENS];     // their places and
    float weight[MAX_TOKENS];  // weights
    float* far;                // values of query rows from `kept`; those below are in shared memory
    int kept, pitch;
    float2* stats;             // [groups, G*T]: m and sum. A group of tiles is what one warp of one split has.
    float m[WARPS][PASS], unit[PASS];  // unit: what 1 of a scaled query row stands for

    __device__ __forceinline__ float* values(const Args& a, int row) const {
        return (row < kept ? at<float>(a.near_at) : far) + row * pitch;
    }
};

// Values of the item's blocks for the query rows `start` to `start + 8 * NT`, and their sums.
template <typename E2, bool INT8, bool MINMAX, int NT>
__device__ __forceinline__ void stream(const Args& a, Work& w, Feed<INT8>& feed, int& stage, int start) {
    constexpr int UNITS = INT8 ? 2 : 1;  // 16-byte pieces of a query that stand against one of a vector
    constexpr bool HALVES = INT8 && NT > 2;  // of a vector's piece are loaded one after the other: registers are short
    // int8 takes fewer instructions to fp16 than to bf16; then a query row of bf16 is scaled to fit.
    using M2 = std::conditional_t<INT8, __half2, E2>;
    constexpr bool SCALED = INT8 && std::is_same_v<E2, __nv_bfloat162>;
    const int tid = thread_index(), lane = tid % 32, warp = tid / 32, quad = lane / 4, in_quad = lane % 4;
    const int chunks = (a.D * (INT8 ? 1 : 2) + CHUNK - 1) / CHUNK;
    const bool soft = a.reduction == Reduction::softmax_mean;

    // Queries in the order of the mma's B fragments, a warp a row, a lane 16 bytes, which are two k steps.
#pragma unroll 1
    for (int i = warp; i < 8 * NT; i += WARPS) {
        const int row = start + i, unit = lane / UNITS / 4 * UNITS + lane % UNITS;
        uint4 q = make_uint4(0, 0, 0, 0);
        if (row < w.rows && lane * 8 < a.D) {
            int64_t offset = row % a.G * a.q_head + w.token[row / a.G] * a.q_token + lane * 8;
            q = *reinterpret_cast<const uint4*>(w.query + 2 * offset);
        }
        if constexpr (SCALED) {
            const auto high = [](uint32_t x) { return max((x & 0x7fffu) >> 7, (x & 0x7fffffffu) >> 23); };
            uint32_t most = max(max(high(q.x), high(q.y)), max(high(q.z), high(q.w)));
            for (int mask = 1; mask < 32; mask *= 2) most = max(most, __shfl_xor_sync(~0u, most, mask));
            const int power = min(264 - int(most), 254);  // the row's largest becomes 2^10: the least lose nothing
            const float scale = __int_as_float(power << 23);
            q = make_uint4(to_half(q.x, scale), to_half(q.y, scale), to_half(q.z, scale), to_half(q.w, scale));
            if (lane == 0) w.unit[i] = __int_as_float((254 - power) << 23);
        }
        if (INT8)  // as `widen` pairs them: 0 2, 1 3, 4 6, 5 7
            q = make_uint4(__byte_perm(q.x, q.y, 0x5410), __byte_perm(q.x, q.y, 0x7632),
                           __byte_perm(q.z, q.w, 0x5410), __byte_perm(q.z, q.w, 0x7632));
        if (unit < chunks * UNITS) at<uint4>(a.queries_at)[(unit * NT + i / 8) * 32 + i % 8 * 4 + lane / UNITS % 4] = q;
    }
    __syncthreads();

    float total[NT][2] = {};
    float* m = w.m[warp] + in_quad * 2;  // of row n * 8 + e at n * 8 + e; all quads write the same
#pragma unroll
    for (int i = 0; i < NT * 2; ++i) m[i / 2 * 8 + i % 2] = LOWEST;
    // A thread's blocks of a tile: both of its parts, or theirs in common, or half of that.
    const int own = a.P == 1 ? 2 : a.P == 2 || quad % 2 == 0 ? 1 : 0;

    for (int tile = w.item.first_tile + warp; tile < w.item.end_tile; tile += WARPS) {
        float sum[2][NT][4] = {};
        float factor[2][2] = {{a.first_factor, a.second_factor}, {a.first_factor, a.second_factor}};  // [half][vector]
        for (int chunk = 0; chunk < chunks; ++chunk) {
            wait_copies<STAGES - 2>();
            feed.next(a, (stage + STAGES - 1) % STAGES);
            uint32_t words[2][2][4];  // [vector][half]
#pragma unroll
            for (int i = 0; i < 4 && !HALVES; ++i) {
                uint4 piece = shared[(stage * 4 + i) * THREADS + tid];
                words[i / 2][i % 2][0] = piece.x, words[i / 2][i % 2][1] = piece.y;
                words[i / 2][i % 2][2] = piece.z, words[i / 2][i % 2][3] = piece.w;
            }
#pragma unroll(HALVES ? 1 : 2)
            for (int unit = 0; unit < UNITS; ++unit) {
#pragma unroll
                for (int i = 0; i < 4 && HALVES; ++i) {
                    uint2 piece = reinterpret_cast<const uint2*>(shared + (stage * 4 + i) * THREADS + tid)[unit];
                    words[i / 2][i % 2][0] = piece.x, words[i / 2][i % 2][1] = piece.y;
                }
                uint32_t block[2][2][4];  // [k step][vector]
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    const int k = i / 8, v = i / 4 % 2, half = i % 2, right = i / 2 % 2;
                    if constexpr (INT8)
                        block[k][v][i % 4] = widen(words[v][half][HALVES ? k : 2 * unit + k] >> (right * 8), a.magic);
                    else
                        block[k][v][i % 4] = words[v][half][2 * k + right];
                }
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const uint4 q = at<uint4>(a.queries_at)[((chunk * UNITS + unit) * NT + n) * 32 + lane];
#pragma unroll
                    for (int k = 0; k < 2; ++k) {
                        uint32_t first[2], second[2];
                        expand<M2, MINMAX>(k ? q.z : q.x, first[0], second[0]);
                        expand<M2, MINMAX>(k ? q.w : q.y, first[1], second[1]);
                        mma<M2>(sum[0][n], block[k][0], first[0], first[1]);
                        mma<M2>(sum[1][n], block[k][1], second[0], second[1]);
                    }
                }
            }
            if (INT8 && chunk == chunks - 1) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t* scales = at<uint32_t>(a.scales_at) + (2 * stage + half) * THREADS + tid;
                    const float2 scale = __half22float2(as<__half2>(*scales));
                    factor[half][0] *= scale.x, factor[half][1] *= scale.y;
                }
            }
            if (++stage == STAGES) stage = 0;
        }

        // Scores, in place of the first sums: [n][e] of this thread's first part, [n][e + 2] of its second.
        const int part = tile * TILE + 2 * quad, parts = w.item.closed * a.P;
        const float* unit = w.unit + thread_index() % 4 * 2;
        bool passed = false;
#pragma unroll
        for (int i = 0; i < NT * 4; ++i) {
            float& x = sum[0][i / 4][i % 4];
            const int half = i % 4 / 2;
            x = factor[half][0] * x + factor[half][1] * sum[1][i / 4][i % 4];
            if (SCALED) x *= unit[i / 4 * 8 + i % 2];
            if (soft && part + half >= parts) x = -INFINITY;
            passed |= x > m[i / 4 * 8 + i % 2] + SLACK;
        }
        if (soft && __any_sync(~0u, passed)) {
#pragma unroll
            for (int i = 0; i < NT * 2; ++i) {
                const int n = i / 2, e = i % 2, row = start + n * 8 + in_quad * 2 + e;
                const float before = m[n * 8 + e];
                float top = fmaxf(before, fmaxf(sum[0][n][e], sum[0][n][e + 2]));
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, mask));
                const float keep = exp2_fast(before - top);
                __syncwarp();
                m[n * 8 + e] = top, total[n][e] *= keep;
#pragma unroll 1
                for (int t = w.item.first_tile + warp; row < w.rows && t < tile; t += WARPS)
#pragma unroll 1
                    for (int j = 0; j < own; ++j) w.values(a, row)[((t * TILE + 2 * quad) >> a.log_p) + j] *= keep;
            }
        }
#pragma unroll
        for (int i = 0; i < NT * 2; ++i) {
            const int n = i / 2, e = i % 2, row = start + n * 8 + in_quad * 2 + e;
            float low = sum[0][n][e], high = sum[0][n][e + 2];
            if (soft) {
                low = exp2_fast(low - m[n * 8 + e]), high = exp2_fast(high - m[n * 8 + e]);
                total[n][e] += low + high;
            }
            if (a.P > 1) low = soft ? low + high : fmaxf(low, high);
            if (a.P > 2) {
                high = __shfl_xor_sync(~0u, low, 4);
                low = soft ? low + high : fmaxf(low, high);
            }
            if (own == 0 || row >= w.rows) continue;
            const int place = row * w.pitch + (part >> a.log_p);
            if (row < w.kept) {
                at<float>(a.near_at)[place] = low;
                if (a.P == 1) at<float>(a.near_at)[place + 1] = high;
            } else {
                w.far[place] = low;
                if (a.P == 1) w.far[place + 1] = high;
            }
        }
    }

    if (soft) {
#pragma unroll
        for (int i = 0; i < NT * 2; ++i) {
            const int row = start + i / 2 * 8 + in_quad * 2 + i % 2;
            float x = total[i / 2][i % 2];
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) x += __shfl_xor_sync(~0u, x, mask);
            if (quad == 0 && row < w.rows)
                w.stats[(w.item.split * WARPS + warp) * a.G * a.T + row] = make_float2(m[i / 2 * 8 + i % 2], x);
        }
    }
    __syncthreads();  // values, sums, and every warp is done with the queries
}

// From values to scores. A block's score is the sum over entries of factor * (value - offset): an entry is a token,
// whose values are first reduced over the group, or (softmax-mean) a query row, whose values are brought to the row's
// m instead of their group's, with no offset.
__device__ __forceinline__ void finish(const Args& a, const Work& w) {
    const int tid = thread_index(), lane = tid % 32, warp = tid / 32, closed = w.item.closed;
    const bool soft = a.reduction == Reduction::softmax_mean;
    const int entries = closed == 0 ? 0 : soft ? w.rows : w.tokens, most_rows = a.G * a.T;
    float2* factors = at<float2>(a.factors_at);  // of entries: offset and factor
    if (soft) {
        for (int row = warp; row < entries; row += WARPS) {
            float2 all = make_float2(LOWEST, 0.0f);
#pragma unroll 4
            for (int g = lane; g < a.splits * WARPS; g += 32) all = merge(all, w.stats[g * most_rows + row]);
            for (int mask = 1; mask < 32; mask *= 2) {
                float m = __shfl_xor_sync(~0u, all.x, mask), sum = __shfl_xor_sync(~0u, all.y, mask);
                all = merge(all, make_float2(m, sum));
            }
            if (lane == 0) factors[row] = make_float2(all.x, w.weight[row / a.G] / (a.G * all.y));
        }
    } else {
        for (int t = 0; t < entries; ++t) {
            float* reduced = w.values(a, t * a.G);
            float sum = 0.0f, squares = 0.0f;
            for (int n = tid; n < closed; n += THREADS) {
                float value = reduced[n];
                for (int g = 1; g < a.G; ++g) {
                    float other = w.values(a, t * a.G + g)[n];
                    value = a.reduction == Reduction::max ? fmaxf(value, other) : value + other;
                }
                if (a.reduction == Reduction::mean) value /= a.G;
                reduced[n] = value;
                sum += value;
            }
            float mean = 0.0f, rate = 1.0f;
            if (a.T > 1) {
                mean = sum_threads(sum) / closed;
                for (int n = tid; n < closed; n += THREADS) squares += (reduced[n] - mean) * (reduced[n] - mean);
                rate = rsqrtf(sum_threads(squares) / closed + 1e-12f);
            }
            if (tid == 0) factors[t] = make_float2(mean, w.weight[t] * rate);
        }
    }
    __syncthreads();

    // Four blocks a thread and turn; they are of one tile.
    const int64_t row_closed = __ldg(a.closed + w.item.pair / a.H);
    const int tiles = tiles_of(a, closed);
    for (int first = 4 * tid; first < a.N; first += 4 * THREADS) {
        float score[4] = {};
        if (first < closed) {
            const int tile = first * a.P / TILE, split = a.splits == 1 ? 0 : ((tile + 1) * a.splits - 1) / tiles;
            const int group = split * WARPS + (tile - tiles * split / a.splits) % WARPS;
            const float2* stats = w.stats + group * most_rows;
#pragma unroll 4
            for (int e = 0; e < entries; ++e) {
                const float4 x = *reinterpret_cast<const float4*>(w.values(a, soft ? e : e * a.G) + first);
                const float2 factor = factors[e];
                const float less = soft ? 0.0f : factor.x;
                const float times = factor.y * (soft ? exp2_fast(stats[e].x - factor.x) : 1.0f);
                score[0] += times * (x.x - less), score[1] += times * (x.y - less);
                score[2] += times * (x.z - less), score[3] += times * (x.w - less);
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int n = first + j;
            const bool always = n < a.sink_blocks || n >= row_closed - a.recent_blocks;
            score[j] = n >= closed ? -INFINITY : always ? INFINITY : score[j];
        }
        float* out = a.out + int64_t(w.item.pair) * a.N + first;
        if (a.N % 4 == 0) {
            *reinterpret_cast<float4*>(out) = make_float4(score[0], score[1], score[2], score[3]);
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (first + j < a.N) out[j] = score[j];
        }
    }
}

template <typename E2, bool INT8, bool MINMAX>
__global__ void __launch_bounds__(THREADS, CTAS_PER_SM) score_kernel(const __grid_constant__ Args a) {
    __shared__ Work w;
    __shared__ bool is_last;
    const int most_rows = a.G * a.T;
    const bool one_pass = most_rows <= PASS;

    Feed<INT8> feed;
    int stage = 0;
    auto begin = [&](int index) {
        feed.index = index;
        feed.open(a);
        if (!one_pass) feed.index = a.items;  // no further
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; ++i) feed.next(a, (stage + i) % STAGES);
    };
    if (one_pass) begin(blockIdx.x);
    for (int index = blockIdx.x; index < a.items; index += gridDim.x) {
        const Item item = item_of(a, index);
        const int tid = thread_index(), lane = tid % 32;
        const int b = item.pair / a.H, h = item.pair - b * a.H;
        const float weight = lane < a.T ? (a.T == 1 ? 1.0f : __ldg(a.weights + int64_t(b) * a.T + lane)) : 0.0f;
        const unsigned active = __ballot_sync(~0u, weight != 0.0f);
        __syncthreads();  // the last item is finished
        if (tid < 32 && weight != 0.0f) {
            int place = __popc(active & ((1u << lane) - 1));
            w.token[place] = lane, w.weight[place] = weight;
        }
        if (tid == 0) {
            w.item = item;
            w.query = a.query + 2 * (b * a.q_row + int64_t(h) * a.G * a.q_head);
            w.tokens = __popc(active), w.rows = w.tokens * a.G;
            w.pitch = pitch_of(item.closed);
            w.far = a.values + int64_t(item.pair) * most_rows * pitch_of(a.N);
            w.kept = a.splits > 1 ? 0 : min(w.rows, a.room / w.pitch);
            w.stats = a.splits > 1 ? a.stats + int64_t(item.pair) * a.splits * WARPS * most_rows
                                   : at<float2>(a.stats_at);
        }
        __syncthreads();

        for (int start = 0; w.item.closed > 0 && (start == 0 || start < w.rows); start += PASS) {
            if (!one_pass) begin(index);
            const int left = w.rows - start;
            if (left <= 8) stream<E2, INT8, MINMAX, 1>(a, w, feed, stage, start);
            else if (left <= 16) stream<E2, INT8, MINMAX, 2>(a, w, feed, stage, start);
            else stream<E2, INT8, MINMAX, 4>(a, w, feed, stage, start);
        }
        if (a.splits > 1) {
            __threadfence();
            __syncthreads();
            // The counter wraps to 0 by itself.
            const unsigned before_last = a.splits - 1;
            if (thread_index() == 0) is_last = atomicInc(a.counters + w.item.pair, before_last) == before_last;
            __syncthreads();
            if (!is_last) continue;
            __threadfence();
        }
        finish(a, w);
    }
}

int attribute(cudaDeviceAttr which) {
    int device = 0, value = 0;
    if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&value, which, device) != cudaSuccess) return 0;
    return value;
}

int places() { return std::max(1, attribute(cudaDevAttrMultiProcessorCount)) * CTAS_PER_SM; }

// Items a (row, KV head): what takes the fewest tiles' time, each warp having a tile at least.
int splits_of(int64_t pairs, int N, int P) {
    const int64_t tiles = (int64_t(N) * P + TILE - 1) / TILE, slots = places();
    int64_t best = 0, least = 0;
    for (int64_t s = 1; s == 1 || (s * WARPS <= tiles && s * pairs <= 4 * slots); ++s) {
        const int64_t time = (pairs * s + slots - 1) / slots * ((tiles + s - 1) / s + ITEM_COST);
        if (s == 1 || time < least) best = s, least = time;
    }
    return static_cast<int>(best);
}

int64_t stats_bytes(int64_t pairs, int splits, int rows) {
    return splits > 1 ? (pairs * splits * WARPS * rows * 8 + 255) / 256 * 256 : 0;
}

}  // namespace

int64_t score_counters(int B, int H) { return (int64_t(B) * H * 4 + 255) / 256 * 256; }

int64_t score_scratch(int B, int H, int G, int T, int N, int P) {
    const int64_t pairs = int64_t(B) * H;
    return score_counters(B, H) + stats_bytes(pairs, splits_of(pairs, N, P), G * T) + pairs * G * T * pitch_of(N) * 4;
}

cudaError_t score(const void* query, int64_t q_row, int64_t q_head, int64_t q_token, const void* summaries,
                  const void* scales, const int64_t* closed, const float* weights, int B, int H, int G, int T, int D,
                  int N, int64_t cap, int P, bool int8, Scorer scorer, float half_range, Reduction reduction,
                  float scaling, int sink_blocks, int recent_blocks, float* out, void* scratch, Dtype dtype,
                  cudaStream_t stream) {
    // A stride that is never taken may be anything. The rest suits 16-byte loads and stores.
    const bool aligned = (B <= 1 || q_row % 8 == 0) && (H * G <= 1 || q_head % 8 == 0) &&
                         (T <= 1 || q_token % 8 == 0) && reinterpret_cast<uintptr_t>(query) % 16 == 0 &&
                         reinterpret_cast<uintptr_t>(summaries) % 16 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0;
    if (!aligned || D % 16 || D < 16 || D > 256 || T < 1 || T > MAX_TOKENS || G < 1 || N > cap ||
        (P != 1 && P != 2 && P != 4) || (int8 && !scales) || int64_t(B) * H > (1 << 20) || N > (1 << 20))
        return cudaErrorInvalidValue;
    if (B <= 0 || H <= 0 || N <= 0) return cudaSuccess;

    const int64_t pairs = int64_t(B) * H;
    const int rows = G * T;
    char* scratch_at = static_cast<char*>(scratch);
    Args a;
    a.query = static_cast<const char*>(query), a.q_row = q_row, a.q_head = q_head, a.q_token = q_token;
    a.summaries = static_cast<const char*>(summaries), a.scales = static_cast<const uint32_t*>(scales);
    a.closed = closed, a.weights = weights;
    a.H = H, a.G = G, a.T = T, a.D = D, a.N = N, a.P = P, a.log_p = P / 2, a.cap = cap;
    a.splits = splits_of(pairs, N, P), a.items = static_cast<int>(pairs * a.splits);
    a.magic = 0x64806480u;
    a.tiles_n = rows <= 8 ? 1 : rows <= 16 ? 2 : 4;
    a.first_factor = reduction == Reduction::softmax_mean ? scaling * LOG2E : scaling;
    a.second_factor = a.first_factor * (scorer == Scorer::midrange ? half_range : 1.0f);
    a.reduction = reduction, a.sink_blocks = sink_blocks, a.recent_blocks = recent_blocks, a.out = out;
    a.counters = reinterpret_cast<unsigned*>(scratch_at);
    a.stats = reinterpret_cast<float2*>(scratch_at + score_counters(B, H));
    a.values = reinterpret_cast<float*>(scratch_at + score_counters(B, H) + stats_bytes(pairs, a.splits, rows));

    // Shared memory: the ring, what belongs to it, and in what is left of an SM's share, values.
    const int chunks = (D * (int8 ? 1 : 2) + CHUNK - 1) / CHUNK;
    a.scales_at = STAGES * THREADS * 64;
    a.queries_at = a.scales_at + (int8 ? STAGES * THREADS * 8 : 0);
    a.stats_at = a.queries_at + chunks * (int8 ? 2 : 1) * a.tiles_n * 512;
    a.factors_at = a.stats_at + WARPS * rows * 8;
    a.near_at = a.factors_at + (rows + rows % 2) * 8;
    const int fixed = a.near_at;
    constexpr int reserved = 1024 + 2048;  // the system's, and the static arrays
    const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - 2048;
    int share = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / CTAS_PER_SM - reserved;
    if (fixed > share) share = most;
    if (fixed > most) return cudaErrorInvalidValue;
    const int64_t wanted = a.splits > 1 ? 0 : int64_t(rows) * pitch_of(N);
    a.room = static_cast<int>(std::min<int64_t>(wanted, (std::min(share, most) - fixed) / 4));
    const int bytes = fixed + 4 * a.room;

    auto pick = [&](auto e2) {
        using E2 = decltype(e2);
        if (scorer == Scorer::minmax) return int8 ? score_kernel<E2, true, true> : score_kernel<E2, false, true>;
        return int8 ? score_kernel<E2, true, false> : score_kernel<E2, false, false>;
    };
    void (*kernel)(const Args) = dtype == Dtype::bf16 ? pick(__nv_bfloat162{}) : pick(__half2{});
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
    if (error != cudaSuccess) return error;
    void* arguments[] = {&a};
    const int ctas = std::min(a.items, places());
    return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(ctas), dim3(THREADS), arguments, bytes,
                            stream);
}

}  // namespace oasis
