"""The stand-in for the published repository has its numbers, and its defects."""

import copy
import sys

import pytest
import torch
from legacy_repository import count_labels_of_small_images, image_row, legacy_model
from tiny import golden_case, golden_json, padded, pictures, text, three_id_image, tiny_model

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
