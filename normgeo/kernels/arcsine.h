// The angle of a cosine, short of a right angle, in radians and float32; loops over it are vectorised.
#pragma once

#include <cmath>

namespace normgeo {

inline float arcsine(float c) {
    const float a = std::fabs(c) < 1.0f ? std::fabs(c) : 1.0f;
    const bool large = a > 0.5f;
    const float z = large ? 0.5f * (1.0f - a) : a * a, s = large ? std::sqrt(z) : a;
    float p = 4.2163199048e-2f;  // Cephes' asinf
    p = p * z + 2.4181311049e-2f;
    p = p * z + 4.5470025998e-2f;
    p = p * z + 7.4953002686e-2f;
    p = p * z + 1.6666752422e-1f;
    const float r = s + s * z * p;
    return std::copysign(large ? 1.57079632679f - 2.0f * r : r, c);
}

}  // namespace normgeo
