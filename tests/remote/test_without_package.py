"""Folders load, answer and are saved again where there is only the folder and no package of ours.

One fresh process does all of it, on folders as ``save_pretrained`` leaves them and one as the
published repository is.
"""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm4v_patched.remote.image_processing_chatglm import ChatGLMImageProcessor
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from glm4v_patched.remote.tokenization_chatglm import ChatGLM4Tokenizer
from tests.helpers.fresh_process import run_without_package
from tests.helpers.tiny import tiny_model
from tests.remote.chats import picture, user
from tests.remote.test_saving import (
    CODE,
    PUBLISHED,
    REMOTE,
    assert_is_ours,
    configured,
    inputs,
    logits,
    write_checkpoint,
)

SCRIPT = """
import json, sys
sys.modules["glm4v_patched"] = None  # cannot be imported
import torch, transformers
from PIL import Image
from safetensors.torch import load_file, save_file

inputs = load_file("inputs.safetensors")
logits, told = {}, {}

def load(auto, folder, **options):
    part = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True, **options)
    assert type(part).__module__.startswith("transformers_modules."), (auto, type(part))
    return part

for folder in "model", "published":
    for auto in "AutoModel", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM":
        for attention in "eager", "sdpa", None:
            options = {} if attention is None else {"attn_implementation": attention}
            model = load(auto, folder, **options).eval()
            assert model.config._attn_implementation == (attention or "sdpa"), (auto, attention)
        with torch.no_grad():
            logits[f"{folder} {auto}"] = model(**inputs).logits.float().contiguous()
    model.save_pretrained(folder + "-again")
assert type(load("AutoConfig", "model")).__name__ == "ChatGLMConfig"

messages = [{"role": "user", "content": "say <|user|>", "image": Image.new("RGB", (30, 20))}]

def ask(name, part):
    row = part.apply_chat_template(messages, tokenize=True, return_dict=True)
    (images,) = {"images", "pixel_values"} & {*row}
    told[name] = [type(part).__name__, images, list(row[images].shape), row["input_ids"][0]]

tokenizer, processor = load("AutoTokenizer", "processor"), load("AutoProcessor", "processor")
ask("tokenizer", tokenizer)
ask("processor", processor)
tokenizer.save_pretrained("tokenizer-again")
processor.save_pretrained("processor-again")
ask("tokenizer again", load("AutoTokenizer", "tokenizer-again"))
ask("processor again", load("AutoProcessor", "processor-again"))
ask("trained", load("AutoProcessor", "trained"))
# Here the tokenizer's code has come without the processor's.
load("AutoTokenizer", "trained-copy").save_pretrained("alone")
ask("alone", load("AutoProcessor", "alone"))
try:
    transformers.AutoImageProcessor.from_pretrained
except ImportError as error:  # where torchvision is missing
    told["image processor"] = str(error)
else:
    told["image processor"] = load("AutoImageProcessor", "processor").size["height"]
save_file(logits, "logits.safetensors")
with open("told.json", "w") as file:
    json.dump(told, file)
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory, small_backend) -> SimpleNamespace:
    """The folders, a processor as it was saved, and what the process found."""
    folder = tmp_path_factory.mktemp("elsewhere")
    save_file(inputs(), folder / "inputs.safetensors")
    tiny_model().save_pretrained(folder / "model")
    write_checkpoint(folder / "published")
    configured(folder / "published", **PUBLISHED)
    for name in CODE:
        shutil.copy(REMOTE / name, folder / "published")
    tokenizer = ChatGLM4Tokenizer(tokenizer_object=small_backend, image_size=56)
    processor = ChatGLMProcessor(ChatGLMImageProcessor(size=56), tokenizer)
    processor.save_pretrained(folder / "processor")
    # As a trainer on texts saves a tokenizer that came with a processor.
    loaded = ChatGLMProcessor.from_pretrained(folder / "processor")
    loaded.tokenizer.save_pretrained(folder / "trained")
    shutil.copytree(folder / "trained", folder / "trained-copy")
    run_without_package(SCRIPT, folder)
    return SimpleNamespace(
        folder=folder,
        processor=processor,
        logits=load_file(folder / "logits.safetensors"),
        told=json.loads((folder / "told.json").read_text()),
    )


def test_every_auto_class_loads_the_model_with_its_logits(elsewhere):
    assert len(elsewhere.logits) == 6
    want = logits(tiny_model())
    for name, got in elsewhere.logits.items():
        assert torch.equal(got, want), name


def test_what_was_loaded_there_is_saved_whole(elsewhere):
    saved, again = elsewhere.folder / "model", elsewhere.folder / "model-again"
    assert_is_ours(again)
    assert_is_ours(elsewhere.folder / "published-again")
    for path in saved.iterdir():
        if path.is_file() and path.name != "generation_config.json":
            assert (again / path.name).read_bytes() == path.read_bytes(), path.name


def test_tokenizers_and_processors_make_the_same_rows_there(elsewhere):
    processor, chat = elsewhere.processor, user("say <|user|>", image=picture())
    kind = "ChatGLM4Tokenizer", "ChatGLMProcessor"
    short, grown = (
        part.apply_chat_template(chat, tokenize=True) for part in (processor.tokenizer, processor)
    )
    shape = [1, 3, 56, 56]
    of_tokenizer = [kind[0], "images", shape, *short]
    of_processor = [kind[1], "pixel_values", shape, *grown]
    told = dict(elsewhere.told)
    assert not (elsewhere.folder / "trained" / "preprocessor_config.json").exists()
    image_processor = told.pop("image processor")
    assert told == {
        "tokenizer": of_tokenizer,
        "tokenizer again": of_tokenizer,
        "processor": of_processor,
        "processor again": of_processor,
        "trained": of_processor,
        "alone": of_tokenizer,
    }
    assert image_processor == 56 or "AutoImageProcessor" in image_processor
