// ONNX Runtime's custom operators over the operator tables, without ONNX Runtime's headers.
//
// OrtApi is a table of function pointers that only ever grows at its end, and OrtCustomOp is a struct whose member
// `version` tells how many members follow. Both are declared here as far as they are used, so that the library builds
// from its own sources and works with ONNX Runtime 1.18 and later. Operators of one name with different types, and for
// CPU and CUDA, are separate OrtCustomOps, which ONNX Runtime merges into one schema.
#include "../core/c_api.h"
#include "../core/operator.h"
#include "../core/parallel.h"

#ifdef TOPROVAR_CUDA
#include "../core/scratch_arena.h"
#endif

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>

namespace toprovar
{

namespace
{

constexpr uint32_t kAPI_VERSION = 18;       // of the table: the newest function used came with 1.17, 1.18 is asked for
constexpr uint32_t kCUSTOM_OP_VERSION = 17; // of OrtCustomOp as declared below
constexpr int32_t kOP_ATTRIBUTE_INT = 1;    // OrtOpAttrType
constexpr int32_t kOP_ATTRIBUTE_INTS = 2;

//! Slots of OrtApi.
enum Slot : int32_t
{
    kCREATE_STATUS = 0,
    kERROR_MESSAGE = 2,
    kCREATE_DOMAIN = 26,
    kDOMAIN_ADD = 27,
    kADD_DOMAIN = 28,
    kTENSOR_DATA = 51,
    kCREATE_TYPE_AND_SHAPE = 57,
    kSET_ELEMENT_TYPE = 58,
    kSET_DIMENSIONS = 59,
    kELEMENT_TYPE = 60,
    kDIMENSION_COUNT = 61,
    kDIMENSIONS = 62,
    kSYMBOLIC_DIMENSIONS = 63,
    kTYPE_AND_SHAPE = 65,
    kATTRIBUTE_FLOAT = 85,
    kATTRIBUTE_INT64 = 86,
    kGET_INPUT = 90,
    kGET_OUTPUT = 91,
    kRELEASE_STATUS = 93,
    kRELEASE_TYPE_AND_SHAPE = 99,
    kATTRIBUTE_INT64S = 163,
    kGPU_STREAM = 193,
    kINFER_INPUT = 268,
    kINFER_ATTRIBUTE = 269,
    kINFER_SET_OUTPUT = 270,
    kSET_SYMBOLIC_DIMENSIONS = 271,
    kREAD_ATTRIBUTE = 272,
    kPARALLEL_FOR = 274,
};

using OrtStatus = void;

struct OrtApiBase
{
    void const* (*getApi)(uint32_t version);
    char const* (*getVersion)();
};

struct OrtCustomOp
{
    uint32_t version;
    void* (*createKernel)(OrtCustomOp const*, void const* api, void const* info);
    char const* (*getName)(OrtCustomOp const*);
    char const* (*getProvider)(OrtCustomOp const*);
    int32_t (*getInputType)(OrtCustomOp const*, size_t);
    size_t (*getInputCount)(OrtCustomOp const*);
    int32_t (*getOutputType)(OrtCustomOp const*, size_t);
    size_t (*getOutputCount)(OrtCustomOp const*);
    void (*compute)(void* kernel, void* context);
    void (*destroyKernel)(void* kernel);
    int32_t (*getInputCharacteristic)(OrtCustomOp const*, size_t);
    int32_t (*getOutputCharacteristic)(OrtCustomOp const*, size_t);
    int32_t (*getInputMemoryType)(OrtCustomOp const*, size_t);
    int32_t (*getVariadicInputMinArity)(OrtCustomOp const*);
    int32_t (*getVariadicInputHomogeneity)(OrtCustomOp const*);
    int32_t (*getVariadicOutputMinArity)(OrtCustomOp const*);
    int32_t (*getVariadicOutputHomogeneity)(OrtCustomOp const*);
    OrtStatus* (*createKernelV2)(OrtCustomOp const*, void const* api, void const* info, void** kernel);
    OrtStatus* (*computeV2)(void* kernel, void* context);
    OrtStatus* (*inferOutputShape)(OrtCustomOp const*, void* context);
    int32_t (*getStartVersion)(OrtCustomOp const*);
    int32_t (*getEndVersion)(OrtCustomOp const*);
};

//! A status that a function of ONNX Runtime returned; handed back as it is.
struct ApiFault
{
    OrtStatus* status;
};

//! ONNX Runtime's functions by slot.
class Api
{
public:
    explicit Api(void const* table = nullptr)
        : mTable(static_cast<void* const*>(table))
    {
    }

    template <class... Arguments>
    void call(Slot slot, Arguments... arguments) const
    {
        using Function = OrtStatus* (*) (Arguments...);
        if (OrtStatus* const status = reinterpret_cast<Function>(mTable[slot])(arguments...))
        {
            throw ApiFault{status};
        }
    }

    void releaseTypeAndShape(void* info) const
    {
        reinterpret_cast<void (*)(void*)>(mTable[kRELEASE_TYPE_AND_SHAPE])(info);
    }

    //! What a fault says; releases it.
    std::string messageOf(ApiFault const& fault) const
    {
        std::string text = reinterpret_cast<char const* (*) (OrtStatus const*)>(mTable[kERROR_MESSAGE])(fault.status);
        reinterpret_cast<void (*)(OrtStatus*)>(mTable[kRELEASE_STATUS])(fault.status);
        return text;
    }

    OrtStatus* statusFrom(std::exception const& fault) const
    {
        constexpr int32_t kFAIL = 1;
        return reinterpret_cast<OrtStatus* (*) (int32_t, char const*)>(mTable[kCREATE_STATUS])(kFAIL, fault.what());
    }

private:
    void* const* mTable;
};

Api gApi; // set once, by RegisterCustomOps

//! Runs `body`; what it throws becomes a status.
template <class Body>
OrtStatus* guarded(Body const& body)
{
    try
    {
        body();
        return nullptr;
    }
    catch (ApiFault const& fault)
    {
        return fault.status;
    }
    catch (std::exception const& fault)
    {
        return gApi.statusFrom(fault);
    }
}

//! An operator for one float type and one provider.
struct CustomOp : OrtCustomOp
{
    CustomOp(Operator const& op, DataType floats, bool isCuda);

    Operator const& mOperator;
    DataType mFloats;
    bool mIsCuda;
};

struct Kernel
{
    CustomOp const& mCustomOp;
    double mAttributes[kMAX_ATTRIBUTES]{};

    void compute(void* context) const;
    void run(Call const& call, void* context) const;
};

CustomOp const& asCustomOp(OrtCustomOp const* op)
{
    return *static_cast<CustomOp const*>(op);
}

Shape shapeFrom(void const* info)
{
    size_t rank = 0;
    gApi.call(kDIMENSION_COUNT, info, &rank);
    if (rank > static_cast<size_t>(kMAX_RANK))
    {
        throw std::invalid_argument("a tensor has " + std::to_string(rank) + " axes");
    }
    Shape shape;
    shape.rank = static_cast<int32_t>(rank);
    gApi.call(kDIMENSIONS, info, &shape.extents[0], rank);
    return shape;
}

Tensor tensorFrom(void const* value)
{
    void* info = nullptr;
    gApi.call(kTYPE_AND_SHAPE, value, &info);
    std::unique_ptr<void, void (*)(void*)> const owner(info, [](void* mine) { gApi.releaseTypeAndShape(mine); });
    int32_t type = 0;
    gApi.call(kELEMENT_TYPE, static_cast<void const*>(info), &type);
    Tensor tensor;
    tensor.type = dataTypeFrom(static_cast<OnnxType>(type));
    tensor.shape = shapeFrom(info);
    gApi.call(kTENSOR_DATA, value, &tensor.data);
    return tensor;
}

void Kernel::compute(void* context) const
{
    Operator const& op = mCustomOp.mOperator;
    Call call;
    std::memcpy(call.attributes, mAttributes, sizeof(mAttributes));
    call.inputCount = static_cast<int32_t>(op.inputs.size());
    call.outputCount = static_cast<int32_t>(op.outputs.size());
    for (int32_t i = 0; i < call.inputCount; ++i)
    {
        void const* value = nullptr;
        gApi.call(kGET_INPUT, static_cast<void const*>(context), static_cast<size_t>(i), &value);
        call.inputs[i] = tensorFrom(value);
    }
    for (int32_t i = 0; i < call.outputCount; ++i)
    {
        Shape const shape = outputShape(op, i, call);
        void* value = nullptr;
        gApi.call(kGET_OUTPUT, context, static_cast<size_t>(i), &shape.extents[0], static_cast<size_t>(shape.rank),
            &value);
        call.outputs[i] = tensorFrom(value);
    }
    try
    {
        checkCall(op, call);
        run(call, context);
    }
    catch (std::exception const& fault)
    {
        throw std::runtime_error(std::string(op.name) + ": " + fault.what());
    }
}

void Kernel::run(Call const& call, void* context) const
{
    Operator const& op = mCustomOp.mOperator;
    if (mCustomOp.mIsCuda)
    {
#ifdef TOPROVAR_CUDA
        Stream stream = nullptr;
        gApi.call(kGPU_STREAM, static_cast<void const*>(context), &stream);
        size_t const bytes = op.cudaScratchBytes ? op.cudaScratchBytes(call) : 0;
        Status const status = op.runOnCuda(call, scratchOnStream(stream, bytes), stream);
        if (status != 0)
        {
            throw std::runtime_error("the launch failed with CUDA error " + std::to_string(status));
        }
#endif
        return;
    }
    // the session's own threads: their number is the session's, and two pools never compete
    HostParallelFor const onSession = [context](int64_t count, std::function<void(int64_t)> const& body)
    {
        struct Work
        {
            std::function<void(int64_t)> const& body;
            std::mutex mutex;
            std::exception_ptr error;
        };
        Work work{body, {}, nullptr};
        void (*const each)(void*, size_t) = [](void* data, size_t i)
        {
            Work& mine = *static_cast<Work*>(data);
            try
            {
                mine.body(static_cast<int64_t>(i));
            }
            catch (...)
            {
                std::lock_guard<std::mutex> const lock(mine.mutex);
                mine.error = std::current_exception();
            }
        };
        gApi.call(kPARALLEL_FOR, static_cast<void const*>(context), each, static_cast<size_t>(count), size_t{0},
            static_cast<void*>(&work));
        if (work.error)
        {
            std::rethrow_exception(work.error);
        }
    };
    HostThreads const threads(onSession);
    op.runOnCpu(call, 0);
}

double attributeFrom(void const* info, Attribute const& attribute)
{
    if (attribute.type == AttributeType::kFLOAT)
    {
        float value = 0.0f;
        gApi.call(kATTRIBUTE_FLOAT, info, attribute.name, &value);
        return value;
    }
    int64_t value = 0;
    if (attribute.type == AttributeType::kINT)
    {
        gApi.call(kATTRIBUTE_INT64, info, attribute.name, &value);
    }
    else
    {
        size_t count = 1;
        gApi.call(kATTRIBUTE_INT64S, info, attribute.name, &value, &count);
    }
    return static_cast<double>(value);
}

OrtStatus* createKernel(OrtCustomOp const* custom, void const*, void const* info, void** kernel)
{
    return guarded(
        [&]
        {
            auto made = std::make_unique<Kernel>(Kernel{asCustomOp(custom)});
            Operator const& op = made->mCustomOp.mOperator;
            for (size_t i = 0; i < op.attributes.size(); ++i)
            {
                try
                {
                    made->mAttributes[i] = attributeFrom(info, op.attributes[i]);
                }
                catch (ApiFault const& fault)
                {
                    throw std::invalid_argument(std::string(op.name) + ": attribute " + op.attributes[i].name
                        + " is missing or of another type: " + gApi.messageOf(fault));
                }
            }
            *kernel = made.release();
        });
}

//! Names of an input's axes as the graph gives them; "" for an axis without.
std::vector<std::string> axisNames(void const* info, int32_t rank)
{
    std::vector<char const*> names(rank);
    gApi.call(kSYMBOLIC_DIMENSIONS, info, names.data(), names.size());
    return {names.begin(), names.end()};
}

//! Sets an output's type and shape. An extent of -1 takes its axis' name from `names`, or a new one.
void setOutput(void const* context, size_t output, DataType type, Shape const& shape, std::vector<std::string> names)
{
    static std::atomic<int64_t> unnamed{0};
    names.resize(shape.rank);
    std::vector<char const*> pointers;
    for (int32_t axis = 0; axis < shape.rank; ++axis)
    {
        if (shape.extents[axis] >= 0)
        {
            names[axis].clear();
        }
        else if (names[axis].empty())
        {
            names[axis] = "toprovar_" + std::to_string(unnamed.fetch_add(1));
        }
        pointers.push_back(names[axis].c_str());
    }
    void* info = nullptr;
    gApi.call(kCREATE_TYPE_AND_SHAPE, &info);
    std::unique_ptr<void, void (*)(void*)> const owner(info, [](void* mine) { gApi.releaseTypeAndShape(mine); });
    gApi.call(kSET_ELEMENT_TYPE, info, static_cast<int32_t>(onnxTypeFrom(type)));
    gApi.call(kSET_DIMENSIONS, info, &shape.extents[0], static_cast<size_t>(shape.rank));
    gApi.call(kSET_SYMBOLIC_DIMENSIONS, info, pointers.data(), pointers.size());
    gApi.call(kINFER_SET_OUTPUT, context, output, static_cast<void const*>(info));
}

//! An integer attribute while shapes are inferred; those that are not integers shape nothing.
double inferredAttribute(void const* context, Attribute const& rule)
{
    if (rule.type == AttributeType::kFLOAT)
    {
        return 0.0;
    }
    void const* attribute = nullptr;
    int64_t value = 0;
    size_t bytes = 0;
    int32_t const type = rule.type == AttributeType::kINT ? kOP_ATTRIBUTE_INT : kOP_ATTRIBUTE_INTS;
    gApi.call(kINFER_ATTRIBUTE, context, rule.name, &attribute);
    gApi.call(kREAD_ATTRIBUTE, attribute, type, static_cast<void*>(&value), sizeof(value), &bytes);
    return static_cast<double>(value);
}

//! Tells the graph what is known of the outputs' shapes; an operator's first input without axes has an unknown shape.
//!
//! ONNX Runtime chooses output types by input types. Where an attribute names the type, only a type set here counts.
OrtStatus* inferOutputShape(OrtCustomOp const* custom, void* changed)
{
    return guarded(
        [&]
        {
            void const* const context = changed;
            Operator const& op = asCustomOp(custom).mOperator;
            int32_t const to = typeAttribute(op);
            Call call;
            DataType floats = DataType::kFLOAT32;
            std::vector<std::vector<std::string>> names;
            for (size_t i = 0; i < op.inputs.size(); ++i)
            {
                void* info = nullptr;
                int32_t type = 0;
                gApi.call(kINFER_INPUT, context, i, &info);
                gApi.call(kELEMENT_TYPE, static_cast<void const*>(info), &type);
                call.inputs[i].shape = shapeFrom(info);
                names.push_back(axisNames(info, call.inputs[i].shape.rank));
                floats = op.inputs[i].type == TypeRule::kFLOATS ? dataTypeFrom(static_cast<OnnxType>(type)) : floats;
            }
            for (size_t i = 0; i < op.attributes.size(); ++i)
            {
                call.attributes[i] = inferredAttribute(context, op.attributes[i]);
            }
            if (to >= 0)
            {
                floats = dataTypeFrom(static_cast<OnnxType>(static_cast<int32_t>(call.attributes[to])));
            }
            for (size_t i = 0; i < op.outputs.size(); ++i)
            {
                int32_t const like = op.outputShapes[i].like;
                Shape& shape = call.inputs[like].shape;
                if (shape.rank == 0 && to < 0)
                {
                    continue;
                }
                if (shape.rank == 0) // the type must be told, and with it a shape: other inputs have as many axes
                {
                    shape = call.inputs[1].shape;
                    std::fill_n(shape.extents, shape.rank, -1);
                }
                setOutput(context, i, typeOf(op.outputs[i].type, floats),
                    outputShape(op, static_cast<int32_t>(i), call), names[like]);
            }
        });
}

int32_t onnxTypeOf(Port const& port, DataType floats)
{
    return static_cast<int32_t>(onnxTypeFrom(typeOf(port.type, floats)));
}

CustomOp::CustomOp(Operator const& op, DataType floats, bool isCuda)
    : OrtCustomOp{}
    , mOperator(op)
    , mFloats(floats)
    , mIsCuda(isCuda)
{
    auto const none = [](OrtCustomOp const*, size_t) -> int32_t { return 0; };
    auto const nothing = [](OrtCustomOp const*) -> int32_t { return 0; };
    version = kCUSTOM_OP_VERSION;
    getName = [](OrtCustomOp const* self) { return asCustomOp(self).mOperator.name; };
    getProvider = [](OrtCustomOp const* self)
    { return asCustomOp(self).mIsCuda ? "CUDAExecutionProvider" : "CPUExecutionProvider"; };
    getInputType = [](OrtCustomOp const* self, size_t i)
    { return onnxTypeOf(asCustomOp(self).mOperator.inputs[i], asCustomOp(self).mFloats); };
    getInputCount = [](OrtCustomOp const* self) { return asCustomOp(self).mOperator.inputs.size(); };
    getOutputType = [](OrtCustomOp const* self, size_t i)
    { return onnxTypeOf(asCustomOp(self).mOperator.outputs[i], asCustomOp(self).mFloats); };
    getOutputCount = [](OrtCustomOp const* self) { return asCustomOp(self).mOperator.outputs.size(); };
    destroyKernel = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    getInputCharacteristic = none;
    getOutputCharacteristic = none;
    getInputMemoryType = none;
    getVariadicInputMinArity = nothing;
    getVariadicInputHomogeneity = nothing;
    getVariadicOutputMinArity = nothing;
    getVariadicOutputHomogeneity = nothing;
    createKernelV2 = toprovar::createKernel;
    computeV2 = [](void* kernel, void* context)
    { return guarded([&] { static_cast<Kernel*>(kernel)->compute(context); }); };
    inferOutputShape = toprovar::inferOutputShape;
    getStartVersion = [](OrtCustomOp const*) -> int32_t { return 1; };
    getEndVersion = [](OrtCustomOp const*) -> int32_t { return INT32_MAX; };
}

//! Every operator, type and provider of this library.
std::vector<std::unique_ptr<CustomOp>> allCustomOps()
{
    std::vector<std::unique_ptr<CustomOp>> made;
    for (Operator const* op : operators())
    {
        for (DataType const floats : floatTypes(*op))
        {
            if (floats != DataType::kBFLOAT16)
            {
                made.push_back(std::make_unique<CustomOp>(*op, floats, false));
            }
            if (op->runOnCuda)
            {
                made.push_back(std::make_unique<CustomOp>(*op, floats, true));
            }
        }
    }
    return made;
}

//! The domain lives as long as the process: sessions point to it.
void* domainOnce()
{
    static void* const domain = []
    {
        static auto* const ops = new std::vector<std::unique_ptr<CustomOp>>(allCustomOps());
        void* made = nullptr;
        gApi.call(kCREATE_DOMAIN, "toprovar", &made);
        for (auto const& op : *ops)
        {
            gApi.call(kDOMAIN_ADD, made, static_cast<OrtCustomOp const*>(op.get()));
        }
        return made;
    }();
    return domain;
}

} // namespace

} // namespace toprovar

//! What SessionOptions.register_custom_ops_library looks for.
extern "C" TOPROVAR_API void* RegisterCustomOps(void* options, toprovar::OrtApiBase const* base)
{
    using namespace toprovar;
    void const* const table = base->getApi(kAPI_VERSION);
    if (!table)
    {
        // an older ONNX Runtime prints its own complaint; its oldest table can carry ours
        Api const oldest(base->getApi(1));
        return oldest.statusFrom(std::runtime_error(
            std::string("toprovar's operators need ONNX Runtime 1.18 or later; this is ") + base->getVersion()));
    }
    gApi = Api(table);
    return guarded([&] { gApi.call(kADD_DOMAIN, options, domainOnce()); });
}
