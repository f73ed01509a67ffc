// Cosines between rows and vectors of bfloat16, and the moments of their angles, called through ctypes. Products of two
// bfloat16 are exact in float32, and processors add them up faster than those of float32: by an instruction, or by a unit
// of its own (AMX) several times as fast. A few rows meet 64 vectors at a time; their cosines never leave the cache.

#ifndef __AVX512BF16__  // before the headers, which take seconds to read, in every process that asks
#error "this processor does not multiply bfloat16"
#endif

#include <cmath>
#include <cstring>
#include <immintrin.h>
#include <vector>

#if defined(__AMX_BF16__) && defined(__linux__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "arcsine.h"
#include "spread.h"

namespace {

constexpr int64_t LANES = 16, VECTORS = 4, PANEL = LANES * VECTORS, BLOCK = 48;
constexpr int64_t PAIR = PANEL * 2;  // numbers of a panel for two of the row
constexpr int64_t AT_ONCE = 6;             // rows, by the instruction
constexpr int64_t TILE = 16, DEPTH = 32;   // rows, and numbers of them, by the unit; panels are a multiple as deep

struct Rows {
    const uint16_t* x;
    int64_t stride, d;
    const double* lengths;

    const uint16_t* at(int64_t i) const { return x + i * stride; }
};

// dots[r][column] of ROWS rows and a panel [pair][column][2]; an odd d is followed by a zero in the panel.
template <int ROWS>
void dots_of(const uint16_t* const* rows, int64_t d, const uint16_t* panel, float (*dots)[PANEL]) {
    __m512 sums[ROWS][VECTORS];
    for (auto& row : sums)
        for (auto& sum : row) sum = _mm512_setzero_ps();
    auto add = [&](int64_t pair, auto get) {
        __m512bh vectors[VECTORS];
        for (int64_t v = 0; v < VECTORS; v++)
            std::memcpy(&vectors[v], panel + pair * PAIR + v * LANES * 2, sizeof vectors[v]);
        for (int r = 0; r < ROWS; r++) {
            const __m512i both = _mm512_set1_epi32(get(rows[r] + 2 * pair));
            for (int64_t v = 0; v < VECTORS; v++)
                sums[r][v] = _mm512_dpbf16_ps(sums[r][v], reinterpret_cast<__m512bh>(both), vectors[v]);
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
constexpr Dots DOTS[AT_ONCE] = {dots_of<1>, dots_of<2>, dots_of<3>, dots_of<4>, dots_of<5>, dots_of<6>};

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
        for (int64_t i = 0; i < d; i++) sum += number(row[i]) * number(panel[i / 2 * PAIR + j * 2 + i % 2]);
        cosines[j] = float(sum / length);
    }
}

constexpr float SMALL = 0x1p-90f;

#ifdef TILES

bool tiles_are_granted() {  // their contents are large, and the system keeps them for those who ask
    static const bool granted = !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */);
    return granted;
}

// What was written there is there: GCC does not know that tiles read it, nor how much of it.
inline void settled(const void* memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

// Tiles 0 to 3 for sums of 16 rows and 4 x 16 vectors, 4 and 5 for numbers of either; others find theirs as they were.
class Tiles {
    struct alignas(64) Shapes {
        uint8_t palette = 1, begin = 0, unused[14] = {};
        uint16_t width[16] = {64, 64, 64, 64, 64, 64};  // bytes
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16};
    } shapes, before;

public:
    Tiles() {
        settled(this);
        _tile_storeconfig(&before);
        settled(this);
        _tile_loadconfig(&shapes);
    }
    ~Tiles() {
        settled(this);
        if (before.palette) _tile_loadconfig(&before);
        else _tile_release();
    }
    Tiles(const Tiles&) = delete;
};

// dots[r][column] of 16 rows, which lie `depth` apart, and a panel as deep.
void dots_by_tiles(const uint16_t* rows, int64_t depth, const uint16_t* panel, float (*dots)[PANEL]) {
    constexpr int64_t TO_NEXT = PAIR * sizeof(uint16_t), OUT = PANEL * sizeof(float);
    settled(rows);
    settled(panel);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < depth; i += DEPTH) {
        const uint16_t* at = panel + i / 2 * PAIR;
        _tile_loadd(4, rows + i, depth * sizeof(uint16_t));
        _tile_loadd(5, at, TO_NEXT);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(5, at + 2 * LANES, TO_NEXT);
        _tile_dpbf16ps(1, 4, 5);
        _tile_loadd(5, at + 4 * LANES, TO_NEXT);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(5, at + 6 * LANES, TO_NEXT);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, dots[0], OUT);
    _tile_stored(1, dots[0] + LANES, OUT);
    _tile_stored(2, dots[0] + 2 * LANES, OUT);
    _tile_stored(3, dots[0] + 3 * LANES, OUT);
}

#endif

// Sums of arcsin(c), its square and c^2 over n rows of an index, for a panel of vectors and one over their lengths.
void moments_of(const Rows& of, const int64_t* index, int64_t n, const uint16_t* panel, const float* shrink,
                float (*dots)[PANEL], double* out, int64_t plane) {
    double sums[3][PANEL] = {};  // a spread is what little the mean of squares and the square of the mean differ by
    for (int64_t i = 0; i < n; i++) {
        const double exact = of.lengths[index[i]];
        const float length = float(exact), scale = length < SMALL ? 1.0f : 1 / length;
        if (!(length > 0 && std::isfinite(length))) continue;
        if (length < SMALL) cosines_of(of.at(index[i]), of.d, exact, panel, dots[i]);
#pragma omp simd
        for (int64_t j = 0; j < PANEL; j++) {
            const float cosine = dots[i][j] * scale * shrink[j];
            const double c = cosine, a = normgeo::arcsine(cosine);
            sums[0][j] += a;
            sums[1][j] += a * a;
            sums[2][j] += c * c;
        }
    }
    for (int m = 0; m < 3; m++) std::memcpy(out + m * plane, sums[m], sizeof sums[m]);
}

// The same for all panels, by tiles or without.
void block_of(const Rows& of, const int64_t* index, int64_t n, bool tiles, const uint16_t* packed, const float* shrink,
              int64_t panels, double* out) {
    const int64_t depth = (of.d + DEPTH - 1) / DEPTH * DEPTH;
    const uint16_t* rows[BLOCK];
    for (int64_t i = 0; i < n; i++) rows[i] = of.at(index[i]);
    auto each_panel = [&](auto find) {
        for (int64_t p = 0; p < panels; p++) {
            alignas(64) float dots[BLOCK][PANEL];
            const uint16_t* panel = packed + p * (depth / 2) * PAIR;
            find(panel, dots);
            moments_of(of, index, n, panel, shrink + p * PANEL, dots, out + p * PANEL, panels * PANEL);
        }
    };
#ifdef TILES
    if (tiles) {
        std::vector<uint16_t> side_by_side(BLOCK * depth);
        for (int64_t i = 0; i < n; i++) std::memcpy(&side_by_side[i * depth], rows[i], of.d * sizeof(uint16_t));
        const Tiles shaped;
        each_panel([&](const uint16_t* panel, float (*dots)[PANEL]) {
            for (int64_t i = 0; i < n; i += TILE) dots_by_tiles(&side_by_side[i * depth], depth, panel, dots + i);
        });
        return;
    }
#endif
    each_panel([&](const uint16_t* panel, float (*dots)[PANEL]) {
        for (int64_t i = 0; i < n; i += AT_ONCE)
            DOTS[(n - i < AT_ONCE ? n - i : AT_ONCE) - 1](rows + i, of.d, panel, dots + i);
    });
}

}  // namespace

// out[moment][column] of the n rows `index` of x, of which `lengths` has all, and `panels` x 64 vectors, packed as
// [panel][pair][column][2] with zeros up to a multiple of 32 numbers, of which `shrink` has one over the lengths. A row
// without a length counts as zero. Blocks of rows are added up in their order, however many threads there are. By tiles
// where they are wanted and there are some.
extern "C" bool normgeo_null_moments(const uint16_t* x, int64_t n, int64_t d, int64_t stride, const int64_t* index,
                                     const double* lengths, const uint16_t* packed, const float* shrink,
                                     int64_t panels, bool tiles, double* out, void* parallel) {
    const Rows rows = {x, stride, d, lengths};
    const int64_t blocks = (n + BLOCK - 1) / BLOCK, size = 3 * panels * PANEL;
    std::vector<double> sums(blocks * size);
#ifdef TILES
    tiles = tiles && tiles_are_granted();
#endif
    normgeo::spread(parallel, blocks, 1, [&](int64_t a, int64_t b) {
        for (int64_t i = a; i < b; i++)
            block_of(rows, index + i * BLOCK, n - i * BLOCK < BLOCK ? n - i * BLOCK : BLOCK, tiles, packed, shrink, panels,
                     &sums[i * size]);
    });
    for (int64_t j = 0; j < size; j++) {
        out[j] = 0;
        for (int64_t block = 0; block < blocks; block++) out[j] += sums[block * size + j];
    }
    return true;
}
