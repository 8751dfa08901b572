"""Features of a frozen tower are computed once: the same numbers, and the tower really is spared.

Two processes: tests/distributed/test_reused_features.py.
"""

import copy
import os
import re
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load, save_file
from transformers import TrainingArguments

from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.data.feature_cache import TowerFeatures, digest_pictures, digest_weights
from glm4v_patched.finetune.plan import settings_of
from glm4v_patched.finetune.worker import RecipeTrainer, features_of
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.data_forms import turns
from tests.helpers.recipes import recipe
from tests.helpers.tiny import (
    encoded,
    grown_image,
    padded,
    pictures,
    text,
    three_id_image,
    tiny_config,
    tiny_model,
)

SHAPE = (6, 64)  # four positions, begin and end, at the width of the tiny language model
BYTES_OF_ONE = 6 * 64 * 4
ONE = torch.ones(1)


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
    """Grows by the number of pictures whenever the tower runs."""
    runs = []
    tower = next(m for m in model.modules() if type(m).__name__ == "EVA2CLIPModel")
    tower.register_forward_hook(lambda tower, inputs, output: runs.append(len(output)))
    return runs


def batch(*rows: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows of ids, with as many pictures as they have images."""
    inputs = padded(list(rows), "right")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    number = sum(row.count(three_id_image()[0]) for row in rows)
    images = {"pixel_values": pictures(number, seed)} if number else {}
    return inputs | {"labels": labels} | images


def one_picture(seed: int = 0) -> dict[str, torch.Tensor]:
    return batch([*text(3, seed), *grown_image(), *text(4, seed)], seed=seed)


def epoch(image: Sequence[int] = tuple(grown_image())) -> list[dict[str, torch.Tensor]]:  # noqa: B008
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
        inputs = inputs if features is None else features.replace_pictures(inputs)
        output = model(**inputs)
        if features is not None:
            features.keep(output)
        output.loss.backward()
        steps.append((output.loss.item(), {n: p.grad for n, p in parameters.items()}))
        optimizer.step()
        optimizer.zero_grad()
    return steps


def assert_same_steps(got: list[tuple], want: list[tuple]) -> None:
    assert [loss for loss, _ in got] == [loss for loss, _ in want]
    for (_, gradients), (_, wanted) in zip(got, want, strict=True):
        assert gradients.keys() == wanted.keys() and len(wanted) > 1
        assert [n for n, g in wanted.items() if not torch.equal(gradients[n], g)] == []


def runs_of(batches, folder: Path | None = None, model=None, **options) -> list[int]:
    """The pictures that go through the tower, as a model that reuses features learns the batches;
    its steps are those of one that does not."""
    model = model or frozen_model()
    plain = copy.deepcopy(model)
    want = train(plain, batches)
    runs = count_runs(model)
    assert_same_steps(train(model, batches, TowerFeatures(model, folder, **options)), want)
    return runs


@pytest.fixture(params=["memory", "folder"])
def folder(request, tmp_path) -> Path | None:
    return None if request.param == "memory" else tmp_path / "features"


# The model takes features in place of pictures


@pytest.mark.parametrize("image", [three_id_image(), grown_image()], ids=["three ids", "grown"])
@torch.no_grad()
def test_features_given_are_merged_as_the_towers_own(image):
    model = tiny_model()
    for inputs in epoch(image)[:2]:
        want = model(**inputs)
        features = encoded(model, inputs["pixel_values"])
        assert torch.equal(want.image_hidden_states, features)
        runs = count_runs(model)
        got = model(**(inputs | {"pixel_values": None}), image_features=features)
        assert runs == []
        assert torch.equal(got.logits, want.logits)
        assert torch.equal(got.image_hidden_states, features)


@torch.no_grad()
def test_features_belong_to_images_in_the_order_of_their_ids():
    model = tiny_model()
    inputs = epoch()[0]
    features = encoded(model, inputs.pop("pixel_values"))
    given, turned = (model(**inputs, image_features=f).logits for f in (features, features.flip(0)))
    assert not torch.equal(given, turned)
    assert model(**batch(text(5))).image_hidden_states is None


def test_no_features_mean_no_image_and_no_blank_one_either(monkeypatch):
    model = tiny_model()
    runs = count_runs(model)
    monkeypatch.setitem(
        type(model.transformer)._merge_images.__globals__,
        "must_run_on_every_process",
        lambda module: True,
    )
    want = model(**batch(text(5)))
    assert runs == [1]
    got = model(**batch(text(5)), image_features=torch.empty(0, *SHAPE))
    assert runs == [1]
    assert torch.equal(got.logits, want.logits)
    assert got.image_hidden_states is None


@pytest.mark.parametrize(
    ("changes", "shape", "named"),
    [
        ({}, (2, *SHAPE), "1 images were given as pixel_values and 2 as image_feat"),
        ({"pixel_values": None}, (2, *SHAPE), "2 images were given for 1 begin-of-image ids"),
        ({"pixel_values": None}, (0, *SHAPE), "0 images were given for 1 begin-of-image ids"),
        *[({"pixel_values": None}, shape, str(shape)) for shape in ((1, 4, 64), (1, 6, 32), SHAPE)],
    ],
    ids=range(6),
)
def test_features_that_do_not_fit_are_refused(changes, shape, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        tiny_model()(**one_picture() | changes, image_features=torch.zeros(shape))


def test_features_are_refused_with_embeddings_and_in_generation():
    model = tiny_model()
    with pytest.raises(ValueError, match="2 images were given with inputs_embeds"):
        model(inputs_embeds=torch.zeros(1, 4, 64), image_features=torch.zeros(2, *SHAPE))
    with pytest.raises(ValueError, match="1 image_features were given to generate.* pixel_values"):
        model.generate(one_picture()["input_ids"], image_features=torch.zeros(1, *SHAPE))


def test_features_have_the_gradients_of_a_trained_tower():
    model = tiny_model().train()
    output = model(**one_picture())
    assert output.image_hidden_states.requires_grad
    output.image_hidden_states.sum().backward()
    assert all(p.grad is not None for p in model.transformer.vision.parameters())


@pytest.mark.parametrize("way", ["by a hook", "by transformers", "by peft"])
def test_a_frozen_tower_keeps_nothing_for_a_backward_pass(way):
    """Whoever makes the inputs of its layers require grad."""
    model = frozen_model()
    if way == "by a hook":
        model.transformer.vision.patch_embedding.register_forward_hook(
            lambda module, inputs, output: output.requires_grad_()
        )
    elif way == "by transformers":
        model.enable_input_require_grads()
    else:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        get_peft_model(model, LoraConfig(r=2, target_modules=r".*encoder.*query_key_value"))
    inside = []
    for layer in model.transformer.vision.transformer.layers:
        layer.register_forward_hook(lambda module, inputs, output: inside.append(output.grad_fn))
    output = model(**one_picture())
    assert inside == [None, None]
    assert not output.image_hidden_states.requires_grad
    output.loss.backward()


def test_pictures_that_require_grad_get_it_through_a_frozen_tower():
    model = frozen_model()
    inputs = one_picture()
    inputs["pixel_values"].requires_grad_()
    model(**inputs).loss.backward()
    assert inputs["pixel_values"].grad.abs().max() > 0


# Pictures that are known do not go through the tower


@pytest.mark.parametrize("image", [three_id_image(), grown_image()], ids=["three ids", "grown"])
@pytest.mark.parametrize("weights", ["language", "lora"])
def test_reuse_changes_no_bit_and_spares_the_tower(weights, image, folder):
    assert runs_of(3 * epoch(image), folder, frozen_model(weights)) == [3, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_features_are_kept_in_the_dtype_of_the_weights(dtype, folder):
    assert runs_of(2 * epoch(), folder, frozen_model(dtype=dtype)) == [3, 1]


def test_a_picture_is_known_in_other_company(folder):
    model = frozen_model()
    runs = count_runs(model)
    features = TowerFeatures(model, folder)
    train(model, epoch()[:2], features)
    seen = torch.cat([inputs["pixel_values"] for inputs in epoch()[:2]])
    mixed = batch([*grown_image(), *text(3, 9), *grown_image(), *grown_image()])
    mixed["pixel_values"] = seen[[3, 0, 3]]
    replaced = features.replace_pictures(mixed)
    assert runs == [3, 1]
    assert "pixel_values" not in replaced
    first, second, third = replaced["image_features"]
    with torch.no_grad():
        three = encoded(model, seen[:3])
        alone = encoded(model, seen[3:])
    assert torch.equal(first, alone[0]) and torch.equal(third, alone[0])
    assert torch.equal(second, three[0])


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]], ids=str)
def test_each_picture_of_a_batch_has_its_own_features(folder, order):
    model = frozen_model()
    features = TowerFeatures(model, folder)
    three = batch([*grown_image(), *grown_image(), *grown_image(), *text(3)])
    three["pixel_values"] = three["pixel_values"][order]
    want = encoded(frozen_model(), three["pixel_values"])
    train(model, [three], features)
    assert torch.equal(features.replace_pictures(three)["image_features"], want)


def test_a_changed_pixel_runs_the_tower(folder):
    changed = one_picture()
    changed["pixel_values"] = changed["pixel_values"].clone()
    changed["pixel_values"][0, 2, 55, 55] += 1e-6
    assert runs_of([one_picture(), one_picture(), changed, one_picture(), changed], folder) == [
        1,
        1,
    ]


def test_one_new_picture_in_a_batch_runs_the_tower_for_all(folder):
    model = frozen_model()
    runs = count_runs(model)
    features = TowerFeatures(model, folder)
    train(model, [one_picture()], features)
    both = batch([*grown_image(), *grown_image()])
    both["pixel_values"] = torch.cat([pictures(1), pictures(1, seed=5)])
    assert "pixel_values" in features.replace_pictures(both)
    train(model, [both, both], features)
    assert runs == [1, 2]


def test_digests_tell_pictures_apart_by_bytes_dtype_and_shape():
    some = pictures(3)
    digests = digest_pictures(some)
    assert digests.shape == (3, 32) and digests.dtype == torch.uint8
    assert len({bytes(row) for row in digests.tolist()}) == 3
    assert torch.equal(digest_pictures(some[[2, 0]]), digests[[2, 0]])
    assert torch.equal(digest_pictures(some.transpose(2, 3).contiguous().transpose(2, 3)), digests)
    signed = torch.where(some == some[0, 0, 0, 0], -some, some)
    other = [
        some.view(torch.int32),
        some.reshape(3, 3, 28, 112),
        signed,
    ]
    assert all(not torch.equal(digest_pictures(values)[0], digests[0]) for values in other)


def test_the_collator_hashes_what_the_model_gets():
    model = frozen_model()
    features = TowerFeatures(model)
    collate = features.collator(lambda rows: batch(*rows))
    made = collate([[*text(3), *grown_image(), *grown_image()], text(4)])
    assert torch.equal(made["picture_digests"], digest_pictures(made["pixel_values"]))
    assert "picture_digests" not in collate([text(4)])
    # They are what is gone by, and the model is not given them.
    train(model, [made | {"pixel_values": made["pixel_values"] * 0}], features)
    replaced = features.replace_pictures(made)
    assert "image_features" in replaced and "picture_digests" not in replaced


@pytest.mark.parametrize("weights", ["all", "one", "adapters", "later"])
def test_a_trained_tower_is_refused(weights, folder):
    model = frozen_model()
    vision, features = model.transformer.vision, TowerFeatures(model, folder)
    if weights == "later":
        train(model, 2 * [one_picture()], features)
    if weights == "adapters":
        get_peft_model(model, LoraConfig(r=2, target_modules=r".*vision.*query_key_value"))
    else:
        (vision.eoi if weights == "one" else vision).requires_grad_(True)
    total = len(list(vision.parameters()))
    trained = {"one": 1, "adapters": 4}.get(weights, total)
    with pytest.raises(ValueError, match=f"{trained} of the tower's {total} param.*requires_grad_"):
        features.replace_pictures(one_picture())


def test_a_model_without_a_tower_is_refused():
    with pytest.raises(ValueError, match="found 0 glm-4v in the model; expected exactly 1.*apply"):
        TowerFeatures(torch.nn.Linear(2, 2))


def test_what_memory_has_no_room_for_runs_the_tower(caplog):
    assert runs_of(2 * epoch(), limit_bytes=4 * BYTES_OF_ONE) == [3, 1]
    assert caplog.records == []
    assert runs_of(2 * epoch(), limit_bytes=4 * BYTES_OF_ONE - 1) == [3, 1, 1]  # the first fits
    [record] = caplog.records
    numbers = f"3 pictures take {3 * BYTES_OF_ONE} of at most {4 * BYTES_OF_ONE - 1} bytes"
    assert numbers in record.getMessage()


def test_a_picture_twice_in_a_batch_is_kept_once(caplog):
    twice = batch([*grown_image(), *grown_image()])
    twice["pixel_values"] = pictures(1).repeat(2, 1, 1, 1)
    model = frozen_model()
    runs = count_runs(model)
    train(model, [twice, one_picture(), twice], TowerFeatures(model, limit_bytes=BYTES_OF_ONE))
    assert runs == [2]
    assert caplog.records == []


# A folder serves later runs


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def filled(tmp_path) -> Path:
    """A folder in which a run has left the features of four pictures."""
    model = frozen_model()
    train(model, epoch(), TowerFeatures(model, tmp_path))
    assert len(files_in(tmp_path)) == 4
    return tmp_path


def test_a_second_run_reuses_what_the_first_left(filled):
    assert runs_of(2 * epoch(), filled) == [3]  # on its first batch
    assert len(files_in(filled)) == 4
    assert runs_of(epoch()[::-1], filled) == [1]  # also one that begins without pictures


def folder_of(model, folder: Path, context=None) -> str:
    """Name of the subfolder for a model's features."""
    before = {path.parent.name for path in files_in(folder)}
    with context or nullcontext():
        train(model, [one_picture()], TowerFeatures(model, folder))
    (name,) = {path.parent.name for path in files_in(folder)} - before or before
    return name


def test_changed_weights_run_the_tower(tmp_path):
    first = folder_of(frozen_model(), tmp_path)
    model = frozen_model()
    with torch.no_grad():
        model.transformer.vision.conv.bias[0] += 1
    assert runs_of(2 * [one_picture()], tmp_path, model) == [1]
    assert len({path.parent.name for path in files_in(tmp_path)} - {first}) == 1


@contextmanager
def matmul_precision(precision: str):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    yield
    torch.set_float32_matmul_precision(before)


def test_other_settings_have_other_features(tmp_path):
    vision = tiny_config().vision_config
    vision = vision if isinstance(vision, dict) else vision.__dict__
    autocast = torch.autocast("cpu", torch.bfloat16)
    in_forward = frozen_model()  # where alone accelerate enters it
    in_forward.forward = autocast(in_forward.forward)
    rounded = frozen_model()  # in which pixels have the dtype of the embeddings
    rounded.transformer.embedding.to(torch.bfloat16)
    names = [
        folder_of(frozen_model(), tmp_path),
        folder_of(frozen_model(vision_config=vision | {"scaling_factor": 2}), tmp_path),
        folder_of(frozen_model(vision_config=vision | {"layer_norm_eps": 1e-3}), tmp_path),
        folder_of(frozen_model(attn_implementation="eager"), tmp_path),
        folder_of(frozen_model(dtype=torch.bfloat16), tmp_path),
        folder_of(in_forward, tmp_path),
        folder_of(rounded, tmp_path, autocast),
        folder_of(frozen_model(), tmp_path, matmul_precision("high")),
    ]
    assert len(set(names)) == len(names)
    # What the language model is does not matter.
    assert folder_of(frozen_model("lora"), tmp_path / "lora") == names[0]


def test_every_weight_of_the_tower_counts():
    vision = tiny_model().transformer.vision
    digests = {digest_weights(vision)}
    weights = dict(vision.named_parameters())
    for weight in weights.values():
        last = weight.data.flatten()[-1].clone()
        weight.data.view(-1)[-1] += 0.125
        digests.add(digest_weights(vision))
        weight.data.view(-1)[-1] = last
    assert len(digests) == 1 + len(weights)
    vision.register_buffer("extra", torch.zeros(2))
    digests.add(digest_weights(vision))
    vision.boi.data, vision.eoi.data = vision.eoi.data, vision.boi.data
    digests.add(digest_weights(vision))
    vision.bfloat16()
    digests.add(digest_weights(vision))
    assert len(digests) == 4 + len(weights)


def rewrite(path: Path, tower: str | None = None, shape=SHAPE) -> None:
    """Other features under this picture's name."""
    save_file(
        {f"picture {path.stem} by tower {tower or path.parent.name}": torch.zeros(shape)}, path
    )


DAMAGES = {
    "empty": lambda path, other: os.truncate(path, 0),
    "cut in the header": lambda path, other: os.truncate(path, 20),
    "cut by a byte": lambda path, other: os.truncate(path, path.stat().st_size - 1),
    "longer by a byte": lambda path, other: path.write_bytes(path.read_bytes() + b"0"),
    "a folder": lambda path, other: (path.unlink(), path.mkdir()),
    "another picture's": lambda path, other: path.write_bytes(other.read_bytes()),
    "another tower's": lambda path, other: rewrite(path, tower="0" * 64),
    "no tensors": lambda path, other: save_file({}, path),
    "more tensors": lambda path, other: save_file(load(path.read_bytes()) | {"a": ONE}, path),
    "another shape": lambda path, other: rewrite(path, shape=(4, 64)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_file_is_named_and_never_used(damage, filled, caplog):
    (name,) = digest_pictures(epoch()[1]["pixel_values"])
    (bad,) = filled.rglob(f"{bytes(name.tolist()).hex()}.safetensors")
    good = bad.read_bytes()
    DAMAGES[damage](bad, next(path for path in files_in(filled) if path != bad))
    assert runs_of(epoch(), filled) == [3, 1]
    assert f"{bad} is not used" in caplog.records[0].getMessage()
    if damage != "a folder":
        assert len(caplog.records) == 1
        assert bad.read_bytes() == good


def test_a_file_holds_the_towers_own_bytes(filled):
    pixels = epoch()[0]["pixel_values"]
    want = encoded(frozen_model(), pixels)
    for digest, features in zip(digest_pictures(pixels).tolist(), want, strict=True):
        (path,) = filled.rglob(f"{bytes(digest).hex()}.safetensors")
        (kept,) = load(path.read_bytes()).values()
        assert torch.equal(kept, features)


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    runs_of(2 * epoch(), tmp_path / "file")
    messages = [record.getMessage() for record in caplog.records]
    assert len([message for message in messages if "could not be written" in message]) == 1


# The recipe


@pytest.fixture
def conversations(tmp_path) -> list[list[dict]]:
    """Five, of which one has no picture."""
    made = []
    for number in range(5):
        path = tmp_path / f"{number}.png"
        Image.new("RGB", (56, 56), (40 * number, 10, 200)).save(path)
        shown = {"image": str(path)} if number != 3 else {}
        made.append(turns(f"Which number is this? {number}", "number " * (number + 1), **shown))
    return made


def trainer(model, features, conversations, processor, out: Path) -> RecipeTrainer:
    arguments = {"num_train_epochs": 3, "per_device_train_batch_size": 1, "learning_rate": 1e-3}
    arguments |= {"gradient_accumulation_steps": 2, "remove_unused_columns": False, "seed": 0}
    arguments |= {"save_strategy": "no", "report_to": "none", "logging_steps": 1, "use_cpu": True}
    return RecipeTrainer(
        model,
        features=features,
        args=TrainingArguments(output_dir=str(out), **arguments),
        train_dataset=conversations,
        eval_dataset=conversations,
        data_collator=ConversationCollator(processor),
        eval_collator=ConversationCollator(processor),
        processing_class=processor,
    )


def trainable_model(processor) -> GLM4VForCausalLM:
    names = {"boi": "<|begin_of_image|>", "eoi": "<|end_of_image|>", "pad": "<|endoftext|>"}
    ids = processor.tokenizer.convert_tokens_to_ids
    return frozen_model(**{f"{name}_token_id": ids(token) for name, token in names.items()})


def test_the_trainer_reuses_features_and_no_bit_changes(folder, conversations, processor, tmp_path):
    """Three epochs in another order each, with batches accumulated."""
    results = []
    for reuse in (False, True):
        model = trainable_model(processor)
        runs = count_runs(model)
        features = TowerFeatures(model, folder) if reuse else None
        training = trainer(model, features, conversations, processor, tmp_path)
        made = [name for made in training.get_train_dataloader() for name in made]
        assert made.count("picture_digests") == (4 if reuse else 0)
        training.train()
        losses = [entry["loss"] for entry in training.state.log_history if "loss" in entry]
        results.append((losses, training.evaluate()["eval_loss"], model.state_dict(), runs))
    (losses, evaluated, weights, runs), (got_losses, got_evaluated, got_weights, got_runs) = results
    assert got_losses == losses and len(losses) == 9
    assert got_evaluated == evaluated
    assert [name for name, w in weights.items() if not torch.equal(got_weights[name], w)] == []
    assert sum(runs) == 4 * 3 + 4
    assert sum(got_runs) == 4


def test_a_trainer_predicts_logits_and_no_features(conversations, processor, tmp_path):
    training = trainer(trainable_model(processor), None, conversations, processor, tmp_path)
    training.model.config.skip_logits = False
    predictions = training.predict(conversations[:1]).predictions
    assert not isinstance(predictions, tuple)
    assert predictions.shape[-1] == 512


def test_a_recipe_says_where_features_are_kept_and_a_continued_one_another_place(tmp_path):
    model, folder = frozen_model(), str(tmp_path)
    (tmp_path / "rows").write_text("")
    changes = {"trained": "lm", "data.train": str(tmp_path / "rows")}
    off, memory, kept = (
        recipe(changes | {"data.reuse_features": value}) for value in (False, True, folder)
    )
    assert features_of(off.data.reuse_features, model) is None
    assert features_of(memory.data.reuse_features, model).folder is None
    assert features_of(kept.data.reuse_features, model).folder == tmp_path
    assert settings_of(off, 1) == settings_of(memory, 1) == settings_of(kept, 1)
    for value in (None, "", 1, ["folder"]):
        with pytest.raises(ValueError, match="data.reuse_features"):
            recipe({"data.reuse_features": value})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_features_wait_in_page_locked_memory(dtype, folder):
    def on_gpu():
        model = frozen_model(dtype=dtype).cuda()
        steps = [{n: v.cuda() for n, v in made.items()} for made in 2 * epoch()]
        return model, steps

    want = train(*on_gpu())
    model, steps = on_gpu()
    runs = count_runs(model)
    features = TowerFeatures(model, folder)
    got = train(model, steps, features)
    assert_same_steps(got, want)
    assert runs == [3, 1]
    if folder is None:
        kept = features._store.features.values()
        assert len(kept) == 4 and all(values.is_pinned() for values in kept)
