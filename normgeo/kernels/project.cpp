// One pass over hidden states: norms and projections accumulated in float64; rows gathered for the null ensemble, and
// the moments of its angles; and what is added up of the named directions' angles. A plain C interface, called through
// ctypes; threads are torch's own (`torch_parallel_for`).
//
// Vectors are the compilers' own (GCC, Clang), so that sums are vectorized without -ffast-math: not a number stays not
// a number, and every row is summed in the same order wherever it lies.

#include <type_traits>

#include "arcsine.h"
#include "lanes.h"
#include "spread.h"

using namespace normgeo;

namespace {

#ifdef __AVX512F__
constexpr int LANES = 8, TILE = 4;  // TILE: rows that share a load of the directions
#else
constexpr int LANES = 4, TILE = 2;
#endif

typedef double Wide __attribute__((vector_size(8 * LANES)));
typedef Of<LANES>::Floats Lanes;

constexpr int AHEAD = 4;  // rows; short rows give the processor's own prefetcher too little to go by

inline Wide doubled(Lanes v) {
#if defined(__AVX512F__)  // GCC 12 converts halves and puts them together
    return reinterpret_cast<Wide>(_mm512_cvtps_pd(reinterpret_cast<__m256>(v)));
#elif defined(__AVX2__)
    return reinterpret_cast<Wide>(_mm256_cvtps_pd(reinterpret_cast<__m128>(v)));
#else
    return __builtin_convertvector(v, Wide);
#endif
}

inline Lanes halved(Wide v) {
#if defined(__AVX512F__)
    return reinterpret_cast<Lanes>(_mm512_cvtpd_ps(reinterpret_cast<__m512d>(v)));
#elif defined(__AVX2__)
    return reinterpret_cast<Lanes>(_mm256_cvtpd_ps(reinterpret_cast<__m256d>(v)));
#else
    return __builtin_convertvector(v, Lanes);
#endif
}

template <class T>
inline Wide load(const T* x) { return doubled(widen<LANES>(x)); }
inline Wide load(const double* x) { return read<Wide>(x); }

template <class T>
inline Wide load_some(const T* x, int64_t n) {  // n < LANES of them, then zeros
    T some[LANES] = {};
    std::memcpy(some, x, n * sizeof(T));
    return load(some);
}

inline double total(Wide v) {
    double sums[LANES];
    std::memcpy(sums, &v, sizeof v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

template <class T>
double centered_norm(const T* x, int64_t d, double mean) {
    Wide sum = {};
    int64_t j = 0;
    for (; j + LANES <= d; j += LANES) {
        const Wide v = load(x + j) - mean;
        sum += v * v;
    }
    double square = total(sum);
    if (j < d) {
        const Wide v = load_some(x + j, d - j) - mean;
        for (int64_t i = 0; i < d - j; i++) square += v[i] * v[i];
    }
    return std::sqrt(square);
}

// |x|, the projections onto three unit vectors and, if wanted, |x - mean|, for rows that lie `stride` apart.
template <class T, int ROWS>
void project_tile(const T* x, int64_t stride, int64_t d, const double* units, double* out, int64_t plane,
                  bool centered) {
    Wide square[ROWS] = {}, dots[ROWS][3] = {};
    auto add = [&](auto get, int64_t j, int64_t n) {
        Wide u[3];
        for (int k = 0; k < 3; k++) u[k] = n < LANES ? load_some(units + k * d + j, n) : load(units + k * d + j);
        for (int r = 0; r < ROWS; r++) {
            const T* at = x + r * stride + j;
            if (j % int64_t(64 / sizeof(T)) == 0) __builtin_prefetch(at + AHEAD * stride);
            const Wide v = get(at, n);
            square[r] += v * v;
            for (int k = 0; k < 3; k++) dots[r][k] += v * u[k];
        }
    };
    int64_t j = 0;
    for (; j + LANES <= d; j += LANES) add([](const T* p, int64_t) { return load(p); }, j, LANES);
    if (j < d) add([](const T* p, int64_t n) { return load_some(p, n); }, j, d - j);
    for (int r = 0; r < ROWS; r++) {
        const double squares = total(square[r]), along = total(dots[r][0]);
        out[r] = std::sqrt(squares);
        for (int k = 0; k < 3; k++) out[(k + 1) * plane + r] = total(dots[r][k]);
        if (!centered) continue;
        const double left = squares - along * along;
        const bool exact = left > 1e-4 * squares;  // where little is left the difference is rounding: sum it itself
        out[4 * plane + r] = exact ? std::sqrt(left) : centered_norm(x + r * stride, d, along / std::sqrt(d));
    }
}

template <class T>
void project_rows(const T* x, int64_t begin, int64_t end, int64_t stride, int64_t d, const double* units, double* out,
                  int64_t plane, bool centered) {
    int64_t i = begin;
    for (; i + TILE <= end; i += TILE)
        project_tile<T, TILE>(x + i * stride, stride, d, units, out + i, plane, centered);
    for (; i < end; i++) project_tile<T, 1>(x + i * stride, stride, d, units, out + i, plane, centered);
}

// Rows as float32, less their mean if `lengths` is of x - mean, over their length; zeros where there is no length.
template <class T>
void gather_row(const T* x, int64_t d, double length, double mean, float* out) {
    if (!(float(length) > 0 && std::isfinite(float(length)))) {
        std::memset(out, 0, d * sizeof(float));
        return;
    }
    const double scale = 1 / length;
    int64_t j = 0;
    for (; j + LANES <= d; j += LANES) {
        const Lanes v = halved((load(x + j) - mean) * scale);
        std::memcpy(out + j, &v, sizeof v);
    }
    if (j < d) {
        const Lanes v = halved((load_some(x + j, d - j) - mean) * scale);
        std::memcpy(out + j, &v, (d - j) * sizeof(float));
    }
}

constexpr int64_t COLUMNS = 64;

// Sums over rows of arcsin(c), its square and c^2, for up to 64 columns of `cosines`. In float64: a spread is what little
// the mean of squares and the square of the mean differ by.
void moments_block(const float* cosines, int64_t rows, int64_t k, int64_t n, double* out, int64_t plane) {
    double sums[3][COLUMNS] = {};
    for (int64_t i = 0; i < rows; i++) {
        const float* row = cosines + i * k;
#pragma omp simd
        for (int64_t j = 0; j < n; j++) {
            const double c = row[j], a = arcsine(row[j]);
            sums[0][j] += a;
            sums[1][j] += a * a;
            sums[2][j] += c * c;
        }
    }
    for (int m = 0; m < 3; m++) std::memcpy(out + m * plane, sums[m], n * sizeof(double));
}

constexpr int64_t GROUPS = 3, BINS = 18000, SUMS = 12;
constexpr double UNIT = 0x1p20, ENERGY_UNIT = 0x1p32;

struct Tally {  // of one site; arrays as in `normgeo_tally`
    const float *norms, *degrees;
    const double* sines;
    double *sums, *least, *most;
    int64_t* histogram;
};

inline int64_t bin_of(double short_of) {
    const double place = (90.0 - short_of) * 100.0;
    return place < 0 ? 0 : place < BINS - 1 ? int64_t(place) : BINS - 1;
}

constexpr int64_t RUN = 16;

inline bool counts(const float* degrees, int64_t vectors, float norm) {
    return norm > 0 && std::isfinite(norm + (degrees[0] + degrees[vectors] + degrees[2 * vectors]));
}

// Vectors `i` to `i + n` <= i + RUN, all of group g and all with an angle; sums are of whole numbers, in any order.
void tally_run(const Tally& t, int64_t i, int64_t n, int64_t g, int64_t vectors, int64_t phases) {
    double* sums = t.sums + g * (SUMS + phases);
    sums[0] += double(n);
    for (int64_t k = 0; k < 3; k++) {
        const float* degrees = t.degrees + k * vectors + i;
        const double* sines = t.sines + k * vectors + i;
        double sum = 0, square = 0, energy = 0, aside = 0, least = t.least[g * 3 + k], most = t.most[g * 3 + k];
        int64_t bins[RUN];
#pragma omp simd reduction(+ : sum, square, energy, aside) reduction(min : least) reduction(max : most)
        for (int64_t j = 0; j < n; j++) {
            const double short_of = degrees[j], units = short_of * UNIT;
            sum += units;
            square += std::rint(units * units * (1 / UNIT));
            energy += std::rint(sines[j] * sines[j] * ENERGY_UNIT);
            aside += std::fabs(units);
            least = units < least ? units : least;
            most = units > most ? units : most;
            bins[j] = bin_of(short_of);
        }
        sums[2 + k] += sum, sums[5 + k] += square, sums[8 + k] += energy;
        if (k == 0) sums[11] += aside;
        t.least[g * 3 + k] = least, t.most[g * 3 + k] = most;
        for (int64_t p = 0; p < phases; p++)
            for (int64_t j = 0; j < n; j++) t.histogram[(p * 3 + k) * BINS + bins[j]]++;
    }
    for (int64_t p = 0; p < phases; p++) {
        const float* norms = t.norms + p * vectors + i;
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < n; j++) sum += std::rint(norms[j] * UNIT);
        sums[SUMS + p] += sum;
    }
}

void tally_site(const Tally& t, const uint8_t* group, int64_t vectors, int64_t phases) {
    for (int64_t i = 0; i < vectors; i += RUN) {
        const int64_t n = vectors - i < RUN ? vectors - i : RUN;
        bool alike = true;
        for (int64_t j = i; j < i + n; j++) alike &= group[j] == group[i] && counts(t.degrees + j, vectors, t.norms[j]);
        if (alike) {
            tally_run(t, i, n, group[i], vectors, phases);
            continue;
        }
        for (int64_t j = i; j < i + n; j++)
            if (counts(t.degrees + j, vectors, t.norms[j])) tally_run(t, j, 1, group[j], vectors, phases);
            else t.sums[group[j] * (SUMS + phases) + 1]++;
    }
}

template <class F>
bool narrow_typed(int64_t dtype, const void* x, const F& body) {
    switch (dtype) {
        case 0: body(static_cast<const float*>(x)); return true;
        case 1: body(static_cast<const Bfloat16*>(x)); return true;
        case 2: body(static_cast<const Float16*>(x)); return true;
    }
    return false;
}

template <class F>
bool typed(int64_t dtype, const void* x, const F& body) {
    if (dtype == 3) body(static_cast<const double*>(x));
    return dtype == 3 || narrow_typed(dtype, x, body);
}

int64_t grain(int64_t d) { return 1 + 16384 / (d + 1); }

}  // namespace

extern "C" {

// out[plane q][row]: |x|, x.u0, x.u1, x.u2 and, if `centered`, |x - mean(x)|, where u0 is the uniform unit vector.
bool normgeo_project(const void* x, int64_t dtype, int64_t rows, int64_t d, int64_t stride, const double* units,
                     double* out, int64_t plane, int64_t centered, void* parallel) {
    return typed(dtype, x, [&](auto* p) {
        spread(parallel, rows, grain(d), [&](int64_t a, int64_t b) {
            project_rows(p, a, b, stride, d, units, out, plane, centered != 0);
        });
    });
}

// out[i] = row `index[i]` of x over its length, or x - mean over its length, from what `normgeo_project` gave for x.
bool normgeo_gather(const void* x, int64_t dtype, int64_t n, int64_t d, int64_t stride, const int64_t* index,
                    const double* scalars, int64_t plane, int64_t centered, float* out, void* parallel) {
    return typed(dtype, x, [&](auto* p) {
        spread(parallel, n, 16 * grain(d), [&](int64_t a, int64_t b) {
            for (int64_t i = a; i < b; i++) {
                const int64_t row = index[i];
                const double length = scalars[(centered ? 4 * plane : 0) + row];
                const double mean = centered ? scalars[plane + row] / std::sqrt(d) : 0.0;
                gather_row(p + row * stride, d, length, mean, out + i * d);
            }
        });
    });
}

// out[slot][moment][column]: sums over a slot's rows of arcsin(c), arcsin(c)^2 and c^2.
bool normgeo_moments(const float* cosines, int64_t slots, int64_t rows, int64_t k, double* out, void* parallel) {
    const int64_t blocks = (k + COLUMNS - 1) / COLUMNS;
    spread(parallel, slots * blocks, 1, [&](int64_t a, int64_t b) {
        for (int64_t t = a; t < b; t++) {
            const int64_t slot = t / blocks, j = t % blocks * COLUMNS, n = k - j < COLUMNS ? k - j : COLUMNS;
            moments_block(cosines + slot * rows * k + j, rows, k, n, out + slot * 3 * k + j, k);
        }
    });
    return true;
}

// For each site and group of vectors: how many count and how many do not; sums of their three angles in degrees short
// of a right angle, the squares, sines squared, the first's absolute values, and the norms in every phase, all in whole
// units; the angles' extremes; and one more in the histogram's bin of every angle, in the `phases` phases from `phase`
// on, of the 3 of site `where`.
bool normgeo_tally(const float* norms, const float* degrees, const double* sines, const uint8_t* group, int64_t sites,
                   int64_t vectors, int64_t phases, const int64_t* where, int64_t phase, double* sums, double* least,
                   double* most, int64_t* histogram, void* parallel) {
    spread(parallel, sites, 1, [&](int64_t a, int64_t b) {
        for (int64_t s = a; s < b; s++) {
            const Tally one = {norms + s * phases * vectors, degrees + s * 3 * vectors, sines + s * 3 * vectors,
                               sums + s * GROUPS * (SUMS + phases), least + s * GROUPS * 3, most + s * GROUPS * 3,
                               histogram + (where[s] * 3 + phase) * 3 * BINS};
            tally_site(one, group, vectors, phases);
        }
    });
    return true;
}
}
