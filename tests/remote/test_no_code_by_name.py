"""No file of a model's folder makes transformers run, import or fetch what it names.

The rows are those of the table in docs/model.md. Where a key is refused, the error names it; where
it is ignored, the folder loads. Either way nothing is fetched, and the planted code does not run.
"""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import huggingface_hub
import pytest
import transformers.utils.hub
from transformers import AutoModelForCausalLM, AutoProcessor

import glm4v_patched
from glm4v_patched.models.base import ModelSource, source_of_adapters
from glm4v_patched.models.check_weights import require_complete_model
from glm4v_patched.models.loading import load_processor
from glm4v_patched.remote.configuration_chatglm import QUANTIZERS_WITH_HUB_KERNELS
from glm4v_patched.remote.image_processing_chatglm import ChatGLMImageProcessor
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from glm4v_patched.remote.tokenization_chatglm import ChatGLM4Tokenizer
from tests.helpers.legacy_repository import remote_code_under
from tests.helpers.tiny import tiny_model

CODE = "from pathlib import Path\nPath(MARKER).touch()\ndef generate(model, **given): pass\n"
PLANTED = "planted.py:Evil"
NAMED_CODE = {"AutoConfig": "someone/repo--planted.Evil", "AutoModelForCausalLM": "planted.Evil"}
AUDIO = {"audio_tokenizer_class": "AutoTokenizer", "audio_tokenizer_name_or_path": "someone/repo"}


def quantized(**values) -> dict:
    return {"quantization_config": {"quant_method": "compressed-tensors"} | values}


# File, the values that are added to it, and the error; None if the key is ignored.
ROWS = [
    ("config.json", {"attn_implementation": "someone/repo"}, "attn_implementation"),
    ("config.json", {"attn_implementation": "flash_attention_2"}, "attn_implementation"),
    ("config.json", {"_attn_implementation_internal": "paged|someone/repo"}, "_internal"),
    ("config.json", {"attn_implementation": {"": "sdpa", "vision_config": "a/b"}}, "attn_impl"),
    ("config.json", {"attn_implementation": "paged|sdpa"}, None),
    ("config.json", {"attn_implementation": "flex_attention"}, None),
    ("config.json", {"vision_config": {"attn_implementation": "someone/repo"}}, "vision_config"),
    ("config.json", {"experts_implementation": "someone/repo"}, "experts_implementation"),
    ("config.json", {"kernel_config": {"RMSNorm": "someone/repo"}}, "kernel_config"),
    ("config.json", {"use_kernels": True}, "use_kernels"),
    ("config.json", {"custom_generate": "someone/repo"}, "custom_generate"),
    *[
        ("config.json", {"quantization_config": {"quant_method": method}}, "quant_method")
        for method in QUANTIZERS_WITH_HUB_KERNELS
    ],
    ("config.json", quantized(format=PLANTED), "format"),
    ("config.json", quantized(sparsity_config={"format": PLANTED}), "format"),
    (
        "config.json",
        quantized(transform_config={"config_groups": {"u": {"type": PLANTED, "apply": []}}}),
        "type",
    ),
    ("config.json", {"auto_map": NAMED_CODE}, None),
    ("config.json", {"tokenizer_class": "Evil", "processor_class": "Evil"}, None),
    ("generation_config.json", {"compile_config": {"backend": "evil"}}, "compile_config"),
    ("generation_config.json", {"cache_implementation": "someone/repo"}, "cache_implementation"),
    ("generation_config.json", {"custom_generate": "someone/repo"}, None),
    ("custom_generate/generate.py", CODE, None),
    ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["planted.Evil", None]}}, None),
    ("processor_config.json", {"audio_tokenizer": AUDIO}, "audio_tokenizer"),
    ("audio_tokenizer_config.json", AUDIO, "audio_tokenizer"),
    ("preprocessor_config.json", {"auto_map": {"AutoImageProcessor": "planted.Evil"}}, None),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, small_backend) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tiny_model().save_pretrained(folder)
    tokenizer = ChatGLM4Tokenizer(tokenizer_object=small_backend)
    ChatGLMProcessor(ChatGLMImageProcessor(size=56), tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def hub_requests(monkeypatch) -> list:
    """Record the calls of downloads, all of which fail."""
    names: list = []

    def record(*arguments, **options):
        names.append((arguments, options))
        raise OSError("nothing is fetched in this test")

    for module in (huggingface_hub, transformers.utils.hub):
        for name in ("hf_hub_download", "snapshot_download"):
            monkeypatch.setattr(module, name, record)
    return names


@pytest.fixture
def folder(saved, tmp_path, monkeypatch):
    """A copy with code in it, which is also the working directory."""
    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    (copy / "planted.py").write_text(CODE.replace("MARKER", repr(str(tmp_path / "it ran"))))
    monkeypatch.chdir(copy)
    with remote_code_under(tmp_path / "modules"):
        yield copy


def plant(file: Path, values) -> None:
    file.parent.mkdir(exist_ok=True)
    if isinstance(values, dict):
        present = json.loads(file.read_text()) if file.is_file() else {}
        if isinstance(inner := values.get("vision_config"), dict):
            values = {"vision_config": present["vision_config"] | inner}
        values = json.dumps(present | values)
    file.write_text(values.replace("MARKER", repr(str(file.parents[2] / "it ran"))))


def by_command(folder: Path) -> None:
    require_complete_model(str(folder))
    GLM4VForCausalLM.from_pretrained(folder)
    load_processor(ModelSource(str(folder), None))


def by_auto_class(folder: Path) -> None:
    """Load with trust_remote_code, as scripts do; the trusted code is then ours."""
    with glm4v_patched.applied():
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        AutoProcessor.from_pretrained(folder, trust_remote_code=True)


@pytest.mark.parametrize(("name", "values", "refused"), ROWS, ids=str)
def test_no_setting_of_a_folder_runs_or_fetches_code(
    folder, tmp_path, hub_requests, name, values, refused
):
    plant(folder / name, values)
    for load in (by_command, by_auto_class):
        with pytest.raises(ValueError, match=refused) if refused else nullcontext():
            load(folder)
    assert not (tmp_path / "it ran").exists() and hub_requests == []


def test_custom_generate_runs_only_with_trust_remote_code(folder, tmp_path):
    plant(folder / "custom_generate" / "generate.py", CODE)
    GLM4VForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert (tmp_path / "it ran").exists()


def test_adapters_name_no_module_to_be_imported(tmp_path):
    (tmp_path / "adapter_model.safetensors").touch()
    config = {"peft_type": "LORA", "base_model_name_or_path": "our-org/base"}
    megatron = {"megatron_config": {"a": 1}, "megatron_core": "planted"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | megatron))
    with pytest.raises(ValueError, match=r"megatron_config is .* import the module 'planted'"):
        source_of_adapters(tmp_path)


NO_TOKENS = {"max_new_tokens": "evil"}
BROKEN = [
    ("config.json", {"quantization_config": {"quant_method": ["x"]}}, "has quantization_config .*"),
    ("config.json", {"transformers_weights": "../a.safetensors"}, "has transformers_weights .*"),
    ("generation_config.json", {"watermarking_config": {"a": 1}}, "has watermarking_config .*"),
    ("generation_config.json", NO_TOKENS, "generation_config.json has max_new_tokens .*remove it"),
    ("chat_template.jinja", "{% if", "chat template: unexpected 'end of template'"),
    ("chat_template.jinja", "{{ messages.__class__.__mro__ }}", "chat template: .* is unsafe"),
    ("processor_config.json", "[]", "processor_config.json holds a list"),
]


@pytest.mark.parametrize(("name", "values", "message"), BROKEN, ids=str)
def test_files_that_cannot_be_read_are_named(folder, name, values, message):
    plant(folder / name, values)
    with pytest.raises(ValueError, match=message):
        require_complete_model(str(folder))
        load_processor(ModelSource(str(folder), None))
