"""Products of few rows in compiled steps: which are replaced, and that they give what they gave."""

import copy

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch.nn.functional import linear

from glm4v_patched.engine.few_rows import (
    BLOCKS_A_PROCESSOR,
    COLUMNS,
    WIDTH,
    blocks_a_part,
    parts_for,
    parts_of_product,
)
from glm4v_patched.inference.decoding import small_batch_matmul
from glm4v_patched.inference.decoding.small_batch_matmul import ProductsOfFewRows

pytestmark = pytest.mark.newest  # torch's compiler

MULTIPROCESSORS = 132  # of an H200
LAYERS = {
    "queries, keys and values": (4608, 4096),
    "attention's output": (4096, 4096),
    "gate and up": (27392, 4096),
    "down": (4096, 13696),
    "vocabulary": (151552, 4096),
}
TINY = ProductsOfFewRows(device="cpu", smallest_weight=0)


@pytest.fixture
def replaced(monkeypatch):
    """The products that were, as long as the test runs."""
    seen, replace = [], small_batch_matmul._replace

    def note(graph, node, *rest):
        seen.append(node.target)
        replace(graph, node, *rest)

    monkeypatch.setattr(small_batch_matmul, "_replace", note)
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield seen
    torch._dynamo.reset()


def compiled(module, pass_=TINY):
    return torch.compile(module, options={"post_grad_custom_pre_pass": pass_})


def two_layers(width=384, inner=256, columns=128):
    torch.manual_seed(0)
    layers = nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, columns, bias=False)
    return nn.Sequential(*layers).bfloat16().requires_grad_(False)


@pytest.mark.parametrize(
    ("rows", "multiprocessors"), [(1, MULTIPROCESSORS), (5, 1), (16, MULTIPROCESSORS)]
)
def test_a_compiled_graph_has_the_products_replaced_and_gives_what_it_gave(
    monkeypatch, replaced, rows, multiprocessors
):
    monkeypatch.setattr(small_batch_matmul, "multiprocessors", lambda device: multiprocessors)
    module, x = two_layers(), torch.randn(rows, 384).bfloat16()
    torch.testing.assert_close(compiled(module)(x), module(x), rtol=0.02, atol=0.01)
    aten = torch.ops.aten
    assert sorted(map(str, replaced)) == [str(aten.addmm.default), str(aten.mm.default)]


@pytest.mark.parametrize(
    ("sizes", "dtype", "fields"),
    [
        ((17, 128, 384), torch.bfloat16, {}),
        ((5, 128, 384), torch.float32, {}),
        ((5, 128, 320), torch.bfloat16, {}),
        ((5, 96, 384), torch.bfloat16, {}),
        ((5, 128, 384), torch.bfloat16, {"smallest_weight": 128 * 384 + 1}),
        ((5, 128, 384), torch.bfloat16, {"device": "cuda"}),
    ],
)
def test_other_products_are_left_alone(replaced, sizes, dtype, fields):
    rows, columns, width = sizes
    layer = nn.Linear(width, columns).to(dtype).requires_grad_(False)
    x = torch.randn(rows, width, dtype=dtype)
    pass_ = ProductsOfFewRows(**({"device": "cpu", "smallest_weight": 0} | fields))
    torch.testing.assert_close(compiled(layer, pass_)(x), layer(x), rtol=0.02, atol=0.01)
    assert not replaced


def test_parts_fill_the_gpu_once_and_none_is_empty():
    room = BLOCKS_A_PROCESSOR * MULTIPROCESSORS
    for columns, width in LAYERS.values():
        parts, blocks = parts_for(columns, width, MULTIPROCESSORS), columns // COLUMNS
        assert parts == 1 if blocks > room else parts * blocks <= room < (parts + 1) * blocks
    for blocks in range(1, 40):
        for multiprocessors in range(1, 140, 7):
            parts = parts_for(COLUMNS, blocks * WIDTH, multiprocessors)
            assert (parts - 1) * blocks_a_part(blocks * WIDTH, parts) < blocks


def test_parts_are_sums_over_the_width():
    x, weight = torch.randn(3, 640).bfloat16(), torch.randn(64, 640).bfloat16()
    parts = parts_of_product(x, weight, 2)
    assert parts.shape == (2, 3, 64) and parts.dtype == torch.float32
    torch.testing.assert_close(parts[0], x[:, :384].float() @ weight[:, :384].float().T)
    torch.testing.assert_close(parts.sum(0), x.float() @ weight.float().T)


def test_generate_compiles_once_for_equal_options():
    """It compares a call's options, which it copies, with the last ones."""
    assert copy.deepcopy(TINY) == TINY != ProductsOfFewRows()
    assert copy.deepcopy(TINY).uuid() == TINY.uuid() != ProductsOfFewRows().uuid()


def test_which_weights_it_takes():
    module = two_layers()
    assert small_batch_matmul.takes_layers_of(module)
    module[2].weight = nn.Parameter(module[2].weight.byte(), requires_grad=False)  # held in fp8
    assert small_batch_matmul.takes_layers_of(module)
    module[0].bias = nn.Parameter(module[0].bias.float(), requires_grad=False)
    assert not small_batch_matmul.takes_layers_of(module)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 16, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("columns", "width"), [*LAYERS.values(), (64, 128), (128, 5 * 128)])
def test_the_kernel_gives_the_product(rows, dtype, columns, width):
    torch.manual_seed(0)
    x = torch.randn(rows, width, device="cuda").to(dtype)
    weight = torch.randn(columns, width, device="cuda").to(dtype)
    for parts in (0, 1, parts_for(columns, width, MULTIPROCESSORS)):
        out = parts_of_product(x, weight, parts)
        wanted = linear(x.float(), weight.float())
        close = 1e-3 if dtype.itemsize == 1 else 1e-4  # tensor cores sum products of fp8 so
        assert (out.sum(0) - wanted).norm() < close * wanted.norm()
    torch.library.opcheck(parts_of_product, (x, weight, 1), test_utils="test_faketensor")


@pytest.mark.gpu
def test_the_kernel_refuses_other_sizes():
    x, weight = (torch.randn(size, 128, device="cuda").bfloat16() for size in (33, 64))
    with pytest.raises(ValueError, match=r"\(33, 128\).*at most 32 rows"):
        parts_of_product(x, weight, 1)


@pytest.mark.gpu
def test_on_a_gpu_compiled_products_are_replaced(replaced):
    module = two_layers(4096, 13696, 4096).cuda()
    x = torch.randn(8, 4096, device="cuda").bfloat16()
    out = compiled(module, ProductsOfFewRows())(x)
    torch.testing.assert_close(out, module(x), rtol=0.02, atol=0.02)
    assert len(replaced) == 2
