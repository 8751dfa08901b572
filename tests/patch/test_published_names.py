"""docs/patching.md is complete: what the published code has, we have, or the page says what to do.

And what it says to do instead works.
"""

import re
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from glm4v_patched.remote import (
    configuration_chatglm,
    modeling_chatglm,
    tokenization_chatglm,
    visual,
)
from glm4v_patched.remote.modeling_chatglm import (
    ChatGLMForSequenceClassification,
    GLMBlock,
    apply_rotary,
)
from tests.helpers.legacy_repository import NUM_RANKS, write_legacy_repository
from tests.helpers.tiny import text, tiny_config, tiny_model
from tests.patch.published_names import FILES, OBJECTS

PAGE = Path(__file__).parents[2] / "docs" / "patching.md"
FILES_OF_OURS = {
    "modeling_chatglm": modeling_chatglm,
    "visual": visual,
    "configuration_chatglm": configuration_chatglm,
    "tokenization_chatglm": tokenization_chatglm,
}
# Ours of the same name is something else, as the page says.
OF_ANOTHER_MEANING = {"decoder"}


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> dict[str, object]:
    """An object of each class, and the files."""
    model = tiny_model()
    found = FILES_OF_OURS | {
        "ChatGLMForConditionalGeneration": model,
        "ChatGLMConfig": tiny_config(),
    }
    found["ChatGLMForSequenceClassification"] = ChatGLMForSequenceClassification(tiny_config())
    for module in model.modules():
        kind = type(module)
        if kind.__module__ in (modeling_chatglm.__name__, visual.__name__):
            found["visual.MLP" if kind is visual.MLP else kind.__name__] = module
    folder = tmp_path_factory.mktemp("published") / "glm-4v-9b"
    write_legacy_repository(folder)
    found["ChatGLM4Tokenizer"] = tokenization_chatglm.ChatGLM4Tokenizer.from_pretrained(folder)
    return found


def named_in_the_table() -> set[str]:
    """What stands in backticks in the first column of the table, but for calls."""
    _, _, rest = PAGE.read_text().partition("\n## Names that are not here\n")
    rows = [row for row in rest.partition("\n## ")[0].splitlines() if row.startswith("| `")]
    cells = [row.split("|")[1] for row in rows]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize("owner", [*FILES, *OBJECTS])
def test_each_published_name_is_ours_or_in_the_table(ours, owner):
    lacking = {n for n in (FILES | OBJECTS)[owner].split() if not hasattr(ours[owner], n)}
    assert lacking <= named_in_the_table(), f"docs/patching.md does not say: {lacking}"


def test_the_table_has_nothing_that_is_here(ours):
    here = {n for owner, names in OBJECTS.items() for n in names.split() if hasattr(ours[owner], n)}
    lacking = {n for o, names in OBJECTS.items() for n in names.split() if not hasattr(ours[o], n)}
    assert named_in_the_table() & here - lacking == OF_ANOTHER_MEANING


def test_layers_run_by_hand_as_the_table_says():
    """As an exporter does that takes the model apart: the sum of its steps is the model."""
    model = tiny_model().eval()
    parts = model.transformer
    ids = torch.tensor([text(7)])
    positions = torch.arange(ids.shape[1])[None]
    hidden = parts.embedding(ids)
    cos, sin = parts.rotary_pos_emb(positions, hidden.dtype)
    with torch.no_grad():
        for layer in parts.encoder.layers:
            assert isinstance(layer, GLMBlock)
            hidden = layer(hidden, cos, sin, None, None, None, {})
        logits = parts.output_layer(parts.encoder.final_layernorm(hidden))
        assert torch.equal(logits, model(input_ids=ids).logits)
    turned = apply_rotary(torch.ones(1, 1, 7, model.config.kv_channels), cos, sin)
    assert turned.shape == (1, 1, 7, model.config.kv_channels)


def test_calls_of_the_published_modules_are_errors():
    """None of them is taken for something else."""
    parts = tiny_model().transformer
    hidden, mask = parts.embedding(torch.tensor([text(7)])), torch.ones(1, 1, 7, 7).bool()
    layer = parts.encoder.layers[0]
    with pytest.raises(TypeError):
        parts.rotary_pos_emb(7)
    for call in (
        lambda: layer(hidden, mask, rotary_pos_emb=hidden),
        lambda: layer(hidden, mask, hidden),
        lambda: layer(hidden, mask, hidden, kv_cache=None, use_cache=True),
        lambda: parts.encoder(hidden, mask, hidden, kv_caches=None, use_cache=True),
        lambda: parts(input_ids=torch.tensor([text(7)]), full_attention_mask=mask),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()


def test_a_cache_is_read_and_reordered_as_the_table_says():
    model = tiny_model().eval()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.tensor([text(5), text(5, seed=1)]), past_key_values=cache)
    keys = cache.layers[0].keys
    assert keys.shape[2] == cache.get_seq_length() == 5
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(cache.layers[0].keys, keys.flip(0))


def test_a_vocabulary_is_read_as_the_table_says(ours):
    tokenizer = ours["ChatGLM4Tokenizer"]
    assert tokenizer.vocab_size == NUM_RANKS  # the published n_words
    assert sorted(tokenizer.get_vocab().values()) == [*range(len(tokenizer))]
    assert tokenizer.backend_tokenizer.decoder is not None
