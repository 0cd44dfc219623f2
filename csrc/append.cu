// One token a row to its open block: slot, page and, where it closes the block, the block's summary.
//
// Floor: latency. Bytes are few (the tables once, 3*8*S a row and head, and K and V of one token; a closing block's 16
// keys), so what counts is how many reads wait for one another: a warp takes a row and head, and reads at once the
// length, the tables and the new token; then the page's number (over the link, if it stands in host memory) while it
// looks for the slot. Nothing else is read unless a block is evicted or closed. No shared memory, no barriers.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "oasis.h"

namespace oasis {
namespace {

constexpr int WARPS = 4;
constexpr int READS = 8;     // slots a lane reads at once: 256 a warp
constexpr int MAX_DIM = 256;
constexpr int PARTS = 4;     // most parts a block
constexpr unsigned ALL = 0xffffffff;

struct Args {
    void *keys, *values;
    int64_t *table, *last_selected;
    const int64_t *lengths, *order;
    const void *new_keys, *new_values;
    int64_t new_row, new_head;
    const int64_t* step;
    bool* fresh;
    int B, H, S, D;
    int64_t* slot;
    bool* evicted;
    int64_t* wasted;
    void* pages;
    const int64_t* page_table;
    int64_t table_row, table_head;
    void *summaries, *scales;
    int64_t cap;
    int P;
    bool int8;
    Scorer scorer;
};

template <typename T>
struct Two;
template <>
struct Two<__nv_bfloat16> {
    using type = __nv_bfloat162;
};
template <>
struct Two<__half> {
    using type = __half2;
};

__device__ __forceinline__ float2 to_float(__nv_bfloat162 x) { return __bfloat1622float2(x); }
__device__ __forceinline__ float2 to_float(__half2 x) { return __half22float2(x); }
__device__ __forceinline__ void round_to(float x, float y, __nv_bfloat162& out) { out = __floats2bfloat162_rn(x, y); }
__device__ __forceinline__ void round_to(float x, float y, __half2& out) { out = __floats2half2_rn(x, y); }

// What a lane knows of `READS` slots, 32 apart.
struct Slots {
    int64_t block[READS], age[READS], order[READS];
};

__device__ __forceinline__ void read_slots(const Args& a, int pair, int first, Slots& slots) {
    const int64_t row = static_cast<int64_t>(pair) * a.S;
#pragma unroll
    for (int i = 0; i < READS; ++i) {
        const int s = first + i * 32;
        if (s >= a.S) continue;
        slots.block[i] = a.table[row + s], slots.age[i] = a.last_selected[row + s], slots.order[i] = a.order[s];
    }
}

struct Place {
    int slot;
    bool evicts;
};

// The slot that holds `block`, or 0: reference: append's where nothing opens. `slots`: the first ones, read already.
__device__ __forceinline__ Place find_block(const Args& a, int pair, int64_t block, Slots& slots) {
    int found = INT_MAX;
    for (int first = threadIdx.x % 32;;) {
#pragma unroll
        for (int i = 0; i < READS; ++i) {
            const int s = first + i * 32;
            if (s < a.S && slots.block[i] == block) found = min(found, s);
        }
        first += 32 * READS;
        if (first >= a.S) break;
        read_slots(a, pair, first, slots);
    }
    found = __reduce_min_sync(ALL, found);
    return {found == INT_MAX ? 0 : found, false};
}

// The slot of the smallest evict_key.
__device__ __forceinline__ Place find_victim(const Args& a, int pair, Slots& slots) {
    int64_t best = LLONG_MAX;
    int best_tag = INT_MAX;  // slot*2, +1 where a block stands in it
    for (int first = threadIdx.x % 32;;) {
#pragma unroll
        for (int i = 0; i < READS; ++i) {
            const int s = first + i * 32;
            const int64_t key = (slots.block[i] < 0 ? -1 : slots.age[i]) * a.S + slots.order[i];
            if (s < a.S && key < best) best = key, best_tag = s * 2 + (slots.block[i] >= 0);
        }
        first += 32 * READS;
        if (first >= a.S) break;
        read_slots(a, pair, first, slots);
    }
    // The smallest key by its halves, then the first slot that has it.
    const int high = static_cast<int>(best >> 32);
    const int least_high = __reduce_min_sync(ALL, high);
    const unsigned low = high == least_high ? static_cast<unsigned>(best) : UINT_MAX;
    const unsigned least_low = __reduce_min_sync(ALL, low);
    const int tag = __reduce_min_sync(ALL, high == least_high && low == least_low ? best_tag : INT_MAX);
    return {tag >> 1, (tag & 1) != 0};
}

// Four dimensions (one column of 8 bytes) of a block's summaries, [part][vector][pair of dimensions], rounded as the
// reference rounds. old: the slot's keys, of which the last is not there yet: it is `last`. columns: D / 4.
template <typename T2>
__device__ __forceinline__ void summarize_column(const uint2* old, const uint2* last, int columns, int column, int P,
                                                 Scorer scorer, T2 (&out)[PARTS][2][2]) {
    uint2 raw[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) raw[i] = i < BLOCK - 1 ? old[i * columns + column] : last[column];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        T2 high[PARTS], low[PARTS];
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) {
            const int part = i / (BLOCK / PARTS);
            const T2 key = *reinterpret_cast<const T2*>(half ? &raw[i].y : &raw[i].x);
            high[part] = i % (BLOCK / PARTS) ? __hmax2(high[part], key) : key;
            low[part] = i % (BLOCK / PARTS) ? __hmin2(low[part], key) : key;
        }
        if (P <= 2) {
            high[0] = __hmax2(high[0], high[1]), low[0] = __hmin2(low[0], low[1]);
            high[1] = __hmax2(high[2], high[3]), low[1] = __hmin2(low[2], low[3]);
        }
        if (P == 1) high[0] = __hmax2(high[0], high[1]), low[0] = __hmin2(low[0], low[1]);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            if (scorer == Scorer::midrange) {
                // Halved and rounded first, as the reference does; only subnormals are changed by that rounding.
                float2 h = to_float(high[part]), l = to_float(low[part]);
                T2 half_high, half_low;
                round_to(h.x * 0.5f, h.y * 0.5f, half_high);
                round_to(l.x * 0.5f, l.y * 0.5f, half_low);
                h = to_float(half_high), l = to_float(half_low);
                round_to(h.x + l.x, h.y + l.y, high[part]);
                round_to(h.x - l.x, h.y - l.y, low[part]);
            }
            out[part][0][half] = high[part];
            out[part][1][half] = low[part];
        }
    }
}

__device__ __forceinline__ unsigned quantize(float x, float scale) {
    return static_cast<unsigned>(static_cast<int>(fminf(fmaxf(rintf(__fdiv_rn(x, scale)), -127.0f), 127.0f))) & 0xff;
}

// reference: summarize, of one block by one warp. index: of the block in [B, H, cap].
template <typename T2>
__device__ __forceinline__ void close_block(const Args& a, const uint2* old, const uint2* last, int64_t index) {
    const int lane = threadIdx.x % 32, columns = a.D / 4, count = a.P * 2;
    uint2* const wide = static_cast<uint2*>(a.summaries) + index * count * columns;
    unsigned* const bytes = static_cast<unsigned*>(a.summaries) + index * count * columns;
    float scale[PARTS * 2] = {};  // first the largest magnitude
    // int8 goes over the keys twice, which the first pass leaves in L1: the scale is needed before the first byte.
#pragma unroll 1
    for (int pass = a.int8 ? 0 : 1; pass < 2; ++pass) {
#pragma unroll 1
        for (int column = lane; column < columns; column += 32) {
            T2 vectors[PARTS][2][2];
            summarize_column(old, last, columns, column, a.P, a.scorer, vectors);
#pragma unroll
            for (int i = 0; i < PARTS * 2; ++i) {
                const float2 x = to_float(vectors[i / 2][i % 2][0]), y = to_float(vectors[i / 2][i % 2][1]);
                if (i >= count) continue;
                if (pass == 0)
                    scale[i] = fmaxf(scale[i], fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(y.x), fabsf(y.y))));
                else if (a.int8)
                    bytes[i * columns + column] = quantize(x.x, scale[i]) | quantize(x.y, scale[i]) << 8 |
                                                  quantize(y.x, scale[i]) << 16 | quantize(y.y, scale[i]) << 24;
                else
                    wide[i * columns + column] = *reinterpret_cast<uint2*>(vectors[i / 2][i % 2]);
            }
        }
        if (pass == 0) {
            __half* scales = static_cast<__half*>(a.scales) + index * count;
#pragma unroll
            for (int i = 0; i < PARTS * 2; ++i) {
                // Bits of floats that are not negative are in the floats' order.
                const float most = __uint_as_float(__reduce_max_sync(ALL, __float_as_uint(scale[i])));
                scale[i] = fmaxf(__half2float(__float2half_rn(__fdiv_rn(most, 127.0f))), 0x1p-14f);
                if (lane == 0 && i < count) scales[i] = __float2half_rn(scale[i]);
            }
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(WARPS * 32) append_kernel(const Args a) {
    const int pair = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (pair >= a.B * a.H) return;
    const int b = pair / a.H, h = pair % a.H;
    const int64_t length = a.lengths[b], step = *a.step;

    // The token, K then V, by lanes: `width` vectors of 16 bytes each, two a lane at most.
    const int width = a.D / 8;
    const int64_t from = b * a.new_row + h * a.new_head;
    const T* const new_key = static_cast<const T*>(a.new_keys) + from;
    const T* const new_value = static_cast<const T*>(a.new_values) + from;
    uint4 part[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int at = lane + 32 * i;
        if (at < width)
            part[i] = reinterpret_cast<const uint4*>(new_key)[at];
        else if (at < 2 * width)
            part[i] = reinterpret_cast<const uint4*>(new_value)[at - width];
    }
    Slots slots;
    read_slots(a, pair, lane, slots);

    // From here on things wait for the length.
    if (length < 0) {  // the row takes no token
        if (lane == 0 && a.slot) a.slot[pair] = 0;
        if (lane == 0 && a.evicted) a.evicted[pair] = false;
        return;
    }
    const int64_t block = length / BLOCK;
    const int into = static_cast<int>(length % BLOCK);
    const int64_t page = a.pages ? a.page_table[b * a.table_row + h * a.table_head + block] : -1;
    const Place place = into == 0 ? find_victim(a, pair, slots) : find_block(a, pair, block, slots);

    const int64_t first = static_cast<int64_t>(pair) * (TAIL + a.S * BLOCK) + TAIL + place.slot * BLOCK;  // line
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int at = lane + 32 * i;
        if (at >= 2 * width) continue;
        const bool value = at >= width;
        const int vector = value ? at - width : at;
        static_cast<uint4*>(value ? a.values : a.keys)[(first + into) * width + vector] = part[i];
        if (page >= 0) {
            const int64_t line = page * 2 * BLOCK + (value ? BLOCK : 0) + into;
            static_cast<uint4*>(a.pages)[line * width + vector] = part[i];
        }
    }
    if (lane == 0) {
        const int64_t at = static_cast<int64_t>(pair) * a.S + place.slot;
        a.table[at] = block;
        a.last_selected[at] = step;
        if (a.slot) a.slot[pair] = place.slot;
        if (a.evicted) a.evicted[pair] = place.evicts;
        if (a.fresh) {
            if (a.wasted && place.evicts && a.fresh[at])
                atomicAdd(reinterpret_cast<unsigned long long*>(a.wasted + h), 1ull);
            a.fresh[at] = false;
        }
    }
    if (a.summaries && into == BLOCK - 1 && block < a.cap) {
        const uint2* old = reinterpret_cast<const uint2*>(static_cast<const T*>(a.keys) + first * a.D);
        close_block<typename Two<T>::type>(a, old, reinterpret_cast<const uint2*>(new_key), pair * a.cap + block);
    }
}

// Whether rows of `bytes` at these strides (in 2-byte elements) start on 16 bytes.
bool aligned(const void* at, int64_t row, int64_t head) {
    return reinterpret_cast<uintptr_t>(at) % 16 == 0 && row % 8 == 0 && head % 8 == 0;
}

}  // namespace

cudaError_t append(void* keys, void* values, int64_t* table, int64_t* last_selected, const int64_t* lengths,
                   const int64_t* order, const void* new_keys, const void* new_values, int64_t new_row,
                   int64_t new_head, const int64_t* step, bool* fresh, int B, int H, int S, int D, int64_t* slot,
                   bool* evicted, int64_t* wasted, void* pages, const int64_t* page_table, int64_t table_row,
                   int64_t table_head, void* summaries, void* scales, int64_t cap, int P, bool int8, Scorer scorer,
                   Dtype dtype, cudaStream_t stream) {
    if (B < 0 || H <= 0 || S <= 0 || D <= 0 || D > MAX_DIM || D % 8 != 0) return cudaErrorInvalidValue;
    if (static_cast<int64_t>(B) * H > INT_MAX - WARPS || S > INT_MAX / (2 * BLOCK)) return cudaErrorInvalidValue;
    if (!aligned(new_keys, new_row, new_head) || !aligned(new_values, new_row, new_head)) return cudaErrorInvalidValue;
    if (pages && !page_table) return cudaErrorInvalidValue;
    if (summaries && ((P != 1 && P != 2 && P != 4) || (int8 && !scales))) return cudaErrorInvalidValue;
    if (B == 0) return cudaSuccess;
    const Args args = {keys,   values,  table, last_selected, lengths,    order,     new_keys,   new_values, new_row,
                       new_head, step,  fresh, B,             H,          S,         D,          slot,       evicted,
                       wasted, pages,   page_table, table_row, table_head, summaries, scales,    cap,        P,
                       int8,   scorer};
    const int ctas = (B * H + WARPS - 1) / WARPS;
    if (dtype == Dtype::bf16)
        append_kernel<__nv_bfloat16><<<ctas, WARPS * 32, 0, stream>>>(args);
    else
        append_kernel<__half><<<ctas, WARPS * 32, 0, stream>>>(args);
    return cudaGetLastError();
}

}  // namespace oasis
