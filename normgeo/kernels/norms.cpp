// LayerNorm, RMSNorm and CRMSNorm of rows, alone or of a residual stream that is added to in place, as operators of
// torch's. Each row is read once from memory; sums are accumulated in float32 in 4 x 16 parts. A norm may be written
// over what was added to the stream: that is in the caches already, and nothing else then has to be fetched or evicted.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <stdexcept>

#include "lanes.h"

namespace normgeo {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int N = 16, PARTS = 4;
typedef Of<N>::Floats Floats;

enum Kind { LAYER = 0, RMS = 1, CRMS = 2, CRMS_PADDED = 3 };

template <class T>
inline Floats get(const T* x, int64_t n) {
    if (n >= N) return widen<N>(x);
    T some[N] = {};
    std::memcpy(some, x, n * sizeof(T));
    return widen<N>(some);
}

template <class T>
inline void put(Floats v, T* out, int64_t n) {
    if (n >= N) return narrow<N>(v, out);
    T some[N];
    narrow<N>(v, some);
    std::memcpy(out, some, n * sizeof(T));
}

inline float total(const Floats* parts) {
    const Floats v = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    float sums[N];
    std::memcpy(sums, &v, sizeof v);
    for (int half = N / 2; half; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

template <class F>
inline void along(int64_t d, const F& body) {  // body(place, numbers there, part of the sum)
    int64_t j = 0;
    for (; j + N * PARTS <= d; j += N * PARTS)
        for (int p = 0; p < PARTS; p++) body(j + p * N, int64_t(N), p);
    for (int p = 0; j < d; j += N, p++) body(j, d - j < N ? d - j : int64_t(N), p);
}

struct Affine {
    const void *weight, *bias;
    float offset;
};

// residual += x, rounded to its dtype; then sum and sum of squares of what is there.
template <class T, class X, bool ADD, bool SUM>
inline void moments(T* residual, const X* x, int64_t d, float* sum, float* square) {
    Floats sums[PARTS] = {}, squares[PARTS] = {};
    along(d, [&](int64_t j, int64_t n, int p) {
        Floats v = get(residual + j, n);
        if (ADD) {
            v += get(x + j, n);
            put(v, residual + j, n);
            if constexpr (sizeof(T) < sizeof(float)) v = get(residual + j, n);
        }
        if (SUM) sums[p] += v;
        squares[p] += v * v;
    });
    *sum = SUM ? total(sums) : 0.0f;
    *square = total(squares);
}

template <class T>
inline float centered_square(const T* x, int64_t d, float mean) {
    Floats squares[PARTS] = {};
    along(d, [&](int64_t j, int64_t n, int p) {
        Floats v = get(x + j, n) - mean;
        for (int64_t i = n; i < N; i++) v[i] = 0;
        squares[p] += v * v;
    });
    return total(squares);
}

// x and out may be the same memory: a row is written when all of it has been read.
template <class T, class X, class Z, class W, bool ADD>
void norm_row(T* residual, const X* x, Z* out, int64_t d, const Affine& affine, float eps, int kind) {
    float sum, square, mean = 0;
    if (kind == RMS) moments<T, X, ADD, false>(residual, x, d, &sum, &square);
    else moments<T, X, ADD, true>(residual, x, d, &sum, &square);
    if (kind == LAYER) {
        mean = sum / d;
        square = centered_square(residual, d, mean);
    } else if (kind != RMS) {
        square += sum * sum;
    }
    const float scale = 1 / std::sqrt(square / (d + (kind == CRMS)) + eps), offset = affine.offset;
    const W *weight = static_cast<const W*>(affine.weight), *bias = static_cast<const W*>(affine.bias);
    const T* from = residual;
    if (!weight && !bias) along(d, [&](int64_t j, int64_t n, int) { put((get(from + j, n) - mean) * scale, out + j, n); });
    else if (!bias) along(d, [&](int64_t j, int64_t n, int) {
        put((get(from + j, n) - mean) * scale * (get(weight + j, n) + offset), out + j, n);
    });
    else if (!weight) along(d, [&](int64_t j, int64_t n, int) {
        put((get(from + j, n) - mean) * scale + get(bias + j, n), out + j, n);
    });
    else along(d, [&](int64_t j, int64_t n, int) {
        put((get(from + j, n) - mean) * scale * (get(weight + j, n) + offset) + get(bias + j, n), out + j, n);
    });
}

template <class T, class X, class Z, class W, bool ADD>
void norm_rows(void* residual, const void* x, void* out, int64_t rows, int64_t d, const Affine& affine, float eps,
               int kind) {
    T* r = static_cast<T*>(residual);
    Z* z = static_cast<Z*>(out);
    const X* more = static_cast<const X*>(x);
    torch::stable::parallel_for(0, rows, 1 + 16384 / (d + 1), [&](int64_t a, int64_t b) {
        for (int64_t i = a; i < b; i++)
            norm_row<T, X, Z, W, ADD>(r + i * d, ADD ? more + i * d : nullptr, z + i * d, d, affine, eps, kind);
    });
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
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dim, x.sizes().data(), strides, dtype,
                                                           aoti_torch_device_type_cpu(), 0, &made));
    return Tensor(made);
}

struct Call {
    void* residual;
    const void* x;  // what is added to it, if anything
    void* out;
    int64_t rows, d;
    Affine affine;
    float eps;
    int kind;
};

enum Type { FLOAT = 0, BFLOAT = 1, HALF = 2 };
struct Types { int stream, added, made, parameters; };

template <bool ADD>
void run(const Call& c, const Types& types) {
    auto go = [&](auto stream, auto more, auto result, auto parameter) {
        norm_rows<decltype(stream), decltype(more), decltype(result), decltype(parameter), ADD>(
            c.residual, c.x, c.out, c.rows, c.d, c.affine, c.eps, c.kind);
    };
    const bool wide = types.parameters == FLOAT, narrow = types.made != types.stream;
    const float full = 0.0f;
    const Bfloat16 brain = {};
    const Float16 half = {};
    if (types.stream == BFLOAT) wide ? go(brain, brain, brain, full) : go(brain, brain, brain, brain);
    else if (types.stream == HALF) wide ? go(half, half, half, full) : go(half, half, half, half);
    else if (types.added == FLOAT) go(full, full, full, full);
    else if constexpr (ADD) {
        if (types.added == BFLOAT) narrow ? go(full, brain, brain, full) : go(full, brain, full, full);
        else narrow ? go(full, half, half, full) : go(full, half, full, full);
    }
}

void check(bool good, const char* what) {
    if (!good) throw std::runtime_error(what);
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
             {stream, added, made, parameters});
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

// The same for Python to call with the places of checked tensors. Between matrix products the way through torch's
// operators, whose code they push out of the caches, takes longer than the norm.
#ifdef PYTHON
#include <Python.h>

namespace normgeo {

constexpr int64_t LONG = 1 << 18;  // numbers from which on other threads of Python may run meanwhile

PyObject* direct(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (count != 14) return PyErr_SetString(PyExc_TypeError, "14 arguments"), nullptr;
    auto place = [&](int i) { return PyLong_AsVoidPtr(given[i]); };
    auto whole = [&](int i) { return PyLong_AsLongLong(given[i]); };
    const int64_t numbers = whole(5), d = whole(6);
    const Affine affine = {place(3), place(4), float(PyFloat_AsDouble(given[8]))};
    const Call call = {place(0), place(1), place(2), d ? numbers / d : 0, d, affine, float(PyFloat_AsDouble(given[7])),
                       int(whole(9))};
    const Types types = {int(whole(10)), int(whole(11)), int(whole(12)), int(whole(13))};
    if (PyErr_Occurred()) return nullptr;
    PyThreadState* others = numbers >= LONG ? PyEval_SaveThread() : nullptr;
    const char* failed = nullptr;
    try {
        call.x ? run<true>(call, types) : run<false>(call, types);
    } catch (const std::exception&) {
        failed = "normgeo's norm failed";
    }
    if (others) PyEval_RestoreThread(others);
    if (failed) return PyErr_SetString(PyExc_RuntimeError, failed), nullptr;
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"direct", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(direct)), METH_FASTCALL,
     "direct(residual, x, out, weight, bias, numbers, d, eps, offset, kind, and the types of stream, x, out, weight)"},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "normgeo_norms", nullptr, -1, methods};

}  // namespace normgeo

PyMODINIT_FUNC PyInit_normgeo_norms() { return PyModule_Create(&normgeo::definition); }
#endif
