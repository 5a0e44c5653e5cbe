#include "c_api.h"

#include "operator.h"
#include "parallel.h"

#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>

using namespace toprovar;

namespace
{

constexpr int32_t kFAILED = 1;

Tensor tensorFrom(ToprovarTensor const& given)
{
    Tensor tensor;
    expect(given.rank >= 0 && given.rank <= kMAX_RANK, "rank", std::to_string(given.rank),
        "0 to " + std::to_string(kMAX_RANK));
    tensor.data = given.data;
    tensor.type = dataTypeFrom(static_cast<OnnxType>(given.type));
    tensor.shape.rank = given.rank;
    for (int32_t axis = 0; axis < given.rank; ++axis)
    {
        expect(given.shape[axis] >= 0, "extent", std::to_string(given.shape[axis]), "0 or more");
        tensor.shape.extents[axis] = given.shape[axis];
    }
    return tensor;
}

double attributeFrom(ToprovarCall const& given, char const* name)
{
    for (int32_t i = 0; i < given.attributeCount; ++i)
    {
        if (std::strcmp(given.attributes[i].name, name) == 0)
        {
            return given.attributes[i].value;
        }
    }
    throw std::invalid_argument(std::string("attribute ") + name + " is missing");
}

Operator const& operatorOf(ToprovarCall const& given)
{
    Operator const* const op = findOperator(given.name);
    if (!op)
    {
        throw std::invalid_argument("no such operator in this library");
    }
    return *op;
}

Call callFrom(Operator const& op, ToprovarCall const& given)
{
    Call call;
    expect(given.inputCount >= 0 && given.inputCount <= kMAX_PORTS && given.outputCount >= 0
            && given.outputCount <= kMAX_PORTS,
        "tensors", std::to_string(given.inputCount) + " and " + std::to_string(given.outputCount),
        "at most " + std::to_string(kMAX_PORTS) + " of each");
    call.inputCount = given.inputCount;
    call.outputCount = given.outputCount;
    for (int32_t i = 0; i < given.inputCount; ++i)
    {
        call.inputs[i] = tensorFrom(given.inputs[i]);
    }
    for (int32_t i = 0; i < given.outputCount; ++i)
    {
        call.outputs[i] = tensorFrom(given.outputs[i]);
    }
    for (size_t i = 0; i < op.attributes.size(); ++i)
    {
        call.attributes[i] = attributeFrom(given, op.attributes[i].name);
    }
    return call;
}

//! Runs `body`; what it throws becomes an error text and a failure.
template <class Body>
int32_t guarded(ToprovarCall const* given, char* error, size_t errorBytes, Body const& body)
{
    try
    {
        body(operatorOf(*given));
        return 0;
    }
    catch (std::exception const& fault)
    {
        if (error && errorBytes)
        {
            std::snprintf(error, errorBytes, "%s: %s", given->name, fault.what());
        }
        return kFAILED;
    }
}

} // namespace

char const* toprovarVersion()
{
    return TOPROVAR_VERSION;
}

char const* toprovarSourceDigest()
{
    return TOPROVAR_SOURCE_DIGEST;
}

char const* toprovarCudaArchitectures()
{
    return TOPROVAR_CUDA_ARCHITECTURES;
}

char const* toprovarHosts()
{
    return TOPROVAR_HOSTS;
}

int32_t toprovarOperatorCount()
{
    return static_cast<int32_t>(operators().size());
}

char const* toprovarOperatorName(int32_t index)
{
    return index >= 0 && index < toprovarOperatorCount() ? operators()[index]->name : nullptr;
}

void toprovarSetThreads(int32_t threads)
{
    setDefaultThreads(threads);
}

int32_t toprovarThreads()
{
    return defaultThreads();
}

int32_t toprovarOutputShape(
    ToprovarCall const* given, int32_t output, int64_t* extents, int32_t* rank, char* error, size_t errorBytes)
{
    return guarded(given, error, errorBytes,
        [&](Operator const& op)
        {
            Call const call = callFrom(op, *given);
            expect(output >= 0 && output < static_cast<int32_t>(op.outputs.size()), "output", std::to_string(output),
                "0 to " + std::to_string(op.outputs.size() - 1));
            expect(call.inputCount == static_cast<int32_t>(op.inputs.size()), "inputs",
                std::to_string(call.inputCount), std::to_string(op.inputs.size()));
            Shape const shape = outputShape(op, output, call);
            *rank = shape.rank;
            std::memcpy(extents, shape.extents, sizeof(shape.extents));
        });
}

int32_t toprovarScratchBytes(ToprovarCall const* given, size_t* bytes, char* error, size_t errorBytes)
{
    return guarded(given, error, errorBytes,
        [&](Operator const& op)
        {
            Call const call = callFrom(op, *given);
            checkCall(op, call);
            *bytes = op.cudaScratchBytes ? op.cudaScratchBytes(call) : 0;
        });
}

int32_t toprovarRun(
    ToprovarCall const* given, char const* device, void* scratch, void* stream, char* error, size_t errorBytes)
{
    return guarded(given, error, errorBytes,
        [&](Operator const& op)
        {
            Call const call = callFrom(op, *given);
            checkCall(op, call);
            if (std::strcmp(device, "cpu") == 0)
            {
                op.runOnCpu(call, 0);
                return;
            }
            expect(std::strcmp(device, "cuda") == 0, "device", device, "cpu or cuda");
            if (!op.runOnCuda)
            {
                throw std::runtime_error("this library was built without CUDA");
            }
            Status const status = op.runOnCuda(call, scratch, stream);
            if (status != 0)
            {
                throw std::runtime_error("the launch failed with CUDA error " + std::to_string(status));
            }
        });
}
