// The operators of this library, each told in plugins/<op>/operator.cpp.
#pragma once

#include "operator.h"

namespace toprovar
{

extern Operator const kENTROPY_ATTENTION;
extern Operator const kCACHED_ATTENTION;
extern Operator const kMASKED_ATTENTION;
extern Operator const kTOKEN_GATE;
extern Operator const kMODULATED_NORM;
extern Operator const kROTARY_HEADS;
extern Operator const kGATED_RESIDUAL;
extern Operator const kBIAS_GELU;
extern Operator const kBIT_SAMPLER;
extern Operator const kTOKEN_RESTORE;

} // namespace toprovar
