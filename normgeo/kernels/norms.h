// LayerNorm, RMSNorm and CRMSNorm of rows, alone or of a residual stream that is added to in place. Each row is read once
// from memory; sums are accumulated in float32, in 4 vectors. A norm may be written over what was added to the stream:
// that is in the caches already, and nothing else then has to be fetched or evicted.
#pragma once

#include <type_traits>

#include "lanes.h"

namespace normgeo {

constexpr int N = NATIVE, PARTS = 4;
typedef Of<N>::Floats Floats;

#ifdef __AVX512BF16__
constexpr bool WORDS = false;  // an instruction rounds a vector
#else
constexpr bool WORDS = true;
#endif

enum Kind { LAYER = 0, RMS = 1, CRMS = 2, CRMS_PADDED = 3 };

// K vectors: one of numbers as they lie, or two of bfloat16, the even ones and the odd ones. Two of those are a word, which
// a shift and a mask take apart without moving anything. What they are made of must be bfloat16 too: then what is not a
// number has bits of one, and stays so when it is rounded.
template <int K>
struct Pack {
    Floats parts[K];
};

template <int K, class F>
inline Pack<K> each(const F& f) {
    Pack<K> out;
    for (int k = 0; k < K; k++) out.parts[k] = f(k);
    return out;
}

template <int K, class T>
inline Pack<K> get_whole(const T* x) {
    if constexpr (K == 1) return {widen<N>(x)};
    else {
        const auto words = read<typename Of<N>::Words>(x);
        return {cast<Floats>(words << 16), cast<Floats>(words & 0xffff0000u)};
    }
}

template <int K, class T>
inline void put_whole(const Pack<K>& v, T* out) {
    if constexpr (K == 1) narrow<N>(v.parts[0], out);
    else {
        auto up = [](Floats part) {  // to nearest, ties to even, in the upper half
            const auto bits = cast<typename Of<N>::Words>(part);
            return bits + (((bits >> 16) & 1u) + 0x7fffu);
        };
        const auto words = (up(v.parts[0]) >> 16) | (up(v.parts[1]) & 0xffff0000u);
        std::memcpy(out, &words, sizeof words);
    }
}

template <int K, class T>
inline Pack<K> get(const T* x, int64_t n) {
    if (n >= K * N) return get_whole<K>(x);
    T some[K * N];
    fetch<K * N>(x, n, some);
    return get_whole<K>(some);
}

template <int K, class T>
inline void put(const Pack<K>& v, T* out, int64_t n) {
    if (n >= K * N) return put_whole<K>(v, out);
    T some[K * N];
    put_whole<K>(v, some);
    deliver<K * N>(some, n, out);
}

inline float total(const Floats* parts) { return summed<N>((parts[0] + parts[1]) + (parts[2] + parts[3])); }

template <int K, class F>
inline void along(int64_t d, const F& body) {  // body(place, numbers there, part of the sum)
    int64_t j = 0;
    for (; j + N * PARTS <= d; j += N * PARTS)
        for (int p = 0; p < PARTS; p += K) body(j + p * N, int64_t(K * N), p);
    for (int p = 0; j < d; j += K * N, p += K) body(j, d - j < K * N ? d - j : int64_t(K * N), p);
}

struct Affine {
    const void *weight, *bias;
    float offset;
};

// residual += x, rounded to its dtype; then sum and sum of squares of what is there.
template <int K, class T, class X, bool ADD, bool SUM>
inline void moments(T* residual, const X* x, int64_t d, float* sum, float* square) {
    Floats sums[PARTS] = {}, squares[PARTS] = {};
    along<K>(d, [&](int64_t j, int64_t n, int p) {
        Pack<K> v = get<K>(residual + j, n);
        if (ADD) {
            const Pack<K> more = get<K>(x + j, n);
            put<K>(each<K>([&](int k) { return v.parts[k] + more.parts[k]; }), residual + j, n);
            v = get<K>(residual + j, n);
        }
        for (int k = 0; k < K; k++) {
            if (SUM) sums[p + k] += v.parts[k];
            squares[p + k] = fused<N>(v.parts[k], v.parts[k], squares[p + k]);
        }
    });
    *sum = SUM ? total(sums) : 0.0f;
    *square = total(squares);
}

template <int K, class T>
inline float centered_square(const T* x, int64_t d, float mean) {
    Floats squares[PARTS] = {};
    along<K>(d, [&](int64_t j, int64_t n, int p) {
        const Pack<K> read = get<K>(x + j, n);
        Pack<K> v = each<K>([&](int k) { return read.parts[k] - mean; });
        for (int64_t i = n; i < K * N; i++) v.parts[i % K][i / K] = 0;
        for (int k = 0; k < K; k++) squares[p + k] = fused<N>(v.parts[k], v.parts[k], squares[p + k]);
    });
    return total(squares);
}

// Gives what the row is multiplied by. x and out may be the same memory: a row is written when all of it has been read.
template <class T, class X, class Z, class W, bool ADD>
float norm_row(T* residual, const X* x, Z* out, int64_t d, const Affine& affine, float eps, int kind) {
    constexpr int K = WORDS && std::is_same_v<T, Bfloat16> && std::is_same_v<W, Bfloat16> ? 2 : 1;
    float sum, square, mean = 0;
    if (kind == RMS) moments<K, T, X, ADD, false>(residual, x, d, &sum, &square);
    else moments<K, T, X, ADD, true>(residual, x, d, &sum, &square);
    if (kind == LAYER) {
        mean = sum / d;
        square = centered_square<K>(residual, d, mean);
    } else if (kind != RMS) {
        square += sum * sum;
    }
    const float scale = 1 / std::sqrt(square / (d + (kind == CRMS)) + eps), offset = affine.offset;
    const W *weight = static_cast<const W*>(affine.weight), *bias = static_cast<const W*>(affine.bias);
    const bool ahead = d * sizeof(T) <= 4096;  // with a longer row the next one would push gamma and beta out of the cache
    auto write = [&](auto at) {  // at(v, place, numbers there)
        along<K>(d, [&](int64_t j, int64_t n, int p) {
            if (ahead && p * N * sizeof(T) % 64 == 0) {  // the next row comes while this one is written
                __builtin_prefetch(residual + d + j);
                if (ADD) __builtin_prefetch(x + d + j);
            }
            put<K>(at(get<K>(residual + j, n), j, n), out + j, n);
        });
    };
    auto gain = [&](const Pack<K>& v, int64_t j, int64_t n) {
        const Pack<K> w = get<K>(weight + j, n);
        return each<K>([&](int k) { return v.parts[k] * scale * w.parts[k]; });
    };
    auto plus = [&](const Pack<K>& v, int64_t j, int64_t n) {
        const Pack<K> b = get<K>(bias + j, n);
        return each<K>([&](int k) { return v.parts[k] + b.parts[k]; });
    };
    if (kind != LAYER && weight && offset == 0) {
        if (bias) write([&](const Pack<K>& v, int64_t j, int64_t n) { return plus(gain(v, j, n), j, n); });
        else write(gain);
    } else write([&](Pack<K> v, int64_t j, int64_t n) {  // what is rare
        v = each<K>([&](int k) { return (v.parts[k] - mean) * scale; });
        if (weight) {
            const Pack<K> w = get<K>(weight + j, n);
            v = each<K>([&](int k) { return v.parts[k] * (w.parts[k] + offset); });
        }
        return bias ? plus(v, j, n) : v;
    });
    return scale;
}

struct Call {
    void* residual;
    const void* x;  // what is added to it, if anything
    void* out;
    int64_t rows, d;
    Affine affine;
    float eps;
    int kind;
    float* scales = nullptr;  // where to keep what each row was multiplied by
};

template <class T, class X, class Z, class W, bool ADD, class Loop>
void norm_rows(const Call& c, const Loop& loop) {
    T* r = static_cast<T*>(c.residual);
    Z* z = static_cast<Z*>(c.out);
    const X* more = static_cast<const X*>(c.x);
    const int64_t d = c.d;
    loop(0, c.rows, 1 + 16384 / (d + 1), [&](int64_t a, int64_t b) {
        for (int64_t i = a; i < b; i++) {
            const float scale = norm_row<T, X, Z, W, ADD>(r + i * d, ADD ? more + i * d : nullptr, z + i * d, d,
                                                          c.affine, c.eps, c.kind);
            if (c.scales) c.scales[i] = scale;
        }
    });
}

enum Type { FLOAT = 0, BFLOAT = 1, HALF = 2 };
struct Types { int stream, added, made, parameters; };

// loop(first, last, the least that is worth a thread, body(begin, end)) may be parallel.
template <bool ADD, class Loop>
void run(const Call& c, const Types& types, const Loop& loop) {
    auto go = [&](auto stream, auto more, auto result, auto parameter) {
        norm_rows<decltype(stream), decltype(more), decltype(result), decltype(parameter), ADD>(c, loop);
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
