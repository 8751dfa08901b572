"""Models saved after ``apply()`` load from their folders without the package."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.utils
import peft
import pytest
import torch
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoProcessor, Trainer, TrainingArguments
from transformers.integrations.peft import MIN_PEFT_VERSION

import glm4v_patched
import glm4v_patched.remote
from glm4v_patched.remote.configuration_chatglm import AUTO_MAP, find_adapter_problem
from tests.helpers.legacy_repository import image_row, remote_code_under, write_legacy_repository
from tests.helpers.processes import run_without_package

REMOTE = Path(glm4v_patched.remote.__file__).parent
PUBLISHED = "zai-org/glm-4v-9b"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LOADS_ADAPTERS = find_adapter_problem() is None
# transformers 5.24 also requires a newer peft to add adapters itself.
ADDS_ADAPTERS = Version(peft.__version__) >= Version(MIN_PEFT_VERSION)
ADAPTERS = ["adapter", "trainer_adapter", *(["transformers_adapter"] if ADDS_ADAPTERS else [])]
MODELS = ["save_pretrained", "trainer"]
# Nonzero from the start, so that a lost adapter changes the logits.
LORA = LoraConfig(target_modules=["query_key_value"], init_lora_weights=False)

SCRIPT = """
import sys
sys.modules["glm4v_patched"] = None  # cannot be imported
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from peft import PeftModel

models, adapters = (names.split(",") for names in sys.argv[1:3])
loads_adapters = sys.argv[3] == "True"
inputs = load_file("inputs.safetensors")
found = {}
for name in models + adapters:
    if name in models:
        model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
    else:
        ours = get_class_from_dynamic_module("modeling_chatglm.GLM4VForCausalLM", name)
        if loads_adapters:
            model = ours.from_pretrained(name)
        else:
            base = ours.from_pretrained("save_pretrained")
            model = PeftModel.from_pretrained(base, name).get_base_model()
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    found[name] = model.eval()(**inputs).logits.detach().contiguous()
processor = AutoProcessor.from_pretrained("trainer_adapter", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("trainer_adapter", trust_remote_code=True)
assert processor.image_processor.size["height"] == tokenizer.image_size == 56
save_file(found, "logits.safetensors")
"""


@pytest.fixture(scope="module", autouse=True)
def offline():
    """Go offline: peft would ask the Hub for the config of the base model."""
    # huggingface_hub 0.36 caches sessions together with their offline state.
    forget_sessions = getattr(huggingface_hub.utils, "reset_sessions", lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        forget_sessions()
        yield
    forget_sessions()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
    """Save models and adapters of a model in the Hub's cache; return the folder and all logits."""
    out = tmp_path_factory.mktemp("saved")
    repository = out / "cache" / "models--zai-org--glm-4v-9b"
    write_legacy_repository(out / "published")
    shutil.copytree(out / "published", repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    inputs = {name: image_row(0)[name] for name in ("input_ids", "images")}
    save_file(inputs, out / "inputs.safetensors")

    def load(auto_class):
        download = {"cache_dir": out / "cache", "local_files_only": True}
        return auto_class.from_pretrained(PUBLISHED, trust_remote_code=True, **download)

    def train(model, name: str) -> None:
        options = {"max_steps": 1, "per_device_train_batch_size": 1, "learning_rate": 1e-2}
        options |= {"use_cpu": True, "remove_unused_columns": False, "save_strategy": "no"}
        arguments = TrainingArguments(str(out / name), report_to="none", **options)
        rows = [{key: value[0] for key, value in image_row(seed).items()} for seed in range(2)]
        run = Trainer(model, arguments, train_dataset=rows, processing_class=load(AutoProcessor))
        run.train()
        run.save_model()

    with remote_code_under(out / "modules"), glm4v_patched.applied():
        models = {name: load(AutoModelForCausalLM) for name in MODELS + ADAPTERS}
        for name in ("adapter", "trainer_adapter"):
            models[name] = get_peft_model(models[name], LORA)
        if ADDS_ADAPTERS:
            models["transformers_adapter"].add_adapter(LORA)
        for name, model in models.items():
            if name.startswith("trainer"):
                train(model, name)
            else:
                model.save_pretrained(out / name)
        with torch.no_grad():
            expected = {name: model.eval()(**inputs).logits for name, model in models.items()}
    for name in ("trainer", *ADAPTERS):  # so that equal logits prove something
        assert (expected[name] - expected["save_pretrained"]).abs().max() > 1e-2, name
    yield out, expected


def test_the_same_models_load_with_our_code_and_without_the_package(saved):
    """Of the models and adapters those that the Trainer saved: the others have the same code and
    settings, as the next test shows."""
    out, expected = saved
    adapters = [name for name in ADAPTERS if name != "adapter"]
    names = "trainer", ",".join(adapters), str(LOADS_ADAPTERS)
    printed = run_without_package(SCRIPT, out, *names, HF_HUB_CACHE=str(out / "cache"))
    assert "is tested on" not in printed  # the warning for an untested transformers
    logits = load_file(out / "logits.safetensors")
    wanted = {name: expected[name] for name in ["trainer", *adapters]}
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", MODELS + ADAPTERS)
def test_our_code_is_beside_the_weights_and_is_the_only_code_named(name, saved):
    folder = saved[0] / name
    code = {path.name: path.read_bytes() for path in folder.glob("*.py")}
    assert {"modeling_chatglm.py", "visual.py"} <= code.keys()
    imported = re.findall(rb"^\s*from \.(\w+) import", b"".join(code.values()), re.MULTILINE)
    assert {f"{module.decode()}.py" for module in imported} <= code.keys()
    assert all((REMOTE / file).read_bytes() == content for file, content in code.items())
    configs = {path.name: path.read_text() for path in folder.glob("*.json")}
    assert not any(f"{PUBLISHED}--" in content for content in configs.values())
    if name in MODELS:
        config = json.loads(configs["config.json"])
        assert config["auto_map"] == AUTO_MAP
        trained = json.loads((saved[0] / "trainer" / "config.json").read_text())
        trainers_own = dict.fromkeys(("use_cache", "eos_token_id"))  # by release
        assert config | trainers_own == trained | trainers_own
        assert config["architectures"] == ["GLM4VForCausalLM"]
    else:
        adapter = json.loads(configs["adapter_config.json"])
        assert adapter["base_model_name_or_path"] == PUBLISHED and "config.json" not in configs
        assert name == "transformers_adapter" or adapter["auto_mapping"] is None


def test_every_adapter_has_the_code_in_its_own_folder_once(saved, tmp_path):
    other = get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(2, 2)), LoraConfig(target_modules=["0"])
    )
    with glm4v_patched.applied():
        base = AutoModelForCausalLM.from_pretrained(saved[0] / "save_pretrained")
        model = get_peft_model(base, LORA, adapter_name="images")
        model.add_adapter("text", LORA)
        model.save_pretrained(tmp_path / "both")
        model.save_pretrained(tmp_path / "one", selected_adapters=["text"])
        model.save_pretrained(tmp_path / "not main", is_main_process=False)
        other.save_pretrained(tmp_path / "another model")
    folders = {path.parent for path in tmp_path.rglob("adapter_config.json")}
    names = {str(folder.relative_to(tmp_path)) for folder in folders}
    assert names == {"both/images", "both/text", "one/text", "another model"}
    ours = folders - {tmp_path / "another model"}
    assert {path.parent for path in tmp_path.rglob("modeling_chatglm.py")} == ours
    assert PeftModel.save_pretrained.__module__ == "peft.peft_model"
