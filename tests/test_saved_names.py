"""Folders saved from a stranger's model contain no names that point to the stranger's code."""

import json
import shutil
from pathlib import Path

import pytest
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer

import glm4v_patched
from glm4v_patched.engine.trainable import load_adapters
from glm4v_patched.inference.merge import copy_license_and_generation, merge
from glm4v_patched.models.adopt import adopt
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.image_processing_chatglm import ChatGLMImageProcessor
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from glm4v_patched.remote.tokenization_chatglm import ChatGLM4Tokenizer
from tests.helpers.answering import write_adapters
from tests.helpers.legacy_repository import remote_code_under
from tests.helpers.recipes import drawn_recipe, train_here
from tests.helpers.tiny import tiny_config, tiny_model

WORD = "stranger"
ELSEWHERE = f"{WORD}/repo--{WORD}.Evil"
ANYWHERE = {f"{WORD}_key": 1, "custom_pipelines": {"x": {"impl": f"{WORD}.Evil"}}}
ANYWHERE |= {"custom_generate": "", "processor_class": f"{WORD}P", f"_{WORD}": {WORD: [WORD]}}
PLANTED = {
    "config.json": ANYWHERE
    | {
        "auto_map": {"AutoModel": ELSEWHERE, f"Auto{WORD}": ELSEWHERE, "AutoTokenizer": ELSEWHERE},
        "architectures": [f"{WORD}Model"],
        "tokenizer_class": WORD,
        "task_specific_params": {WORD: {}},
        "finetuning_task": WORD,
        "prefix": WORD,
        "_name_or_path": f"{WORD}/repo",
    },
    "generation_config.json": ANYWHERE,
    "tokenizer_config.json": ANYWHERE
    | {
        "auto_map": {"AutoTokenizer": [ELSEWHERE, None], "AutoProcessor": ELSEWHERE, WORD: WORD},
        "name_or_path": f"{WORD}/repo",
        "tokenizer_class": WORD,
        "backend": WORD,
    },
    "preprocessor_config.json": ANYWHERE
    | {"auto_map": {"AutoImageProcessor": ELSEWHERE, "AutoProcessor": ELSEWHERE, WORD: WORD}},
    "processor_config.json": ANYWHERE | {"auto_map": {"AutoProcessor": ELSEWHERE, WORD: WORD}},
    "special_tokens_map.json": ANYWHERE,
    "adapter_config.json": {"auto_mapping": {"base_model_class": WORD, "parent_library": WORD}},
}


def write_headers(folder: Path, **metadata: str) -> None:
    """Write the weights of a folder again, with headers that have only this metadata."""
    for file in folder.glob("*.safetensors"):
        save_file(load_file(file), file, metadata={"format": "pt", **metadata})


def plant(folder: Path) -> None:
    """Put the word into every file of a folder, and files with it beside them."""
    adapters = (folder / "adapter_config.json").is_file()
    for name, values in PLANTED.items():
        path = folder / name
        if adapters != (name == "adapter_config.json"):
            continue
        content = json.loads(path.read_text()) if path.is_file() else {}
        if "vision_config" in content:
            content["vision_config"][f"{WORD}_key"] = WORD
        path.write_text(json.dumps(content | values))
    write_headers(folder, **{WORD: WORD})
    (folder / "README.md").write_text(f"---\nlibrary_name: {WORD}\ntags: [{WORD}]\n---\n{WORD}")
    for name in (f"{WORD}.py", "training_args.bin", f"custom_generate/{WORD}.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"raise SystemExit('{WORD}')")


def names_of_others(folder: Path) -> list[str]:
    word, files = WORD.encode(), [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 1
    return [str(p) for p in files if word in p.read_bytes() or WORD in p.relative_to(folder).name]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A recipe on a model of others."""
    changes = {"trained": "projector", "engine.zero_stage": 0, "trainer.dataloader_num_workers": 0}
    planted = drawn_recipe(tmp_path_factory.mktemp("planted"), changes | {"trainer.max_steps": 1})
    plant(Path(planted.model))
    return planted


@pytest.fixture
def model(planted, tmp_path) -> Path:
    return Path(shutil.copytree(planted.model, tmp_path / "model"))


@pytest.fixture
def adapters(model, tmp_path) -> Path:
    write_adapters(tmp_path / "adapters", model)
    plant(tmp_path / "adapters")
    return tmp_path / "adapters"


def by_merge(model: Path, adapters: Path, out: Path) -> None:
    merge(str(adapters), out)


def by_take_over(model: Path, adapters: Path, out: Path) -> None:
    """Copy the files that ``export`` copies beside the weights."""
    out.mkdir()
    copy_license_and_generation(model, out)
    ChatGLMConfig.from_pretrained(model).save_pretrained(out)


def by_adopt(model: Path, adapters: Path, out: Path) -> None:
    write_headers(model)  # weights are linked as they are
    adopt(model, out)


def by_build(model: Path, adapters: Path, out: Path) -> None:
    from hub_upload import build

    write_headers(model)
    source = build.read_source(str(model), "zai-org/glm-4v-9b", "shapes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "check_loading", lambda target: "")  # tests/hub_upload does
        build.build_model_repository(source, out, "our-org/built")


def by_classes(model: Path, adapters: Path, out: Path) -> None:
    """Each class by itself, in a folder of its own."""
    of_model = (GLM4VForCausalLM, ChatGLMConfig)
    for cls in (*of_model, ChatGLMProcessor, ChatGLM4Tokenizer, ChatGLMImageProcessor):
        cls.from_pretrained(model).save_pretrained(out / cls.__name__)


def by_auto_classes(model: Path, adapters: Path, out: Path) -> None:
    with glm4v_patched.applied(), remote_code_under(out.parent / "modules"):
        for cls in (AutoModelForCausalLM, AutoProcessor, AutoTokenizer):
            cls.from_pretrained(model, trust_remote_code=True).save_pretrained(out)


def by_peft(model: Path, adapters: Path, out: Path) -> None:
    with glm4v_patched.applied():
        loaded = PeftModel.from_pretrained(GLM4VForCausalLM.from_pretrained(model), adapters)
        loaded.save_pretrained(out / "applied")
    continued = load_adapters(GLM4VForCausalLM.from_pretrained(model), adapters)
    continued.save_pretrained(out / "continued")
    continued.merge_and_unload().save_pretrained(out / "merged")
    config = LoraConfig(target_modules=".*fc1")
    get_peft_model(GLM4VForCausalLM.from_pretrained(model), config).save_pretrained(out / "new")


def by_train(model: Path, adapters: Path, out: Path) -> None:
    train_recipe = drawn_recipe(out.parent / "drawn", {"engine.zero_stage": 0})
    train_here(train_recipe.override(TRAINED | {"model": str(model), "out": str(out)}))


TRAINED = {"trained": "projector", "trainer.dataloader_num_workers": 0, "trainer.max_steps": 1}
WAYS = [by_merge, by_take_over, by_build, by_adopt, by_classes, by_auto_classes, by_peft, by_train]


@pytest.mark.parametrize("save", WAYS)
def test_nothing_of_others_is_saved_and_it_is_logged(model, adapters, tmp_path, warned, save):
    save(model, adapters, tmp_path / "out")
    assert names_of_others(tmp_path / "out") == []
    assert any("is saved without" in line and f"{WORD}_key" in line for line in warned.messages)


def test_what_belongs_to_a_model_is_saved_and_a_note_is_not(tmp_path, warned):
    """Labels, ids, options of generation and of quantized weights stay."""
    quantized = {"quant_method": "quanto", "weights": "int8"}  # whose class needs no package
    labels = {"id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}}
    preserved = {"pad_token_id": 7, "eos_token_id": [1, 2], "rope_ratio": 2, "skip_logits": True}
    preserved |= labels | {"problem_type": None}
    config = tiny_config(**preserved, quantization_config=quantized | {WORD: WORD})
    config.my_note = 1
    config.save_pretrained(tmp_path)
    assert [line for line in warned.messages if "my_note" in line and "quantization_config" in line]
    again = ChatGLMConfig.from_pretrained(tmp_path)
    preserved["quantization_config"] = quantized
    assert {name: getattr(again, name) for name in preserved} == preserved
    assert not hasattr(again, "my_note") and config.my_note == 1
    warned.clear()
    model = tiny_model()
    options = {"temperature": 0.5, "do_sample": True, "stop_strings": ["x"], "suppress_tokens": [1]}
    model.generation_config.update(**options)
    model.generation_config.my_note = 1
    model.save_pretrained(tmp_path / "model")
    assert [line for line in warned.messages if "my_note" in line]
    assert model.generation_config.my_note == 1
    saved = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert options.items() <= saved.items() and "my_note" not in saved
    warned.clear()
    GLM4VForCausalLM.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "again")
    assert warned.messages == []
