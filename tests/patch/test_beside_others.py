"""Our folder loads where transformers is newer than tested, and beside another "chatglm"."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from PIL import Image
from safetensors.torch import load_file

import glm4v_patched
from glm4v_patched.remote.configuration_chatglm import FIRST_UNTESTED_TRANSFORMERS
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.helpers.fresh_process import run_without_package
from tests.helpers.legacy_repository import write_legacy_repository

# Ends with the logits of a picture's row, in both forms, in out/logits.
SCRIPT = """
import sys
sys.modules["glm4v_patched"] = None  # cannot be imported
folder, out = sys.argv[1:]
import torch, transformers
from PIL import Image
from safetensors.torch import save_file
{before}

messages = [{{"role": "user", "image": Image.new("RGB", (70, 50), "red"), "content": "What?"}}]
found = {{}}
for cls in {order}:
    found[cls] = getattr(transformers, cls).from_pretrained(folder, trust_remote_code=True)
logits = {{}}
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
save_file(logits, out + "/logits")
found["AutoModel"].save_pretrained(out + "/again")
{after}
"""
ORDER = ["AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoProcessor", "AutoTokenizer"]

# As vLLM's: registered for the whole process, no checks, other names for some fields.
REGISTERED = """
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
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder that holds model and processor, with the vocabulary that fits the golden model."""
    folder = tmp_path_factory.mktemp("beside")
    write_legacy_repository(folder / "published")
    with glm4v_patched.applied():
        GLM4VForCausalLM.from_pretrained(folder / "published").save_pretrained(folder / "saved")
        processor = ChatGLMProcessor.from_pretrained(folder / "published")
        processor.save_pretrained(folder / "saved")
    return folder / "saved"


@torch.no_grad()
def wanted_logits(saved: Path) -> torch.Tensor:
    processor = ChatGLMProcessor.from_pretrained(saved)
    picture = Image.new("RGB", (70, 50), "red")
    inputs = processor.apply_chat_template(
        [{"role": "user", "image": picture, "content": "What?"}],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    return GLM4VForCausalLM.from_pretrained(saved).eval()(**inputs).logits


def load_without_package(saved, out, before="", after="", order=ORDER) -> str:
    out.mkdir()
    script = SCRIPT.format(before=before, after=after, order=order)
    errors = run_without_package(script, out, str(saved), str(out))
    for name, logits in load_file(out / "logits").items():
        assert torch.equal(logits, wanted_logits(saved)), name
    return errors


@pytest.mark.parametrize("order", [ORDER, ORDER[::-1]], ids=["config first", "tokenizer first"])
def test_a_process_with_a_config_of_somebody_else_for_the_type(order, saved, tmp_path):
    made = """
auto = transformers.AutoModelForCausalLM
made = auto.from_config(found["AutoConfig"], trust_remote_code=True)
assert type(made.config).__module__.startswith("transformers_modules."), type(made.config)
"""
    errors = load_without_package(
        saved, tmp_path / "out", before=REGISTERED, after=made, order=order
    )
    assert "is tested on" not in errors  # as it is for a transformers that is too new
    config = json.loads((tmp_path / "out" / "again" / "config.json").read_text())
    # What a class adds of its own cannot be told from what its user did.
    assert config.pop("interleaved_qkv", None) in (False, None)
    assert config == json.loads((saved / "config.json").read_text())


def with_range(saved: Path, folder: Path, oldest: str, first_untested: str) -> Path:
    """A copy whose code says to be tested on others than the installed transformers."""
    shutil.copytree(saved, folder)
    path = folder / "configuration_chatglm.py"
    code = path.read_text()
    for name, version in [("OLDEST", oldest), ("FIRST_UNTESTED", first_untested)]:
        code, number = re.subn(rf"(?m)^({name}_TRANSFORMERS) = .*", rf'\1 = "{version}"', code)
        assert number == 1
    path.write_text(code)
    return folder


def test_a_transformers_newer_than_tested_is_warned_of_once(saved, tmp_path):
    folder = with_range(saved, tmp_path / "copy", "4.57.6", "4.57.6")
    errors = load_without_package(folder, tmp_path / "out")
    found = f">=4.57.6,!=5.1.0,<4.57.6 and found {transformers.__version__}; if it fails"
    assert errors.count(found) == 1


@pytest.mark.skipif(
    Version("5.0") <= Version(transformers.__version__) < Version("5.4"),
    reason="AutoTokenizer of transformers 5.0 to 5.3 hides the first error; none before does",
)
def test_a_transformers_older_than_tested_is_one_clear_error(saved, tmp_path):
    for cls in ORDER:  # what was loaded in part is not loaded again
        with_range(saved, tmp_path / cls, "98", "99")
    code = f"""
import sys, transformers
for cls in {ORDER}:
    try:
        getattr(transformers, cls).from_pretrained(sys.argv[1] + "/" + cls, trust_remote_code=True)
    except ImportError as error:
        assert "<99 and found {transformers.__version__}, which lacks" in str(error), error
    else:
        raise AssertionError(cls)
"""
    run_without_package(code, tmp_path, str(tmp_path))


def test_apply_takes_tested_versions_only(tmp_path):
    code = """
import sys, transformers
sys.path.insert(0, sys.argv[1])
transformers.__version__ = sys.argv[2] + ".0"
import glm4v_patched
before = vars(transformers.AutoModel)["from_pretrained"]
try:
    glm4v_patched.apply()
except ImportError as error:
    assert str(error).startswith("apply() replaces methods of transformers >=4.57.6,")
    assert f"<{sys.argv[2]} and found" in str(error)
else:
    raise AssertionError("applied")
assert vars(transformers.AutoModel)["from_pretrained"] is before
"""
    package = Path(sys.modules["glm4v_patched"].__file__).parents[1]
    run_without_package(code, tmp_path, str(package), FIRST_UNTESTED_TRANSFORMERS)
