"""``glm4v-patched merge``: one model of adapters and their base, file by file."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from glm4v_patched.cli import main
from glm4v_patched.inference import merge as module
from glm4v_patched.inference.merge import merge
from glm4v_patched.inference.questions import read_questions
from glm4v_patched.models.find import find_source
from glm4v_patched.models.loading import load_processor
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from hub_upload import build as building
from hub_upload.build import build_model_repository, read_source
from tests.helpers.tiny import update_json

BOTH = r".*query_key_value"
FIRST = "encoder.layers.0.self_attention.query_key_value"
KINDS = {
    "alpha": {"r": 4, "lora_alpha": 32},
    "rsLoRA": {"r": 4, "lora_alpha": 8, "use_rslora": True},
    "DoRA": {"r": 4, "lora_alpha": 8, "use_dora": True},
    "patterns": {"r": 4, "rank_pattern": {FIRST: 2}, "alpha_pattern": {FIRST: 64}},
    "other layers": {"r": 2, "target_modules": r".*(dense_h_to_4h|output_layer|encoder.*\.dense)"},
}


def adapters_on(model: Path, folder: Path, **options) -> Path:
    base = GLM4VForCausalLM.from_pretrained(model, dtype="auto")
    config = LoraConfig(**{"target_modules": BOTH, "task_type": "CAUSAL_LM"} | options)
    adapted = get_peft_model(base, config)
    torch.manual_seed(0)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    adapted.save_pretrained(folder)
    return folder


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {n: w for path in folder.glob("*.safetensors") for n, w in load_file(path).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_those_of_peft(files, tmp_path, kind):
    folder = adapters_on(files.model, tmp_path / "adapters", **KINDS[kind])
    merge(str(folder), tmp_path / "merged")
    model = GLM4VForCausalLM.from_pretrained(files.model)
    expected = PeftModel.from_pretrained(model, folder).merge_and_unload().state_dict()
    merged, before = read_weights(tmp_path / "merged"), read_weights(files.model)
    assert merged.keys() == before.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)
    changed = {name for name in merged if not torch.equal(merged[name], before[name])}
    assert len(changed) == 4 if kind != "other layers" else len(changed) > 4


def test_files_their_format_and_the_dtypes_of_the_base_are_kept(files, tmp_path):
    """Each tensor keeps its dtype, bf16 or fp32, and its file."""
    sharded, norm = tmp_path / "model", "transformer.encoder.final_layernorm.weight"
    shutil.copytree(files.model, sharded)
    (sharded / "model.safetensors").unlink()
    model = GLM4VForCausalLM.from_pretrained(files.model, dtype=torch.bfloat16)
    model.save_pretrained(sharded, max_shard_size="400KB")
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    path = sharded / index["weight_map"][norm]
    tensors = load_file(path)
    save_file(tensors | {norm: tensors[norm].float()}, path, metadata={"format": "pt"})
    folder = adapters_on(sharded, tmp_path / "adapters", r=4, lora_alpha=32)
    merge(str(folder), tmp_path / "merged")
    assert len([*sharded.glob("*.safetensors")]) > 3
    for path in sharded.glob("*.safetensors"):
        before, after = load_file(path), load_file(tmp_path / "merged" / path.name)
        assert {n: w.dtype for n, w in before.items()} == {n: w.dtype for n, w in after.items()}
        with safe_open(tmp_path / "merged" / path.name, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}  # without it, transformers 4 refuses a file
    merged_index = tmp_path / "merged" / "model.safetensors.index.json"
    assert json.loads(merged_index.read_text()) == index


def moved_to(model: Path, files, folder: Path, **changes) -> Path:
    """The adapters in a folder of their own, on this model."""
    shutil.copytree(files.adapters, folder)
    changes = {"base_model_name_or_path": str(model)} | changes
    update_json(folder / "adapter_config.json", **changes)
    return folder


def test_no_file_outside_is_written_that_an_index_names(files, tmp_path, monkeypatch):
    """For a folder, before anything is loaded, and for a download from the Hub."""
    folder, victim = tmp_path / "model", tmp_path / "mine.safetensors"
    shutil.copytree(files.model, folder)
    (folder / "model.safetensors").rename(victim)
    names = dict.fromkeys(load_file(victim), "../mine.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    adapters, before = str(moved_to(folder, files, tmp_path / "adapters")), victim.read_bytes()
    of_hub = module.ModelSource(str(folder), adapters=Path(adapters))
    for find in (module.find_source, lambda *_: of_hub):
        monkeypatch.setattr(module, "find_source", find)
        with pytest.raises(ValueError, match="names '../mine.safetensors'; expected only names"):
            merge(adapters, tmp_path / "out")
    assert victim.read_bytes() == before and not (tmp_path / "out").exists()


def test_the_folder_is_one_that_save_pretrained_writes_answers_so_and_can_be_published(
    files, answerer, adapted, load_answerer, tmp_path, monkeypatch
):
    merged = tmp_path / "new" / "merged"
    assert main(["merge", str(files.adapters), "--out", str(merged)]) == 0
    assert {path.name for path in merged.iterdir()} == {path.name for path in files.model.iterdir()}
    configs = [json.loads((folder / "config.json").read_text()) for folder in (files.model, merged)]
    assert configs[0] == configs[1]
    modes = {path.stat().st_mode & 0o777 for path in merged.iterdir()}
    assert len(modes) == 1 and [path.name for path in merged.parent.iterdir()] == ["merged"]
    prompts = [question.prompt for question in read_questions(files.data)]
    answers = [model.answer(prompts) for model in (answerer, adapted, load_answerer(merged))]
    assert answers[0] != answers[1] == answers[2]
    (merged / "MODEL_LICENSE").write_text("The weights are under this license.\n")
    monkeypatch.setattr(building, "check_loading", lambda target: [])  # tests/hub_upload does
    source = read_source(str(merged), "zai-org/glm-4v-9b", "LoRA on shapes")
    build_model_repository(source, tmp_path / "published", "our-org/glm-4v-9b-shapes")
    assert (tmp_path / "published" / "model.safetensors").is_file()


def test_the_processor_of_the_adapters_goes_with_their_model(files, tmp_path):
    adapters = moved_to(files.model, files, tmp_path / "adapters")
    processor = load_processor(find_source(str(adapters)))
    processor.chat_template = processor.tokenizer.chat_template = "hello"
    processor.save_pretrained(adapters)
    merge(str(adapters), tmp_path / "merged")
    assert load_processor(find_source(str(tmp_path / "merged"))).chat_template == "hello"


def test_a_weight_that_was_merged_wrongly_is_noticed_and_nothing_is_left(
    files, tmp_path, monkeypatch
):
    """Adapters that change a layer's output by 4%, twice, in bf16."""
    with torch.device("meta"):
        model = GLM4VForCausalLM(GLM4VForCausalLM.config_class.from_pretrained(files.model))
    layers = module.adapted_layers(find_source(str(files.adapters)), model)
    name, layer = next(iter(layers.items()))
    weight = load_file(files.model / "model.safetensors")[name].bfloat16()
    scale = 0.04 * weight.float().std() / layer.get_delta_weight("default").std()
    layer.lora_B["default"].weight *= scale
    module.merged_weight(layer, weight, name)
    delta = LoraLinear.get_delta_weight
    monkeypatch.setattr(LoraLinear, "get_delta_weight", lambda *args: 2 * delta(*args))
    layer.merged_adapters.clear()
    with pytest.raises(RuntimeError, match=f"{name}: the merged layer's output differs"):
        module.merged_weight(layer, weight, name)
    with pytest.raises(RuntimeError, match="the merged layer's output differs"):
        merge(str(files.adapters), tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


def test_more_than_lora_is_refused_by_name(files, tmp_path, words):
    for number, (changes, named) in enumerate(
        (
            ({"bias": "lora_only"}, "bias is"),
            ({"modules_to_save": ["output_layer"]}, "modules_to_save is"),
            ({"lora_bias": True, "use_qalora": True}, "lora_bias is true, use_qalora is true"),
            ({"of_next_year": 3}, "of_next_year is 3"),
            ({"peft_type": "IA3"}, "peft_type is"),
        )
    ):
        adapters = moved_to(files.model, files, tmp_path / str(number), **changes)
        with words.refused(ValueError, named, files=files.model.parent):
            merge(str(adapters), tmp_path / "merged")
    adapters = moved_to(files.model, files, tmp_path / "broken")
    tensors = load_file(adapters / "adapter_model.safetensors")
    next(weight for name, weight in tensors.items() if "lora_B" in name)[0, 0] = float("nan")
    save_file(tensors, adapters / "adapter_model.safetensors")
    with words.refused(ValueError, "query_key_value.weight"):
        merge(str(adapters), tmp_path / "merged")
    options = {"r": 2, "target_modules": ["word_embeddings"]}
    folder = adapters_on(files.model, tmp_path / "embeddings", **options)
    with words.refused(ValueError, "word_embeddings.weight"):
        merge(str(folder), tmp_path / "merged")


def test_a_weight_missing_from_a_model_of_the_hub_is_named(files, tmp_path, monkeypatch):
    """For a folder, an earlier check finds it."""
    model = Path(shutil.copytree(files.model, tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    del weights[f"transformer.{FIRST}.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    of_hub = module.ModelSource(str(model), adapters=files.adapters)
    monkeypatch.setattr(module, "find_source", lambda *_: of_hub)
    with pytest.raises(ValueError, match=rf"is missing 1 of the \d+ weights .*{FIRST}"):
        merge("our-org/adapters", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_mistake_is_told_and_nothing_is_replaced(files, tmp_path, monkeypatch, refused):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").touch()
    refused(["merge", files.adapters, "--out", tmp_path / "there"], "there exists")
    refused(["merge", files.model, "--out", tmp_path / "out"], "holds no adapters")
    of_hub = ["merge", files.adapters, "--revision", "main", "--out", tmp_path / "out"]
    refused(of_hub, "revision is 'main'")
    refused(["merge", files.adapters, "--out", files.model / "out"], "lies in the model's folder")
    size = (files.model / "model.safetensors").stat().st_size
    free = shutil._ntuple_diskusage(9, 9, size - 1)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: free)
    refused(["merge", files.adapters, "--out", tmp_path / "out"], "3.1 MB")
    assert {path.name for path in tmp_path.iterdir()} == {"there"}
