// RMSNorm to the last bit as torch gives it in steps, called through ctypes: the mean of squares is summed in torch's own
// order, and every other step is rounded for itself. Built without contraction into fused multiplications and additions.

#define KEEP_SUBNORMALS

#include <atomic>

#include "lanes.h"
#include "spread.h"

using namespace normgeo;

namespace {

// Sums of `size` vectors as torch's `cascade_sum` has them: 4 at a time, in 4 levels of 16 each.
template <int L, class F>
typename Of<L>::Floats cascade_sum(int64_t size, const F& get) {
    constexpr int AT_ONCE = 4, LEVELS = 4, POWER = 4;
    constexpr int64_t STEP = 1 << POWER;
    typename Of<L>::Floats sums[LEVELS][AT_ONCE] = {};
    const int64_t groups = size / AT_ONCE;
    int64_t i = 0;
    auto add = [&] {
        for (int k = 0; k < AT_ONCE; k++) sums[0][k] += get(i * AT_ONCE + k);
    };
    while (i + STEP <= groups) {
        for (const int64_t stop = i + STEP; i < stop; i++) add();
        for (int level = 1; level < LEVELS; level++) {
            for (int k = 0; k < AT_ONCE; k++) {
                sums[level][k] += sums[level - 1][k];
                sums[level - 1][k] = typename Of<L>::Floats{};
            }
            if (i & ((STEP - 1) << (level * POWER))) break;
        }
    }
    for (; i < groups; i++) add();
    for (int level = 1; level < LEVELS; level++)
        for (int k = 0; k < AT_ONCE; k++) sums[0][k] += sums[level][k];
    for (i = groups * AT_ONCE; i < size; i++) sums[0][0] += get(i);
    for (int k = 1; k < AT_ONCE; k++) sums[0][0] += sums[0][k];
    return sums[0][0];
}

// Of float32 squares, with torch's vectors of L numbers: first what is left of the row, then the parts of the vectors' sum.
template <int L, class T>
float sum_of_squares(const T* x, int64_t d) {
    const int64_t whole = d / L;
    const auto sums = cascade_sum<L>(whole, [&](int64_t i) {
        const auto v = widen<L>(x + i * L);
        return v * v;
    });
    T some[L] = {};
    std::memcpy(some, x + whole * L, (d - whole * L) * sizeof(T));
    const auto left = widen<L>(some);
    float sum = 0;
    for (int64_t i = 0; i < d - whole * L; i++) sum += left[i] * left[i];
    for (int i = 0; i < L; i++) sum += sums[i];
    return sum;
}

// out = x * scale, rounded to x's dtype first if `halfway`, and times gamma.
template <class T, class W>
void scale_row(const T* x, int64_t d, float scale, const W* gamma, bool halfway, T* out) {
    typedef Of<16>::Floats Floats;
    auto some = [&](const T* from, const W* weight, T* to) {
        Floats v = widen<16>(from) * scale;
        if (halfway) {
            narrow<16>(v, to);
            v = widen<16>(to);
        }
        narrow<16>(weight ? v * widen<16>(weight) : v, to);
    };
    int64_t j = 0;
    for (; j + 16 <= d; j += 16) some(x + j, gamma ? gamma + j : nullptr, out + j);
    if (j == d) return;
    T from[16] = {}, to[16];
    W weight[16] = {};
    std::memcpy(from, x + j, (d - j) * sizeof(T));
    if (gamma) std::memcpy(weight, gamma + j, (d - j) * sizeof(W));
    some(from, gamma ? weight : nullptr, to);
    std::memcpy(out + j, to, (d - j) * sizeof(T));
}

template <int L, class T, class W>
bool rows_of(const T* x, int64_t rows, int64_t d, int64_t stride, const W* gamma, float eps, bool halfway, T* out,
             void* parallel) {
    std::atomic<bool> good{true};
    spread(parallel, rows, 1 + 16384 / (d + 1), [&](int64_t a, int64_t b) {
        for (int64_t i = a; i < b; i++) {
            const float scale = 1 / std::sqrt(sum_of_squares<L>(x + i * stride, d) / float(d) + eps);
            if (!(scale > 0 && scale <= 0x1.fffffep127f)) good = false;
            scale_row(x + i * stride, d, scale, gamma, halfway, out + i * d);
        }
    });
    return good;
}

template <class T>
bool typed(const void* x, int64_t rows, int64_t d, int64_t stride, const void* gamma, bool wide, float eps,
           bool halfway, int64_t lanes, void* out, void* parallel) {
    auto all = [&](auto* weight) {
        auto* from = static_cast<const T*>(x);
        auto* to = static_cast<T*>(out);
        switch (lanes) {
            case 4: return rows_of<4>(from, rows, d, stride, weight, eps, halfway, to, parallel);
            case 8: return rows_of<8>(from, rows, d, stride, weight, eps, halfway, to, parallel);
            case 16: return rows_of<16>(from, rows, d, stride, weight, eps, halfway, to, parallel);
            default: return false;
        }
    };
    return wide ? all(static_cast<const float*>(gamma)) : all(static_cast<const T*>(gamma));
}

}  // namespace

// out[row] = x[row] * rsqrt(mean(x[row]^2) + eps) * gamma, which is of x's dtype, or float32 if `wide`, or null. False where
// a row has no finite rms, for there is more than one NaN; `out` is of no use then.
extern "C" bool normgeo_rms(const void* x, int64_t dtype, int64_t rows, int64_t d, int64_t stride, const void* gamma,
                            int64_t wide, double eps, int64_t halfway, int64_t lanes, void* out, void* parallel) {
    switch (dtype) {
        case 0: return typed<float>(x, rows, d, stride, gamma, wide, float(eps), halfway, lanes, out, parallel);
        case 1: return typed<Bfloat16>(x, rows, d, stride, gamma, wide, float(eps), halfway, lanes, out, parallel);
        case 2: return typed<Float16>(x, rows, d, stride, gamma, wide, float(eps), halfway, lanes, out, parallel);
    }
    return false;
}
