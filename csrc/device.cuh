// What attend, gather and score share: PTX instructions as functions, and a few lines every launch of theirs needs.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace oasis {
namespace {

constexpr float LOWEST = -1e30f;  // below any score, and finite, so that no difference is NaN
constexpr float LOG2E = 1.44269504f;
constexpr unsigned ALL = 0xffffffffu;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 (4) bytes on their way to shared memory, or zeros where not real: then nothing is read.
__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy4(uint32_t to, const void* from, bool real) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(real ? 4 : 0) : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t from) {
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
    }
}

__device__ __forceinline__ uint32_t transpose(uint32_t matrix) {
    uint32_t to;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(matrix));
    return to;
}

template <typename E>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if constexpr (std::is_same<E, __half>::value) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

template <typename E>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    typename std::conditional<std::is_same<E, __half>::value, __half2, __nv_bfloat162>::type pair;
    if constexpr (std::is_same<E, __half>::value) {
        pair = __floats2half2_rn(low, high);
    } else {
        pair = __floats2bfloat162_rn(low, high);
    }
    uint32_t packed;
    memcpy(&packed, &pair, 4);
    return packed;
}

// Whether this CTA is the last of `arrivals` to come here; what all have written before is then there to be read. The
// counter is 0 before and after.
__device__ __forceinline__ bool arrives_last(int* counters, int64_t pair, int arrivals) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();  // this CTA's results before its arrival, and all others' before they are read
        last = atomicAdd(counters + pair, 1) == arrivals - 1;
        if (last) counters[pair] = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}

struct Limits {
    int sms = 0, sm_shared = 0, cta_shared = 0;  // bytes of shared memory that an SM has, and the most a CTA gets
};

inline cudaError_t read_limits(Limits& limits) {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    const auto read = [&](int& value, cudaDeviceAttr what) {
        if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, what, device);
    };
    read(limits.sms, cudaDevAttrMultiProcessorCount);
    read(limits.sm_shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    read(limits.cta_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return error;
}

template <typename Arguments>
cudaError_t launch(void (*kernel)(Arguments), dim3 grid, int threads, int shared_bytes, const Arguments& arguments,
                   cudaStream_t stream) {
    const void* entry = reinterpret_cast<const void*>(kernel);
    cudaError_t error = cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error == cudaSuccess) {
        error = cudaFuncSetAttribute(entry, cudaFuncAttributePreferredSharedMemoryCarveout,
                                     cudaSharedmemCarveoutMaxShared);
    }
    if (error != cudaSuccess) return error;
    kernel<<<grid, threads, shared_bytes, stream>>>(arguments);
    return cudaGetLastError();
}

inline int64_t round_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }

inline bool misaligned(const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes != 0; }

}  // namespace
}  // namespace oasis
