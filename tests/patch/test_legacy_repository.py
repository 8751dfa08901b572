"""The stand-in for the published repository has its numbers, and its defects."""

import pytest
import torch
from transformers import AutoTokenizer

from glm4v_patched.remote.tokenization_chatglm import ChatGLM4Tokenizer
from tests.helpers.legacy_repository import (
    LEGACY_SPECIAL_TOKENS,
    SENTENCES,
    remote_code_under,
    write_legacy_repository,
)
from tests.helpers.tiny import (
    golden_case,
    golden_json,
    padded,
    pictures,
    text,
    three_id_image,
    tiny_model,
)

# As in parity/test_golden.py. Measured: logits 2.4e-5, gradients 1.2e-5.
ATOL = 4e-5
GRADIENT_ATOL = 2e-5

UNPADDED = ["text_single", "image_single", "image_single_labels", "image_batch2_labels"]
PADDED = ["left_pad_labels", "right_pad_labels"]


def padded_images() -> dict[str, torch.Tensor]:
    rows = [[*text(3), *three_id_image(), *text(length, seed=1)] for length in (4, 7)]
    return padded(rows, "left") | {"images": pictures(2)}


def compare_with_golden(model, case: str, inputs: dict, valid=...) -> None:
    _, want, gradients = golden_case(f"{case}.fp32")
    output = model(**inputs)
    torch.testing.assert_close(output.logits[valid], want["logits"][valid], rtol=0, atol=ATOL)
    if "labels" in inputs:
        output.loss.backward()
        assert output.loss.item() == pytest.approx(want["loss_fp32"].item(), abs=GRADIENT_ATOL)
        got = {name: model.get_parameter(name).grad for name in gradients}
        torch.testing.assert_close(got, gradients, rtol=0, atol=GRADIENT_ATOL)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("case", UNPADDED)
def test_published_numbers_of_unpadded_rows(case, training, legacy):
    inputs, _, _ = golden_case(f"{case}.fp32")
    inputs = {name: value for name, value in inputs.items() if not name.endswith("_expanded")}
    compare_with_golden(legacy.train(training), case, inputs)


@pytest.mark.parametrize("padding", PADDED)
def test_published_numbers_of_padded_rows_in_eval(padding, legacy):
    """Images with the mask that its generation expands; text without labels."""
    inputs, _, _ = golden_case(f"image_batch2_{padding}.fp32")
    mask = inputs["attention_mask_expanded"]
    wanted = ("input_ids", "images", "position_ids", "labels")
    inputs = {name: inputs[name] for name in wanted} | {"attention_mask": mask}
    compare_with_golden(legacy, f"image_batch2_{padding}", inputs, mask.bool())

    inputs, _, _ = golden_case(f"text_{padding}.fp32")
    inputs = {name: inputs[name] for name in ("input_ids", "position_ids", "attention_mask")}
    valid = inputs["attention_mask"].bool()
    compare_with_golden(legacy, f"text_{padding}", inputs, valid)


def test_parameters_have_the_published_names_and_shapes(legacy):
    got = {name: list(value.shape) for name, value in legacy.state_dict().items()}
    assert got == golden_json("param_shapes.json")


@pytest.mark.parametrize("which, loses_them", [("legacy", True), ("ours", False)])
def test_images_of_padded_rows_are_lost_in_training(which, loses_them, legacy):
    model = (legacy if which == "legacy" else tiny_model()).train()
    inputs = padded_images()
    logits = model(**inputs).logits
    changed = model(**inputs | {"images": pictures(2, seed=9)}).logits
    assert torch.equal(logits, changed) is loses_them
    changed.sum().backward()
    tower = [*model.transformer.vision.parameters()]
    assert all(parameter.grad is None for parameter in tower) is loses_them


# The tokenizer


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("legacy_tokenizer")
    write_legacy_repository(folder / "repository")
    with remote_code_under(folder / "modules"):
        yield folder / "repository"


@pytest.fixture(scope="module")
def legacy_tokenizer(repository):
    return AutoTokenizer.from_pretrained(repository, trust_remote_code=True)


@pytest.fixture(scope="module")
def our_tokenizer(repository):
    return ChatGLM4Tokenizer.from_pretrained(repository)


def legacy_ids(tokenizer, text, **arguments):
    """Without a mask nothing is padded, and the published tokenizer encodes."""
    return tokenizer.encode(text, return_attention_mask=False, **arguments)


@pytest.mark.parametrize("with_prefix", [True, False])
def test_legacy_ids_are_ours(with_prefix, legacy_tokenizer, our_tokenizer):
    assert type(legacy_tokenizer) is not type(our_tokenizer)
    texts = [
        *SENTENCES,
        "",
        "naïve  \n\n\t 1234567 x",
        "\U0001f600",
        "".join(LEGACY_SPECIAL_TOKENS),
    ]
    for case in [*texts, "Is it<|user|>\n<|begin_of_image|>red?"]:
        ours = our_tokenizer.encode(case, add_special_tokens=with_prefix)
        assert legacy_ids(legacy_tokenizer, case, add_special_tokens=with_prefix) == ours, case


@pytest.mark.parametrize("text", ["", "Which shape is it? <|user|>"])
def test_legacy_messages_have_our_ids(text, legacy_tokenizer, our_tokenizer):
    message = {"role": "user", "image": "a picture", "content": text}
    (ids,) = our_tokenizer.apply_chat_template([message])
    assert legacy_tokenizer.get_prefix_tokens() + legacy_tokenizer._encode_message(message) == ids
