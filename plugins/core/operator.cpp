#include "operators.h"

#include <stdexcept>

namespace toprovar
{

std::vector<Operator const*> const& operators()
{
    static std::vector<Operator const*> const all{&kENTROPY_ATTENTION, &kCACHED_ATTENTION, &kMASKED_ATTENTION,
        &kTOKEN_GATE, &kMODULATED_NORM, &kROTARY_HEADS, &kGATED_RESIDUAL, &kBIAS_GELU, &kBIT_SAMPLER, &kTOKEN_RESTORE};
    return all;
}

Operator const* findOperator(std::string const& name)
{
    for (Operator const* op : operators())
    {
        if (name == op->name)
        {
            return op;
        }
    }
    return nullptr;
}

OnnxType onnxTypeFrom(DataType type)
{
    switch (type)
    {
    case DataType::kFLOAT32: return OnnxType::kFLOAT32;
    case DataType::kFLOAT16: return OnnxType::kFLOAT16;
    case DataType::kBFLOAT16: return OnnxType::kBFLOAT16;
    case DataType::kINT32: return OnnxType::kINT32;
    case DataType::kINT64: return OnnxType::kINT64;
    }
    throw std::invalid_argument("unknown element type");
}

DataType dataTypeFrom(OnnxType type)
{
    switch (type)
    {
    case OnnxType::kFLOAT32: return DataType::kFLOAT32;
    case OnnxType::kFLOAT16: return DataType::kFLOAT16;
    case OnnxType::kBFLOAT16: return DataType::kBFLOAT16;
    case OnnxType::kINT32: return DataType::kINT32;
    case OnnxType::kINT64: return DataType::kINT64;
    }
    throw std::invalid_argument("ONNX element type " + std::to_string(static_cast<int32_t>(type))
        + "; expected 1 (float32), 6 (int32), 7 (int64), 10 (float16) or 16 (bfloat16)");
}

namespace
{

char const* nameOf(DataType type)
{
    switch (type)
    {
    case DataType::kFLOAT32: return "float32";
    case DataType::kFLOAT16: return "float16";
    case DataType::kBFLOAT16: return "bfloat16";
    case DataType::kINT32: return "int32";
    case DataType::kINT64: return "int64";
    }
    return "unknown";
}

bool isFloat(DataType type)
{
    return type == DataType::kFLOAT32 || type == DataType::kFLOAT16 || type == DataType::kBFLOAT16;
}

bool dependsOnFloats(Port const& port)
{
    return port.type == TypeRule::kFLOATS || port.type == TypeRule::kATTRIBUTE;
}

int64_t extentFrom(Extent const& rule, Call const& call)
{
    int64_t const attribute = rule.attribute < 0 ? 1 : static_cast<int64_t>(call.attributes[rule.attribute]);
    if (rule.input < 0)
    {
        return attribute;
    }
    int64_t const whole = call.inputs[rule.input].shape[rule.axis];
    if (whole < 0)
    {
        return whole; // not known yet
    }
    int64_t const divisor = rule.divisor * attribute;
    expect(divisor > 0 && whole % divisor == 0, "extent " + std::to_string(whole), "divided by "
        + std::to_string(divisor), "a divisor of it");
    return whole / divisor;
}

void checkPorts(std::vector<Port> const& ports, Tensor const* tensors, DataType floats)
{
    for (size_t i = 0; i < ports.size(); ++i)
    {
        DataType const expected = typeOf(ports[i].type, floats);
        expect(tensors[i].type == expected, ports[i].name, nameOf(tensors[i].type), nameOf(expected));
    }
}

} // namespace

int64_t Shape::size() const
{
    int64_t product = 1;
    for (int32_t axis = 0; axis < rank; ++axis)
    {
        product *= extents[axis];
    }
    return product;
}

std::string textFrom(Shape const& shape)
{
    std::string text = "[";
    for (int32_t axis = 0; axis < shape.rank; ++axis)
    {
        text += (axis ? ", " : "") + std::to_string(shape.extents[axis]);
    }
    return text + "]";
}

std::vector<DataType> floatTypes(Operator const& op)
{
    for (auto const* ports : {&op.inputs, &op.outputs})
    {
        for (Port const& port : *ports)
        {
            if (dependsOnFloats(port))
            {
                return {DataType::kFLOAT32, DataType::kFLOAT16, DataType::kBFLOAT16};
            }
        }
    }
    return {DataType::kFLOAT32};
}

DataType typeOf(TypeRule rule, DataType floats)
{
    switch (rule)
    {
    case TypeRule::kFLOATS:
    case TypeRule::kATTRIBUTE: return floats;
    case TypeRule::kFLOAT32: return DataType::kFLOAT32;
    case TypeRule::kINT32: return DataType::kINT32;
    case TypeRule::kINT64: return DataType::kINT64;
    }
    throw std::invalid_argument("unknown type rule");
}

int32_t typeAttribute(Operator const& op)
{
    for (size_t i = 0; i < op.attributes.size(); ++i)
    {
        if (std::string("to") == op.attributes[i].name)
        {
            return static_cast<int32_t>(i);
        }
    }
    return -1;
}

Shape outputShape(Operator const& op, int32_t output, Call const& call)
{
    ShapeRule const& rule = op.outputShapes[output];
    Shape shape = call.inputs[rule.like].shape;
    expect(shape.rank >= rule.dropped, op.inputs[rule.like].name, textFrom(shape),
        "at least " + std::to_string(rule.dropped) + " axes");
    shape.rank -= rule.dropped;
    for (Extent const& extent : rule.last)
    {
        shape.extents[shape.rank++] = extentFrom(extent, call);
    }
    return shape;
}

void checkCall(Operator const& op, Call const& call)
{
    int32_t const inputCount = static_cast<int32_t>(op.inputs.size());
    int32_t const outputCount = static_cast<int32_t>(op.outputs.size());
    expect(call.inputCount == inputCount, "inputs", std::to_string(call.inputCount), std::to_string(inputCount));
    expect(call.outputCount == outputCount, "outputs", std::to_string(call.outputCount), std::to_string(outputCount));
    DataType floats = DataType::kFLOAT32;
    for (int32_t i = 0; i < inputCount; ++i)
    {
        if (op.inputs[i].type == TypeRule::kFLOATS)
        {
            floats = call.inputs[i].type;
            expect(isFloat(floats), op.inputs[i].name, nameOf(floats), "float32, float16 or bfloat16");
            break;
        }
    }
    int32_t const to = typeAttribute(op);
    if (to >= 0)
    {
        floats = dataTypeFrom(static_cast<OnnxType>(static_cast<int32_t>(call.attributes[to])));
        expect(isFloat(floats), "attribute to", nameOf(floats), "float32, float16 or bfloat16");
    }
    checkPorts(op.inputs, call.inputs, floats);
    checkPorts(op.outputs, call.outputs, floats);
    op.check(call);
}

void expect(bool holds, std::string const& what, std::string const& found, std::string const& expected)
{
    if (!holds)
    {
        throw std::invalid_argument(what + ": found " + found + "; expected " + expected);
    }
}

void expectShape(char const* name, Tensor const& tensor, std::initializer_list<int64_t> extents)
{
    bool fits = tensor.shape.rank == static_cast<int32_t>(extents.size());
    int32_t axis = 0;
    for (int64_t const extent : extents)
    {
        fits = fits && (extent < 0 || tensor.shape.extents[axis] == extent);
        ++axis;
    }
    if (fits)
    {
        return; // no words are made for what is right: this runs before every launch
    }
    std::string expected;
    for (int64_t const extent : extents)
    {
        expected += (expected.empty() ? "[" : ", ") + (extent < 0 ? std::string("any") : std::to_string(extent));
    }
    expect(false, name, textFrom(tensor.shape), expected + "]");
}

} // namespace toprovar
