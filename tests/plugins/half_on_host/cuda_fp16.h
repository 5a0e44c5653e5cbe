// Half precision for attention_single_host.cpp, by the compiler's own type.
#pragma once

using __half = _Float16;

inline float __half2float(__half value)
{
    return static_cast<float>(value);
}

inline __half __float2half(float value)
{
    return static_cast<__half>(value);
}
