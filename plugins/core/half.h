// float16 on the processor, without any instruction of its own: loops over these vectorise.
#pragma once

#include <cstdint>
#include <cstring>

namespace toprovar
{

#define TOPROVAR_INLINE inline __attribute__((always_inline))

//! A loop's function is compiled for several processors and chosen when the library is loaded.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12 // v3 is AVX2 with FMA, v4 AVX-512
#define TOPROVAR_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define TOPROVAR_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#endif
#else
#define TOPROVAR_CLONES
#endif

struct Half
{
    uint16_t bits;
};

template <class To, class From>
TOPROVAR_INLINE To bitsAs(From from)
{
    static_assert(sizeof(To) == sizeof(From), "sizes differ");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

TOPROVAR_INLINE float floatFrom(float x)
{
    return x;
}

TOPROVAR_INLINE float floatFrom(Half x)
{
    uint32_t const sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
    uint32_t const rest = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
    // the exponent's bias changes by a product, which also turns subnormal numbers into normal ones
    float const finite = bitsAs<float>(rest) * 0x1p112f;
    uint32_t const special = rest | 0x7f800000u; // infinity and NaN
    uint32_t const magnitude = rest >= 0x0f800000u ? special : bitsAs<uint32_t>(finite);
    return bitsAs<float>(sign | magnitude);
}

template <class T>
T roundedFrom(float x);

template <>
TOPROVAR_INLINE float roundedFrom<float>(float x)
{
    return x;
}

//! To nearest, ties to even.
template <>
TOPROVAR_INLINE Half roundedFrom<Half>(float x)
{
    uint32_t const bits = bitsAs<uint32_t>(x);
    uint32_t const sign = (bits >> 16) & 0x8000u;
    uint32_t const magnitude = bits & 0x7fffffffu;
    // below the smallest normal number, adding 0.5 makes float32's own rounding cut where float16 does
    uint32_t const subnormal = bitsAs<uint32_t>(bitsAs<float>(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t const normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t const finite = magnitude < 0x38800000u ? subnormal : normal;
    uint32_t const large = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return Half{static_cast<uint16_t>(sign | (magnitude >= 0x477ff000u ? large : finite))};
}

template <class T>
TOPROVAR_INLINE float roundTrip(float x)
{
    return floatFrom(roundedFrom<T>(x));
}

} // namespace toprovar
