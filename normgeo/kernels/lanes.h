// Vectors of N numbers as the compilers have them (GCC, Clang), and half precision read into them and rounded back.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace normgeo {

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

#ifdef __AVX512F__  // GCC 12 takes the general forms to pieces

template <>
inline Of<16>::Floats widen<16>(const Bfloat16* x) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    return reinterpret_cast<Of<16>::Floats>(_mm512_slli_epi32(wide, 16));
}

template <>
inline Of<8>::Floats widen<8>(const Bfloat16* x) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    return reinterpret_cast<Of<8>::Floats>(_mm256_slli_epi32(wide, 16));
}

template <>
inline Of<8>::Floats widen<8>(const Float16* x) {
    return reinterpret_cast<Of<8>::Floats>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
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
