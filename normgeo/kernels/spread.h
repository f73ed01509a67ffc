// Torch's parallel loop, handed over as a pointer (`torch_parallel_for`); null for one thread.
#pragma once

#include <cstdint>

namespace normgeo {

typedef void (*Body)(int64_t begin, int64_t end, void* context);
typedef int32_t (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, Body body, void* context);

template <class F>
void spread(void* parallel, int64_t n, int64_t grain, const F& body) {
    if (!parallel || n <= grain) {
        body(int64_t(0), n);
        return;
    }
    reinterpret_cast<ParallelFor>(parallel)(
        0, n, grain, [](int64_t a, int64_t b, void* f) { (*static_cast<const F*>(f))(a, b); },
        const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace normgeo
