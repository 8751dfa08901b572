"""The whole model in one graph: torch.compile(fullgraph=True) and torch.export."""

import pytest
import torch

from tests.helpers.tiny import grown_image, padded, pictures, text, three_id_image, tiny_model

# fp32. Measured 0 with a backend that computes op by op.
ATOL = 1e-5


@pytest.fixture
def model():
    torch._dynamo.reset()
    yield tiny_model(num_layers=1)
    torch._dynamo.reset()


@torch.no_grad()
def test_compiles_to_one_graph(model):
    first = [*text(3, seed=1), *grown_image(), *text(4, seed=2)]
    inputs = padded([first, [*grown_image(), *text(2, seed=3)]], "left")
    inputs |= {"pixel_values": pictures(2)}
    want = model(**inputs)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    got = torch.compile(model, fullgraph=True, backend=backend)(**inputs)
    valid = inputs["attention_mask"].bool()
    assert (got.logits - want.logits)[valid].abs().max() <= ATOL
    assert len(graphs) == 1
    assert got.past_key_values.get_seq_length() == want.past_key_values.get_seq_length()


@torch.no_grad()
def test_a_compiled_graph_says_when_rows_do_not_fit_it(model):
    # With inductor's decompositions, which lose nothing of the checks.
    backend = "aot_eager_decomp_partition"
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
    ids = torch.tensor([text(12)])
    compiled(input_ids=ids, use_cache=False)
    for fault in (ids + 512, ids - 600):
        with pytest.raises(RuntimeError, match="these rows do not fit a compiled graph"):
            compiled(input_ids=fault, use_cache=False)
    # As long as grown ones, for the shapes of short rows tell that they are not.
    grown = {"input_ids": torch.tensor([[*text(4), *grown_image(), *text(2)]])}
    grown |= {"pixel_values": pictures(1), "use_cache": False}
    assert (compiled(**grown).logits - model(**grown).logits).abs().max() <= ATOL
    row = torch.tensor([[*text(5), *three_id_image(), *text(4)]])
    with pytest.raises(RuntimeError, match="in the three-id form .give grown rows"):
        compiled(input_ids=row, pixel_values=pictures(1), use_cache=False)


@torch.no_grad()
def test_exports_text(model):
    inputs = {"input_ids": torch.tensor([text(8, seed=1)]), "use_cache": False}
    program = torch.export.export(model, (), inputs, strict=False)
    other = inputs | {"input_ids": torch.tensor([text(8, seed=4)])}
    got = program.module()(**other)
    assert (got.logits - model(**other).logits).abs().max() <= ATOL
    with pytest.raises(RuntimeError, match="do not fit a compiled graph"):
        program.module()(**(inputs | {"input_ids": inputs["input_ids"] + 512}))
