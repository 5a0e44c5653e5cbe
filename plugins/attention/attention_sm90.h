// The Hopper kernel behind launchAttention, built for sm_90a alone.
#pragma once

#include "attention.h"

namespace toprovar
{

//! Whether the Hopper kernel takes this problem: 16-bit types, widths 64 and 128, no mask, enough queries.
bool fitsSm90(AttentionProblem const& problem);

//! perHead: [L, R, H] entropies, or null.
Status launchSm90(AttentionProblem const& problem, float* perHead, Stream stream);

} // namespace toprovar
