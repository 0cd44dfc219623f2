// What every binding asks of its tensors, in Python's words. No CUDA header of torch.
#pragma once
#include <torch/extension.h>

#include <string>

#include "oasis.h"

namespace {

using at::ScalarType;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t ANY = -1;

// Messages are put together without streams: where a toolchain links a second C++ library into the extension, the
// first number that a stream prints asks one library for the other's locale, and the process dies.
std::string word(const char* text) { return text; }
std::string word(const std::string& text) { return text; }
template <typename T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
std::string word(T number) {
    return std::to_string(number);
}
std::string word(ScalarType type) { return c10::toString(type); }
std::string word(const at::Device& device) { return device.str(); }
std::string word(at::IntArrayRef sizes) {
    std::string out = "[";
    for (size_t i = 0; i < sizes.size(); ++i) {
        if (i) out += ", ";
        out += sizes[i] == ANY ? "any" : std::to_string(sizes[i]);
    }
    return out + "]";
}
std::string word(const Tensor& t);

template <typename... Words>
std::string text(const Words&... words) {
    std::string out;
    ((out += word(words)), ...);
    return out;
}

// A ValueError of Python's with this message unless `ok`.
#define REQUIRE(ok, ...)                                           \
    do {                                                           \
        if (!(ok)) throw pybind11::value_error(text(__VA_ARGS__)); \
    } while (0)

cudaStream_t as_stream(int64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

std::string word(const Tensor& t) {
    return text(t.scalar_type(), " ", t.sizes(), " on ", t.device(), t.is_contiguous() ? "" : ", not contiguous");
}

std::string wanted(c10::ArrayRef<ScalarType> types, at::IntArrayRef shape) {
    std::string out;
    for (size_t i = 0; i < types.size(); ++i) out += text(i ? " or " : "", types[i]);
    return out + " " + word(shape);
}

void check_shape(const char* op, const char* name, const Tensor& t, c10::ArrayRef<ScalarType> types,
                 at::IntArrayRef shape) {
    bool ok = std::find(types.begin(), types.end(), t.scalar_type()) != types.end() &&
              t.dim() == static_cast<int64_t>(shape.size());
    for (size_t i = 0; ok && i < shape.size(); ++i) ok = shape[i] == ANY || t.size(i) == shape[i];
    REQUIRE(ok, "oasis_hf.", op, ": `", name, "` must be ", wanted(types, shape), ", not ", t, ".");
}

void rank(const char* op, const char* name, const Tensor& t, int64_t dims) {
    REQUIRE(t.dim() == dims, "oasis_hf.", op, ": `", name, "` must have ", dims, " dimensions, not ",
            t, ".");
}

const Tensor& given(const char* op, const OptionalTensor& scales) {
    REQUIRE(scales.has_value(), "oasis_hf.", op, ": `scales` must be given with int8 summaries.");
    return *scales;
}

// One call's tensors all live on the device of its first one; that it is a GPU is asked last, so that everything else
// can be tested without one.
class Checker {
  public:
    Checker(const char* op, const Tensor& first, const char* name) : op_(op), name_(name), device_(first.device()) {}

    void on_gpu() const {
        REQUIRE(device_.is_cuda(), "oasis_hf.", op_, ": `", name_, "` must be on a CUDA device, not ",
                device_, ".");
    }

    // Any strides, but the last dimension is contiguous and everything starts and steps in units of 16 bytes.
    void strided(const Tensor& t, const char* name, c10::ArrayRef<ScalarType> types, at::IntArrayRef shape) const {
        check_shape(op_, name, t, types, shape);
        on_device(t, name);
        bool aligned = reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0 && t.stride(-1) == 1;
        for (int64_t i = 0; i + 1 < t.dim(); ++i)
            aligned = aligned && (t.size(i) == 1 || t.stride(i) * t.element_size() % 16 == 0);
        REQUIRE(aligned, "oasis_hf.", op_, ": `", name,
                "` must have a contiguous last dimension and strides in units of 16 bytes, not strides ",
                t.strides(), ".");
    }

    void dense(const Tensor& t, const char* name, c10::ArrayRef<ScalarType> types, at::IntArrayRef shape) const {
        check_shape(op_, name, t, types, shape);
        on_device(t, name);
        REQUIRE(t.is_contiguous(), "oasis_hf.", op_, ": `", name, "` must be contiguous, not strides ",
                t.strides(), ".");
    }

    // Memory that the device reads through its host address: pinned, or its own.
    void reachable(const Tensor& t, const char* name, c10::ArrayRef<ScalarType> types, at::IntArrayRef shape) const {
        check_shape(op_, name, t, types, shape);
        if (t.is_cuda()) return on_device(t, name);
        cudaPointerAttributes attributes{};
        bool pinned = t.numel() == 0 || (cudaPointerGetAttributes(&attributes, t.data_ptr()) == cudaSuccess &&
                                         attributes.type != cudaMemoryTypeUnregistered);
        REQUIRE(pinned, "oasis_hf.", op_, ": `", name, "` must be pinned or on the device, not pageable.");
    }

  private:
    void on_device(const Tensor& t, const char* name) const {
        REQUIRE(t.device() == device_, "oasis_hf.", op_, ": `", name, "` must be on ", device_, ", not ",
                t.device(), ".");
    }

    const char *op_, *name_;
    at::Device device_;
};

const ScalarType kModel[] = {ScalarType::BFloat16, ScalarType::Half};
const ScalarType kLong[] = {ScalarType::Long};
const ScalarType kInt[] = {ScalarType::Int};
const ScalarType kFloat[] = {ScalarType::Float};
const ScalarType kHalf[] = {ScalarType::Half};
const ScalarType kBool[] = {ScalarType::Bool};
const ScalarType kBytes[] = {ScalarType::Byte};
const ScalarType kPages[] = {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float};

oasis::Dtype dtype_of(const Tensor& t) {
    return t.scalar_type() == ScalarType::BFloat16 ? oasis::Dtype::bf16 : oasis::Dtype::f16;
}

oasis::Scorer scorer_of(const char* op, const std::string& name) {
    if (name == "minmax") return oasis::Scorer::minmax;
    REQUIRE(name == "midrange", "oasis_hf.", op, ": `scorer` must be 'minmax' or 'midrange', not '", name,
            "'.");
    return oasis::Scorer::midrange;
}

oasis::Reduction reduction_of(const char* op, const std::string& name) {
    if (name == "max") return oasis::Reduction::max;
    if (name == "mean") return oasis::Reduction::mean;
    REQUIRE(name == "softmax-mean", "oasis_hf.", op,
            ": `reduction` must be 'max', 'mean' or 'softmax-mean', not '", name, "'.");
    return oasis::Reduction::softmax_mean;
}

void launched(const char* op, cudaError_t error) {
    const bool size = error == cudaErrorInvalidValue;
    if (error == cudaSuccess) return;
    throw std::runtime_error(text("oasis_hf.", op, ": ", cudaGetErrorString(error),
                                      size ? " (a size that the operator does not take)" : "", "."));
}

template <typename T>
T* pointer(const OptionalTensor& t) {
    return t.has_value() && t->numel() ? static_cast<T*>(t->data_ptr()) : nullptr;
}

}  // namespace
