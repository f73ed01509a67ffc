// The norms as operators of torch's.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <stdexcept>

#include "norms.h"

namespace normgeo {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check(bool good, const char* what) {
    if (!good) throw std::runtime_error(what);
}

// Contiguous, of x's shape and dtype. torch::stable::empty_like finds its operator by name, which takes as long as a
// token's norm.
inline Tensor made_like(const Tensor& x) {
    constexpr int64_t MOST = 8;
    const int64_t dim = x.dim();
    if (dim > MOST) return torch::stable::empty_like(x);
    int64_t strides[MOST], step = 1;
    for (int64_t i = dim - 1; i >= 0; step *= x.size(i--)) strides[i] = step;
    int32_t dtype;
    AtenTensorHandle made;
    check(aoti_torch_get_dtype(x.get(), &dtype) == AOTI_TORCH_SUCCESS &&
              aoti_torch_empty_strided(dim, x.sizes().data(), strides, dtype, aoti_torch_device_type_cpu(), 0, &made) ==
                  AOTI_TORCH_SUCCESS,
          "torch has no memory for what normgeo's norms give");
    return Tensor(made);
}

inline int type_of(const Tensor& t) {
    const auto type = t.scalar_type();
    check(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
          "normgeo's norms take float32, bfloat16 and float16");
    return type == ScalarType::Float ? FLOAT : type == ScalarType::BFloat16 ? BFLOAT : HALF;
}

template <bool ADD>
void checked(const Tensor& residual, const Tensor& x, const Tensor& out, const std::optional<Tensor>& weight,
             const std::optional<Tensor>& bias, double eps, double offset, int64_t kind) {
    const int64_t d = residual.size(-1), rows = d ? residual.numel() / d : 0;
    for (const auto* t : {&residual, &x, &out})
        check(t->is_contiguous() && t->numel() == residual.numel(), "normgeo's norms take contiguous tensors of one shape");
    const int stream = type_of(residual), added = type_of(x), made = type_of(out);
    check(added == stream || stream == FLOAT, "normgeo's norms add no wider tensor to a stream");
    check(made == stream || made == added, "normgeo's norms give what the stream or the added is in");
    const int parameters = weight ? type_of(*weight) : bias ? type_of(*bias) : stream;
    for (const auto* p : {&weight, &bias})
        check(!*p || ((*p)->numel() == d && (*p)->is_contiguous() && type_of(**p) == parameters),
              "gamma and beta have d numbers of one dtype");
    check(parameters == stream || parameters == FLOAT, "gamma and beta are of the input's dtype or float32");
    const Affine affine = {weight ? weight->data_ptr() : nullptr, bias ? bias->data_ptr() : nullptr, float(offset)};
    run<ADD>({residual.data_ptr(), x.data_ptr(), out.data_ptr(), rows, d, affine, float(eps), int(kind)},
             {stream, added, made, parameters}, [](auto... given) { torch::stable::parallel_for(given...); });
}

Tensor norm(Tensor x, std::optional<Tensor> weight, std::optional<Tensor> bias, double eps, double offset,
            int64_t kind) {
    Tensor out = made_like(x);
    checked<false>(x, x, out, weight, bias, eps, offset, kind);
    return out;
}

void add_norm_(Tensor residual, Tensor x, Tensor out, std::optional<Tensor> weight, std::optional<Tensor> bias,
               double eps, double offset, int64_t kind) {
    checked<true>(residual, x, out, weight, bias, eps, offset, kind);
}

}  // namespace normgeo

STABLE_TORCH_LIBRARY(normgeo, m) {
    m.def("norm(Tensor x, Tensor? weight, Tensor? bias, float eps, float offset, int kind) -> Tensor");
    m.def("add_norm_(Tensor(a!) residual, Tensor x, Tensor(b!) out, Tensor? weight, Tensor? bias, float eps, "
          "float offset, int kind) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(normgeo, CPU, m) {
    m.impl("norm", TORCH_BOX(&normgeo::norm));
    m.impl("add_norm_", TORCH_BOX(&normgeo::add_norm_));
}
