"""Gives compiled steps of ``generate`` the kernel for products of a few rows
(:mod:`..engine.few_rows`)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...engine.few_rows import COLUMNS, WIDTH, multiprocessors, parts_for

try:
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
except ImportError as error:
    raise ImportError(
        f"torch {torch.__version__} has no torch._inductor.custom_graph_pass with CustomGraphPass "
        "and get_hash_for_files, which replaces products in compiled steps: install torch 2.11 to "
        "2.15, or answer with --cache dynamic"
    ) from error

ROWS = 16
"""At most, of products that are replaced."""

# A product with less is over before a kernel of its own would pay.
SMALLEST_WEIGHT = 2**22

# Of weights that are multiplied as they are; those in fp8 are multiplied by engine/fp8_numbers.py.
DTYPES = (torch.bfloat16, torch.float16)


def takes_layers_of(model: nn.Module) -> bool:
    """Whether the kernel computes with the layers' weights as the model holds them, and not as a
    package holds them in fewer bytes."""
    held = (*DTYPES, torch.uint8)  # bytes of fp8.HeldLinear
    return all(type(each) is nn.Parameter and each.dtype in held for each in model.parameters())


@dataclass(frozen=True)
class ProductsOfFewRows(CustomGraphPass):
    """Replaces products in a graph that inductor compiles: its ``post_grad_custom_pre_pass``.

    Two of them are equal if their fields are, so that ``generate`` compiles a step once.
    """

    device: str = "cuda"
    smallest_weight: int = SMALLEST_WEIGHT

    def __call__(self, graph: fx.Graph) -> None:
        for target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            for node in graph.find_nodes(op="call_function", target=target):
                *bias, x, transposed = node.args
                if self._takes(x.meta["val"], transposed.meta["val"]) and not node.kwargs:
                    _replace(graph, node, x, transposed, *bias)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,), repr(self))

    def _takes(self, x: Tensor, transposed: Tensor) -> bool:
        """Whether a product, of fake tensors, is of a few rows with a large weight as a linear
        layer holds it."""
        width, columns = transposed.shape
        return (
            x.device.type == self.device
            and multiprocessors(x.device) > 0
            and x.dtype == transposed.dtype
            and x.dtype in DTYPES
            and all(isinstance(size, int) for size in (*x.shape, columns))
            and len(x) <= ROWS
            and columns * width >= self.smallest_weight
            and columns % COLUMNS == 0
            and width % WIDTH == 0
            and transposed.stride() == (1, width)
        )


def _replace(graph: fx.Graph, node: fx.Node, x: fx.Node, transposed: fx.Node, *bias) -> None:
    """By the parts of the product, their sum, the bias and the dtype: what comes after the product
    takes the last three into its own kernel."""
    aten, value = torch.ops.aten, transposed.meta["val"]
    width, columns = value.shape

    def call(target, *args) -> fx.Node:
        made = graph.call_function(target, args)
        values = fx.map_arg(args, lambda each: each.meta["val"])
        with value.fake_mode:
            made.meta["val"] = target(*values)
        return made

    with graph.inserting_before(node):
        weight = call(aten.permute.default, transposed, [1, 0])
        parts = parts_for(columns, width, multiprocessors(value.device))
        product = call(torch.ops.glm4v_patched.parts_of_product.default, x, weight, parts)
        product = call(aten.sum.dim_IntList, product, [0])
        if bias:
            product = call(aten.add.Tensor, product, *bias)
        product = call(torch.ops.prims.convert_element_type.default, product, value.dtype)
    node.replace_all_uses_with(product)
    graph.erase_node(node)
