"""Saved folders with untested transformers, and beside another config of type "chatglm"."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from PIL import Image
from safetensors.torch import load_file

import glm4v_patched
from glm4v_patched.patch.auto_classes import require_tested_transformers
from glm4v_patched.remote.configuration_chatglm import FIRST_UNTESTED_TRANSFORMERS
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.helpers.legacy_repository import write_legacy_repository
from tests.helpers.processes import run_without_package

# Loads folders for which the installed transformers is too old; then, beside a config that is
# registered for the whole process as vLLM's is, a folder for which it is newer than tested. Writes
# the logits of a sample with an image, unexpanded and expanded, to newer/logits.
SCRIPT = """
import sys
sys.modules["glm4v_patched"] = None  # cannot be imported
import torch, transformers
from PIL import Image
from safetensors.torch import save_file

for name in sys.argv[1].split(","):
    try:
        getattr(transformers, name).from_pretrained("older " + name, trust_remote_code=True)
    except ImportError as error:
        message = f"<99, but {transformers.__version__} is installed, which is too old"
        assert message in str(error), error
    else:
        raise AssertionError(name)

class ChatGLMConfig(transformers.PretrainedConfig):
    model_type = "chatglm"
    attribute_map = {"num_hidden_layers": "num_layers", "n_head_kv": "multi_query_group_num"}

    def __init__(self, num_layers=28, padded_vocab_size=65024, seq_length=2048, **fields):
        self.num_layers = num_layers
        self.padded_vocab_size = self.vocab_size = padded_vocab_size
        self.seq_length = self.max_position_embeddings = seq_length
        self.interleaved_qkv = False
        super().__init__(**fields)

transformers.AutoConfig.register("chatglm", ChatGLMConfig, exist_ok=True)
names = ("AutoTokenizer", "AutoProcessor", "AutoModelForCausalLM", "AutoModel", "AutoConfig")
found = {}
for name in names:
    found[name] = getattr(transformers, name).from_pretrained("newer", trust_remote_code=True)
model = transformers.AutoModelForCausalLM
made = model.from_config(found["AutoConfig"], trust_remote_code=True)
assert type(made.config).__module__.startswith("transformers_modules."), type(made.config)
messages = [{"role": "user", "image": Image.new("RGB", (70, 50), "red"), "content": "What?"}]
logits = {}
for name in ("AutoModel", "AutoModelForCausalLM"):
    model = found[name].eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    assert type(model.config).__module__.startswith("transformers_modules."), type(model.config)
    for one in ("AutoProcessor", "AutoTokenizer"):
        inputs = found[one].apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt"
        )
        with torch.no_grad():
            logits[name + one] = model(**inputs).logits.contiguous()
save_file(logits, "newer/logits")
found["AutoModel"].save_pretrained("again")
"""
# AutoTokenizer of transformers 5.0 to 5.3 hides the first error.
HIDES_ERRORS = Version("5.0") <= Version(transformers.__version__) < Version("5.4")
CHECKED = ["AutoConfig", "AutoModel", *([] if HIDES_ERRORS else ["AutoTokenizer"])]


def with_range(saved: Path, folder: Path, oldest: str, first_untested: str) -> Path:
    """Copy a folder, and change the range of transformers versions in its code."""
    shutil.copytree(saved, folder)
    path = folder / "configuration_chatglm.py"
    code = path.read_text()
    for name, version in [("OLDEST", oldest), ("FIRST_UNTESTED", first_untested)]:
        code, number = re.subn(rf"(?m)^({name}_TRANSFORMERS) = .*", rf'\1 = "{version}"', code)
        assert number == 1
    path.write_text(code)
    return folder


@torch.no_grad()
def test_untested_versions_and_another_config_of_the_same_type(tmp_path):
    """Too old is one clear error, newer than tested one warning; our config and code are used."""
    write_legacy_repository(tmp_path / "published")
    saved = tmp_path / "saved"
    with glm4v_patched.applied():
        model = GLM4VForCausalLM.from_pretrained(tmp_path / "published").eval()
        processor = ChatGLMProcessor.from_pretrained(tmp_path / "published")
    model.save_pretrained(saved)
    processor.save_pretrained(saved)
    for name in CHECKED:  # each needs its own copy, as modules stay imported
        with_range(saved, tmp_path / f"older {name}", "98", "99")
    with_range(saved, tmp_path / "newer", "4.57.6", "4.57.6")
    printed = run_without_package(SCRIPT, tmp_path, ",".join(CHECKED))
    warning = f">=4.57.6,!=5.1.0,<4.57.6, but {transformers.__version__} is installed; if it fails"
    assert printed.count(warning) == 1

    image = Image.new("RGB", (70, 50), "red")
    messages = [{"role": "user", "image": image, "content": "What?"}]
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    expected = model(**processor.apply_chat_template(messages, **options)).logits
    for name, logits in load_file(tmp_path / "newer" / "logits").items():
        assert torch.equal(logits, expected), name
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    # A field that a class adds itself cannot be distinguished from one that its user set.
    assert config.pop("interleaved_qkv", None) in (False, None)
    assert config == json.loads((saved / "config.json").read_text())


def test_apply_refuses_untested_versions(monkeypatch):
    require_tested_transformers(transformers.__version__)
    monkeypatch.setattr(transformers, "__version__", f"{FIRST_UNTESTED_TRANSFORMERS}.0")
    before = vars(transformers.AutoModel)["from_pretrained"]
    with pytest.raises(ImportError, match=f"<{FIRST_UNTESTED_TRANSFORMERS}, but"):
        glm4v_patched.apply()
    assert vars(transformers.AutoModel)["from_pretrained"] is before
