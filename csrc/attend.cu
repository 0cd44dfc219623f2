// Attention of a decode step's 1 to 8 query tokens over the working set.
//
// Floor: K and V of slots and tail are read once, 4 * (TAIL + S*16) * D bytes a (row, head); for each query row and
// token 4*D operations, so up to a few dozen query rows a KV head the tensor cores wait for memory.
//
// The G query heads of a group and the T tokens are packed as R = G*T query rows of one KV head. A (row, head)'s keys
// are one stream of S+1 tiles of 16 tokens: the tail and half a slot, then halves of two neighbouring slots, at last
// half a slot. Each warp has its own ring of tiles in shared memory, filled by cp.async, so that no barrier over the
// CTA stops the stream: at D = 128 a CTA has 64 KB on their way, an SM twice that. A tile gives
//     S^T[16 tokens, query rows] = K Q^T,    P = exp2(S - m),    O^T[D, query rows] += V^T P^T:
// tokens are the rows of the mma, so 8 query rows waste nothing. P goes from one product to the next in registers,
// transposed by movmatrix. m follows the scores only where one passes it by SLACK (as in FlashAttention-4), mostly in
// the first tile; the result is the same for any m. Many query rows: a team of 2 or 4 warps shares its tiles and
// divides the rows; still more rows are chunks of their own, whose keys may still be in L2.
// What is not visible is never read: cp.async writes zeros there, and P is exactly 0.
// A chunk of query rows of a (row, head) is a unit; each CTA has an equal share of all units' tiles (shares.cuh). Where a
// unit is cut, each CTA leaves a partial result in scratch, and the last to arrive merges them, always in the same order.
// There are as many CTAs as fit at once beside a gather that is running (GATHER_CTAS).
#include <algorithm>
#include <climits>

#include "device.cuh"
#include "oasis.h"
#include "shares.cuh"

namespace oasis {
namespace {

constexpr int TILE = 16;          // tokens
constexpr int STAGES = 3;         // tiles in a warp's ring
constexpr float SLACK = 8.0f;     // in log2: P stays under 256

constexpr int warps(int D) { return D > 128 ? 2 : 4; }
constexpr bool swizzled(int D) { return D % 64 == 0; }
constexpr int line_bytes(int D) { return D * 2 + (swizzled(D) ? 0 : 16); }  // a token in shared memory
constexpr int tile_bytes(int D) { return TILE * line_bytes(D); }  // K or V
constexpr int ring_bytes(int D) { return STAGES * warps(D) * 2 * tile_bytes(D); }
constexpr int shared_bytes(int D) { return ring_bytes(D) + STAGES * warps(D) * 4; }  // and each tile's visible tokens

// Where a token's 16-byte piece lies in a tile, so that ldmatrix finds a piece of 8 tokens in 8 different groups of
// banks: pieces change places where a line is a multiple of 128 bytes, else a line is an odd number of pieces.
template <int D>
__device__ __forceinline__ int place(int token, int piece) {
    return token * line_bytes(D) + (swizzled(D) ? piece ^ (token % 8) : piece) * 16;
}

struct Arguments {
    const void *query, *keys, *values;
    const int64_t *table, *lengths;
    const bool* tail_mask;
    const float* sinks;
    void* out;
    int* counters;           // [units]
    float *stats, *partial;  // [units, most_parts, chunk_rows, 2], m and l, and [units, most_parts, chunk_rows, D]
    int64_t q_row, q_head, q_token;
    float scale;  // of q.k, to log2
    int H, G, T, S, team_warps, chunks, most_parts, total;  // total: tiles of all units
};

// There are at most two teams of more than one warp; `mate` is the team's first warp.
__device__ __forceinline__ void team_sync(int mate, int team_warps) {
    if (team_warps == 1) {
        __syncwarp();
    } else if (mate == 0) {
        asm volatile("bar.sync 1, %0;" ::"r"(team_warps * 32) : "memory");
    } else {
        asm volatile("bar.sync 2, %0;" ::"r"(team_warps * 32) : "memory");
    }
}

// A slot's visible tokens, one bit each. Block -1: the slot is empty.
__device__ __forceinline__ uint32_t visible_tokens(int64_t block, int64_t length) {
    const int64_t count = block < 0 ? 0 : length - block * BLOCK;
    return (1u << static_cast<int>(min(max(count, int64_t(0)), int64_t(BLOCK)))) - 1;
}

// Blocks of the slots a tile has halves of: tokens 0-7 are the last of slot tile - 1, tokens 8-15 the first of slot
// `tile`. Tile 0 begins with the tail, tile S ends with nothing; from tile `end` on there is nothing at all.
struct Halves {
    int64_t first, second;
};

__device__ __forceinline__ Halves read_table(const int64_t* table, int tile, int end, int slots) {
    return {tile > 0 && tile < end ? __ldg(table + tile - 1) : -1, tile < min(end, slots) ? __ldg(table + tile) : -1};
}

// A softmax over some of the tokens: l = sum of exp2(x - m), o = sum of exp2(x - m) * v.
struct Partial {
    float m, l;
    float4 o;  // four dimensions
};

// Part i: m and l at stats + i * stats_step, four dimensions of o at lines + i * lines_step.
__device__ __forceinline__ Partial merge(const float* stats, int64_t stats_step, const float* lines,
                                         int64_t lines_step, int parts) {
    Partial sum = {LOWEST, 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll 8
    for (int i = 0; i < parts; ++i) {
        const float2 stat = *reinterpret_cast<const float2*>(stats + i * stats_step);
        const float4 o = *reinterpret_cast<const float4*>(lines + i * lines_step);
        const float m = fmaxf(sum.m, stat.x), keep = exp2_fast(sum.m - m), add = exp2_fast(stat.x - m);
        sum = {m, sum.l * keep + stat.y * add,
               {sum.o.x * keep + o.x * add, sum.o.y * keep + o.y * add, sum.o.z * keep + o.z * add,
                sum.o.w * keep + o.w * add}};
    }
    return sum;
}

// The sink joins the softmax, once, and out is o / l: zeros where nothing was seen. `row` is one of the R.
template <typename E, int D>
__device__ __forceinline__ void finish(const Arguments& a, int64_t pair, int head, int row, int d, Partial sum) {
    if (a.sinks != nullptr) {
        const float sink = a.sinks[head * a.G + row / a.T] * LOG2E;
        const float m = fmaxf(sum.m, sink), keep = exp2_fast(sum.m - m);
        sum = {m, sum.l * keep + exp2_fast(sink - m), {sum.o.x * keep, sum.o.y * keep, sum.o.z * keep, sum.o.w * keep}};
    }
    const float scale = sum.l > 0.0f ? 1.0f / sum.l : 0.0f;
    const int64_t line = (pair / a.H * a.T + row % a.T) * a.H * a.G + head * a.G + row / a.T;
    *reinterpret_cast<uint2*>(static_cast<E*>(a.out) + line * D + d) = {
        pack<E>(sum.o.x * scale, sum.o.y * scale), pack<E>(sum.o.z * scale, sum.o.w * scale)};
}

// Tiles begin ... end - 1 of a unit. NT: tiles of 8 query rows a warp. With lane = 4 * g + t a thread holds rows g and
// g + 8 (tokens in S^T, dimensions in O^T) and columns 2t and 2t + 1 (query rows) of an mma's result.
template <typename E, int D, int NT>
__device__ __forceinline__ void attend_tiles(const Arguments& a, int unit, int begin, int end) {
    constexpr int WARPS = warps(D), STEPS = D / 16, TILE_BYTES = tile_bytes(D);
    extern __shared__ __align__(128) unsigned char shared[];
    uint32_t* visible = reinterpret_cast<uint32_t*>(shared + ring_bytes(D));  // [STAGES, WARPS]
    const uint32_t ring = shared_address(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int member = warp & (a.team_warps - 1), mate = warp - member;  // mate: the team's first warp
    const int64_t pair = unit / a.chunks;
    const int chunk = unit % a.chunks, row = unit / a.chunks / a.H, head = unit / a.chunks - row * a.H;
    const int R = a.G * a.T, chunk_rows = 8 * NT * a.team_warps;
    const int first_row = chunk * chunk_rows + member * 8 * NT;  // of this warp's query rows

    // In round k the CTA has tiles begin + k * WARPS + warp: each warp loads one, and its whole team uses it.
    const int rounds = (max(end - begin - mate, 0) + WARPS - 1) / WARPS;
    const int64_t* table = a.table + pair * a.S;
    const int64_t length = __ldg(a.lengths + row);
    Halves halves[STAGES];
#pragma unroll
    for (int s = 0; s < STAGES; ++s) halves[s] = read_table(table, begin + s * WARPS + warp, end, a.S);
    uint32_t tail = 0;  // entries that any query sees
    if (begin == 0) {
        bool any = false;
#pragma unroll
        for (int token = 0; token < TAIL; ++token) any |= token < a.T && a.tail_mask[token * TAIL + lane % TAIL];
        tail = __ballot_sync(ALL, any) & 0xff;
    }

    const int64_t stream = pair * (TAIL + static_cast<int64_t>(a.S) * BLOCK) * D;
    const char* keys = reinterpret_cast<const char*>(static_cast<const E*>(a.keys) + stream);
    const char* values = reinterpret_cast<const char*>(static_cast<const E*>(a.values) + stream);
    const auto load = [&](int stage, int tile, const Halves& blocks) {
        const uint32_t first = tile == 0 ? tail : visible_tokens(blocks.first, length) >> 8;
        const uint32_t seen = first | (visible_tokens(blocks.second, length) & 0xff) << 8;
        if (lane == 0) visible[stage * WARPS + warp] = seen;
        if (seen != 0) {
            const uint32_t to = ring + (stage * WARPS + warp) * 2 * TILE_BYTES;
            const int64_t from = static_cast<int64_t>(tile) * TILE * D * 2;
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                const int piece = i * 32 + lane, token = piece / (D / 8);  // 16 bytes each
                const bool real = seen >> token & 1;
                const int64_t at = real ? from + piece * 16 : 0;  // nothing is read where not real
                copy16(to + place<D>(token, piece % (D / 8)), keys + at, real);
                copy16(to + place<D>(token, piece % (D / 8)) + TILE_BYTES, values + at, real);
            }
        }
        copy_commit();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) load(s, begin + s * WARPS + warp, halves[s]);
    Halves next = halves[STAGES - 1];

    // Queries, the right-hand operand of K Q^T, for the whole kernel; and which query rows see tail entry g.
    uint32_t q[STEPS][NT][2], tail_rows = 0;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int r = first_row + n * 8 + g;
        const E* from = static_cast<const E*>(a.query) + row * a.q_row + (head * a.G + r / a.T) * a.q_head +
                        r % a.T * a.q_token + 2 * t;
#pragma unroll
        for (int i = 0; i < STEPS * 2; ++i) {
            q[i / 2][n][i % 2] = r < R ? __ldg(reinterpret_cast<const uint32_t*>(from + i * 8)) : 0;
        }
#pragma unroll
        for (int c = 0; c < 2 && begin == 0; ++c) {
            const int token = (first_row + n * 8 + 2 * t + c) % a.T;
            tail_rows |= static_cast<uint32_t>(a.tail_mask[token * TAIL + g]) << (2 * n + c);
        }
    }

    float o[STEPS][NT][4] = {}, m[NT][2], l[NT][2] = {};  // l: of this thread's tokens alone
#pragma unroll
    for (int n = 0; n < NT; ++n) m[n][0] = m[n][1] = LOWEST;
    const int key_token = lane % 16, value_token = lane % 8 + lane / 16 * 8;  // whose piece ldmatrix gets from a lane
    for (int round = 0, stage = 0; round < rounds; ++round, stage = stage == STAGES - 1 ? 0 : stage + 1) {
        // This round's tiles are here, and the team is done with the last round's: their place is loaded next.
        copy_wait<STAGES - 2>();
        team_sync(mate, a.team_warps);
        const int ahead = begin + (round + STAGES - 1) * WARPS + warp;
        load(stage == 0 ? STAGES - 1 : stage - 1, ahead, next);
        next = read_table(table, ahead + WARPS, end, a.S);

        for (int w = mate; w < mate + a.team_warps && first_row < R; ++w) {
            const uint32_t seen = visible[stage * WARPS + w], at = ring + (stage * WARPS + w) * 2 * TILE_BYTES;
            if (seen == 0) continue;
            float x[NT][4] = {};
#pragma unroll
            for (int k = 0; k < STEPS; ++k) {
                uint32_t key[4];
                load_matrices<false>(key, at + place<D>(key_token, 2 * k + lane / 16));
#pragma unroll
                for (int n = 0; n < NT; ++n) mma<E>(x[n], key, q[k][n]);
            }
            const bool has_tail = begin + round * WARPS + w == 0, low = seen >> g & 1, high = seen >> (g + 8) & 1;
            bool passed = false;
#pragma unroll
            for (int i = 0; i < NT * 4; ++i) {
                float& score = x[i / 4][i % 4];
                const bool sees = i % 4 >= 2 ? high : has_tail ? tail_rows >> (i / 4 * 2 + i % 2) & 1 : low;
                score = sees ? score * a.scale : -INFINITY;
                passed |= score > m[i / 4][i % 2] + SLACK;
            }
            if (__any_sync(ALL, passed)) {
#pragma unroll
                for (int i = 0; i < NT * 2; ++i) {
                    const int n = i / 2, c = i % 2;
                    float top = fmaxf(m[n][c], fmaxf(x[n][c], x[n][c + 2]));
#pragma unroll
                    for (int lanes = 4; lanes < 32; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, lanes));
                    const float keep = exp2_fast(m[n][c] - top);
                    m[n][c] = top;
                    l[n][c] *= keep;
#pragma unroll
                    for (int k = 0; k < STEPS; ++k) o[k][n][c] *= keep, o[k][n][c + 2] *= keep;
                }
            }
            uint32_t p[NT][2];
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    x[n][i] = exp2_fast(x[n][i] - m[n][i % 2]);
                    l[n][i % 2] += x[n][i];
                }
                p[n][0] = transpose(pack<E>(x[n][0], x[n][1]));
                p[n][1] = transpose(pack<E>(x[n][2], x[n][3]));
            }
#pragma unroll
            for (int k = 0; k < STEPS; ++k) {
                uint32_t value[4];
                load_matrices<true>(value, at + TILE_BYTES + place<D>(value_token, 2 * k + lane / 8 % 2));
#pragma unroll
                for (int n = 0; n < NT; ++n) mma<E>(o[k][n], value, p[n]);
            }
        }
    }

    // Teams are merged over shared memory: a line of o for each team and query row of the chunk, then their m and l.
    constexpr int LINES = WARPS * 8 * NT, MERGE_LINE = D + 4;  // 4: the stores below meet no bank twice
    static_assert(LINES * (MERGE_LINE + 2) * 4 <= ring_bytes(D), "the lines lie over the ring");
    float *lines = reinterpret_cast<float*>(shared), *line_stats = lines + LINES * MERGE_LINE;
    copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < NT * 2; ++i) {
        const int n = i / 2, c = i % 2, line = warp * 8 * NT + n * 8 + 2 * t + c;
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) l[n][c] += __shfl_xor_sync(ALL, l[n][c], lanes);
        if (g == 0) *reinterpret_cast<float2*>(line_stats + line * 2) = {m[n][c], l[n][c]};
#pragma unroll
        for (int k = 0; k < STEPS * 2; ++k) lines[line * MERGE_LINE + k * 8 + g] = o[k / 2][n][c + k % 2 * 2];
    }
    __syncthreads();
    const int first_tile = unit * (a.S + 1);
    const int first_cta = cta_of(first_tile, a.total), parts = cta_of(first_tile + a.S, a.total) - first_cta + 1;
    const int64_t unit_line = static_cast<int64_t>(unit) * a.most_parts * chunk_rows;  // its first in scratch
    const int items = min(R - chunk * chunk_rows, chunk_rows) * (D / 4);
    for (int item = threadIdx.x; item < items; item += WARPS * 32) {
        const int in_chunk = item / (D / 4), d = item % (D / 4) * 4;
        const Partial sum = merge(line_stats + in_chunk * 2, chunk_rows * 2, lines + in_chunk * MERGE_LINE + d,
                                  chunk_rows * MERGE_LINE, LINES / chunk_rows);
        if (parts == 1) {
            finish<E, D>(a, pair, head, chunk * chunk_rows + in_chunk, d, sum);
        } else {
            const int64_t line = unit_line + (blockIdx.x - first_cta) * chunk_rows + in_chunk;
            *reinterpret_cast<float4*>(a.partial + line * D + d) = sum.o;
            if (d == 0) *reinterpret_cast<float2*>(a.stats + line * 2) = {sum.m, sum.l};
        }
    }
    if (parts == 1) return;

    const bool last = arrives_last(a.counters, unit, parts);
    for (int item = threadIdx.x; last && item < items; item += WARPS * 32) {
        const int in_chunk = item / (D / 4), d = item % (D / 4) * 4;
        const int64_t line = unit_line + in_chunk;
        const Partial sum = merge(a.stats + line * 2, chunk_rows * 2, a.partial + line * D + d, chunk_rows * D, parts);
        finish<E, D>(a, pair, head, chunk * chunk_rows + in_chunk, d, sum);
    }
}

// Grid: one CTA a share of the tiles.
template <typename E, int D, int NT>
__global__ void __launch_bounds__(warps(D) * 32, 2) attend_kernel(const Arguments a) {
    const unsigned tiles = a.S + 1;
    unsigned at = static_cast<int64_t>(a.total) * blockIdx.x / gridDim.x;
    const unsigned stop = static_cast<int64_t>(a.total) * (blockIdx.x + 1) / gridDim.x;
    while (at < stop) {
        const unsigned unit = at / tiles, begin = at - unit * tiles, end = min(begin + stop - at, tiles);
        attend_tiles<E, D, NT>(a, unit, begin, end);
        at = unit * tiles + end;
        __syncthreads();  // the next tiles are loaded to where the lines were merged
    }
}

using Kernel = void (*)(Arguments);

template <typename E, int NT>
Kernel kernel_of(int D) {
    switch (D) {
        case 64: return attend_kernel<E, 64, NT>;
        case 80: return attend_kernel<E, 80, NT>;
        case 96: return attend_kernel<E, 96, NT>;
        case 128: return attend_kernel<E, 128, NT>;
        case 256: return attend_kernel<E, 256, NT>;
        default: return nullptr;
    }
}

struct Plan {
    int row_tiles, team_warps, chunk_rows, chunks;  // row_tiles: NT
    int64_t units, total;
    Shares shares;

    int64_t counters() const { return round_up(units * 4); }
    int64_t lines() const { return units * shares.most_parts * chunk_rows; }  // of scratch
};

// Query rows go to the warps of a team first, then to further chunks.
cudaError_t make_plan(int B, int H, int G, int T, int S, int D, Plan& plan) {
    if (kernel_of<__half, 1>(D) == nullptr || std::min({B, H, G, T}) < 1 || T > TAIL || S < 0 || S > (1 << 24) ||
        std::max(B, H) > 65535 || G > (1 << 16)) {
        return cudaErrorInvalidValue;
    }
    const int R = G * T;
    plan.row_tiles = R <= 8 ? 1 : 2;
    plan.team_warps = 1;
    while (plan.team_warps < warps(D) && plan.team_warps * plan.row_tiles * 8 < R) plan.team_warps *= 2;
    plan.chunk_rows = plan.team_warps * plan.row_tiles * 8;
    plan.chunks = (R + plan.chunk_rows - 1) / plan.chunk_rows;
    plan.units = static_cast<int64_t>(B) * H * plan.chunks;
    plan.total = plan.units * (S + 1);
    if (plan.total >= INT_MAX) return cudaErrorInvalidValue;

    Limits limits;
    const cudaError_t error = read_limits(limits);
    if (error != cudaSuccess) return error;
    const int sms = limits.sms > 2 * GATHER_CTAS ? limits.sms - GATHER_CTAS : limits.sms;
    const int64_t at_once = static_cast<int64_t>(sms) * std::max(1, limits.sm_shared / (shared_bytes(D) + 1024));
    plan.shares = share_out(plan.units, S + 1, at_once);
    return cudaSuccess;
}

}  // namespace

int64_t attend_counters(int B, int H, int G, int T, int S, int D) {
    Plan plan;
    return make_plan(B, H, G, T, S, D, plan) == cudaSuccess ? plan.counters() : 0;
}

int64_t attend_scratch(int B, int H, int G, int T, int S, int D) {
    Plan plan;
    if (make_plan(B, H, G, T, S, D, plan) != cudaSuccess) return 0;
    return plan.counters() + round_up(plan.lines() * 8) + plan.lines() * D * 4;
}

cudaError_t attend(const void* query, int64_t q_row, int64_t q_head, int64_t q_token, const void* keys,
                   const void* values, const int64_t* table, const int64_t* lengths, const bool* tail_mask,
                   float scaling, const float* sinks, int B, int H, int G, int T, int S, int D, void* out,
                   void* scratch, Dtype dtype, cudaStream_t stream) {
    Plan plan;
    const cudaError_t error = make_plan(B, H, G, T, S, D, plan);
    if (error != cudaSuccess) return error;
    // Queries are read in pairs; the stride of a dimension of size 1 may be anything.
    const bool odd = (B > 1 && q_row % 2) || (H * G > 1 && q_head % 2) || (T > 1 && q_token % 2);
    if (odd || misaligned(query, 4) || misaligned(keys, 16) || misaligned(values, 16) || misaligned(out, 8) ||
        misaligned(scratch, 16)) {
        return cudaErrorInvalidValue;
    }
    char* after_counters = static_cast<char*>(scratch) + plan.counters();
    const Arguments arguments = {
        query, keys, values, table, lengths, tail_mask, sinks, out, static_cast<int*>(scratch),
        reinterpret_cast<float*>(after_counters), reinterpret_cast<float*>(after_counters + round_up(plan.lines() * 8)),
        q_row, q_head, q_token, scaling * LOG2E, H, G, T, S, plan.team_warps, plan.chunks, plan.shares.most_parts,
        static_cast<int>(plan.total)};
    const bool one = plan.row_tiles == 1;
    const Kernel kernel = dtype == Dtype::bf16
                              ? (one ? kernel_of<__nv_bfloat16, 1>(D) : kernel_of<__nv_bfloat16, 2>(D))
                              : (one ? kernel_of<__half, 1>(D) : kernel_of<__half, 2>(D));
    return launch(kernel, dim3(plan.shares.ctas), warps(D) * 32, shared_bytes(D), arguments, stream);
}

}  // namespace oasis
