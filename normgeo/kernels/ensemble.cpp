// Cosines between rows of bfloat16 and unit vectors, and the moments of their angles, called through ctypes. The vectors
// are sums of two bfloat16, exact to 2^-17 of a number; products of two bfloat16 are exact in float32, and processors add
// them up several times as fast as those of float32. Rows are read where they are, a few at a time against 64 vectors;
// their cosines never leave the cache.

#include <cstring>
#include <immintrin.h>
#include <vector>

#include "arcsine.h"
#include "spread.h"

#ifndef __AVX512BF16__
#error "this processor does not multiply bfloat16"
#endif

namespace {

constexpr int64_t LANES = 16, VECTORS = 4, PANEL = LANES * VECTORS, PARTS = 2, TILE = 6, BLOCK = 16 * TILE;
constexpr int64_t PAIR = PARTS * PANEL * 2;  // numbers of a panel for two of the row

// dots[r][column] of ROWS rows and a panel [pair][part][column][2]; an odd d is followed by a zero in the panel.
template <int ROWS>
void dots_of(const uint16_t* const* rows, int64_t d, const uint16_t* panel, float (*dots)[PANEL]) {
    __m512 sums[ROWS][VECTORS];
    for (auto& row : sums)
        for (auto& sum : row) sum = _mm512_setzero_ps();
    auto add = [&](int64_t pair, auto get) {
        for (int64_t part = 0; part < PARTS; part++) {
            __m512bh units[VECTORS];
            for (int64_t v = 0; v < VECTORS; v++)
                std::memcpy(&units[v], panel + pair * PAIR + (part * PANEL + v * LANES) * 2, sizeof units[v]);
            for (int r = 0; r < ROWS; r++) {
                const __m512i both = _mm512_set1_epi32(get(rows[r] + 2 * pair));
                for (int64_t v = 0; v < VECTORS; v++)
                    sums[r][v] = _mm512_dpbf16_ps(sums[r][v], reinterpret_cast<__m512bh>(both), units[v]);
            }
        }
    };
    for (int64_t pair = 0; pair < d / 2; pair++)
        add(pair, [](const uint16_t* x) {
            int32_t both;
            std::memcpy(&both, x, sizeof both);
            return both;
        });
    if (d % 2) add(d / 2, [](const uint16_t* x) { return int32_t(*x); });
    for (int r = 0; r < ROWS; r++)
        for (int64_t v = 0; v < VECTORS; v++) _mm512_storeu_ps(dots[r] + v * LANES, sums[r][v]);
}

typedef void (*Dots)(const uint16_t* const*, int64_t, const uint16_t*, float (*)[PANEL]);
constexpr Dots DOTS[TILE] = {dots_of<1>, dots_of<2>, dots_of<3>, dots_of<4>, dots_of<5>, dots_of<6>};

inline double number(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &wide, sizeof x);
    return x;
}

// The same for one row whose numbers are so small that the instruction takes them for zero: over its length.
void cosines_of(const uint16_t* row, int64_t d, double length, const uint16_t* panel, float* cosines) {
    for (int64_t j = 0; j < PANEL; j++) {
        double sum = 0;
        for (int64_t i = 0; i < d; i++)
            for (int64_t part = 0; part < PARTS; part++)
                sum += number(row[i]) * number(panel[i / 2 * PAIR + (part * PANEL + j) * 2 + i % 2]);
        cosines[j] = float(sum / length);
    }
}

constexpr float SMALL = 0x1p-90f;

struct Rows {
    const uint16_t* x;
    int64_t stride, d;
    const int64_t* index;
    const double* lengths;
};

// Sums over a block of rows of arcsin(c), its square and c^2, for a panel of vectors.
void moments_of(const Rows& of, int64_t begin, int64_t end, const uint16_t* panel, double* out, int64_t plane) {
    double sums[3][PANEL] = {};
    for (int64_t i = begin; i < end; i += TILE) {
        const int64_t n = end - i < TILE ? end - i : TILE;
        const uint16_t* rows[TILE];
        float dots[TILE][PANEL], part[3][PANEL] = {};
        for (int64_t r = 0; r < n; r++) rows[r] = of.x + of.index[i + r] * of.stride;
        DOTS[n - 1](rows, of.d, panel, dots);
        for (int64_t r = 0; r < n; r++) {
            const float length = float(of.lengths[of.index[i + r]]);
            if (!(length > 0 && std::isfinite(length))) continue;
            const float shrink = length < SMALL ? 1.0f : 1 / length;
            if (length < SMALL) cosines_of(rows[r], of.d, of.lengths[of.index[i + r]], panel, dots[r]);
#pragma omp simd
            for (int64_t j = 0; j < PANEL; j++) {
                const float c = dots[r][j] * shrink, a = normgeo::arcsine(c);
                part[0][j] += a;
                part[1][j] += a * a;
                part[2][j] += c * c;
            }
        }
        for (int m = 0; m < 3; m++)
            for (int64_t j = 0; j < PANEL; j++) sums[m][j] += part[m][j];
    }
    for (int m = 0; m < 3; m++) std::memcpy(out + m * plane, sums[m], sizeof sums[m]);
}

}  // namespace

// out[moment][column] of the n rows `index` of x, of which `lengths` has all, and `panels` x 64 vectors, packed as
// [panel][pair][part][column][2]. A row without a length counts as zero. Blocks of rows are added up in their order,
// however many threads there are.
extern "C" bool normgeo_null_moments(const uint16_t* x, int64_t n, int64_t d, int64_t stride, const int64_t* index,
                                     const double* lengths, const uint16_t* packed, int64_t panels, double* out,
                                     void* parallel) {
    const Rows rows = {x, stride, d, index, lengths};
    const int64_t blocks = (n + BLOCK - 1) / BLOCK, columns = panels * PANEL, size = (d + 1) / 2 * PAIR;
    std::vector<double> sums(blocks * 3 * columns);
    normgeo::spread(parallel, blocks * panels, 1, [&](int64_t a, int64_t b) {
        for (int64_t task = a; task < b; task++) {
            const int64_t panel = task / blocks, block = task % blocks, begin = block * BLOCK;
            moments_of(rows, begin, begin + BLOCK < n ? begin + BLOCK : n, packed + panel * size,
                       sums.data() + block * 3 * columns + panel * PANEL, columns);
        }
    });
    for (int64_t j = 0; j < 3 * columns; j++) {
        out[j] = 0;
        for (int64_t block = 0; block < blocks; block++) out[j] += sums[block * 3 * columns + j];
    }
    return true;
}
