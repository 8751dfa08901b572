"""The stand-in for the published repository has its numbers, and its defects."""

import copy
import sys

import pytest
import torch
from transformers import AutoTokenizer

from glm4v_patched.remote.image_processing_chatglm import ChatGLMImageProcessor
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from glm4v_patched.remote.tokenization_chatglm import ChatGLM4Tokenizer
from tests.helpers.legacy_repository import (
    LEGACY_SPECIAL_TOKENS,
    SENTENCES,
    count_labels_of_small_images,
    image_row,
    legacy_model,
    remote_code_under,
    write_legacy_repository,
)
from tests.helpers.tiny import (
    BOI,
    EOI,
    PAD,
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


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    with legacy_model(tmp_path_factory.mktemp("legacy"), dtype=torch.float32) as model:
        yield model


@pytest.fixture
def legacy(loaded, monkeypatch):
    """In eval mode."""
    code = sys.modules[type(loaded).__module__]
    monkeypatch.setattr(code, "LABELS_OF_AN_IMAGE", code.LABELS_OF_AN_IMAGE)
    loaded.zero_grad()
    return loaded.eval()


def padded_images() -> dict[str, torch.Tensor]:
    rows = [[*text(3), *three_id_image(), *text(length, seed=1)] for length in (4, 7)]
    return padded(rows, "left") | {"images": pictures(2)}


def labelled_text() -> dict[str, torch.Tensor]:
    ids = torch.tensor([text(9)])
    return {"input_ids": ids, "labels": ids}


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
    count_labels_of_small_images(legacy)
    inputs, _, _ = golden_case(f"{case}.fp32")
    inputs = {name: value for name, value in inputs.items() if not name.endswith("_expanded")}
    compare_with_golden(legacy.train(training), case, inputs)


@pytest.mark.parametrize("padding", PADDED)
def test_published_numbers_of_padded_rows_in_eval(padding, legacy):
    """Images with the mask that its generation expands; text without labels."""
    count_labels_of_small_images(legacy)
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


@pytest.mark.parametrize(
    "inputs, message",
    [(image_row(0), "to match target batch_size"), (labelled_text(), "is not in list")],
    ids=["image of another size", "no image"],
)
def test_rows_that_cannot_be_labelled(inputs, message, legacy):
    with pytest.raises(ValueError, match=message):
        legacy(**inputs)
    tiny_model()(**inputs).loss.backward()


def test_a_row_without_an_image_skips_the_tower(legacy):
    ran = []
    with legacy.transformer.vision.register_forward_hook(lambda *_: ran.append(True)):
        legacy(torch.tensor([text(9)]))
        assert not ran
        legacy(**image_row(0) | {"labels": None})
        assert ran


def test_loss_is_rounded_to_the_dtype_of_the_weights(legacy):
    count_labels_of_small_images(legacy)
    rounded = copy.deepcopy(legacy).bfloat16()(**image_row(0)).loss
    assert rounded.dtype == torch.bfloat16
    assert tiny_model(torch.bfloat16)(**image_row(0)).loss.dtype == torch.float32


@pytest.fixture
def uninitialised_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_a_model_made_from_a_config_is_not_initialised(legacy, uninitialised_memory_is_nan):
    def initialised(model) -> set[bool]:
        parameters = [
            *model.transformer.encoder.parameters(),
            model.transformer.output_layer.weight,
        ]
        return {not parameter.isnan().any() for parameter in parameters}

    ours = type(tiny_model())
    assert initialised(type(legacy)(legacy.config)) == {False}
    assert initialised(ours(ours.config_class(**golden_json("config.json")))) == {True}


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


def test_ids_of_special_tokens_are_those_of_the_golden_config(legacy_tokenizer, our_tokenizer):
    config = golden_json("config.json")
    for tokenizer in (legacy_tokenizer, our_tokenizer):
        ids = tokenizer.convert_tokens_to_ids
        assert ids("<|begin_of_image|>") == config["boi_token_id"] == BOI
        assert ids("<|end_of_image|>") == config["eoi_token_id"] == EOI
        assert tokenizer.pad_token_id == config["pad_token_id"] == PAD
        stops = ["<|endoftext|>", "<|user|>", "<|observation|>"]
        assert ids(stops) == config["eos_token_id"]
        assert ids(list(LEGACY_SPECIAL_TOKENS)) == [*range(498, 512)]
        assert len(tokenizer) == config["padded_vocab_size"]


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


def test_legacy_merges_what_it_learned(legacy_tokenizer):
    ids = legacy_ids(legacy_tokenizer, SENTENCES[0], add_special_tokens=False)
    assert len(ids) < len(SENTENCES[0]) / 3
    # Only bytes can spell this one.
    assert legacy_ids(legacy_tokenizer, "Żż", add_special_tokens=False) == [*"Żż".encode()]


@pytest.mark.parametrize("text", ["", "Which shape is it? <|user|>"])
def test_legacy_messages_have_our_ids(text, legacy_tokenizer, our_tokenizer):
    message = {"role": "user", "image": "a picture", "content": text}
    (ids,) = our_tokenizer.apply_chat_template([message])
    assert legacy_tokenizer.get_prefix_tokens() + legacy_tokenizer._encode_message(message) == ids


@pytest.mark.parametrize(
    "encode",
    [
        lambda tokenizer: tokenizer.pad({"input_ids": [[1], [2, 3]]}),
        lambda tokenizer: tokenizer(["one", "one more"], padding=True),
        lambda tokenizer: tokenizer("one"),
    ],
    ids=["pad", "a padded batch", "one row with its mask"],
)
def test_legacy_padding_fails_where_ours_works(encode, legacy_tokenizer, our_tokenizer):
    with pytest.raises(TypeError, match=r"_pad\(\) got an unexpected keyword .*'padding_side'"):
        encode(legacy_tokenizer)
    assert set(encode(our_tokenizer)) == {"input_ids", "attention_mask"}


def test_legacy_chat_fails_where_ours_works(legacy_tokenizer, our_tokenizer):
    conversation = [{"role": "user", "content": "hi"}]
    with pytest.raises((TypeError, AttributeError), match="padding_side|batch_encode_plus"):
        legacy_tokenizer.apply_chat_template(conversation)
    our_tokenizer.apply_chat_template(conversation)


def test_legacy_pads_left_or_not_at_all(legacy_tokenizer, monkeypatch):
    row = legacy_tokenizer._pad({"input_ids": [7, 8]}, max_length=4, padding_strategy="max_length")
    assert row == {
        "input_ids": [PAD, PAD, 7, 8],
        "attention_mask": [0, 0, 1, 1],
        "position_ids": [0, 0, 0, 1],
    }
    monkeypatch.setattr(legacy_tokenizer, "padding_side", "right")
    with pytest.raises(AssertionError):
        legacy_tokenizer._pad({"input_ids": [7, 8]})


def test_legacy_loses_the_image_size_in_saving(repository, legacy_tokenizer, tmp_path):
    ours = ChatGLM4Tokenizer.from_pretrained(repository)
    assert legacy_tokenizer.image_size == ours.image_size == 56
    legacy_tokenizer.save_pretrained(tmp_path / "legacy")
    ours.save_pretrained(tmp_path / "ours")
    saved = AutoTokenizer.from_pretrained(tmp_path / "legacy", trust_remote_code=True)
    assert saved.image_size is None
    assert legacy_ids(saved, "one") == legacy_ids(legacy_tokenizer, "one")
    assert ChatGLM4Tokenizer.from_pretrained(tmp_path / "ours").image_size == 56


def test_legacy_repeats_text_before_a_special_token(legacy_tokenizer):
    tokens = [b"a", "<|user|>", b"b"]
    assert legacy_tokenizer.convert_tokens_to_string(tokens) == "aab"


def test_legacy_pairs_end_with_a_token_that_is_none(legacy_tokenizer, our_tokenizer):
    with pytest.raises(KeyError, match="<eos>"):
        legacy_ids(legacy_tokenizer, "one", text_pair="two")
    our_tokenizer.encode("one", text_pair="two")


def test_rows_of_our_processor_fit_the_golden_model(our_tokenizer):
    processor = ChatGLMProcessor(ChatGLMImageProcessor(size=56), our_tokenizer)
    row = "<|begin_of_image|><|endoftext|><|end_of_image|>Which shape is it?"
    inputs = processor(text=row, return_tensors="pt", images=pictures(1)[0].sigmoid())
    assert tiny_model()(**inputs).logits.isfinite().all()
