// CRC-32C of bytes while they are copied, called through ctypes. Blocks are shared out among threads, and each is read as
// three streams at once, for the processor's instruction answers after three cycles and takes another every cycle; the
// streams' checksums, and the blocks', are then put together as polynomials. Copies go past the caches: what is written
// to a disk is not read again here.

#if !defined(__SSE4_2__) && !defined(__ARM_FEATURE_CRC32)
#error "this processor has no instruction for CRC-32C"
#endif

#include <cstdint>
#include <cstring>
#include <vector>

#include "spread.h"

#ifdef __SSE4_2__
#include <immintrin.h>
#else
#include <arm_acle.h>
#endif

namespace {

inline uint32_t extend(uint32_t crc, uint64_t word) {
#ifdef __SSE4_2__
    return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
#else
    return __crc32cd(crc, word);
#endif
}

inline uint32_t extend(uint32_t crc, uint8_t byte) {
#ifdef __SSE4_2__
    return _mm_crc32_u8(crc, byte);
#else
    return __crc32cb(crc, byte);
#endif
}

constexpr uint32_t POLYNOMIAL = 0x82F63B78u, ONE = 1u << 31;  // bit 31 is the coefficient of 1

uint32_t times(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = ONE; bit; bit >>= 1) {
        if (a & bit) product ^= b;
        b = b & 1 ? (b >> 1) ^ POLYNOMIAL : b >> 1;
    }
    return product;
}

uint32_t shift(int64_t bytes) {  // x^(8 bytes)
    uint32_t found = ONE, power = ONE >> 8;
    for (; bytes; bytes >>= 1, power = times(power, power))
        if (bytes & 1) found = times(found, power);
    return found;
}

constexpr int64_t LINE = 64, STREAM = 256 * LINE, BLOCK = 3 * STREAM;

inline void copy_line(const char* from, char* to, bool whole_lines) {
#ifdef __AVX512F__
    const __m512i line = _mm512_loadu_si512(from);
    if (whole_lines) _mm512_stream_si512(reinterpret_cast<__m512i*>(to), line);
    else _mm512_storeu_si512(to, line);
#elif defined(__AVX__)
    for (int64_t i = 0; i < LINE; i += 32) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
        if (whole_lines) _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), half);
        else _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), half);
    }
#else
    (void)whole_lines;
    std::memcpy(to, from, LINE);
#endif
}

// The remainder of a block's polynomial, begun with zero.
template <bool COPIES>
uint32_t block(const char* x, char* out, uint32_t one, uint32_t two) {
    uint32_t crc[3] = {};
    const bool whole_lines = reinterpret_cast<uintptr_t>(out) % LINE == 0;
    for (int64_t i = 0; i < STREAM; i += LINE) {
        for (int64_t j = i; j < i + LINE; j += 8)
            for (int s = 0; s < 3; s++) {
                uint64_t word;
                std::memcpy(&word, x + s * STREAM + j, 8);
                crc[s] = extend(crc[s], word);
            }
        if (COPIES)
            for (int s = 0; s < 3; s++) copy_line(x + s * STREAM + i, out + s * STREAM + i, whole_lines);
    }
    return times(two, crc[0]) ^ times(one, crc[1]) ^ crc[2];
}

}  // namespace

extern "C" uint32_t normgeo_crc32c(const char* x, int64_t n, char* out, void* parallel) {
    static const uint32_t one = shift(STREAM), two = shift(2 * STREAM), three = shift(BLOCK);
    const int64_t blocks = n / BLOCK;
    std::vector<uint32_t> found(blocks);
    auto some = [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++)
            found[i] = out ? block<true>(x + i * BLOCK, out + i * BLOCK, one, two)
                           : block<false>(x + i * BLOCK, nullptr, one, two);
#ifdef __AVX__
        _mm_sfence();  // others may read what went past the caches
#endif
    };
    normgeo::spread(parallel, blocks, 2, some);
    uint32_t crc = ~0u;
    for (const uint32_t next : found) crc = times(three, crc) ^ next;
    int64_t i = blocks * BLOCK;
    for (; i + 8 <= n; i += 8) {
        uint64_t word;
        std::memcpy(&word, x + i, 8);
        crc = extend(crc, word);
    }
    for (; i < n; i++) crc = extend(crc, static_cast<uint8_t>(x[i]));
    if (out) std::memcpy(out + blocks * BLOCK, x + blocks * BLOCK, n - blocks * BLOCK);
    return ~crc;
}
