"""A model's weights are compared with its config by names and shapes, before anything is loaded."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from glm4v_patched.cli import main
from glm4v_patched.models.check_weights import COMPUTED_BUFFER_SUFFIX, require_complete_model
from glm4v_patched.models.find import find_model_problem, find_source
from glm4v_patched.models.weight_files import SINGLE_FILE, WEIGHTS_INDEX, shards_of
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.recipes import drawn_recipe, write_recipe
from tests.helpers.tiny import update_json

TOWER = "transformer.vision."
LAYER = "transformer.encoder.layers.1."


@pytest.fixture(scope="module")
def tiny_recipe(tmp_path_factory):
    """A recipe of a tiny model that is whole."""
    return drawn_recipe(tmp_path_factory.mktemp("weights"))


@pytest.fixture
def model(tiny_recipe, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_recipe.model, tmp_path / "model"))


def change(model: Path, new) -> None:
    """Replace the weights by what ``new`` makes of them."""
    save_file(new(load_file(model / SINGLE_FILE)), model / SINGLE_FILE, metadata={"format": "pt"})


def renamed(old: str, new: str):
    return lambda weights: {name.replace(old, new): weight for name, weight in weights.items()}


def without(start: str):
    return lambda weights: {n: weight for n, weight in weights.items() if not n.startswith(start)}


def with_more(name: str, *sides: int):
    return lambda weights: weights | {name: torch.zeros(sides)}


def write_index(folder: Path, where: dict[str, str]) -> None:
    (folder / WEIGHTS_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


BOI = r"transformer.vision.boi \[1, 1, 128\]"
FAULTS = {
    "another tool's prefix": (
        lambda weights: {f"base_model.{name}": weight for name, weight in weights.items()},
        r"55 of 55 weights are missing.* 55 weights are not part .*\(base_model.transformer.emb",
    ),
    "adapters that were not merged": (renamed("dense.", "dense.base_layer."), "base_layer.weight"),
    "no tower": (without(TOWER), rf"38 of 55 weights are missing.*\({BOI}, "),
    "a layer less": (without(LAYER), r"7 of 55 weights are missing.*layers.1.input_layernorm"),
    "a layer more": (
        with_more("transformer.encoder.layers.7.mlp.x.weight", 2),
        r"1 weights are not part .*\(transformer.encoder.layers.7.mlp.x.weight \[2\]\)",
    ),
    "another config": (None, r"dense_4h_to_h.weight: \[128, 256\], not \[128, 8\]"),
}


@pytest.mark.parametrize(("new", "message"), FAULTS.values(), ids=FAULTS)
def test_weights_that_do_not_match_their_config_are_refused(model, new, message):
    if new is None:
        update_json(model / "config.json", ffn_hidden_size=8)
    else:
        change(model, new)
    with pytest.raises(ValueError, match=message) as refused:
        require_complete_model(str(model))
    assert str(model) in str(refused.value) and "expected the names and shapes" in str(
        refused.value
    )


def test_an_index_may_name_any_file_of_its_folder(tmp_path):
    for name in ("a+b@1,[2].safetensors", "-x~.safetensors"):
        (tmp_path / name).touch()
        write_index(tmp_path, {"a": name})
        assert shards_of(tmp_path) == [name]


@pytest.mark.parametrize("name", ["chat_template.jinja", WEIGHTS_INDEX, "notes"])
def test_a_pipe_in_a_model_folder_is_refused_without_reading_it(model, name):
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    assert f"{name} in it is a pipe" in find_model_problem(str(model))
    (model / name).unlink()
    (model / name).symlink_to("nowhere")  # as in a cache of the Hub that has no weights
    (model / "link.json").symlink_to("config.json")
    assert find_model_problem(str(model)) is None


def test_files_that_are_cut_short_or_too_many_or_need_a_package_are_refused(model):
    content = (model / SINGLE_FILE).read_bytes()
    (model / SINGLE_FILE).write_bytes(content[:-1])
    message = f"{len(content) - 1:,} of its {len(content):,} bytes"
    assert message in find_model_problem(str(model))
    (model / SINGLE_FILE).write_bytes(content)
    # transformers would read the one, and the index tell of the other.
    (model / "model-1.safetensors").write_bytes(content)
    write_index(model, {"a": "model-1.safetensors"})
    with pytest.raises(ValueError, match="expected one of the two"):
        require_complete_model(str(model))
    for outside in ("../a.safetensors", "..\\a.safetensors"):
        write_index(model, {"a": outside})
        with pytest.raises(ValueError, match="without a path"):
            require_complete_model(str(model))
    (model / WEIGHTS_INDEX).unlink()
    update_json(model / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    missing = "saved quantized by gptq, needs gptqmodel and optimum: .*install gptqmodel optimum"
    with pytest.raises(RuntimeError, match=missing):
        find_source(str(model))
    with pytest.raises(
        ValueError, match="--weights fp8: .* was saved quantized by gptq; remove --w"
    ):
        find_source(str(model), weights="fp8")


def test_a_decoders_names_a_rotary_buffer_and_an_old_index_are_accepted(model, tmp_path):
    """The decoder's own names, the published buffer, a file beside an old index."""
    want = dict(GLM4VForCausalLM.from_pretrained(model).named_parameters())
    number = require_complete_model(str(model))
    change(model, lambda weights: {n.removeprefix("transformer."): w for n, w in weights.items()})
    change(model, with_more("rotary_pos_emb.inv_freq", 8))
    write_index(model, {"a": SINGLE_FILE})
    assert require_complete_model(str(model)) == number and find_model_problem(str(model)) is None
    read = GLM4VForCausalLM.from_pretrained(model).state_dict()
    assert all(torch.equal(weight, read[name]) for name, weight in want.items())


def test_pickled_weights_are_refused_with_the_cure(model):
    torch.save(load_file(model / SINGLE_FILE), model / "pytorch_model.bin")
    assert find_model_problem(str(model)) is None
    (model / SINGLE_FILE).unlink()
    assert "Pickled weights (*.bin) are not read: save" in str(find_model_problem(str(model)))


def test_quantized_weights_stored_in_pieces_are_accepted(model):
    """As compressed-tensors, GPTQ and bitsandbytes name them."""
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    update_json(model / "config.json", quantization_config=quantized)

    def in_pieces(weights):
        packed = torch.zeros(4, 1, dtype=torch.uint8)
        for number, name in enumerate([n for n in weights if n.endswith("dense.weight")]):
            pieces = [f"{name}_packed", f"{name}_scale"] if number % 2 else [name, f"{name}.absmax"]
            del weights[name]
            weights |= {piece: packed.clone() for piece in pieces}
        return weights

    change(model, in_pieces)
    require_complete_model(str(model))
    # What is not packed has its own size.
    whole = (model / SINGLE_FILE).read_bytes()
    change(model, with_more("transformer.output_layer.weight", 7, 64))
    with pytest.raises(ValueError, match="other shapes"):
        require_complete_model(str(model))
    (model / SINGLE_FILE).write_bytes(whole)
    change(model, without(LAYER + "self_attention.dense"))
    with pytest.raises(ValueError, match="are missing"):
        require_complete_model(str(model))


def test_from_scratch_accepts_only_missing_and_trained_weights(model):
    adapter, number = TOWER + "linear_proj", require_complete_model(str(model))
    change(model, without(adapter))
    assert require_complete_model(str(model), None, [adapter]) == number - 6
    for from_scratch, trained in (
        ([f"{adapter}.gate"], "full"),  # not all of it
        ([adapter, "score"], "full"),  # nothing of that name
        ([adapter], "lora_lm"),  # not trained
    ):
        with pytest.raises(ValueError, match=r"missing|from_scratch"):
            require_complete_model(str(model), None, from_scratch, trained)


def test_weights_on_the_hub_are_checked_by_their_headers(hub, model, tmp_path):
    contents = {path.name: path.read_bytes() for path in model.iterdir()}
    change(model, without(TOWER))
    hub.add_repository("our-org/whole", contents)
    hub.add_repository("our-org/text", contents | {SINGLE_FILE: (model / SINGLE_FILE).read_bytes()})
    require_complete_model("our-org/whole")
    with pytest.raises(ValueError, match="38 of 55 weights are missing"):
        require_complete_model("our-org/text")
    for number, header in enumerate((b"{", b"[]", b'{"a": 1}', b'{"a": {"shape": [null]}}')):
        damaged = len(header).to_bytes(8, "little") + header
        hub.add_repository(f"our-org/damaged-{number}", contents | {SINGLE_FILE: damaged})
        with pytest.raises(ValueError, match=f"our-org/damaged-{number} cannot be loaded"):
            require_complete_model(f"our-org/damaged-{number}")
    shard, where = (
        contents.pop(SINGLE_FILE),
        dict.fromkeys(load_file(tmp_path / "model" / SINGLE_FILE), "a"),
    )
    where = json.dumps({"weight_map": where}).encode()
    hub.add_repository("our-org/index", contents | {"a": shard, WEIGHTS_INDEX: where})
    with pytest.raises(ValueError, match=f"{WEIGHTS_INDEX} has metadata None"):
        require_complete_model("our-org/index")


ON_CPU = ["--device", "cpu"]
COMMANDS = [
    ["train", "{recipe}", "--processes", "1", *ON_CPU],
    ["doctor", "{recipe}", "--processes", "1", *ON_CPU],
    ["answer", "{model}", "--data", "{rows}", "--out", "{out}", *ON_CPU],
    ["compare", "{model}"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_every_command_refuses_a_model_with_missing_weights(
    tiny_recipe, model, tmp_path, capfd, command
):
    change(model, without(TOWER))
    recipe, out = tmp_path / "recipe.json", tmp_path / "out"
    write_recipe(tiny_recipe.override({"model": str(model), "out": str(out)}), recipe)
    places = {"recipe": recipe, "model": model, "rows": tiny_recipe.data.train, "out": out}
    assert main([part.format(**places) for part in command]) == 1
    assert "38 of 55 weights are missing" in "".join(capfd.readouterr()) and not out.exists()


FEW, MANY = (
    settings(max_examples=number, derandomize=True, deadline=None) for number in (60, 3_000)
)
PART = st.text("abcdefghijklmnopqrstuvwxyz_.0123456789", min_size=1, max_size=12)
KINDS = st.sampled_from(["drop", "rename", "prefix", "part", "add", "reshape"])
CHANGES = st.lists(st.tuples(KINDS, st.integers(0, 10_000), PART), max_size=4)


def changed(weights: dict, changes: list[tuple[str, int, str]]) -> dict:
    """Weights with some of them left out, called otherwise or of another shape."""
    weights = dict(weights)
    for kind, number, text in changes:
        name = sorted(weights)[number % len(weights)]
        parts = name.split(".")
        parts.insert(number % len(parts), text)
        new = {"rename": text, "prefix": text + name, "part": ".".join(parts)}
        if kind == "add":
            weights[text] = torch.zeros(1)
        elif kind == "reshape":
            weights[name] = torch.zeros(number % 7 + 1)
        elif kind == "drop":
            del weights[name]
        else:
            weights[new[kind]] = weights.pop(name)
    return weights


@pytest.mark.parametrize("profile", [FEW, pytest.param(MANY, marks=pytest.mark.exhaustive)])
def test_any_change_of_names_or_shapes_is_refused(model, profile):
    whole = load_file(model / SINGLE_FILE)
    shapes = {
        name: tensor.shape
        for name, tensor in whole.items()
        if not name.endswith(COMPUTED_BUFFER_SUFFIX)
    }

    @profile
    @given(CHANGES)
    def check(changes):
        new = changed(whole, changes)
        save_file(new, model / SINGLE_FILE, metadata={"format": "pt"})
        if {n: new[n].shape for n in new if not n.endswith(COMPUTED_BUFFER_SUFFIX)} == shapes:
            require_complete_model(str(model))
            return
        with pytest.raises(ValueError, match="weights") as raised:
            require_complete_model(str(model))
        assert len(str(raised.value)) < 2_000

    check()
