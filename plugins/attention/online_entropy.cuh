// State of one query row while its keys pass by: softmax and entropy in one sweep, in base 2.
//
// With y_j = log2(e) * score_j and a reference m that is at least the largest y so far:
//
//     x_j = y_j - m     l = sum 2^x     t = sum x 2^x     o = sum 2^x v
//     when m moves to m':  d = m - m',  a = 2^d:   t <- a (t + d l),  l <- a l,  o <- a o
//     at the end:  output o / l,  entropy ln 2 * (log2 l - t / l)
//
// A hidden key has the score kLOWEST and not minus infinity: zero times it is zero, and not NaN.
// Source: ToProVAR eq. 2 and Algorithm 2, with the term d l that the printed algorithm lacks.
#pragma once

#include <cuda_runtime.h>

namespace toprovar
{

constexpr float kLOG2E = 1.4426950408889634f;
constexpr float kLN2 = 0.6931471805599453f;
constexpr float kLOWEST = -1.0e30f;

//! 2^x to two units in the last place; exp2f spends two more instructions on results below 1e-38.
__device__ __forceinline__ float powerOfTwo(float x)
{
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

struct RowState
{
    float m = kLOWEST;
    float l = 0.f;
    float t = 0.f;

    //! Moves the reference to at least `largest`; returns the factor by which o shrinks.
    __device__ __forceinline__ float raise(float largest)
    {
        float const moved = fmaxf(m, largest);
        float const d = m - moved;
        float const a = exp2f(d);
        t = a * fmaf(d, l, t);
        l *= a;
        m = moved;
        return a;
    }

    //! Adds another state over other keys; o of this one shrinks by the first factor, the other's by the second.
    __device__ __forceinline__ float2 join(RowState other)
    {
        float const moved = fmaxf(m, other.m);
        float const mine = raise(moved);
        float const theirs = other.raise(moved);
        l += other.l;
        t += other.t;
        return make_float2(mine, theirs);
    }

    //! Nats; rounding may fall below zero.
    __device__ __forceinline__ float entropy() const
    {
        float const nats = kLN2 * (log2f(l) - t / l);
        return nats < 0.f ? 0.f : nats;
    }
};

} // namespace toprovar
