// What an operator is, told once for all hosts: its ports, types, output shapes, attributes, and how it runs.
//
// plugins/<op>/operator.cpp fills one Operator per name; the hosts (ONNX Runtime, TensorRT, C functions) read the tables
// and know no operator by name. Operators live in the ONNX domain "toprovar"; beside their own attributes all accept
// plugin_namespace and plugin_version, which only TensorRT reads.
#pragma once

#include "kernel_types.h"

#include <initializer_list>
#include <string>
#include <vector>

namespace toprovar
{

constexpr int32_t kMAX_RANK = 8;
constexpr int32_t kMAX_PORTS = 8;
constexpr int32_t kMAX_ATTRIBUTES = 4;

//! Numbers by which ONNX and ONNX Runtime name element types.
enum class OnnxType : int32_t
{
    kFLOAT32 = 1,
    kINT32 = 6,
    kINT64 = 7,
    kFLOAT16 = 10,
    kBFLOAT16 = 16,
};

OnnxType onnxTypeFrom(DataType type);

//! Throws std::invalid_argument for a type that no operator has.
DataType dataTypeFrom(OnnxType type);

struct Shape
{
    int32_t rank{0};
    int64_t extents[kMAX_RANK]{};

    int64_t operator[](int32_t axis) const { return extents[axis < 0 ? axis + rank : axis]; }
    int64_t size() const; //!< elements
};

std::string textFrom(Shape const& shape);

//! A tensor as a host hands it over, dense and row-major; nothing is owned.
struct Tensor
{
    void* data{nullptr};
    Shape shape;
    DataType type{DataType::kFLOAT32};
};

//! One use of an operator. Attributes stand in the order of Operator::attributes.
struct Call
{
    int32_t inputCount{0};
    int32_t outputCount{0};
    Tensor inputs[kMAX_PORTS];
    Tensor outputs[kMAX_PORTS];
    double attributes[kMAX_ATTRIBUTES]{};
};

//! The element type of a port.
enum class TypeRule : int32_t
{
    kFLOATS,    //!< the call's float type: float32, float16 or bfloat16, the same on all such ports
    kATTRIBUTE, //!< the ONNX type that the attribute "to" names: float32, float16 or bfloat16
    kFLOAT32,
    kINT32,
    kINT64,
};

struct Port
{
    char const* name;
    TypeRule type;
};

//! An extent of an output: that of an input's axis, divided by `divisor` times an attribute, or the attribute itself.
struct Extent
{
    int32_t input;     //!< -1: the attribute alone
    int32_t axis;      //!< negative counts from the end
    int32_t attribute; //!< -1: none
    int32_t divisor;
};

//! An output's shape: that of input `like` without its last `dropped` axes, then `last`.
struct ShapeRule
{
    int32_t like;
    int32_t dropped;
    std::vector<Extent> last;
};

enum class AttributeType : int32_t
{
    kFLOAT,
    kINT,
    kINTS, //!< a list of one integer: what a function's body can hand on as a shape
};

struct Attribute
{
    char const* name;
    AttributeType type;
};

struct Operator
{
    char const* name;
    std::vector<Port> inputs;
    std::vector<Port> outputs;
    std::vector<ShapeRule> outputShapes; //!< one per output
    std::vector<Attribute> attributes;

    //! Throws std::invalid_argument where shapes or attributes don't fit each other. Data pointers are not read.
    void (*check)(Call const&);

    //! Bytes of scratch memory for a CUDA run, enough on any device; null where the operator needs none. Data pointers
    //! are not read.
    size_t (*cudaScratchBytes)(Call const&);

    //! Null in a library built without CUDA.
    Status (*runOnCuda)(Call const&, void* scratch, Stream stream);

    void (*runOnCpu)(Call const&, int32_t threads);
};

//! All operators of this library.
std::vector<Operator const*> const& operators();

//! Null for an unknown name.
Operator const* findOperator(std::string const& name);

//! The float types that `op` can have: one where no port depends on a choice.
std::vector<DataType> floatTypes(Operator const& op);

//! A port's element type, for a call whose float type is `floats`; kATTRIBUTE ports read the call's "to".
DataType typeOf(TypeRule rule, DataType floats);

//! Where "to" stands among the attributes, or -1.
int32_t typeAttribute(Operator const& op);

//! The output's shape, from the inputs' shapes and the attributes; extents of -1, not known yet, pass through.
//! Throws std::invalid_argument where none follows.
Shape outputShape(Operator const& op, int32_t output, Call const& call);

//! Checks counts, ranks and types of all ports, then op.check. Throws std::invalid_argument naming port and values.
void checkCall(Operator const& op, Call const& call);

//! Throws std::invalid_argument "<what>: <found>; expected <expected>" unless it holds.
void expect(bool holds, std::string const& what, std::string const& found, std::string const& expected);

//! Throws unless the tensor has these extents; -1 fits any.
void expectShape(char const* name, Tensor const& tensor, std::initializer_list<int64_t> extents);

#ifdef TOPROVAR_CUDA
#define TOPROVAR_ON_CUDA(function) function
#else
#define TOPROVAR_ON_CUDA(function) nullptr
#endif

} // namespace toprovar
