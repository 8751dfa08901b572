"""Features of a frozen tower are computed once: the same numbers, and the tower really is spared.

Two processes: tests/distributed/test_reused_features.py.
"""

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from glm4v_patched.data.feature_cache import TowerFeatures, digest_pixel_values, digest_weights
from glm4v_patched.finetune.assembly import make_feature_cache
from glm4v_patched.finetune.job import resolve_recipe
from glm4v_patched.remote.visual import EVA2CLIPModel
from tests.helpers.recipes import drawn_recipe, recipe, train_here
from tests.helpers.tiny import (
    encoded,
    expanded_image,
    padded,
    random_pixels,
    text,
    tiny_model,
    unexpanded_image,
)

SHAPE = (6, 64)  # four positions, begin and end, at the width of the tiny language model
BYTES_OF_ONE = 6 * 64 * 4


def frozen_model(weights: str = "language", **changes):
    """In training mode, with a frozen tower."""
    model = tiny_model(**changes).train()
    model.transformer.vision.requires_grad_(False)
    if weights == "lora":
        torch.manual_seed(0)
        layers = r".*encoder.*query_key_value"
        model = get_peft_model(
            model, LoraConfig(r=2, target_modules=layers, init_lora_weights=False)
        )
    return model


def count_runs(model) -> list[int]:
    """Grows by the number of images whenever the tower runs."""
    runs = []
    tower = next(m for m in model.modules() if type(m).__name__ == "EVA2CLIPModel")
    tower.register_forward_hook(lambda tower, inputs, output: runs.append(len(output)))
    return runs


def batch(*rows: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows of ids, with as many images as they have images."""
    inputs = padded(list(rows), "right")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    number = sum(row.count(unexpanded_image()[0]) for row in rows)
    images = {"pixel_values": random_pixels(number, seed)} if number else {}
    return inputs | {"labels": labels} | images


def one_image() -> dict[str, torch.Tensor]:
    return batch([*text(3, 0), *expanded_image(), *text(4, 0)])


def epoch(image: Sequence[int] = (*expanded_image(),)) -> list[dict[str, torch.Tensor]]:  # noqa: B008
    """Rows with two images, with one and with none, and a batch without any."""
    two = [*text(3, 1), *image, *text(2, 2), *image, *text(4, 3)]
    one = [*text(6, 4), *image, *text(5, 5)]
    return [batch(two, one, seed=1), batch(text(9, 6), one, seed=2), batch(text(7, 7), text(5, 8))]


def train(model, batches, features: TowerFeatures | None = None) -> list[tuple]:
    """Loss and gradients of each step. The weights change, so that a step depends on all before."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.001)
    steps = []
    for inputs in batches:
        inputs = inputs if features is None else features.replace_images(inputs)
        output = model(**inputs)
        if features is not None:
            features.cache_new(output)
        output.loss.backward()
        steps.append((output.loss.item(), {n: p.grad for n, p in parameters.items()}))
        optimizer.step()
        optimizer.zero_grad()
    return steps


def runs_of(batches, folder: Path | None = None, model=None, **options) -> list[int]:
    """The images that go through the tower, as a model that reuses features learns the batches;
    its steps are those of one that does not."""
    model = model or frozen_model()
    want = train(copy.deepcopy(model), batches)
    runs = count_runs(model)
    result = train(model, batches, TowerFeatures(model, folder, **options))
    assert [loss for loss, _ in result] == [loss for loss, _ in want]
    for (_, gradients), (_, wanted) in zip(result, want, strict=True):
        assert gradients.keys() == wanted.keys() and len(wanted) > 1
        assert [n for n, g in wanted.items() if not torch.equal(gradients[n], g)] == []
    return runs


@pytest.fixture(params=["memory", "folder"])
def folder(request, tmp_path) -> Path | None:
    return None if request.param == "memory" else tmp_path / "features"


def test_features_that_do_not_fit_are_refused():
    model, inputs = tiny_model(), one_image()
    two, none = torch.zeros(2, *SHAPE), inputs | {"pixel_values": None}
    for wrong_model, features, message in (
        (inputs, two, "1 images were given as pixel_values and 2 as image_feat"),
        (none, two, "2 images were given for 1 begin-of-image ids"),
        (none, torch.zeros(1, 4, 64), r"\(1, 4, 64\)"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**wrong_model, image_features=features)


@pytest.mark.parametrize(
    ("weights", "image", "dtype"),
    [
        ("language", unexpanded_image(), torch.float32),
        ("lora", expanded_image(), torch.float32),
        ("language", expanded_image(), torch.bfloat16),
    ],
    ids=["three ids", "lora", "bf16"],
)
def test_reuse_changes_no_bit_and_spares_the_tower(weights, image, dtype, folder):
    assert runs_of(3 * epoch(image), folder, frozen_model(weights, dtype=dtype)) == [3, 1]


def test_an_image_is_known_in_any_company_and_order_and_not_by_other_pixels(folder):
    model = frozen_model()
    features = TowerFeatures(model, folder)
    train(model, epoch()[:2], features)
    seen = torch.cat([inputs["pixel_values"] for inputs in epoch()[:2]])
    want = torch.cat([encoded(model, seen[:3]), encoded(model, seen[3:])])
    runs = count_runs(model)
    for order in ([3, 0, 3], [0, 1, 2], [2, 1, 3]):
        mixed = batch([*expanded_image(), *text(3, 9), *expanded_image(), *expanded_image()])
        mixed["pixel_values"] = seen[order]
        replaced = features.replace_images(mixed)
        assert runs == [] and "pixel_values" not in replaced
        assert torch.equal(replaced["image_features"], want[order])
    mixed["pixel_values"][1, 2, 55, 55] += 1e-6
    train(model, [mixed, mixed], features)  # one is new, and all go through
    assert runs == [3]
    new = encoded(model, mixed["pixel_values"])[1]
    assert torch.equal(features.replace_images(mixed)["image_features"][1], new)


@pytest.mark.parametrize(("weights", "trained"), [("one", 1), ("adapters", 4)])
def test_a_trained_tower_is_refused(weights, trained):
    model = frozen_model()
    vision, features = model.transformer.vision, TowerFeatures(model)
    train(model, 2 * [one_image()], features)
    if weights == "adapters":
        get_peft_model(model, LoraConfig(r=2, target_modules=r".*vision.*query_key_value"))
    else:
        vision.eoi.requires_grad_(True)
    message = f"{trained} of the tower's {len([*vision.parameters()])} param.*requires_grad_"
    with pytest.raises(ValueError, match=message):
        features.replace_images(one_image())


def test_what_memory_has_no_room_for_runs_the_tower(caplog):
    assert runs_of(2 * epoch(), limit_bytes=4 * BYTES_OF_ONE) == [3, 1]
    twice = batch([*expanded_image(), *expanded_image()])  # one image, and kept once
    twice["pixel_values"] = random_pixels(1).repeat(2, 1, 1, 1)
    model = frozen_model()
    runs = count_runs(model)
    train(model, [twice, one_image(), twice], TowerFeatures(model, limit_bytes=BYTES_OF_ONE))
    assert runs == [2] and caplog.records == []
    assert runs_of(2 * epoch(), limit_bytes=4 * BYTES_OF_ONE - 1) == [3, 1, 1]  # the first fits
    numbers = f"3 images take {3 * BYTES_OF_ONE} of at most {4 * BYTES_OF_ONE - 1} bytes"
    assert caplog.text.count(numbers) == len(caplog.records) == 1


@pytest.fixture
def filled(tmp_path) -> Path:
    """A folder in which a run has left the features of four images."""
    model = frozen_model()
    train(model, epoch(), TowerFeatures(model, tmp_path))
    return tmp_path


def test_a_second_run_reuses_the_features_that_the_first_left(filled):
    assert runs_of(2 * epoch(), filled) == [3]  # on its first batch
    assert runs_of(epoch()[::-1], filled) == [1]  # also one that begins without images
    digests = digest_pixel_values(torch.cat([inputs["pixel_values"] for inputs in epoch()[:2]]))
    names = {f"{bytes(digest).hex()}.safetensors" for digest in digests.tolist()}
    assert {path.name for path in filled.glob("*/*")} == names and len(names) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reused_features_have_the_dtype_and_bytes_that_the_tower_computed(dtype, folder):
    model, inputs = frozen_model(dtype=dtype), one_image()
    features = TowerFeatures(model, folder)
    train(model, [inputs], features)
    reused = features.replace_images(inputs)["image_features"]
    computed = encoded(model, inputs["pixel_values"].to(dtype))
    assert reused.dtype == dtype and torch.equal(reused, computed)


def folder_of(model, folder: Path) -> str:
    """Name of the subfolder for a model's features."""
    before = {*folder.glob("*")}
    train(model, [one_image()], TowerFeatures(model, folder))
    (new_folder,) = {*folder.glob("*")} - before or before
    return new_folder.name


def test_other_weights_and_settings_have_other_features(tmp_path, monkeypatch):
    in_forward = frozen_model()  # where alone accelerate enters it
    in_forward.forward = torch.autocast("cpu", torch.bfloat16)(in_forward.forward)
    changed = frozen_model()
    with torch.no_grad():
        changed.transformer.vision.conv.bias[0] += 1
    models = [frozen_model(), changed, in_forward]
    models += [frozen_model(attn_implementation="eager"), frozen_model(dtype=torch.bfloat16)]
    names = [folder_of(model, tmp_path) for model in models]
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    names.append(folder_of(frozen_model(), tmp_path))
    monkeypatch.undo()
    assert len({*names}) == len(names)
    # What the language model is does not matter.
    assert folder_of(frozen_model("lora"), tmp_path / "lora") == names[0]


def test_every_weight_of_the_tower_counts_and_each_in_its_place():
    vision = tiny_model().transformer.vision
    digests = {digest_weights(vision)}
    weights = dict(vision.named_parameters())
    for weight in weights.values():
        weight.data.view(-1)[-1] += 0.125
        digests.add(digest_weights(vision))
    vision.boi.data, vision.eoi.data = vision.eoi.data, vision.boi.data
    digests.add(digest_weights(vision))
    digests.add(digest_weights(vision.bfloat16()))
    assert len(digests) == 3 + len(weights)
    vision.register_buffer("scale", torch.zeros(1))
    digests.add(digest_weights(vision))
    vision.scale += 1
    digests.add(digest_weights(vision))
    assert len(digests) == 5 + len(weights)


def test_pixels_of_another_shape_or_dtype_are_another_image():
    images = [torch.zeros(1, *shape) for shape in ((3, 2, 4), (3, 4, 2))]
    images += [images[0].to(torch.float16), torch.zeros(1, 3, 2, 8, dtype=torch.float16)]
    assert len({bytes(digest_pixel_values(pixels)[0].tolist()) for pixels in images}) == len(images)


@pytest.mark.parametrize("damage", ["cut by a byte", "a folder", "another's", "another shape"])
def test_a_bad_file_is_named_and_never_used(damage, filled, caplog):
    (name,) = digest_pixel_values(epoch()[1]["pixel_values"])
    (bad,) = filled.rglob(f"{bytes(name.tolist()).hex()}.safetensors")
    other, good = next(path for path in bad.parent.iterdir() if path != bad), bad.read_bytes()
    bad.unlink()
    if damage == "a folder":
        bad.mkdir()
    elif damage == "another shape":
        save_file({f"image {bad.stem} by tower {bad.parent.name}": torch.zeros(4, 64)}, bad)
    else:
        bad.write_bytes(good[:-1] if damage == "cut by a byte" else other.read_bytes())
    assert runs_of(epoch(), filled) == [3, 1]
    assert f"{bad} is not used" in caplog.records[0].getMessage()
    if damage != "a folder":
        assert len(caplog.records) == 1 and bad.read_bytes() == good


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    runs_of(2 * epoch(), tmp_path / "file")
    assert caplog.text.count("could not be written") == 1


def test_a_training_reuses_features_and_no_bit_changes(tmp_path, monkeypatch):
    """Two epochs in another order each, with batches accumulated, and evaluations. All batches are
    full: in a batch of another size an image's features may round differently."""
    runs, plain = [], EVA2CLIPModel.forward

    def counted(tower, images, *more):
        runs.append(len(images))
        return plain(tower, images, *more)

    monkeypatch.setattr(EVA2CLIPModel, "forward", counted)
    changes = {"trained": "lm", "engine.zero_stage": 0, "data.eval_answers": 0}
    changes |= {"trainer.num_train_epochs": 2.0, "trainer.max_steps": None}
    changes["trainer.dataloader_num_workers"] = 0
    changes |= {"data.eval": str(tmp_path / "eval.jsonl")}
    recipe = drawn_recipe(tmp_path, changes | {"trainer.gradient_accumulation_steps": 2})
    rows = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(rows[:8]))
    (tmp_path / "eval.jsonl").write_text("".join(rows[8:10]))
    results = []
    for name, reuse in (("plain", False), ("memory", True), ("kept", str(tmp_path / "features"))):
        run = recipe.override({"data.reuse_features": reuse, "out": str(tmp_path / name)})
        report = train_here(run)
        weights = Path(run.out, "model.safetensors").read_bytes()
        losses = [entry["eval_loss"] for entry in report["evaluations"]]
        results.append((report["history"], losses, weights))
        assert len(losses) == 2
        assert resolve_recipe(run).settings(1) == resolve_recipe(recipe).settings(1)
        assert sum(runs) == 10 if reuse else sum(runs) >= 20
        runs.clear()
    assert results[0] == results[1] == results[2]


def test_a_recipe_says_where_features_are_kept(tmp_path):
    model = frozen_model()
    assert (
        make_feature_cache(False, model) is None and make_feature_cache(True, model).folder is None
    )
    assert make_feature_cache(str(tmp_path), model).folder == tmp_path
    for value in (None, "", ["folder"]):
        with pytest.raises(ValueError, match="data.reuse_features"):
            recipe({"data.reuse_features": value})


@pytest.mark.gpu
def test_on_a_gpu_features_wait_in_page_locked_memory():
    model = frozen_model(dtype=torch.bfloat16).cuda()
    features = TowerFeatures(model)
    train(model, [{n: v.cuda() for n, v in batch.items()} for batch in epoch()], features)
    cached = features._store.features.values()
    assert len(cached) == 4 and all(values.is_pinned() for values in cached)
