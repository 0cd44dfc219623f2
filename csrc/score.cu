// score: what the next step wants of every closed block (oasis_hf/ops/reference.py: score).
//
// Floor: the summaries of closed blocks are read once. B=64, H=8, N=1,024, D=128, P=2, int8: 273 MB with their scales,
// 64 us at 4.27 TB/s; bf16 with P=1 the same, int8 with P=1 half. Operations: 4*D a part and query row, 11 GFLOP at 20
// query rows: nothing to tensor cores; what has to be watched is that int8 takes 5 instructions to widen 4 values.
//
// Both scorers are two dot products with exact operands: q+ . max + q- . min, or q . mid + lambda * |q| . half. Tiles
// of 16 parts, which lie side by side in memory, are the rows of an mma, query rows (active token x head of the group)
// its columns, and each of the two vectors has an accumulator of its own, so that scales, lambda and the attention's
// scaling are applied to fp32 sums. int8 is widened to fp16; a query row is then scaled by a power of two to fit, which
// rounds off 2^-35 of its largest value.
// Each warp has its own ring of tiles in shared memory, filled by cp.async, so that no barrier over the CTA stops the
// stream: over 100 KB an SM are on their way. Queries stay in registers; more than fit go to CTAs that find tiles in L2.
// A query row's value of a block is its best part's score or, for softmax-mean, log2 of the sum of its parts' exp2: no
// maximum has to be known for it. Values wait for the row's maximum and sum in shared memory, as far as they fit and one
// CTA has all of them, otherwise in scratch. Few (row, KV head)s are split over CTAs, and the last to arrive finishes.
#include <algorithm>
#include <cmath>

#include "device.cuh"
#include "oasis.h"

namespace oasis {
namespace {

constexpr int MOST_CTAS = 1024;  // where (row, KV head)s are split
constexpr int MOST_WARPS = 4;    // a CTA
constexpr int RING = 104 << 10;  // bytes of tiles that an SM's CTAs have on their way at most
constexpr int RESERVED = 2560;   // bytes of shared memory: 1,024 a CTA that the system takes, and static arrays
constexpr int TILE = 16;         // parts

// Sizes are in bytes. A line is two parts in shared memory, and an odd number of 16-byte pieces, so that ldmatrix finds
// a piece of 8 lines in 8 different groups of banks.
template <int D, bool INT8, bool FEW>
struct Shape {
    // Few query rows need few registers: more CTAs with smaller rings cover each other's starts and ends, and all rows
    // of a batch of 49 run at once.
    static constexpr int CTAS = INT8 && D <= 128 ? (FEW ? 4 : 3) : 2;
    static constexpr int VECTOR = D * (INT8 ? 1 : 2), PART = 2 * VECTOR, LINE = 2 * PART + 16;
    static constexpr int SCALES = TILE / 2 * LINE, STAGE = SCALES + (INT8 ? TILE * 4 : 0);  // a tile, then its scales
    static constexpr int WARPS = VECTOR > 256 ? 2 : MOST_WARPS, THREADS = WARPS * 32;
    static constexpr int STAGES = std::max(2, RING / CTAS / (WARPS * STAGE)), RING_BYTES = WARPS * STAGES * STAGE;
    static constexpr int ROW_TILES = FEW ? 1 : 2, ROWS = 8 * ROW_TILES;  // query rows that fit in registers
};

struct Arguments {
    const uint16_t* query;
    const char* summaries;
    const uint32_t* scales;  // pairs of fp16
    const int64_t* closed;
    const float* weights;
    float *out, *values;  // values: [B*H, R, pitch(N)]
    int* counters;        // [B*H]
    float2* stats;        // [B*H, splits*warps, R]: maximum and sum of a query row in one warp's tiles
    int64_t q_row, q_head, q_token, cap;
    float first_factor, second_factor;  // of the two dot products
    int H, G, T, N, log_p, sink_blocks, recent_blocks;
    Reduction reduction;
    bool minmax, bf16;
    uint32_t magic;            // see widen
    int splits, chunks, room;  // of tiles, of query rows; room: floats of shared memory for values
};

// Floats between the values of two query rows: what a warp stores at a time is spread over all banks.
__host__ __device__ inline int pitch_of(int blocks) { return (blocks + 15) / 16 * 16 + 4; }

// What a CTA works at. Tokens whose weight is not 0 have a bit in `active` and G of the query `rows`.
struct Work {
    int64_t pair;
    unsigned active;
    int row, head, rows, first_row, closed, begin, end, kept, pitch;  // begin, end: of its tiles
    int recent;         // the first block that is
    float *near, *far;  // values of the first `kept` rows, and of the others
    float2* stats;

    __device__ __forceinline__ float* values(int r) const {
        return (r < kept ? near : far) + r * static_cast<int64_t>(pitch);
    }

    __device__ __forceinline__ int token(int i) const { return __fns(active, 0, i + 1); }  // the i-th active one
};

__device__ __forceinline__ __half2 as_half2(uint32_t x) { return *reinterpret_cast<__half2*>(&x); }

// Bytes 0 and 2 of a word of int8 as fp16, exactly: 1,024 + 128 + x, less 1,152. `magic` holds that number; it is an
// argument of the kernel, since ptxas makes two of a bitwise operation with two constants that it knows.
__device__ __forceinline__ uint32_t widen(uint32_t x, uint32_t magic) {
    const __half2 wide = __hsub2(as_half2((x & 0x00ff00ffu) ^ magic), as_half2(magic));
    return *reinterpret_cast<const uint32_t*>(&wide);
}

// Of two values: log2 of the sum of their exp2 or, with soft = 0, the larger.
__device__ __forceinline__ float join(float x, float y, float soft) {
    const float high = fmaxf(x, y);
    return high + soft * log2_fast(1.0f + exp2_fast(fminf(x, y) - high));
}

// Of two sets: the maximum, and the sum of exp2(x - maximum).
__device__ __forceinline__ float2 merge(float2 x, float2 y) {
    const float high = fmaxf(x.x, y.x);
    return {high, x.y * exp2_fast(x.x - high) + y.y * exp2_fast(y.x - high)};
}

__device__ __forceinline__ float2 merge_lanes(float2 x, int lanes) {
    return merge(x, {__shfl_xor_sync(ALL, x.x, lanes), __shfl_xor_sync(ALL, x.y, lanes)});
}

extern __shared__ __align__(128) unsigned char shared[];

// The CTA's tiles against NT tiles of 8 query rows. With lane = 4 * g + t a thread has parts 2g and 2g + 1, rows g and
// g + 8 of an mma, and of its result query rows 2t and 2t + 1.
template <typename E, typename S, int D, bool INT8, int NT>
__device__ __forceinline__ void stream(const Arguments& a, const Work& w, int split) {
    constexpr int STEPS = D / 16;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int ring_at = warp * S::STAGES * S::STAGE, parts = w.closed << a.log_p;
    const uint32_t ring = shared_address(shared) + ring_at;
    const int64_t first_part = w.pair * a.cap << a.log_p;
    const char* summaries = a.summaries + first_part * S::PART + lane * 16;
    const auto copy = [&](int tile, int stage_at) {
        const int there = tile < w.end ? min(parts - tile * TILE, TILE) : 0, bytes = there * S::PART - lane * 16;
        const char* from = summaries + static_cast<int64_t>(tile) * TILE * S::PART;
#pragma unroll
        for (int i = 0; i < TILE * S::PART; i += 512)
            copy16(ring + stage_at + lane * 16 + i + (i + lane * 16) / (2 * S::PART) * 16, from + i, i < bytes);
        if (INT8 && lane < TILE)
            copy4(ring + stage_at + S::SCALES + lane * 4, a.scales + first_part + tile * TILE + lane, lane < there);
        copy_commit();
    };
#pragma unroll 1
    for (int s = 0; s < S::STAGES; ++s) copy(w.begin + s * S::WARPS + warp, s * S::STAGE);

    // Queries with k in the tiles' order: ldmatrix gives a thread two neighbouring values of every 8 or four bytes of
    // every 16, which `widen` takes as 0 2 and 1 3.
    uint32_t q[STEPS * 2][2][NT];  // [half k step][dot product]
    // Of a result's query rows, first_row + i / 2 * 8 + i % 2: what 1 stands for, maximum and sum so far, and values.
    const int first_row = w.first_row + 2 * t, rows = w.rows - first_row;
    float unit[NT * 2];
    float2 seen[NT * 2];
    float* values[NT * 2];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int r = w.first_row + n * 8 + g;
        const uint16_t* from = a.query + w.row * a.q_row + (w.head * a.G + r % a.G) * a.q_head +
                               w.token(r / a.G) * a.q_token + t * (INT8 ? 4 : 2);
        uint32_t x[STEPS * 2];
        float2 wide[STEPS * 2];
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < STEPS * 2; ++i) {
            const uint16_t* at = from + i / 2 * 16 + i % 2 * (INT8 ? 2 : 8);
            x[i] = r < w.rows ? __ldg(reinterpret_cast<const uint32_t*>(at)) : 0;
            const float2 bf16 = {__uint_as_float(x[i] << 16), __uint_as_float(x[i] & 0xffff0000u)};
            wide[i] = a.bf16 ? bf16 : __half22float2(as_half2(x[i]));
            most = fmaxf(most, fmaxf(fabsf(wide[i].x), fabsf(wide[i].y)));
        }
        if constexpr (INT8) {
            most = fmaxf(most, __shfl_xor_sync(ALL, most, 1));
            most = fmaxf(most, __shfl_xor_sync(ALL, most, 2));
            const int power = min(264 - (__float_as_int(most) >> 23), 254);  // the row's largest becomes 2^10
            const float scale = __int_as_float(power << 23), back = __int_as_float((254 - power) << 23);
#pragma unroll
            for (int i = 0; i < STEPS * 2; i += 2) {
                x[i] = pack<E>(wide[i].x * scale, wide[i + 1].x * scale);
                x[i + 1] = pack<E>(wide[i].y * scale, wide[i + 1].y * scale);
            }
            unit[2 * n] = __shfl_sync(ALL, back, 8 * t), unit[2 * n + 1] = __shfl_sync(ALL, back, 8 * t + 4);
        }
#pragma unroll
        for (int i = 0; i < STEPS * 2; ++i) {
            const uint32_t negative = (x[i] >> 15 & 0x00010001u) * 0xffffu;
            q[i][0][n] = a.minmax ? x[i] & ~negative : x[i];
            q[i][1][n] = x[i] & (a.minmax ? negative : 0x7fff7fffu);
        }
        values[2 * n] = w.values(first_row + n * 8), values[2 * n + 1] = w.values(first_row + n * 8 + 1);
        seen[2 * n] = seen[2 * n + 1] = {LOWEST, 0.0f};
    }
    const int rows_even = a.log_p == 2 && g % 2 ? 0 : rows, rows_odd = a.log_p == 0 ? rows : 0;  // what is stored
    const float soft = a.reduction == Reduction::softmax_mean ? 1.0f : 0.0f;
    // What ldmatrix gets from a lane: even and odd parts, and both again of the second vector or of the next piece.
    const int lane_at = lane % 8 * S::LINE + lane / 8 % 2 * S::PART + lane / 16 * (INT8 ? S::VECTOR : 16);
    int at = 0;
    for (int tile = w.begin + warp; tile < w.end; tile += S::WARPS) {
        copy_wait<S::STAGES - 1>();
        __syncwarp();
        float sum[2][NT][4] = {};
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            uint32_t part[2][4], bytes[4];
            if constexpr (INT8) {
                load_matrices<false>(bytes, ring + at + lane_at + k * 16);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    part[i / 2][i % 2] = widen(bytes[i], a.magic);
                    part[i / 2][i % 2 + 2] = widen(bytes[i] >> 8, a.magic);
                }
            } else {
                load_matrices<false>(part[0], ring + at + lane_at + k * 32);
                load_matrices<false>(part[1], ring + at + lane_at + k * 32 + S::VECTOR);
            }
#pragma unroll
            for (int i = 0; i < NT * 2; ++i)
                mma<E>(sum[i % 2][i / 2], part[i % 2], {q[2 * k][i % 2][i / 2], q[2 * k + 1][i % 2][i / 2]});
        }
        float2 scale[2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};  // of the even and the odd part's vectors
        if constexpr (INT8) {
            const __half2* scales = reinterpret_cast<const __half2*>(shared + ring_at + at + S::SCALES) + 2 * g;
            scale[0] = __half22float2(scales[0]), scale[1] = __half22float2(scales[1]);
        }
        __syncwarp();
        copy(tile + S::STAGES * S::WARPS, at);
        at = at == (S::STAGES - 1) * S::STAGE ? 0 : at + S::STAGE;

        const int part = tile * TILE + 2 * g, block = part >> a.log_p;
        float even[NT * 2], odd[NT * 2];  // of parts, then of blocks
#pragma unroll
        for (int i = 0; i < NT * 4; ++i) {
            const int half = i % 2, n = i / 4, c = i / 2 % 2 + half * 2;
            const float score = scale[half].x * a.first_factor * sum[0][n][c] +
                                scale[half].y * a.second_factor * sum[1][n][c];
            (half ? odd : even)[i / 2] = part + half < parts ? score * (INT8 ? unit[i / 2] : 1.0f) : LOWEST;
        }
        if (a.log_p > 0) {
#pragma unroll
            for (int i = 0; i < NT * 2; ++i) even[i] = join(even[i], odd[i], soft), odd[i] = LOWEST;
        }
        if (a.log_p > 1) {
#pragma unroll
            for (int i = 0; i < NT * 2; ++i) even[i] = join(even[i], __shfl_xor_sync(ALL, even[i], 4), soft);
        }
#pragma unroll
        for (int i = 0; i < NT * 2; ++i) {
            const float top = fmaxf(seen[i].x, fmaxf(even[i], odd[i]));
            seen[i].y = seen[i].y * exp2_fast(seen[i].x - top) + exp2_fast(even[i] - top) + exp2_fast(odd[i] - top);
            seen[i].x = top;
            if (i / 2 * 8 + i % 2 < rows_even) values[i][block] = even[i];
            if (i / 2 * 8 + i % 2 < rows_odd) values[i][block + 1] = odd[i];
        }
    }
#pragma unroll
    for (int i = 0; i < NT * 2; ++i) {
        if (a.log_p < 2) seen[i] = merge_lanes(seen[i], 4);  // else these two have seen the same blocks
        seen[i] = merge_lanes(merge_lanes(seen[i], 8), 16);
        const int r = i / 2 * 8 + i % 2;
        if (g == 0 && r < rows) w.stats[(split * S::WARPS + warp) * w.rows + first_row + r] = seen[i];
    }
    copy_wait<0>();  // copies past the end write zeros to the ring, where `finish` has its factors
}

// From values to scores. A block's score is the sum over entries of factor * (value - offset): an entry is a token,
// whose values are first reduced over the group, or (softmax-mean) a query row, with exp2 of the difference.
template <int WARPS>
__device__ __forceinline__ void finish(const Arguments& a, const Work& w, float weight) {
    constexpr int QUADS = 4, STEP = 4 * 32 * WARPS;  // blocks: a thread takes four times four, STEP apart
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, parts = a.splits * WARPS;
    const bool soft = a.reduction == Reduction::softmax_mean;
    const int group = soft ? 1 : a.G, entries = w.closed > 0 ? w.rows / group : 0;
    float2* factors = reinterpret_cast<float2*>(shared);  // offset and factor, where the ring was
    for (int e = warp; e < entries; e += WARPS) {
        float offset = 0.0f, factor = __shfl_sync(ALL, weight, w.token(e * group / a.G));
        if (soft) {
            float2 all = {LOWEST, 0.0f};
            for (int i = lane; i < parts; i += 32) all = merge(all, w.stats[i * w.rows + e]);
            for (int lanes = 1; lanes < min(parts, 32); lanes *= 2) all = merge_lanes(all, lanes);
            offset = all.x, factor /= a.G * all.y;
        } else {
            float* reduced = w.values(e * a.G);
            const auto sum = [&](auto term) {
                float x = 0.0f;
                for (int n = lane; n < w.closed; n += 32) x += term(n);
                for (int lanes = 1; lanes < 32; lanes *= 2) x += __shfl_xor_sync(ALL, x, lanes);
                return x;
            };
            const float mean = sum([&](int n) {
                float x = reduced[n];
                for (int i = 1; i < a.G; ++i) {
                    const float other = w.values(e * a.G + i)[n];
                    x = a.reduction == Reduction::max ? fmaxf(x, other) : x + other;
                }
                return reduced[n] = a.reduction == Reduction::max ? x : x / a.G;
            }) / w.closed;
            const float variance = sum([&](int n) { return (reduced[n] - mean) * (reduced[n] - mean); }) / w.closed;
            if (a.T > 1) offset = mean, factor *= rsqrtf(variance + 1e-12f);
        }
        if (lane == 0) factors[e] = {offset, factor};
    }
    __syncthreads();
    for (int first = 4 * threadIdx.x; first < a.N; first += QUADS * STEP) {
        float score[QUADS * 4] = {};
#pragma unroll 4
        for (int e = 0; e < entries; ++e) {
            const float* values = w.values(e * group);
            const float2 factor = factors[e];
#pragma unroll
            for (int j = 0; j < QUADS; ++j) {
                const int n = first + j * STEP;
                const float4 x = *reinterpret_cast<const float4*>(values + (n < w.closed ? n : 0));
                const float over[4] = {x.x - factor.x, x.y - factor.x, x.z - factor.x, x.w - factor.x};
#pragma unroll
                for (int i = 0; i < 4; ++i) score[j * 4 + i] += factor.y * (soft ? exp2_fast(over[i]) : over[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < QUADS * 4; ++i) {
            const int n = first + i / 4 * STEP + i % 4;
            const bool always = n < a.sink_blocks || n >= w.recent;
            if (n < a.N) a.out[w.pair * a.N + n] = n >= w.closed ? -INFINITY : always ? INFINITY : score[i];
        }
    }
}

// Grid: (splits * chunks, H, B).
template <typename E, int D, bool INT8, bool FEW>
__global__ void __launch_bounds__(Shape<D, INT8, FEW>::THREADS, Shape<D, INT8, FEW>::CTAS)
score_kernel(const Arguments a) {
    using S = Shape<D, INT8, FEW>;
    __shared__ float2 cta_stats[S::WARPS * S::ROWS];
    const int lane = threadIdx.x % 32, split = blockIdx.x / a.chunks, chunk = blockIdx.x - split * a.chunks;
    Work w;
    w.row = blockIdx.z, w.head = blockIdx.y, w.pair = static_cast<int64_t>(w.row) * a.H + w.head;
    const int64_t closed = __ldg(a.closed + w.row), most = a.N;
    w.closed = max(int64_t(0), min(closed, most)), w.recent = max(int64_t(0), min(closed - a.recent_blocks, most));
    const float weight = lane >= a.T ? 0.0f : a.T == 1 ? 1.0f : __ldg(a.weights + w.row * a.T + lane);
    w.active = __ballot_sync(ALL, weight != 0.0f);
    w.rows = __popc(w.active) * a.G, w.first_row = chunk * S::ROWS;
    if (w.first_row > 0 && w.first_row >= w.rows) return;
    const int arrivals = a.splits * max(1, (w.rows + S::ROWS - 1) / S::ROWS);
    const int tiles = ((w.closed << a.log_p) + TILE - 1) / TILE;
    w.begin = tiles * split / a.splits, w.end = tiles * (split + 1) / a.splits;
    w.pitch = pitch_of(w.closed), w.kept = arrivals > 1 ? 0 : a.room / w.pitch;
    w.near = reinterpret_cast<float*>(shared + S::RING_BYTES);
    w.far = a.values + w.pair * a.G * a.T * pitch_of(a.N);
    w.stats = arrivals > 1 ? a.stats + w.pair * a.splits * S::WARPS * a.G * a.T : cta_stats;

    if (!FEW && w.rows - w.first_row > 8) stream<E, S, D, INT8, S::ROW_TILES>(a, w, split);
    else if (w.rows > w.first_row) stream<E, S, D, INT8, 1>(a, w, split);
    if (arrivals == 1) __syncthreads();
    else if (!arrives_last(a.counters, w.pair, arrivals)) return;
    finish<S::WARPS>(a, w, weight);
}

template <typename E, int D, bool INT8, bool FEW>
cudaError_t run_with(Arguments a, int B, cudaStream_t stream) {
    using S = Shape<D, INT8, FEW>;
    Limits limits;
    if (const cudaError_t error = read_limits(limits); error != cudaSuccess) return error;
    // Values get what an SM's CTAs leave of its shared memory.
    const int bytes = std::max(S::RING_BYTES, std::min(limits.sm_shared / S::CTAS, limits.cta_shared) - RESERVED);
    a.room = (bytes - S::RING_BYTES) / 4, a.chunks = (a.G * a.T + S::ROWS - 1) / S::ROWS;
    // One wave at most: two CTAs an SM are enough for the memory's bandwidth, and each has its start and end. What comes
    // after the first chunk of query rows is not counted: up to 16 rows, it has nothing to do.
    const int64_t slots = std::min(limits.sms * 2, MOST_CTAS), pairs = int64_t(B) * a.H;
    a.splits = std::max(1, std::min<int>(slots / pairs, (a.N << a.log_p) / (TILE * S::WARPS)));
    return launch(score_kernel<E, D, INT8, FEW>, dim3(a.splits * a.chunks, a.H, B), S::THREADS, bytes, a, stream);
}

template <typename E, int D, bool INT8>
cudaError_t run(Arguments a, int B, cudaStream_t stream) {
    return a.G * a.T <= 8 ? run_with<E, D, INT8, true>(a, B, stream) : run_with<E, D, INT8, false>(a, B, stream);
}

template <typename E, bool INT8>
auto run_of(int D) {
    return D == 64 ? run<E, 64, INT8> : D == 80 ? run<E, 80, INT8> : D == 96 ? run<E, 96, INT8> :
           D == 128 ? run<E, 128, INT8> : D == 256 ? run<E, 256, INT8> : nullptr;
}

int64_t stats_bytes(int64_t pairs, int64_t rows) {
    return round_up(std::max<int64_t>(pairs, MOST_CTAS) * MOST_WARPS * rows * sizeof(float2));
}

}  // namespace

int64_t score_counters(int B, int H) { return round_up(int64_t(B) * H * 4); }

int64_t score_scratch(int B, int H, int G, int T, int N, int P) {
    const int64_t pairs = int64_t(B) * H, rows = int64_t(G) * T;
    return score_counters(B, H) + stats_bytes(pairs, rows) + pairs * rows * pitch_of(N) * 4;
}

cudaError_t score(const void* query, int64_t q_row, int64_t q_head, int64_t q_token, const void* summaries,
                  const void* scales, const int64_t* closed, const float* weights, int B, int H, int G, int T, int D,
                  int N, int64_t cap, int P, bool int8, Scorer scorer, float half_range, Reduction reduction,
                  float scaling, int sink_blocks, int recent_blocks, float* out, void* scratch, Dtype dtype,
                  cudaStream_t stream) {
    const bool bf16 = dtype == Dtype::bf16, minmax = scorer == Scorer::minmax;
    const auto run = int8 ? run_of<__half, true>(D) : bf16 ? run_of<__nv_bfloat16, false>(D) : run_of<__half, false>(D);
    // Queries are read in pairs; the stride of a dimension of size 1 may be anything.
    const bool odd = (B > 1 && q_row % 2) || (H * G > 1 && q_head % 2) || (T > 1 && q_token % 2);
    if (run == nullptr || odd || misaligned(query, 4) || misaligned(summaries, 16) || misaligned(scratch, 16) ||
        T < 1 || T > MAX_TOKENS || G < 1 || int64_t(G) * T > 4096 || N > cap || N > (1 << 20) ||
        (P != 1 && P != 2 && P != 4) || (int8 && !scales) || std::max(B, H) > 65535 || int64_t(B) * H > (1 << 20))
        return cudaErrorInvalidValue;
    if (B <= 0 || H <= 0 || N <= 0) return cudaSuccess;
    const float factor = reduction == Reduction::softmax_mean ? scaling * LOG2E : scaling;
    char* after_counters = static_cast<char*>(scratch) + score_counters(B, H);
    const Arguments a = {
        static_cast<const uint16_t*>(query), static_cast<const char*>(summaries), static_cast<const uint32_t*>(scales),
        closed, weights, out, reinterpret_cast<float*>(after_counters + stats_bytes(int64_t(B) * H, G * T)),
        static_cast<int*>(scratch), reinterpret_cast<float2*>(after_counters), q_row, q_head, q_token, cap, factor,
        minmax ? factor : factor * half_range, H, G, T, N, P / 2, sink_blocks, recent_blocks, reduction, minmax, bf16,
        0x64806480u};
    return run(a, B, stream);
}

}  // namespace oasis
