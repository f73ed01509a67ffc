// Norms of rows that keep what their gradients need, and the gradients, called through ctypes. With v a row, s its sum
// where it is CRMSNorm's and 0 otherwise, D what its squares are divided by, and r the scale that was kept,
//
//     g = gamma dz,   dv = r g - r^3 (g.v) (v + s) / D,   dgamma = sum over rows of dz r v,   dbeta = sum over rows of dz;
//
// LayerNorm is RMSNorm of v less its mean, and its dv is what is left without the mean.

#include <algorithm>
#include <memory>
#include <new>

#include "norms.h"
#include "spread.h"

using namespace normgeo;

namespace {

constexpr int TOGETHER = 4;  // rows, for which sums over rows are fetched and put back once
constexpr int64_t SHARE = 32, SHARES = 128;  // rows that are summed at a time at least, and how many such sums there are
constexpr int64_t FEW = 64;  // rows after which a sum is put aside: of very many the last ones would be rounded away

struct Gradients {
    const void *x, *dz;
    const float *scales, *gamma;
    void* dx;
    int64_t d, width;  // width: d and what fills the last vector of sums over rows
    int kind;
};

template <int R>
struct Rows {
    float scale[R], along[R], shift[R], mean[R];  // dv = scale g - along v + shift, and v = x - mean
};

// What the gradients of R rows have in common over a row. One row after the other comes from memory, as it lies there.
template <class T, int R, bool SUM>
Rows<R> constants(const Gradients& c, const T* x, const T* dz, const float* scales) {
    Rows<R> out = {};
    const int64_t d = c.d;
    for (int r = 0; r < R; r++, x += d, dz += d) {
        Floats dots[PARTS] = {}, sums[PARTS] = {}, others[PARTS] = {};
        if (c.kind == LAYER) {
            Floats whole[PARTS] = {};
            along<1>(d, [&](int64_t j, int64_t n, int p) { whole[p] += get<1>(x + j, n).parts[0]; });
            out.mean[r] = total(whole) / d;
        }
        along<1>(d, [&](int64_t j, int64_t n, int p) {
            const Floats v = get<1>(x + j, n).parts[0] - out.mean[r];
            const Floats g = get<1>(dz + j, n).parts[0] * read<Floats>(c.gamma + j);
            dots[p] = fused<N>(g, v, dots[p]);
            if (SUM) sums[p] += v, others[p] += g;
        });
        const float scale = scales[r];
        out.scale[r] = scale;
        // in this order nothing of a row of 1e15 underflows
        out.along[r] = scale * (scale * (scale * total(dots) / (d + (c.kind == CRMS))));
        if (SUM) out.shift[r] = c.kind == LAYER ? -scale * total(others) / d : -out.along[r] * total(sums);
    }
    return out;
}

// Gradients of R rows; what they add to those of gamma and beta is added to sums over rows.
template <class T, int R, bool WEIGHT, bool BIAS>
void some_rows(const Gradients& c, int64_t row, float* dgamma, float* dbeta) {
    const int64_t d = c.d, at = row * d;
    const T *x = static_cast<const T*>(c.x) + at, *dz = static_cast<const T*>(c.dz) + at;
    T* dx = static_cast<T*>(c.dx) + at;
    const Rows<R> k = c.kind == RMS ? constants<T, R, false>(c, x, dz, c.scales + row)
                                    : constants<T, R, true>(c, x, dz, c.scales + row);
    for (int64_t j = 0; j < d; j += N) {
        const Floats gamma = read<Floats>(c.gamma + j);
        Floats weight = WEIGHT ? read<Floats>(dgamma + j) : Floats{}, bias = BIAS ? read<Floats>(dbeta + j) : Floats{};
        for (int r = 0; r < R; r++) {
            const Floats v = get<1>(x + r * d + j, d - j).parts[0] - k.mean[r];
            const Floats scaled = get<1>(dz + r * d + j, d - j).parts[0] * k.scale[r];
            put<1>(Pack<1>{{fused<N>(scaled, gamma, k.shift[r] - k.along[r] * v)}}, dx + r * d + j, d - j);
            if (WEIGHT) weight = fused<N>(scaled, v, weight);
            if (BIAS) bias += get<1>(dz + r * d + j, d - j).parts[0];
        }
        if (WEIGHT) std::memcpy(dgamma + j, &weight, sizeof weight);
        if (BIAS) std::memcpy(dbeta + j, &bias, sizeof bias);
    }
}

// Sums over some rows, and room for as many again.
template <class T, bool WEIGHT, bool BIAS>
void share(const Gradients& c, int64_t row, int64_t last, float* sums) {
    const int64_t kept = (WEIGHT + BIAS) * c.width;
    float* few = sums + kept;
    std::fill(sums, sums + 2 * kept, 0.0f);
    while (row < last) {
        const int64_t stop = std::min(row + FEW, last);
        float* dbeta = few + WEIGHT * c.width;
        for (; row + TOGETHER <= stop; row += TOGETHER) some_rows<T, TOGETHER, WEIGHT, BIAS>(c, row, few, dbeta);
        for (; row < stop; row++) some_rows<T, 1, WEIGHT, BIAS>(c, row, few, dbeta);
        for (int64_t j = 0; j < kept; j++) sums[j] += few[j], few[j] = 0.0f;
    }
}

// The sum of some sums over rows, each `step` after the other, in order.
template <class W>
void total_of(const float* sums, int64_t shares, int64_t step, int64_t d, void* out) {
    W* to = static_cast<W*>(out);
    for (int64_t j = 0; j < d; j += N) {
        Floats sum = {};
        for (int64_t i = 0; i < shares; i++) sum += read<Floats>(sums + i * step + j);
        put<1>(Pack<1>{{sum}}, to + j, d - j);
    }
}

template <class F>
bool typed(int64_t dtype, const F& f) {
    switch (dtype) {
        case FLOAT: f(float()); return true;
        case BFLOAT: f(Bfloat16()); return true;
        case HALF: f(Float16()); return true;
        default: return false;
    }
}

}  // namespace

// out = gamma y + beta of contiguous rows, as in `norms.cpp`, and what each row was multiplied by; dtypes are numbered as
// in `norms.h`, and parameters are of that of x or float32.
extern "C" void normgeo_norm(const void* x, int64_t dtype, int64_t rows, int64_t d, const void* weight, const void* bias,
                             int64_t parameters, double eps, double offset, int64_t kind, void* out, float* scales,
                             void* parallel) {
    const Affine affine = {weight, bias, float(offset)};
    const int type = int(dtype);
    run<false>({const_cast<void*>(x), nullptr, out, rows, d, affine, float(eps), int(kind), scales},
               {type, type, type, int(parameters)},
               [&](int64_t, int64_t n, int64_t grain, const auto& body) { spread(parallel, n, grain, body); });
}

// dx, and dweight and dbias unless null; false without the memory for it. Sums over rows are in an order that no number of
// threads changes.
extern "C" bool normgeo_norm_gradients(const void* x, int64_t dtype, int64_t rows, int64_t d, const void* weight,
                                       int64_t parameters, double offset, int64_t kind, const float* scales,
                                       const void* dz, void* dx, void* dweight, void* dbias, void* parallel) {
    const int64_t width = (d + N - 1) / N * N, shares = std::min((rows + SHARE - 1) / SHARE, SHARES);
    const int64_t kept = (dweight != nullptr) + (dbias != nullptr), step = 2 * kept * width;
    const std::unique_ptr<float[]> gamma(new (std::nothrow) float[width]), sums(new (std::nothrow) float[shares * step + 1]);
    if (!gamma || !sums) return false;
    std::fill(gamma.get(), gamma.get() + d, 1.0f);
    std::fill(gamma.get() + d, gamma.get() + width, 0.0f);
    if (weight) typed(parameters, [&](auto of) {
        const auto* from = static_cast<const decltype(of)*>(weight);
        for (int64_t j = 0; j < d; j += N)
            put<1>(Pack<1>{{get<1>(from + j, d - j).parts[0] + float(offset)}}, gamma.get() + j, d - j);
    });
    const Gradients c = {x, dz, scales, gamma.get(), dx, d, width, int(kind)};
    typed(dtype, [&](auto of) {
        typedef decltype(of) T;
        auto go = [&](auto each) {
            spread(parallel, shares, 1 + 16384 / (rows / (shares + !shares) * d + 1), [&](int64_t a, int64_t b) {
                for (int64_t i = a; i < b; i++) each(c, rows * i / shares, rows * (i + 1) / shares, sums.get() + i * step);
            });
        };
        if (dweight) dbias ? go(share<T, true, true>) : go(share<T, true, false>);
        else dbias ? go(share<T, false, true>) : go(share<T, false, false>);
    });
    typed(parameters, [&](auto of) {
        if (dweight) total_of<decltype(of)>(sums.get(), shares, step, d, dweight);
        if (dbias) total_of<decltype(of)>(sums.get() + (kept - 1) * width, shares, step, d, dbias);
    });
    return true;
}
