// TensorRT and TensorRT-RTX plugins over the operator tables: one IPluginV3 class and one creator for all operators.
//
// `IPluginRegistry::loadLibrary` finds the creators through getCreators and setLoggerFinder. They are registered in the
// namespace "toprovar" under version "1"; a node becomes a plugin layer if its attributes say so (plugins/functions.py).
// Builds with TensorRT 10.13 and later.
#include "../core/c_api.h"
#include "../core/operator.h"

#include <NvInferRuntime.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>

namespace toprovar
{

namespace
{

constexpr char const* kNAMESPACE = "toprovar";
constexpr char const* kPLUGIN_VERSION = "1";

nvinfer1::ILoggerFinder* gLoggerFinder = nullptr;

void logError(std::string const& text) noexcept
{
    nvinfer1::ILogger* const logger = gLoggerFinder ? gLoggerFinder->findLogger() : nullptr;
    if (logger)
    {
        logger->log(nvinfer1::ILogger::Severity::kERROR, text.c_str());
        return;
    }
    std::fprintf(stderr, "error: %s\n", text.c_str()); // TensorRT-RTX 1.7 has no logger to find while it parses
}

//! Runs `body`; what it throws is logged and gives `failed`.
template <class Result, class Body>
Result guarded(char const* name, Result failed, Body const& body) noexcept
{
    try
    {
        return body();
    }
    catch (std::exception const& fault)
    {
        logError(std::string("toprovar::") + name + ": " + fault.what());
        return failed;
    }
}

nvinfer1::DataType tensorrtTypeFrom(DataType type)
{
    switch (type)
    {
    case DataType::kFLOAT32: return nvinfer1::DataType::kFLOAT;
    case DataType::kFLOAT16: return nvinfer1::DataType::kHALF;
    case DataType::kBFLOAT16: return nvinfer1::DataType::kBF16;
    case DataType::kINT32: return nvinfer1::DataType::kINT32;
    case DataType::kINT64: return nvinfer1::DataType::kINT64;
    }
    throw std::invalid_argument("unknown element type");
}

DataType typeFrom(nvinfer1::DataType type)
{
    switch (type)
    {
    case nvinfer1::DataType::kFLOAT: return DataType::kFLOAT32;
    case nvinfer1::DataType::kHALF: return DataType::kFLOAT16;
    case nvinfer1::DataType::kBF16: return DataType::kBFLOAT16;
    case nvinfer1::DataType::kINT32: return DataType::kINT32;
    case nvinfer1::DataType::kINT64: return DataType::kINT64;
    default:
        throw std::invalid_argument("TensorRT's data type " + std::to_string(static_cast<int32_t>(type))
            + " is none of float32, float16, bfloat16, int32 and int64");
    }
}

Tensor tensorFrom(nvinfer1::PluginTensorDesc const& description, void const* data)
{
    Tensor tensor;
    tensor.type = typeFrom(description.type);
    tensor.data = const_cast<void*>(data);
    tensor.shape.rank = description.dims.nbDims;
    std::copy_n(description.dims.d, description.dims.nbDims, tensor.shape.extents);
    return tensor;
}

double attributeFrom(nvinfer1::PluginField const& field)
{
    if (field.length >= 1)
    {
        switch (field.type)
        {
        case nvinfer1::PluginFieldType::kFLOAT32: return *static_cast<float const*>(field.data);
        case nvinfer1::PluginFieldType::kFLOAT64: return *static_cast<double const*>(field.data);
        case nvinfer1::PluginFieldType::kINT32: return *static_cast<int32_t const*>(field.data);
        case nvinfer1::PluginFieldType::kINT64:
            return static_cast<double>(*static_cast<int64_t const*>(field.data));
        default: break;
        }
    }
    throw std::invalid_argument(std::string("attribute ") + field.name + " is not a number");
}

nvinfer1::PluginFieldType fieldTypeOf(Attribute const& attribute)
{
    return attribute.type == AttributeType::kFLOAT ? nvinfer1::PluginFieldType::kFLOAT32
                                                   : nvinfer1::PluginFieldType::kINT32;
}

//! One use of an operator in an engine.
class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuild,
                     public nvinfer1::IPluginV3OneRuntime
{
public:
    Plugin(Operator const& op, std::array<double, kMAX_ATTRIBUTES> const& attributes)
        : mOperator(op)
        , mAttributes(attributes)
    {
    }

    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override
    {
        switch (type)
        {
        case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
        case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
        case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
        }
        return nullptr;
    }

    nvinfer1::IPluginV3* clone() noexcept override
    {
        return guarded<nvinfer1::IPluginV3*>(
            mOperator.name, nullptr, [&] { return new Plugin(mOperator, mAttributes); });
    }

    nvinfer1::AsciiChar const* getPluginName() const noexcept override { return mOperator.name; }
    nvinfer1::AsciiChar const* getPluginVersion() const noexcept override { return kPLUGIN_VERSION; }
    nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override { return kNAMESPACE; }

    int32_t getNbOutputs() const noexcept override { return static_cast<int32_t>(mOperator.outputs.size()); }

    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const*, int32_t, nvinfer1::DynamicPluginTensorDesc const*,
        int32_t) noexcept override
    {
        return 0;
    }

    int32_t getOutputDataTypes(nvinfer1::DataType* outputTypes, int32_t outputCount,
        nvinfer1::DataType const* inputTypes, int32_t inputCount) const noexcept override
    {
        return guarded(mOperator.name, -1,
            [&]
            {
                DataType const floats = floatsFrom(inputCount, [&](int32_t i) { return inputTypes[i]; });
                for (int32_t i = 0; i < outputCount; ++i)
                {
                    outputTypes[i] = tensorrtTypeFrom(typeOf(mOperator.outputs[i].type, floats));
                }
                return 0;
            });
    }

    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t, nvinfer1::DimsExprs const*, int32_t,
        nvinfer1::DimsExprs* outputs, int32_t outputCount, nvinfer1::IExprBuilder& builder) noexcept override
    {
        return guarded(mOperator.name, -1,
            [&]
            {
                for (int32_t i = 0; i < outputCount; ++i)
                {
                    ShapeRule const& rule = mOperator.outputShapes[i];
                    outputs[i] = inputs[rule.like];
                    expect(outputs[i].nbDims >= rule.dropped, mOperator.inputs[rule.like].name,
                        std::to_string(outputs[i].nbDims) + " axes", "at least " + std::to_string(rule.dropped));
                    outputs[i].nbDims -= rule.dropped;
                    for (Extent const& extent : rule.last)
                    {
                        outputs[i].d[outputs[i].nbDims++] = expressionFrom(extent, inputs, builder);
                    }
                }
                return 0;
            });
    }

    bool supportsFormatCombination(int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors,
        int32_t inputCount, int32_t) noexcept override
    {
        return guarded(mOperator.name, false,
            [&]
            {
                nvinfer1::PluginTensorDesc const& mine = tensors[position].desc;
                bool const isInput = position < inputCount;
                Port const& port = isInput ? mOperator.inputs[position] : mOperator.outputs[position - inputCount];
                // ports before this one are settled: the float type is that of the first, or this one's own choice
                DataType const floats = floatsFrom(std::min(position + 1, inputCount),
                    [&](int32_t i) { return tensors[i].desc.type; });
                return mine.format == nvinfer1::TensorFormat::kLINEAR
                    && mine.type == tensorrtTypeFrom(typeOf(port.type, floats));
            });
    }

    size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t inputCount,
        nvinfer1::DynamicPluginTensorDesc const* outputs, int32_t outputCount) const noexcept override
    {
        return guarded(mOperator.name, size_t{0},
            [&]
            {
                Call call = emptyCall(inputCount, outputCount);
                for (int32_t i = 0; i < inputCount; ++i)
                {
                    call.inputs[i] = tensorFrom(largest(inputs[i]), nullptr);
                }
                for (int32_t i = 0; i < outputCount; ++i)
                {
                    call.outputs[i] = tensorFrom(largest(outputs[i]), nullptr);
                }
                return mOperator.cudaScratchBytes ? mOperator.cudaScratchBytes(call) : 0;
            });
    }

    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* inputs, int32_t inputCount,
        nvinfer1::PluginTensorDesc const* outputs, int32_t outputCount) noexcept override
    {
        return guarded(mOperator.name, -1,
            [&]
            {
                checkCall(mOperator, callFrom(inputs, inputCount, nullptr, outputs, outputCount, nullptr));
                return 0;
            });
    }

    int32_t enqueue(nvinfer1::PluginTensorDesc const* inputTensors, nvinfer1::PluginTensorDesc const* outputTensors,
        void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept override
    {
        return guarded(mOperator.name, -1,
            [&]
            {
                Call const call = callFrom(inputTensors, static_cast<int32_t>(mOperator.inputs.size()), inputs,
                    outputTensors, static_cast<int32_t>(mOperator.outputs.size()), outputs);
                Status const status = mOperator.runOnCuda(call, workspace, stream);
                if (status != 0)
                {
                    throw std::runtime_error("the launch failed with CUDA error " + std::to_string(status));
                }
                return 0;
            });
    }

    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override { return clone(); }

    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override
    {
        return guarded<nvinfer1::PluginFieldCollection const*>(mOperator.name, nullptr,
            [&]
            {
                mFields.clear();
                for (size_t i = 0; i < mOperator.attributes.size(); ++i)
                {
                    Attribute const& attribute = mOperator.attributes[i];
                    mFloats[i] = static_cast<float>(mAttributes[i]);
                    mInts[i] = static_cast<int32_t>(mAttributes[i]);
                    bool const isFloat = attribute.type == AttributeType::kFLOAT;
                    void const* const data = isFloat ? static_cast<void const*>(&mFloats[i]) : &mInts[i];
                    mFields.emplace_back(attribute.name, data, fieldTypeOf(attribute), 1);
                }
                mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
                return &mCollection;
            });
    }

private:
    //! The call's float type, of the first `known` inputs or the attribute "to".
    template <class TypeOfInput>
    DataType floatsFrom(int32_t known, TypeOfInput const& typeOfInput) const
    {
        int32_t const to = typeAttribute(mOperator);
        if (to >= 0)
        {
            return dataTypeFrom(static_cast<OnnxType>(static_cast<int32_t>(mAttributes[to])));
        }
        for (int32_t i = 0; i < known; ++i)
        {
            if (mOperator.inputs[i].type == TypeRule::kFLOATS)
            {
                DataType const floats = typeFrom(typeOfInput(i));
                expect(floats != DataType::kINT32 && floats != DataType::kINT64, mOperator.inputs[i].name,
                    "an integer type", "a float type");
                return floats;
            }
        }
        return DataType::kFLOAT32;
    }

    nvinfer1::IDimensionExpr const* expressionFrom(
        Extent const& rule, nvinfer1::DimsExprs const* inputs, nvinfer1::IExprBuilder& builder) const
    {
        int64_t const attribute = rule.attribute < 0 ? 1 : static_cast<int64_t>(mAttributes[rule.attribute]);
        if (rule.input < 0)
        {
            return builder.constant(attribute);
        }
        nvinfer1::DimsExprs const& from = inputs[rule.input];
        nvinfer1::IDimensionExpr const* const whole = from.d[rule.axis < 0 ? rule.axis + from.nbDims : rule.axis];
        return builder.operation(
            nvinfer1::DimensionOperation::kFLOOR_DIV, *whole, *builder.constant(rule.divisor * attribute));
    }

    Call emptyCall(int32_t inputCount, int32_t outputCount) const
    {
        expect(inputCount <= kMAX_PORTS && outputCount <= kMAX_PORTS, "tensors", std::to_string(inputCount),
            "at most " + std::to_string(kMAX_PORTS));
        Call call;
        call.inputCount = inputCount;
        call.outputCount = outputCount;
        std::copy(mAttributes.begin(), mAttributes.end(), call.attributes);
        return call;
    }

    Call callFrom(nvinfer1::PluginTensorDesc const* inputTensors, int32_t inputCount, void const* const* inputs,
        nvinfer1::PluginTensorDesc const* outputTensors, int32_t outputCount, void* const* outputs) const
    {
        Call call = emptyCall(inputCount, outputCount);
        for (int32_t i = 0; i < inputCount; ++i)
        {
            call.inputs[i] = tensorFrom(inputTensors[i], inputs ? inputs[i] : nullptr);
        }
        for (int32_t i = 0; i < outputCount; ++i)
        {
            call.outputs[i] = tensorFrom(outputTensors[i], outputs ? outputs[i] : nullptr);
        }
        return call;
    }

    //! A tensor at its profile's largest shape.
    static nvinfer1::PluginTensorDesc largest(nvinfer1::DynamicPluginTensorDesc const& tensor)
    {
        nvinfer1::PluginTensorDesc description = tensor.desc;
        description.dims = tensor.max.nbDims == description.dims.nbDims ? tensor.max : description.dims;
        return description;
    }

    Operator const& mOperator;
    std::array<double, kMAX_ATTRIBUTES> mAttributes;
    std::array<float, kMAX_ATTRIBUTES> mFloats{};
    std::array<int32_t, kMAX_ATTRIBUTES> mInts{};
    std::vector<nvinfer1::PluginField> mFields;
    nvinfer1::PluginFieldCollection mCollection{};
};

class Creator final : public nvinfer1::IPluginCreatorV3One
{
public:
    explicit Creator(Operator const& op)
        : mOperator(op)
    {
        for (Attribute const& attribute : op.attributes)
        {
            mFields.emplace_back(attribute.name, nullptr, fieldTypeOf(attribute), 1);
        }
        mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
    }

    nvinfer1::IPluginV3* createPlugin(nvinfer1::AsciiChar const*, nvinfer1::PluginFieldCollection const* given,
        nvinfer1::TensorRTPhase) noexcept override
    {
        return guarded<nvinfer1::IPluginV3*>(mOperator.name, nullptr,
            [&]
            {
                std::array<double, kMAX_ATTRIBUTES> attributes{};
                for (size_t i = 0; i < mOperator.attributes.size(); ++i)
                {
                    attributes[i] = attributeFrom(fieldOf(*given, mOperator.attributes[i].name));
                }
                return new Plugin(mOperator, attributes);
            });
    }

    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override { return &mCollection; }
    nvinfer1::AsciiChar const* getPluginName() const noexcept override { return mOperator.name; }
    nvinfer1::AsciiChar const* getPluginVersion() const noexcept override { return kPLUGIN_VERSION; }
    nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override { return kNAMESPACE; }

private:
    static nvinfer1::PluginField const& fieldOf(nvinfer1::PluginFieldCollection const& given, char const* name)
    {
        for (int32_t i = 0; i < given.nbFields; ++i)
        {
            if (std::strcmp(given.fields[i].name, name) == 0)
            {
                return given.fields[i];
            }
        }
        throw std::invalid_argument(std::string("attribute ") + name + " is missing");
    }

    Operator const& mOperator;
    std::vector<nvinfer1::PluginField> mFields;
    nvinfer1::PluginFieldCollection mCollection{};
};

} // namespace

} // namespace toprovar

extern "C" TOPROVAR_API void setLoggerFinder(nvinfer1::ILoggerFinder* finder)
{
    toprovar::gLoggerFinder = finder;
}

extern "C" TOPROVAR_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count)
{
    using namespace toprovar;
    // never destroyed: the registry may outlive this library's statics
    static auto* const creators = []
    {
        auto* const made = new std::vector<nvinfer1::IPluginCreatorInterface*>;
        for (Operator const* op : operators())
        {
            made->push_back(new Creator(*op));
        }
        return made;
    }();
    count = static_cast<int32_t>(creators->size());
    return creators->data();
}
