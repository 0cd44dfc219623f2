// summarize: the two vectors of every part of closed blocks (oasis_hf/ops/reference.py: summarize).
//
// Floor: keys once, summaries once: 4,096 + 256 * P * 2 bytes a block for int8 (D=128), 4,096 + 512 * P otherwise.
// Operations are few; int8 needs one correctly rounded division a value, made of a reciprocal a vector and three
// multiply-adds a value.
//
// One group of 8, 16 or 32 lanes a block: a lane holds 8 neighbouring channels of all 16 tokens, 16 loads of 16 bytes
// in flight. All roundings are the reference's: midrange in the keys' dtype, the scale to fp16 before it divides.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <climits>

#include "oasis.h"

namespace oasis {
namespace {

constexpr int THREADS = 128;
constexpr int LANE_CHANNELS = 8;  // 16 bytes of bf16 or fp16

__device__ __forceinline__ float2 to_float2(__nv_bfloat162 x) { return __bfloat1622float2(x); }
__device__ __forceinline__ float2 to_float2(__half2 x) { return __half22float2(x); }
__device__ __forceinline__ __nv_bfloat162 half_of(__nv_bfloat162 x) {
    return __hmul2_rn(x, __float2bfloat162_rn(0.5f));
}
__device__ __forceinline__ __half2 half_of(__half2 x) { return __hmul2_rn(x, __float2half2_rn(0.5f)); }

// Four small integers in float to int8. The sum's low byte is the integer, rounded half to even.
__device__ __forceinline__ uint32_t pack4(const float* x) {
    constexpr float shift = 12582912.0f;  // 1.5 * 2^23
    uint32_t low = __byte_perm(__float_as_uint(x[0] + shift), __float_as_uint(x[1] + shift), 0x0040);
    uint32_t high = __byte_perm(__float_as_uint(x[2] + shift), __float_as_uint(x[3] + shift), 0x0040);
    return __byte_perm(low, high, 0x5410);
}

// This lane's 8 channels of a vector to `out`, as they are.
template <typename E2>
__device__ __forceinline__ void store(const E2 (&vector)[4], void* out, int64_t at, bool there) {
    if (there) *reinterpret_cast<uint4*>(static_cast<char*>(out) + 2 * at) = *reinterpret_cast<const uint4*>(vector);
}

// The same as int8, with a scale that is the same in all lanes of the group: it is returned.
template <typename E2>
__device__ __forceinline__ __half quantize(const E2 (&vector)[4], void* out, int64_t at, bool there, int lanes) {
    float x[LANE_CHANNELS], most = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 pair = to_float2(vector[i]);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
        most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
    for (int mask = lanes / 2; mask; mask /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
    constexpr float tiny = 6.103515625e-05f;  // the least normal fp16
    const __half scale = __float2half_rn(fmaxf(__half2float(__float2half_rn(__fdiv_rn(most, 127.0f))), tiny));
    const float divisor = __half2float(scale), inverse = __frcp_rn(divisor);
    // x / divisor, correctly rounded (Markstein). No clamp: a scale at most 2^-11 too small leaves it under 127.5.
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; ++i) {
        float quotient = x[i] * inverse;
        x[i] = fmaf(fmaf(-quotient, divisor, x[i]), inverse, quotient);
    }
    if (there) *reinterpret_cast<uint2*>(static_cast<char*>(out) + at) = make_uint2(pack4(x), pack4(x + 4));
    return scale;
}

template <typename E2, int P, bool INT8>
__global__ void __launch_bounds__(THREADS) summarize_kernel(
    const uint16_t* keys, int64_t key_stride, int key_token, unsigned outer, unsigned blocks, int D, int lanes,
    bool midrange, void* out, int64_t out_stride, __half2* scales, int64_t scale_stride) {
    constexpr int RUN = BLOCK / P;
    const unsigned group = (blockIdx.x * THREADS + threadIdx.x) / lanes, lane = threadIdx.x % lanes;
    const unsigned o = group / blocks, block = group % blocks;
    // Lanes without channels or a block take part in their group's shuffles.
    const bool there = o < outer && lane * LANE_CHANNELS < unsigned(D);

    uint4 raw[BLOCK];
    const uint16_t* from = keys + o * key_stride + int64_t(block) * (BLOCK * key_token) + lane * LANE_CHANNELS;
#pragma unroll
    for (int i = 0; i < BLOCK; ++i)
        raw[i] = there ? __ldcs(reinterpret_cast<const uint4*>(from + i * key_token)) : make_uint4(0, 0, 0, 0);

#pragma unroll
    for (int p = 0; p < P; ++p) {
        E2 first[4], second[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            E2 high, low;
#pragma unroll
            for (int token = 0; token < RUN; ++token) {
                E2 key = reinterpret_cast<const E2*>(&raw[p * RUN + token])[i];
                high = token ? __hmax2_nan(high, key) : key;
                low = token ? __hmin2_nan(low, key) : key;
            }
            first[i] = midrange ? __hadd2_rn(half_of(high), half_of(low)) : high;
            second[i] = midrange ? __hsub2_rn(half_of(high), half_of(low)) : low;
        }
        const int64_t at = o * out_stride + ((int64_t(block) * P + p) * 2) * D + lane * LANE_CHANNELS;
        if constexpr (INT8) {
            __half2 pair;
            pair.x = quantize(first, out, at, there, lanes);
            pair.y = quantize(second, out, at + D, there, lanes);
            if (there && lane == 0) scales[o * scale_stride / 2 + int64_t(block) * P + p] = pair;
        } else {
            store(first, out, at, there);
            store(second, out, at + D, there);
        }
    }
}

template <typename E2>
cudaError_t launch(const void* keys, int64_t outer, int64_t key_stride, int64_t key_token, int64_t blocks, int D, int P,
                   bool midrange, bool int8, void* out, int64_t out_stride, void* scales, int64_t scale_stride,
                   cudaStream_t stream) {
    auto* kernel = P == 1   ? (int8 ? summarize_kernel<E2, 1, true> : summarize_kernel<E2, 1, false>)
                   : P == 2 ? (int8 ? summarize_kernel<E2, 2, true> : summarize_kernel<E2, 2, false>)
                            : (int8 ? summarize_kernel<E2, 4, true> : summarize_kernel<E2, 4, false>);
    int lanes = 8;
    while (lanes * LANE_CHANNELS < D) lanes *= 2;
    const int64_t ctas = (outer * blocks * lanes + THREADS - 1) / THREADS;
    auto outer32 = static_cast<unsigned>(outer), blocks32 = static_cast<unsigned>(blocks);
    auto token32 = static_cast<int>(key_token);
    void* arguments[] = {&keys,  &key_stride, &token32, &outer32,    &blocks32, &D,
                         &lanes, &midrange,   &out,     &out_stride, &scales,   &scale_stride};
    return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(ctas)), dim3(THREADS),
                            arguments, 0, stream);
}

}  // namespace

cudaError_t summarize(const void* keys, int64_t outer, int64_t key_stride, int64_t key_token, int64_t blocks, int D,
                      int P, Scorer scorer, bool int8, void* out, int64_t out_stride, void* scales,
                      int64_t scale_stride, Dtype dtype, cudaStream_t stream) {
    if (outer <= 0 || blocks <= 0) return cudaSuccess;
    // Loads and stores of 16 bytes (8 of int8); a stride that is never taken may be anything.
    const bool aligned = (outer == 1 || (key_stride % 8 == 0 && out_stride % 8 == 0 && scale_stride % 2 == 0)) &&
                         reinterpret_cast<uintptr_t>(keys) % 16 == 0 && key_token % 8 == 0 &&
                         reinterpret_cast<uintptr_t>(out) % (int8 ? 8 : 16) == 0 &&
                         reinterpret_cast<uintptr_t>(scales) % 4 == 0;
    if (!aligned || D % 16 || D < 16 || D > 256 || (P != 1 && P != 2 && P != 4) || (int8 && !scales) ||
        outer * blocks > (int64_t(1) << 31) / 32 || key_token < 0 || key_token > INT_MAX / BLOCK)
        return cudaErrorInvalidValue;
    auto* run = dtype == Dtype::bf16 ? launch<__nv_bfloat162> : launch<__half2>;
    return run(keys, outer, key_stride, key_token, blocks, D, P, scorer == Scorer::midrange, int8, out, out_stride,
               scales, scale_stride, stream);
}

}  // namespace oasis
