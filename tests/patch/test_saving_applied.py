"""After ``apply()``, what is saved loads from its folder, without the package."""

import json
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
from glm4v_patched.remote.configuration_chatglm import AUTO_MAP, fault_of_adapters
from tests.helpers.fresh_process import run_without_package
from tests.helpers.legacy_repository import (
    image_row,
    remote_code_under,
    write_legacy_repository,
)

REMOTE = Path(glm4v_patched.remote.__file__).parent
PUBLISHED = "zai-org/glm-4v-9b"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LOADS_ADAPTERS = fault_of_adapters() is None
# transformers 5.24 wants a newer peft for adapters that it adds, too.
ADDS_ADAPTERS = Version(peft.__version__) >= Version(MIN_PEFT_VERSION)
ADAPTERS = ["adapter", "trainer_adapter", *(["transformers_adapter"] if ADDS_ADAPTERS else [])]
WHOLE = ["save_pretrained", "trainer", "merged"]

SCRIPT = """
import json, sys
sys.modules["glm4v_patched"] = None  # cannot be imported
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from peft import PeftModel

out, whole, adapters = sys.argv[1], sys.argv[2].split(","), sys.argv[3].split(",")
by_itself = sys.argv[4] == "True"
inputs = load_file(out + "/inputs.safetensors")
found, classes = {}, {}
for name in whole + adapters:
    folder = out + "/" + name
    if name in whole:
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    else:
        ours = get_class_from_dynamic_module("modeling_chatglm.GLM4VForCausalLM", folder)
        if by_itself:
            model = ours.from_pretrained(folder)
        else:
            base = ours.from_pretrained(out + "/save_pretrained")
            model = PeftModel.from_pretrained(base, folder).get_base_model()
    with torch.no_grad():
        found[name] = model.eval()(**inputs).logits.contiguous()
    classes[name] = f"{type(model).__module__} {type(model).__name__}"
for name in ("trainer", "trainer_adapter"):
    processor = AutoProcessor.from_pretrained(out + "/" + name, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(out + "/" + name, trust_remote_code=True)
    assert processor.image_processor.size["height"] == tokenizer.image_size == 56
    assert len(tokenizer(["a", "a longer one"], padding=True, return_tensors="pt").input_ids) == 2
save_file(found, out + "/logits.safetensors")
with open(out + "/classes.json", "w") as file:
    json.dump(classes, file)
"""


@pytest.fixture(scope="module", autouse=True)
def offline():
    """peft asks the Hub for the config of a base that it knows by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        forget_sessions()
        yield
    forget_sessions()


def forget_sessions() -> None:
    """huggingface_hub 0.36 keeps sessions, and whether they are offline, for whoever comes next."""
    getattr(huggingface_hub.utils, "reset_sessions", lambda: None)()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
    """A folder of each kind, from a model loaded from the cache of the Hub, and its logits."""
    out = tmp_path_factory.mktemp("saved")
    repository = out / "cache" / "models--zai-org--glm-4v-9b"
    write_legacy_repository(out / "published")
    shutil.copytree(out / "published", repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    inputs = {name: image_row(0)[name] for name in ("input_ids", "images")}
    save_file(inputs, out / "inputs.safetensors")
    want = {}

    def load(auto_class):
        where = {"cache_dir": out / "cache", "local_files_only": True}
        return auto_class.from_pretrained(PUBLISHED, trust_remote_code=True, **where)

    def model_with_adapters(adapters=None):
        torch.manual_seed(0)
        # Nonzero from the start, so that an adapter that is lost is noticed.
        config = LoraConfig(target_modules=["query_key_value"], init_lora_weights=False)
        if adapters == "of transformers":
            model = load(AutoModelForCausalLM)
            model.add_adapter(config)
            return model
        return get_peft_model(load(AutoModelForCausalLM), config)

    def keep(name: str, model) -> None:
        with torch.no_grad():
            want[name] = model.eval()(**inputs).logits

    def trainer(model, name: str) -> Trainer:
        arguments = TrainingArguments(
            output_dir=str(out / name),
            max_steps=1,
            per_device_train_batch_size=1,
            learning_rate=1e-2,
            use_cpu=True,
            remove_unused_columns=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        )
        rows = [{key: value[0] for key, value in image_row(seed).items()} for seed in range(2)]
        return Trainer(model, arguments, train_dataset=rows, processing_class=load(AutoProcessor))

    with remote_code_under(out / "modules"), glm4v_patched.applied():
        model = load(AutoModelForCausalLM)
        model.save_pretrained(out / "save_pretrained")
        keep("save_pretrained", model)
        for name, model in (
            ("trainer", load(AutoModelForCausalLM)),
            ("trainer_adapter", model_with_adapters()),
        ):
            run = trainer(model, name)
            run.train()
            run.save_model()
            keep(name, model)
        model = model_with_adapters()
        model.save_pretrained(out / "adapter")
        keep("adapter", model)
        merged = model.merge_and_unload()
        merged.save_pretrained(out / "merged")
        keep("merged", merged)
        if ADDS_ADAPTERS:
            model = model_with_adapters("of transformers")
            model.save_pretrained(out / "transformers_adapter")
            keep("transformers_adapter", model)
    yield out, want


@pytest.fixture(scope="module")
def loaded(saved) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What a process without the package loads from these folders: logits, and classes."""
    out, _ = saved
    folders = ",".join(WHOLE), ",".join(ADAPTERS), str(LOADS_ADAPTERS)
    run_without_package(SCRIPT, out, str(out), *folders, HF_HUB_CACHE=str(out / "cache"))
    return load_file(out / "logits.safetensors"), json.loads((out / "classes.json").read_text())


@pytest.mark.parametrize("name", WHOLE + ADAPTERS)
def test_the_same_model_loads_with_our_code_and_without_the_package(name, saved, loaded):
    logits, classes = loaded
    torch.testing.assert_close(logits[name], saved[1][name], rtol=0, atol=1e-6)
    module, class_name = classes[name].split()
    assert module.startswith("transformers_modules.") and class_name == "GLM4VForCausalLM"


def test_the_adapters_and_the_training_changed_the_model(saved):
    """So that equal logits above say something."""
    _, want = saved
    for name in ("trainer", *ADAPTERS):
        assert (want[name] - want["save_pretrained"]).abs().max() > 1e-2, name


@pytest.mark.parametrize("name", WHOLE + ADAPTERS)
def test_our_code_lies_beside_the_weights_and_is_all_that_is_named(name, saved):
    folder = saved[0] / name
    code = {path.name: path.read_bytes() for path in folder.glob("*.py")}
    assert {"modeling_chatglm.py", "visual.py"} <= code.keys()
    assert all((REMOTE / file).read_bytes() == content for file, content in code.items())
    configs = {path.name: path.read_text() for path in folder.glob("*.json")}
    assert not any(f"{PUBLISHED}--" in content for content in configs.values())
    if name in WHOLE:
        config = json.loads(configs["config.json"])
        assert config["auto_map"] == AUTO_MAP
        assert config["architectures"] == ["GLM4VForCausalLM"]
    else:
        adapter = json.loads(configs["adapter_config.json"])
        library = (adapter.get("auto_mapping") or {}).get("parent_library", "")
        assert library in ("", "glm4v_patched.remote.modeling_chatglm")
        assert adapter["base_model_name_or_path"] == PUBLISHED and "config.json" not in configs


@pytest.mark.skipif(
    not LOADS_ADAPTERS, reason=f"this transformers {fault_of_adapters()}: by PeftModel, above"
)
def test_an_adapter_loads_through_the_auto_classes(saved):
    """By its folder alone, base and all."""
    out, want = saved
    where = {"cache_dir": out / "cache", "local_files_only": True}
    inputs = {name: image_row(0)[name] for name in ("input_ids", "images")}
    with glm4v_patched.applied():
        model = AutoModelForCausalLM.from_pretrained(out / "adapter", **where)
        processor = AutoProcessor.from_pretrained(out / "trainer_adapter")
    assert type(model).__module__.startswith("glm4v_patched.remote.")
    assert type(processor).__module__.startswith("glm4v_patched.remote.")
    with torch.no_grad():
        torch.testing.assert_close(
            model.eval()(**inputs).logits, want["adapter"], rtol=0, atol=1e-6
        )


def test_every_adapter_has_the_code_in_its_own_folder_once(saved, tmp_path):
    with glm4v_patched.applied():
        base = AutoModelForCausalLM.from_pretrained(saved[0] / "save_pretrained")
        config = LoraConfig(target_modules=["query_key_value"])
        model = get_peft_model(base, config, adapter_name="pictures")
        model.add_adapter("text", config)
        model.save_pretrained(tmp_path / "both")
        model.save_pretrained(tmp_path / "one", selected_adapters=["text"])
        model.save_pretrained(tmp_path / "not main", is_main_process=False)
    folders = {path.parent for path in tmp_path.rglob("adapter_config.json")}
    names = {str(folder.relative_to(tmp_path)) for folder in folders}
    assert names == {"both/pictures", "both/text", "one/text"}
    assert {path.parent for path in tmp_path.rglob("modeling_chatglm.py")} == folders


def test_adapters_of_other_models_are_saved_as_before(tmp_path):
    model = get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(2, 2)), LoraConfig(target_modules=["0"])
    )
    with glm4v_patched.applied():
        model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_config.json").exists() and not [*tmp_path.glob("*.py")]
    assert PeftModel.save_pretrained.__module__ == "peft.peft_model"
