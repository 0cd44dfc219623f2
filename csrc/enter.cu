// A decode step's new tokens before their attention: K and V to the tail, queries behind the recent ones.
//
// Floor: bytes = the new tokens' Q, K and V and the recent queries, read and written once: 1.3 MB at 64 rows of 2 tokens
// and W = 4, so a launch's 2 us at any size; no arithmetic. It stands for six small copies a layer.
//
// A thread has 16 bytes of a head's line and goes through its lines, EACH at a time: a query line moves `count` lines
// forward in its own buffer, so lines are read before any that lies behind them is written.
#include <cuda_runtime.h>

#include <cstdint>

#include "oasis.h"

namespace oasis {
namespace {

constexpr int THREADS = 256;
constexpr int EACH = 8;  // lines in flight

struct Lines {
    const char* from;
    int64_t row, head, token;  // strides in bytes
};

struct Args {
    Lines query, keys, values;
    char *queries, *tail_keys, *tail_values;
    bool* fresh;
    int B, H, Hq, T, count, W, room, S;
    int width;  // 16-byte vectors of a line
};

__global__ void __launch_bounds__(THREADS) enter_kernel(const Args a) {
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    const int heads = a.Hq + 2 * a.H, column = static_cast<int>(thread % a.width) * 16;
    const int64_t item = thread / a.width;
    const int row = static_cast<int>(item / heads), line = a.width * 16;
    int head = static_cast<int>(item % heads);
    if (row >= a.B) return;
    if (head < a.Hq) {
        char* own = a.queries + (static_cast<int64_t>(row) * a.Hq + head) * a.room * line + column;
        const char* fresh = a.query.from + row * a.query.row + head * a.query.head + column;
        const int lines = a.W + a.T - a.count;
        for (int first = 0; first < lines; first += EACH) {
            uint4 x[EACH];
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int from = first + i + a.count;
                if (first + i < lines) {
                    x[i] = *reinterpret_cast<const uint4*>(from < a.W ? own + static_cast<int64_t>(from) * line
                                                                      : fresh + (from - a.W) * a.query.token);
                }
            }
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (first + i < lines) *reinterpret_cast<uint4*>(own + static_cast<int64_t>(first + i) * line) = x[i];
            }
        }
        return;
    }
    head -= a.Hq;
    const bool is_value = head >= a.H;
    if (is_value) head -= a.H;
    const Lines& lines = is_value ? a.values : a.keys;
    const int64_t pair = static_cast<int64_t>(row) * a.H + head;
    const char* from = lines.from + row * lines.row + head * lines.head + column;
    char* to = (is_value ? a.tail_values : a.tail_keys) + pair * (TAIL + static_cast<int64_t>(a.S) * BLOCK) * line +
               column;
    for (int t = 0; t < a.T; ++t) {
        *reinterpret_cast<uint4*>(to + t * line) = *reinterpret_cast<const uint4*>(from + t * lines.token);
    }
    // What stands in a slot when the step attends is read: nothing is fresh after it.
    for (int slot = column / 16; !is_value && slot < a.S; slot += a.width) a.fresh[pair * a.S + slot] = false;
}

}  // namespace

cudaError_t enter(const void* query, int64_t q_row, int64_t q_head, int64_t q_token, const void* new_keys,
                  int64_t k_row, int64_t k_head, int64_t k_token, const void* new_values, int64_t v_row,
                  int64_t v_head, int64_t v_token, void* queries, void* keys, void* values, bool* fresh, int B, int H,
                  int Hq, int T, int count, int W, int room, int S, int D, int element, cudaStream_t stream) {
    if (B < 0 || H < 1 || Hq < 1 || T < 1 || T > TAIL || count < 1 || count > T || W < 1 || W + T - count > room ||
        S < 0 || D * element % 16 != 0)
        return cudaErrorInvalidValue;
    if (B == 0) return cudaSuccess;
    const auto lines = [&](const void* from, int64_t row, int64_t head, int64_t token) {
        return Lines{static_cast<const char*>(from), row * element, head * element, token * element};
    };
    const Args a = {lines(query, q_row, q_head, q_token), lines(new_keys, k_row, k_head, k_token),
                    lines(new_values, v_row, v_head, v_token), static_cast<char*>(queries), static_cast<char*>(keys),
                    static_cast<char*>(values), fresh, B, H, Hq, T, count, W, room, S, D * element / 16};
    const int64_t threads = static_cast<int64_t>(B) * (Hq + 2 * H) * a.width;
    enter_kernel<<<static_cast<unsigned>((threads + THREADS - 1) / THREADS), THREADS, 0, stream>>>(a);
    return cudaGetLastError();
}

}  // namespace oasis
