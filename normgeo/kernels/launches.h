// Norms on a GPU by kernels that Triton has built, launched without it: it takes longer to launch one than the GPU needs
// for a small norm. A build is looked up by all that it was built for; what is not there Triton is asked for first.
#pragma once

#include <array>
#include <cstring>
#include <map>
#include <optional>

#include "norms.h"

namespace normgeo {

// The driver's function: kernel, programs and threads in three dimensions each, bytes of shared memory, stream, where each
// argument is, nothing; and torch's, which gives a device's current stream. Both give 0 if all went well.
using LaunchKernel = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
using CurrentStream = int (*)(int32_t, void**);

constexpr uintptr_t ALIGNED = 16;  // bytes, at multiples of which tensors begin that builds are for

// What there may be among a kernel's arguments, in the order of `_forward` in triton_norms.py; the first six are addresses.
enum Argument { RESIDUAL, ADDED, WEIGHT, BIAS, OUT, SCALES, ROWS, WIDTH, DIVISOR, EPS, OFFSET, ARGUMENTS };
constexpr int SPARE = 4;  // what Triton adds to a kernel's arguments, none of which is used

struct Build {
    void* kernel;
    unsigned threads, shared;
    int64_t rows;  // a program
    int count;
    std::array<Argument, ARGUMENTS> arguments;
};

class Launches {
public:
    LaunchKernel launch = nullptr;
    CurrentStream stream = nullptr;

    // For calls like this one, with an addition or without; the first that was kept stays.
    void keep(const Call& call, const Types& types, bool adds, int device, const Build& build) {
        builds.emplace(key(call, types, adds, device), build);
    }

    void clear() { builds.clear(); }

    // A build for this, a copy, as others may be kept while it is launched; none where tensors begin at odd places.
    std::optional<Build> find(const Call& c, const Types& types, bool adds, int device) const {
        const void* all[] = {c.residual, c.x, c.affine.weight, c.affine.bias};
        uintptr_t places = 0;
        for (const void* one : all) places |= reinterpret_cast<uintptr_t>(one);
        if (!launch || places % ALIGNED || c.rows <= 0 || c.rows > INT32_MAX / 2) return {};
        const auto found = builds.find(key(c, types, adds, device));
        return found == builds.end() ? std::nullopt : std::optional(found->second);
    }

    // Whether it was launched.
    bool operator()(const Build& build, const Call& c, int device) const {
        union { const void* address; int32_t count; float number; } values[ARGUMENTS] = {};
        values[RESIDUAL].address = c.residual;
        values[ADDED].address = c.x;
        values[WEIGHT].address = c.affine.weight;
        values[BIAS].address = c.affine.bias;
        values[OUT].address = c.out;
        values[ROWS].count = int32_t(c.rows);
        values[WIDTH].count = int32_t(c.d);
        values[DIVISOR].count = int32_t(c.d + (c.kind == CRMS));
        values[EPS].number = c.eps;
        values[OFFSET].number = c.affine.offset;
        void *nothing = nullptr, *queue = nullptr, *places[ARGUMENTS + SPARE];
        int count = 0;
        while (count < build.count) places[count] = &values[build.arguments[count]], count++;
        for (int i = 0; i < SPARE; i++) places[count++] = &nothing;
        if (stream(device, &queue)) return false;
        const unsigned programs = unsigned((c.rows + build.rows - 1) / build.rows);
        return !launch(build.kernel, programs, 1, 1, build.threads, 1, 1, build.shared, queue, places, nullptr);
    }

private:
    using Key = std::array<int64_t, 11>;
    std::map<Key, Build> builds;

    static int64_t bits(float number) {
        number += 0.0f;  // there are two zeros
        int32_t same;
        std::memcpy(&same, &number, sizeof same);
        return same;
    }

    static Key key(const Call& c, const Types& t, bool adds, int device) {
        return {c.d, c.kind, device, t.stream, t.added, t.made, t.parameters, adds,
                (c.affine.weight != nullptr) + 2 * (c.affine.bias != nullptr), bits(c.eps), bits(c.affine.offset)};
    }
};

}  // namespace normgeo
