"""The library's custom operators in ONNX Runtime on the CPU, functions' bodies, and float64 references agree."""

import numpy as np
import onnxruntime
import pytest
from onnx import helper, parser
from operator_cases import (
    BODY_TOLERANCE,
    Case,
    all_cases,
    attention_case,
    gate_case,
    made,
    masked_case,
    model_of,
    norm_case,
)

from toprovar.plugins.functions import DOMAIN, OPSET, PLUGIN, functions

CASES = all_cases()


def session(model, plugins=None, threads=2):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    if plugins is not None:
        options.register_custom_ops_library(str(plugins.path))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_and_body_agree_with_the_reference(case, plugin_library):
    kernel = session(model_of(case, has_body=False), plugin_library)  # without a body it is the kernel or nothing
    case.check(kernel.run(None, case.inputs))
    body = session(model_of(case, has_body=True))
    case.check(body.run(None, case.inputs), BODY_TOLERANCE)


@pytest.mark.parametrize(("T", "dtype"), [(1, "f4"), (81, "f4"), (81, "f2")])
def test_kernel_and_body_agree_on_a_row_whose_keys_are_all_hidden(T, dtype, plugin_library):
    case = masked_case(17, T, 0, dtype)
    assert (case.inputs["mask"][1] == -1e4).all()
    kernel = session(model_of(case, has_body=False), plugin_library).run(None, case.inputs)
    body = session(model_of(case, has_body=True)).run(None, case.inputs)
    # a score beside a mask of -1e4 is rounded to 1e-3, so weights are too
    rounded = {"float32": 4e-3, "float16": 1e-2}
    for found in (kernel, body):
        case.check(found, rounded)


def test_every_operator_has_a_case_and_a_function(plugin_library):
    assert {case.kind for case in CASES} == set(functions()) == set(plugin_library.operators)


def test_a_kernel_wins_over_the_body(plugin_library):
    case = gate_case(1, 81, 17, 4)
    model = model_of(case, has_body=True)
    wrong = (
        "TokenGate <count, plugin_namespace, plugin_version> (score) => (indices) { indices = Cast <to = 7> (score) }"
    )
    del model.functions[:]
    model.functions.append(parser.parse_function(f'<domain: "{DOMAIN}", opset_import: ["" : {OPSET}]>\n{wrong}'))
    assert session(model).run(None, case.inputs)[0].shape == (81,)
    case.check(session(model, plugin_library).run(None, case.inputs))


@pytest.mark.parametrize("case", [case for case in CASES if case.kind != "TokenGate"][::5], ids=str)
def test_open_extents_run_too(case, plugin_library):
    case.check(session(model_of(case, has_body=False, is_open=True), plugin_library).run(None, case.inputs))


@pytest.mark.parametrize("dtype", ["f4", "f2"])
@pytest.mark.parametrize("shape", [(17, 2, 81), ("n", 2, 81)])
def test_the_norms_type_follows_its_attribute_inside_a_graph(dtype, shape, plugin_library):
    case = norm_case(17, 2, 1, 81, dtype)
    node = helper.make_node("ModulatedNorm", list(case.inputs), ["inner"], domain=DOMAIN, **case.attributes, **PLUGIN)
    inputs = [helper.make_tensor_value_info("x", 1, shape)]
    inputs += [helper.make_tensor_value_info(name, 1, (1, 1, 81)) for name in ("scale", "shift")]
    output = helper.make_tensor_value_info("wide", 1, None)
    nodes = [node, helper.make_node("Cast", ["inner"], ["wide"], to=1)]
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(helper.make_graph(nodes, "g", inputs, [output]), opset_imports=opsets, ir_version=10)
    running = session(model, plugin_library)
    assert running.get_outputs()[0].shape == list(shape)
    (found,) = running.run(None, case.inputs)
    case.check([found.astype(dtype)])
    if dtype == "f2":
        assert np.array_equal(found, found.astype(np.float16))


def test_shapes_are_inferred(plugin_library):
    case = attention_case("EntropyAttention", 17, 81, 2, 3, 128, "f4")
    outputs = session(model_of(case, has_body=False), plugin_library).get_outputs()
    assert [output.shape for output in outputs] == [[17, 2, 3, 128], [17, 2]]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_do_not_depend_on_threads(threads, plugin_library):
    case = attention_case("EntropyAttention", 81, 987, 1, 2, 16, "f4")
    model = model_of(case, has_body=False)
    first = session(model, plugin_library, 2).run(None, case.inputs)
    again = session(model, plugin_library, threads).run(None, case.inputs)
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))


def test_many_sessions_share_the_library(plugin_library):
    case = gate_case(3, 987, 500, 2)
    running = [session(model_of(case, has_body=False), plugin_library) for _ in range(3)]
    for one in running:
        case.check(one.run(None, case.inputs))


def test_shapes_that_do_not_fit_are_told(plugin_library):
    case = norm_case(17, 2, 2, 81, "f4")
    running = session(model_of(case, has_body=False, is_open=True), plugin_library)
    with pytest.raises(Exception, match=r"ModulatedNorm: shift: found \[1, 2, 80\]; expected \[1, 2, 81\]"):
        running.run(None, {**case.inputs, "shift": made("f4", 1, 2, 80)})


def test_a_missing_attribute_is_told(plugin_library):
    case = gate_case(1, 81, 17, 4)
    model = model_of(Case(case.kind, case.inputs, {}, case.expected, case.types), has_body=False)
    with pytest.raises(Exception, match="TokenGate: attribute count is missing or of another type"):
        session(model, plugin_library)
