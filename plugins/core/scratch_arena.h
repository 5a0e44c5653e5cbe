// Scratch memory on the GPU for hosts that provide none: one chunk per stream, in order of the stream's work.
#pragma once

#include "kernel_types.h"

namespace toprovar
{

//! At least `bytes` bytes, 256-byte aligned, for work on this stream of the current device; null for 0 bytes.
//!
//! Chunks grow and are never freed: a captured CUDA graph keeps their addresses. Growing is refused while the stream is
//! being captured, so run a graph once before its capture. Throws std::runtime_error saying so, or naming CUDA's error.
void* scratchOnStream(Stream stream, size_t bytes);

} // namespace toprovar
