// RMSNorm to the last bit as torch gives it in steps, called through ctypes: the mean of squares is summed in torch's own
// order, and every other step is rounded for itself. Built without contraction into fused multiplications and additions.

#include <atomic>
#include <type_traits>
#include <vector>

#include "lanes.h"
#include "spread.h"

using namespace normgeo;

namespace {

inline float number(float x) { return x; }
inline float number(Bfloat16 x) { return cast<float>(uint32_t(x.bits) << 16); }
inline float number(Float16 x) { return static_cast<float>(cast<_Float16>(x)); }

constexpr int at_most_native(int n) { return n < NATIVE ? n : NATIVE; }

// Numbers that torch sums at once, 4 vectors of L: `parts`, in which number i is at `place(i)`.
template <class T, int L>
struct Block {
    static constexpr int SIZE = 4 * L, WIDTH = at_most_native(L), PARTS = SIZE / WIDTH;
    typedef typename Of<WIDTH>::Floats Floats;
    Floats parts[PARTS];

    static constexpr int64_t place(int64_t i) { return i; }

    static Block read(const T* x) {
        Block out;
        for (int k = 0; k < PARTS; k++) out.parts[k] = widen<WIDTH>(x + k * WIDTH);
        return out;
    }

    void write(T* out) const {
        for (int k = 0; k < PARTS; k++) narrow<WIDTH>(parts[k], out + k * WIDTH);
    }

    Block rounded() const {
        T to[SIZE];
        write(to);
        return read(to);
    }
};

// Two of them are a word: taken apart by a shift and a mask, numbers are where they are needed without being moved. None
// is not a number, for a row with such a one is none of ours.
template <int L>
struct Block<Bfloat16, L> {
    static constexpr int SIZE = 4 * L, WIDTH = at_most_native(2 * L), PARTS = SIZE / WIDTH;
    typedef typename Of<WIDTH>::Floats Floats;
    typedef typename Of<WIDTH>::Words Words;
    Floats parts[PARTS];  // of every two, the first has the even numbers and the second the odd ones

    static constexpr int64_t place(int64_t i) {
        const int64_t word = i / 2;
        return (word / WIDTH * 2 + i % 2) * WIDTH + word % WIDTH;
    }

    static Block read(const Bfloat16* x) {
        Block out;
        for (int k = 0; k < PARTS; k += 2) {
            const Words words = normgeo::read<Words>(x + k * WIDTH);
            out.parts[k] = cast<Floats>(words << 16);
            out.parts[k + 1] = cast<Floats>(words & 0xffff0000u);
        }
        return out;
    }

    static Words up(Floats v) {  // to nearest, ties to even, in the upper half
        const Words bits = cast<Words>(v);
        return bits + (((bits >> 16) & 1u) + 0x7fffu);
    }

    void write(Bfloat16* out) const {
        for (int k = 0; k < PARTS; k += 2) {
            const Words words = (up(parts[k]) >> 16) | (up(parts[k + 1]) & 0xffff0000u);
            std::memcpy(out + k * WIDTH, &words, sizeof words);
        }
    }

    Block rounded() const {
        Block out;
        for (int k = 0; k < PARTS; k++) out.parts[k] = cast<Floats>(up(parts[k]) & 0xffff0000u);
        return out;
    }
};

// f of every part; a block is never copied as such, in vectors narrower than those that it is then read in.
template <class B, class F>
inline B each(const F& f) {
    B out;
    for (int k = 0; k < B::PARTS; k++) out.parts[k] = f(k);
    return out;
}

// Sums of so many blocks as torch's `cascade_sum` has them, in 4 levels of 16 each.
template <class B, class F>
B cascade_sum(int64_t blocks, const F& get) {
    constexpr int LEVELS = 4, POWER = 4;
    constexpr int64_t STEP = 1 << POWER;
    B sums[LEVELS];
    auto add = [&](int level, const B& more) {
        for (int k = 0; k < B::PARTS; k++) sums[level].parts[k] += more.parts[k];
    };
    auto clear = [&](int level) {
        for (auto& part : sums[level].parts) part = typename B::Floats{};
    };
    for (int level = 0; level < LEVELS; level++) clear(level);
    int64_t i = 0;
    while (i + STEP <= blocks) {
        for (const int64_t stop = i + STEP; i < stop; i++) add(0, get(i));
        for (int level = 1; level < LEVELS; level++) {
            add(level, sums[level - 1]);
            clear(level - 1);
            if (i & ((STEP - 1) << (level * POWER))) break;
        }
    }
    for (; i < blocks; i++) add(0, get(i));
    for (int level = 1; level < LEVELS; level++) add(0, sums[level]);
    return sums[0];
}

// Of float32 squares, with torch's vectors of L numbers: first what is left of the row, then the parts of the vectors' sum.
template <int L, class T>
float sum_of_squares(const T* x, int64_t d) {
    typedef Block<T, L> B;
    const int64_t blocks = d / B::SIZE;
    const B found = cascade_sum<B>(blocks, [&](int64_t i) {
        const B v = B::read(x + i * B::SIZE);
        return each<B>([&](int k) { return v.parts[k] * v.parts[k]; });
    });
    auto square = [&](int64_t i) { return number(x[i]) * number(x[i]); };
    float placed[B::SIZE], sums[L], sum = 0;
    std::memcpy(placed, &found, sizeof placed);
    for (int l = 0; l < L; l++) sums[l] = placed[B::place(l)];
    int64_t j = blocks * B::SIZE;
    for (; j + L <= d; j += L)
        for (int l = 0; l < L; l++) sums[l] += square(j + l);
    for (int k = 1; k < 4; k++)
        for (int l = 0; l < L; l++) sums[l] += placed[B::place(k * L + l)];
    for (; j < d; j++) sum += square(j);
    for (int l = 0; l < L; l++) sum += sums[l];
    return sum;
}

template <class T>
using Some = Block<T, std::is_same<T, Bfloat16>::value ? NATIVE / 2 : NATIVE>;

// out = x * scale, rounded to x's dtype first if `halfway`, and times gamma, whose numbers are where blocks have them.
template <class T>
void scale_row(const T* x, int64_t d, float scale, const float* gamma, bool halfway, T* out) {
    typedef Some<T> B;
    auto some = [&](const T* from, int64_t j, T* to) {
        const B read = B::read(from), scaled = each<B>([&](int k) { return read.parts[k] * scale; });
        const B v = halfway ? scaled.rounded() : scaled;
        each<B>([&](int k) {
            return v.parts[k] * normgeo::read<typename B::Floats>(gamma + j + k * (B::SIZE / B::PARTS));
        }).write(to);
    };
    int64_t j = 0;
    for (; j + B::SIZE <= d; j += B::SIZE) some(x + j, j, out + j);
    if (j == d) return;
    T from[B::SIZE] = {}, to[B::SIZE];
    std::memcpy(from, x + j, (d - j) * sizeof(T));
    some(from, j, to);
    std::memcpy(out + j, to, (d - j) * sizeof(T));
}

template <class T, class W>
std::vector<float> placed(const W* gamma, int64_t d) {
    typedef Some<T> B;
    std::vector<float> out((d + B::SIZE - 1) / B::SIZE * B::SIZE, 1.0f);  // times one changes no bit
    for (int64_t i = 0; gamma && i < d; i++)
        out[i / B::SIZE * B::SIZE + B::place(i % B::SIZE)] = number(gamma[i]);
    return out;
}

template <int L, class T>
bool rows_of(const T* x, int64_t rows, int64_t d, int64_t stride, const float* gamma, float eps, bool halfway, T* out,
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
    const auto weights = wide ? placed<T>(static_cast<const float*>(gamma), d) : placed<T>(static_cast<const T*>(gamma), d);
    auto* from = static_cast<const T*>(x);
    auto* to = static_cast<T*>(out);
    switch (lanes) {
        case 4: return rows_of<4>(from, rows, d, stride, weights.data(), eps, halfway, to, parallel);
        case 8: return rows_of<8>(from, rows, d, stride, weights.data(), eps, halfway, to, parallel);
        case 16: return rows_of<16>(from, rows, d, stride, weights.data(), eps, halfway, to, parallel);
        default: return false;
    }
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
