"""Products of a few rows with large weights, in compiled steps of ``generate``.

Their time is what reading the weights takes. The kernel here (:mod:`small_batch_matmul_triton`)
reads them at more of the memory's bandwidth than cuBLAS's for so few rows do, and than the
reductions that inductor makes of one row's products: docs/benchmarks has the figures.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

try:
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
except ImportError as error:
    raise ImportError(
        f"torch {torch.__version__} has no torch._inductor.custom_graph_pass with CustomGraphPass "
        "and get_hash_for_files, which replaces products in compiled steps: install torch 2.11 to "
        "2.15, or answer with --cache dynamic"
    ) from error

# Sizes of the kernel's blocks: the fastest of 400 settings on an H200, or within 2 % of it, for all
# products of a step. Each has 80 KiB of weights and rows under way, so two fit a multiprocessor.
ROWS, COLUMNS, WIDTH = 16, 64, 128
BLOCKS_A_PROCESSOR = 2

# A product with less is over before a kernel of its own would pay.
SMALLEST_WEIGHT = 2**22

DTYPES = (torch.bfloat16, torch.float16)


def takes_layers_of(model: nn.Module) -> bool:
    """Whether the kernel computes with the layers' weights as the model holds them, and not as a
    package holds them in fewer bytes."""
    return all(type(each) is nn.Parameter and each.dtype in DTYPES for each in model.parameters())


@torch.library.custom_op("glm4v_patched::parts_of_product", mutates_args=())
def parts_of_product(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """``x @ weight.T``, as sums over parts of the width that are yet to be added.

    Args:
        x: ``(M, K)`` bf16 or fp16; a GPU takes at most :data:`ROWS` rows.
        weight: ``(N, K)`` of the same dtype. A GPU takes multiples of :data:`COLUMNS` and
            :data:`WIDTH`.
        parts: How many of them there are, of :data:`WIDTH` times :func:`blocks_a_part` each but the
            last.

    Returns:
        ``(parts, M, N)`` fp32.
    """
    size = blocks_a_part(x.shape[1], parts) * WIDTH
    pieces = zip(x.float().split(size, dim=1), weight.float().split(size, dim=1), strict=True)
    return torch.stack([piece @ of_weight.T for piece, of_weight in pieces])


@parts_of_product.register_fake
def _(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    return x.new_empty(parts, len(x), len(weight), dtype=torch.float32)


@parts_of_product.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    from . import small_batch_matmul_triton  # takes Triton

    blocks = blocks_a_part(x.shape[1], parts)
    sizes = ROWS, COLUMNS, WIDTH
    return small_batch_matmul_triton.parts_of_product(x, weight, parts, blocks, sizes)


def blocks_a_part(width: int, parts: int) -> int:
    return -(-(width // WIDTH) // parts)


def parts_for(columns: int, width: int, processors: int) -> int:
    """Into how many parts a product is cut, so that its blocks fill the GPU once. A product that
    fills it already is one part."""
    wanted = max(BLOCKS_A_PROCESSOR * processors // (columns // COLUMNS), 1)
    # Parts of whole blocks: the last ones would be empty where they do not go up.
    return -(-(width // WIDTH) // blocks_a_part(width, min(wanted, width // WIDTH)))


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
            and _multiprocessors(x.device) > 0
            and x.dtype == transposed.dtype
            and x.dtype in DTYPES
            and all(isinstance(size, int) for size in (*x.shape, columns))
            and len(x) <= ROWS
            and columns * width >= self.smallest_weight
            and columns % COLUMNS == 0
            and width % WIDTH == 0
            and transposed.stride() == (1, width)
        )


def _multiprocessors(device: torch.device) -> int:
    """That the kernel runs on: of GPUs since Ampere, whose shared memory holds its blocks. A CPU,
    for tests, is one."""
    if device.type != "cuda":
        return 1
    facts = torch.cuda.get_device_properties(device)
    return facts.multi_processor_count if facts.major >= 8 else 0


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
        parts = parts_for(columns, width, _multiprocessors(value.device))
        product = call(torch.ops.glm4v_patched.parts_of_product.default, x, weight, parts)
        product = call(aten.sum.dim_IntList, product, [0])
        if bias:
            product = call(aten.add.Tensor, product, *bias)
        product = call(torch.ops.prims.convert_element_type.default, product, value.dtype)
    node.replace_all_uses_with(product)
    graph.erase_node(node)
