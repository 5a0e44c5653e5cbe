"""A thin hand on onnx-ir: writes a graph as one writes the arithmetic, `g.Add(x, y)`.

Matrices are initializers that point into the bundle's weights file; small constants live in the graph. The compute type
of matrix products is a parameter; what must be fp32 is asked for with `f32`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from toprovar.exporter.weights_file import WEIGHTS_FILE, WeightsLayout
from toprovar.plugins.functions import DOMAIN, OPSET, PLUGIN, functions
from toprovar.runtime.manifest import COMPUTE_DTYPES, TensorFacts

IR_VERSION = 10
DTYPES = {
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "I64": ir.DataType.INT64,
    "U8": ir.DataType.UINT8,
    "I32": ir.DataType.INT32,
}
# attention would fall apart into its scores, and no builder selects more than 3840 tokens; what is left is element by
# element, and TensorRT fuses it into the products around it
AS_PLUGINS = ("CachedAttention", "EntropyAttention", "MaskedAttention", "TokenGate")
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class GraphBuilder:
    """Collects nodes, inputs and outputs of one graph.

    layout:  where the weights lie
    compute: "fp32", "fp16" or "bf16": the type of matrix products
    """

    def __init__(self, name: str, layout: WeightsLayout, compute: str = "fp32") -> None:
        self.name = name
        self.layout = layout
        self.compute = DTYPES[COMPUTE_DTYPES[compute]]
        self._nodes: list[ir.Node] = []
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._initializers: dict[str, ir.Value] = {}
        self._facts: dict[str, TensorFacts] = {}
        self._count = 0
        self._custom_kinds: set[str] = set()

    # -- values ----------------------------------------------------------------------------------------------------

    def input(self, name: str, shape: Sequence[int], dtype: str = "F32", is_open: bool = False) -> ir.Value:
        """is_open: the first axis may be anything up to shape[0]."""
        extents: list[int | str] = [f"{name}_length", *shape[1:]] if is_open else [*shape]
        value = ir.Value(name=name, type=ir.TensorType(DTYPES[dtype]), shape=ir.Shape(extents))
        self._inputs.append(value)
        self._facts[name] = TensorFacts.model_validate({"dtype": dtype, "shape": shape, "is_open": is_open})
        return value

    def output(self, value: ir.Value, name: str, shape: Sequence[int], dtype: str = "F32") -> None:
        """Names a value as an output. It keeps feeding the graph under that name: a copy of every new key would cost a
        millisecond per step of a 2B model."""
        is_free = value.producer() is not None and value not in self._outputs
        named = value if is_free else self.Identity(value)
        named.name = name
        named.type = ir.TensorType(DTYPES[dtype])
        named.shape = ir.Shape(shape)
        self._outputs.append(named)
        self._facts[name] = TensorFacts.model_validate({"dtype": dtype, "shape": shape})

    def weight(self, name: str, rows: tuple[int, int] | None = None) -> ir.Value:
        """A tensor of the weights file, or a contiguous range of its rows."""
        spec = self.layout.specs[name]
        shape, offset = spec.shape, self.layout.offsets[name]
        key = name
        if rows is not None:
            start, end = rows
            if not 0 <= start < end <= shape[0]:
                raise ValueError(f"rows {start}:{end} of {name} are outside its {shape[0]} rows")
            row_bytes = spec.size_bytes // shape[0]
            shape, offset = (end - start, *shape[1:]), offset + start * row_bytes
            key = f"{name}[{start}:{end}]"
        if key not in self._initializers:
            size_bytes = spec.size_bytes if rows is None else (rows[1] - rows[0]) * row_bytes
            tensor = ir.ExternalTensor(
                WEIGHTS_FILE, offset, size_bytes, DTYPES[spec.dtype], shape=ir.Shape(shape), name=key
            )
            self._initializers[key] = ir.Value(
                name=key, type=ir.TensorType(DTYPES[spec.dtype]), shape=ir.Shape(shape), const_value=tensor
            )
        return self._initializers[key]

    def constant(self, array: np.ndarray | Sequence[int] | float, dtype: Any = None) -> ir.Value:
        """A small constant inside the graph, shared with equal ones; integers become int64, other numbers float32."""
        values = np.asarray(array)
        if dtype is not None:
            values = values.astype(dtype)
        elif values.dtype.kind in "iu":
            values = values.astype(np.int64)
        elif values.dtype.kind == "f":
            values = values.astype(np.float32)
        content = str(values.reshape(-1).tolist()) if values.size <= 8 else sha256(values.tobytes()).hexdigest()[:16]
        key = f"const_{values.dtype}_{'x'.join(map(str, values.shape))}_{content}"
        if key not in self._initializers:
            tensor = ir.tensor(np.ascontiguousarray(values), name=key)
            self._initializers[key] = ir.Value(
                name=key, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor
            )
        return self._initializers[key]

    def full(self, value: np.generic, shape: Sequence[int]) -> ir.Value:
        """A tensor of one value, made when the graph runs, so that it takes no room in the file."""
        return self.Expand(self.constant(np.asarray(value)[None], value.dtype), list(shape))

    # -- nodes -----------------------------------------------------------------------------------------------------

    def op(self, kind: str, inputs: Sequence[Any], outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        """Adds a node; numbers and arrays among the inputs become constants. Several outputs come as a tuple."""
        values = [item if isinstance(item, ir.Value) or item is None else self.constant(item) for item in inputs]
        node = ir.node(kind, values, attributes, domain=domain, num_outputs=outputs, name=f"n{self._count}_{kind}")
        for index, value in enumerate(node.outputs):
            value.name = f"v{self._count}_{index}"
        self._count += 1
        self._nodes.append(node)
        return node.outputs[0] if outputs == 1 else tuple(node.outputs)

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        if not kind[0].isupper():
            raise AttributeError(kind)

        def call(*inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
            return self.op(kind, inputs, outputs, **attributes)

        return call

    def custom(self, kind: str, inputs: Sequence[Any], outputs: int = 1, **attributes: Any) -> Any:
        """A node of our own domain; those that TensorRT would not fuse better itself ask it for a plugin."""
        self._custom_kinds.add(kind)
        plugin = PLUGIN if kind in AS_PLUGINS else {}
        return self.op(kind, inputs, outputs, domain=DOMAIN, **attributes, **plugin)

    # -- the arithmetic that recurs --------------------------------------------------------------------------------

    def f32(self, x: ir.Value) -> ir.Value:
        return x if self.compute == ir.DataType.FLOAT else self.Cast(x, to=ir.DataType.FLOAT.value)

    def narrow(self, x: ir.Value) -> ir.Value:
        return x if self.compute == ir.DataType.FLOAT else self.Cast(x, to=self.compute.value)

    def reshape(self, x: ir.Value, shape: Sequence[int]) -> ir.Value:
        return self.Reshape(x, self.constant(list(shape)))

    def split(self, x: ir.Value, axis: int, sizes: Sequence[int]) -> Sequence[ir.Value]:
        parts = self.Split(x, self.constant(list(sizes)), axis=axis, outputs=len(sizes))
        return parts if len(sizes) > 1 else (parts,)

    def linear(self, x: ir.Value, name: str, bias: str | None = None) -> ir.Value:
        """x @ W + b in the compute type; W is stored [in, out]. x: fp32 or compute type, at least 2-D."""
        y = self.MatMul(self.narrow(x), self.weight(name))
        return self.Add(y, self.weight(bias)) if bias else y

    def modulated_norm(self, x: ir.Value, scale: ir.Value, shift: ir.Value, dtype: str | None = None) -> ir.Value:
        """Layer norm without affine, eps 1e-6, * scale + shift, in the compute type unless told otherwise.

        x: [n, R, C] fp32; scale, shift: [1, R or 1, C] fp32.
        """
        to = self.compute if dtype is None else DTYPES[dtype]
        return self.custom("ModulatedNorm", [x, scale, shift], epsilon=1e-6, to=to.value)

    def gated_residual(self, x: ir.Value, y: ir.Value, name: str, gate: ir.Value) -> ir.Value:
        """x + (y @ W + b) * gate, the product in the compute type. x: [n, R, C] fp32; gate: [1, R or 1, C] fp32."""
        operands = [x, self.MatMul(y, self.weight(name)), self.weight(f"{name}_bias"), gate]
        return self.custom("GatedResidual", operands)

    def resize(self, x: ir.Value, rows: np.ndarray | None, columns: np.ndarray | None) -> ir.Value:
        """Separable resize of [..., h, w] in fp32 by constant matrices [new, old]; None leaves an axis as it is."""
        if columns is not None:
            x = self.MatMul(x, self.constant(columns.T))
        return self.MatMul(self.constant(rows), x) if rows is not None else x

    # -- the finished graph ----------------------------------------------------------------------------------------

    def model(self) -> ir.Model:
        opsets = {"": OPSET, DOMAIN: 1} if self._custom_kinds else {"": OPSET}
        graph = ir.Graph(
            self._inputs,
            self._outputs,
            nodes=self._nodes,
            initializers=list(self._initializers.values()),
            opset_imports=opsets,
            name=self.name,
        )
        known = functions()
        used = [ir.serde.deserialize_function(known[kind]()) for kind in sorted(self._custom_kinds)]
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="toprovar", functions=used)

    def signature(self, side: str) -> dict[str, TensorFacts]:
        """Names, types and shapes of the graph's "inputs" or "outputs", for the manifest."""
        values = self._inputs if side == "inputs" else self._outputs
        return {str(value.name): self._facts[str(value.name)] for value in values}

    def save(self, path: Path) -> None:
        ir.save(self.model(), path)
