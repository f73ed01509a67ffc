// Vectors of N numbers as the compilers have them (GCC, Clang), and half precision read into them and rounded back.
// Vectors wider than the processor's are correct, and slow: GCC takes them to pieces in memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace normgeo {

#if defined(__AVX512F__)
constexpr int NATIVE = 16;  // float32 numbers in a vector of this processor's
#elif defined(__AVX2__)
constexpr int NATIVE = 8;
#else
constexpr int NATIVE = 4;
#endif

template <int N>
struct Of {
    typedef float Floats __attribute__((vector_size(4 * N)));
    typedef int32_t Ints __attribute__((vector_size(4 * N)));
    typedef uint32_t Words __attribute__((vector_size(4 * N)));
    typedef uint16_t Shorts __attribute__((vector_size(2 * N)));
};

struct Bfloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

template <class To, class From>
inline To cast(From from) {
    To to;
    static_assert(sizeof(To) == sizeof(From), "sizes differ");
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class V>
inline V read(const void* from) {
    V to;
    std::memcpy(&to, from, sizeof to);
    return to;
}

template <int N>
inline typename Of<N>::Floats widen(const float* x) { return read<typename Of<N>::Floats>(x); }

template <int N>
inline typename Of<N>::Floats widen(const Bfloat16* x) {
    typedef typename Of<N>::Ints Ints;
    return cast<typename Of<N>::Floats>(__builtin_convertvector(read<typename Of<N>::Shorts>(x), Ints) << 16);
}

template <int N>
inline typename Of<N>::Floats widen(const Float16* x) {
    typedef typename Of<N>::Ints Ints;
    typedef typename Of<N>::Floats Floats;
    const Ints half = __builtin_convertvector(read<typename Of<N>::Shorts>(x), Ints);
    const Ints sign = (half & 0x8000) << 16, rest = half & 0x7fff;
    const Ints finite = cast<Ints>(cast<Floats>(rest << 13) * 0x1p112f);  // moves the exponent, subnormals included
    const Ints beyond = (rest >= 0x7c00) & 0x7f800000;                    // infinite or not a number
    return cast<Floats>(finite | beyond | sign);
}

// Rounding to nearest, ties to even; not a number stays that.
template <int N>
inline void narrow(typename Of<N>::Floats v, float* out) { std::memcpy(out, &v, sizeof v); }

template <int N>
inline void narrow(typename Of<N>::Floats v, Bfloat16* out) {
    typedef typename Of<N>::Words Words;
    typedef typename Of<N>::Shorts Shorts;
    const Words bits = cast<Words>(v), nan = cast<Words>(v != v);
    const Words rounded = (bits + (0x7fff + ((bits >> 16) & 1))) >> 16;
    const Shorts shorts = __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), Shorts);
    std::memcpy(out, &shorts, sizeof shorts);
}

template <int N>
inline void narrow(typename Of<N>::Floats v, Float16* out) {
    for (int i = 0; i < N; i++) {
        const _Float16 half = static_cast<_Float16>(v[i]);
        std::memcpy(out + i, &half, sizeof half);
    }
}

#ifdef __AVX2__
inline __m256i first(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif

// The first n of COUNT numbers, and zeros behind them. Calls that copy so few bytes take as long as dozens of vectors.
template <int COUNT, class T>
inline void fetch(const T* from, int64_t n, T* to) {
    constexpr int SIZE = COUNT * sizeof(T);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const uint64_t some = (uint64_t(1) << (n * sizeof(T))) - 1;
    if constexpr (SIZE == 64) return _mm512_storeu_si512(to, _mm512_maskz_loadu_epi8(some, from));
    if constexpr (SIZE == 32)
        return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_maskz_loadu_epi8(__mmask32(some), from));
#elif defined(__AVX2__)
    if constexpr (SIZE == 32 && sizeof(T) == 4)
        return _mm256_storeu_ps(reinterpret_cast<float*>(to), _mm256_maskload_ps(reinterpret_cast<const float*>(from), first(n)));
#endif
    std::memset(to, 0, SIZE);
    std::memcpy(to, from, n * sizeof(T));
}

// The first n of COUNT numbers, of which nothing behind them is written over.
template <int COUNT, class T>
inline void deliver(const T* from, int64_t n, T* to) {
    constexpr int SIZE = COUNT * sizeof(T);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const uint64_t some = (uint64_t(1) << (n * sizeof(T))) - 1;
    if constexpr (SIZE == 64) return _mm512_mask_storeu_epi8(to, some, _mm512_loadu_si512(from));
    if constexpr (SIZE == 32)
        return _mm256_mask_storeu_epi8(to, __mmask32(some), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
    if constexpr (SIZE == 32 && sizeof(T) == 4)
        return _mm256_maskstore_ps(reinterpret_cast<float*>(to), first(n), _mm256_loadu_ps(reinterpret_cast<const float*>(from)));
#endif
    (void)SIZE;
    std::memcpy(to, from, n * sizeof(T));
}

// a * b + c, rounded once where the processor can: left to compilers, it is so in some loops and not in others.
template <int N>
inline typename Of<N>::Floats fused(typename Of<N>::Floats a, typename Of<N>::Floats b, typename Of<N>::Floats c) {
    return a * b + c;
}

// The sum of all numbers: the upper half is added to the lower one, again and again.
template <int N>
inline float summed(typename Of<N>::Floats v) {
    float sums[N];
    std::memcpy(sums, &v, sizeof v);
    for (int half = N / 2; half; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

// GCC 12 takes the general forms to pieces.

#ifdef __AVX2__

inline float summed(__m128 v) {
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps(v, v, 1)));
}

inline float summed(__m256 v) { return summed(_mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1))); }

template <>
inline float summed<8>(Of<8>::Floats v) { return summed(reinterpret_cast<__m256>(v)); }

#ifdef __FMA__

template <>
inline Of<8>::Floats fused<8>(Of<8>::Floats a, Of<8>::Floats b, Of<8>::Floats c) {
    return reinterpret_cast<Of<8>::Floats>(
        _mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
}

#endif

template <>
inline Of<4>::Floats widen<4>(const Bfloat16* x) {
    const __m128i wide = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
    return reinterpret_cast<Of<4>::Floats>(_mm_slli_epi32(wide, 16));
}

template <>
inline Of<8>::Floats widen<8>(const Bfloat16* x) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    return reinterpret_cast<Of<8>::Floats>(_mm256_slli_epi32(wide, 16));
}

template <>
inline void narrow<8>(Of<8>::Floats v, Bfloat16* out) {
    const __m256 floats = reinterpret_cast<__m256>(v);
    const __m256i bits = _mm256_castps_si256(floats), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(floats, floats, _CMP_UNORD_Q));
    const __m256i rounded = _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), _mm256_set1_epi32(0x7fc0), nan);
    const __m128i low = _mm256_castsi256_si128(rounded), high = _mm256_extracti128_si256(rounded, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_packus_epi32(low, high));
}

#ifdef __F16C__

template <>
inline Of<4>::Floats widen<4>(const Float16* x) {
    return reinterpret_cast<Of<4>::Floats>(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
}

template <>
inline Of<8>::Floats widen<8>(const Float16* x) {
    return reinterpret_cast<Of<8>::Floats>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}

template <>
inline void narrow<8>(Of<8>::Floats v, Float16* out) {
    const __m128i halves = _mm256_cvtps_ph(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), halves);
}

#endif
#endif
#ifdef __AVX512F__

template <>
inline float summed<16>(Of<16>::Floats v) {
    const __m512 whole = reinterpret_cast<__m512>(v);
    const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(whole), 1));
    return summed(_mm256_add_ps(_mm512_castps512_ps256(whole), upper));
}

template <>
inline Of<16>::Floats fused<16>(Of<16>::Floats a, Of<16>::Floats b, Of<16>::Floats c) {
    return reinterpret_cast<Of<16>::Floats>(
        _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
}

template <>
inline Of<16>::Floats widen<16>(const Bfloat16* x) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    return reinterpret_cast<Of<16>::Floats>(_mm512_slli_epi32(wide, 16));
}

template <>
inline Of<16>::Floats widen<16>(const Float16* x) {
    return reinterpret_cast<Of<16>::Floats>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))));
}

template <>
inline void narrow<16>(Of<16>::Floats v, Float16* out) {
    const __m256i halves = _mm512_cvtps_ph(reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), halves);
}

template <>
inline void narrow<16>(Of<16>::Floats v, Bfloat16* out) {
#ifdef __AVX512BF16__  // makes subnormal numbers zero
    const __m256bh halves = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(v));
    std::memcpy(out, &halves, sizeof halves);
#else
    const __m512i bits = reinterpret_cast<__m512i>(v), one = _mm512_set1_epi32(1);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(reinterpret_cast<__m512>(v), reinterpret_cast<__m512>(v), _CMP_UNORD_Q);
    const __m512i shifted = _mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), nan, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(shifted));
#endif
}

#endif

}  // namespace normgeo
