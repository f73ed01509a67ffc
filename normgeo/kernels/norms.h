// LayerNorm, RMSNorm and CRMSNorm of rows, alone or of a residual stream that is added to in place. Each row is read once
// from memory; sums are accumulated in float32 in 4 x 16 parts. A norm may be written over what was added to the stream:
// that is in the caches already, and nothing else then has to be fetched or evicted.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "lanes.h"

namespace normgeo {

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

}  // namespace normgeo
