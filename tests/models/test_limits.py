"""What a stranger wrote costs nothing before it is refused: sizes, JSON, templates, patterns."""

import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from jinja2.exceptions import TemplateError

from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.models import limited_process
from glm4v_patched.models.base import ModelSource
from glm4v_patched.models.check_weights import require_loadable_settings
from glm4v_patched.models.find import find_source
from glm4v_patched.models.limited_process import LIMITED_PROCESS, LimitExceeded
from glm4v_patched.models.limits import (
    PROCESSOR_JSON_FILES,
    LimitedTemplate,
    require_processor_files,
    require_valid_adapters,
)
from glm4v_patched.models.loading import load_processor
from glm4v_patched.patch import config_json
from glm4v_patched.patch.config_json import MAX_JSON_DEPTH, read_json_object
from glm4v_patched.remote import configuration_chatglm, modeling_chatglm
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.tokenization_chatglm import CHAT_TEMPLATE
from tests.helpers.tiny import update_json

OTHER_TEMPLATE = CHAT_TEMPLATE + "{# by others #}"
CHAT = [{"role": "user", "content": "Hello 你好"}, {"role": "assistant", "content": "<sop>"}]


def nested(key: str, value: object, config: dict) -> dict:
    """Fields of a config with one changed, which may be the tower's."""
    section, _, name = key.rpartition(".")
    return {section: config[section] | {name: value}} if section else {name: value}


SIZES = ["num_layers", "padded_vocab_size", "hidden_size", "ffn_hidden_size", "kv_channels"]
SIZES += ["num_attention_heads", "multi_query_group_num"]
SIZES += [f"vision_config.{name}" for name in ("hidden_size", "num_hidden_layers", "in_channels")]
SIZES += ["vision_config.intermediate_size"]


@pytest.mark.parametrize("key", SIZES)
def test_a_config_of_other_sizes_than_its_weights_is_refused_with_both_numbers(model, key):
    config = json.loads((model / "config.json").read_text())
    section, _, name = key.rpartition(".")
    value = 2 * (config[section] if section else config)[name]
    update_json(model / "config.json", **nested(key, value, config))
    with pytest.raises(ValueError, match=r"are missing|have other shapes .*\], not \["):
        find_source(str(model))


def test_more_layers_than_weights_are_refused_before_a_model_is_built(model, monkeypatch):
    monkeypatch.setattr(modeling_chatglm, "GLM4VForCausalLM", None)
    config = json.loads((model / "config.json").read_text())
    for key in ("num_layers", "vision_config.num_hidden_layers"):
        (model / "config.json").write_text(json.dumps(config | nested(key, 999, config)))
        with pytest.raises(ValueError, match="has 999 layers, and there are 56 weights"):
            find_source(str(model))


def test_more_positions_or_larger_patches_than_there_are_weights_for_are_refused(model):
    vision = json.loads((model / "config.json").read_text())["vision_config"]
    for side, patch in ((2**14, 14), (vision["image_size"] * 2, 28)):
        positions = (side // patch) ** 2 + 1
        changed = {"image_size": side, "patch_size": patch, "num_positions": positions}
        update_json(model / "config.json", vision_config=vision | changed)
        with pytest.raises(ValueError, match="have other shapes .*_embedding"):
            find_source(str(model))


ABSURD = [
    *({name: value} for name in configuration_chatglm.MAX_CONFIG_SIZES for value in (10**18, "40")),
    {"num_hidden_layers": 10**9},  # for transformers another name of num_layers
    {"num_key_value_heads": 10**9},
    *(
        {"vision_config": ChatGLMConfig().vision_config | {name: 10**18}}
        for name in configuration_chatglm.MAX_VISION_SIZES
    ),
]


@pytest.mark.parametrize("fields", ABSURD, ids=lambda fields: str(fields)[:40])
def test_absurd_sizes_are_refused_by_the_config_itself(fields):
    with pytest.raises(ValueError, match=r" is .*; expected an integer from 1 to [\d,]+$"):
        ChatGLMConfig(**fields)


def test_the_largest_allowed_sizes_build_on_the_meta_device():
    """Of one layer each; no product overflows."""
    vision = configuration_chatglm.MAX_VISION_SIZES | {"num_hidden_layers": 1}
    vision |= {"image_size": 2**14, "patch_size": 2**2, "num_positions": 2**24 + 1}
    with pytest.raises(ValueError, match="num_positions is"):
        ChatGLMConfig(vision_config=vision)
    vision |= {"patch_size": 2**3, "num_positions": 2**22 + 1}
    config = ChatGLMConfig(
        **configuration_chatglm.MAX_CONFIG_SIZES | {"num_layers": 1, "num_labels": 2},
        vision_config=ChatGLMConfig().vision_config | vision,
    )
    with torch.device("meta"):
        built = modeling_chatglm.GLM4VForCausalLM(config)
    assert sum(weight.numel() for weight in built.parameters()) > 2**48


JSON = {
    "deep": ("[" * 99_999, "cannot be read: maximum recursion"),
    "deep enough for others": (
        '{"a":' * 200 + "1" + "}" * 200,
        f"nests more than {MAX_JSON_DEPTH}",
    ),
    "lists": ('{"a":' + "[" * 200 + "]" * 200 + "}", f"nests more than {MAX_JSON_DEPTH}"),
    "twice": ('{"num_layers": 2, "num_layers": 3}', "the key 'num_layers' is there twice"),
    "twice inside": ('{"a": {"b": 1, "b": 1}}', "the key 'b' is there twice"),
    "digits": ('{"a": ' + "9" * 9999 + "}", "Exceeds the limit"),
    "a list": ("[]", "holds a list"),
    "half": ('{"a"', "cannot be read"),
}


@pytest.mark.parametrize(("text", "message"), JSON.values(), ids=JSON)
def test_json_is_read_within_limits(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path}/a.json .*{message}"):
        read_json_object(tmp_path / "a.json")


@pytest.mark.parametrize("name", [*PROCESSOR_JSON_FILES, "config.json", "generation_config.json"])
def test_all_json_that_transformers_reads_is_read_within_limits_first(model, name):
    (model / name).write_text(JSON["lists"][0])
    with pytest.raises(ValueError, match=f"{name} nests more than {MAX_JSON_DEPTH}"):
        require_loadable_settings(str(model))
        load_processor(ModelSource(str(model)))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
def test_files_that_are_far_too_large_are_not_read(model, name):
    with (model / name).open("r+b") as file:
        file.truncate(2**33)  # no byte of it is written, nor read
    with pytest.raises(ValueError, match=f"{name} has 8,589,934,592 bytes; expected at most"):
        require_loadable_settings(str(model))
        load_processor(ModelSource(str(model)))


def test_json_may_be_nested_up_to_the_limit(tmp_path):
    for depth, fits in ((MAX_JSON_DEPTH, True), (MAX_JSON_DEPTH + 1, False)):
        (tmp_path / "a.json").write_text('{"a":' * depth + "1" + "}" * depth)
        try:
            assert read_json_object(tmp_path / "a.json") and fits
        except ValueError as error:
            assert not fits and "nests more" in str(error)


def test_a_file_may_have_as_many_bytes_as_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(config_json, "MAX_JSON_BYTES", 10)
    path = tmp_path / "a.json"
    path.write_bytes(b'{"a": 100}')
    assert read_json_object(path) == {"a": 100}
    path.write_bytes(b'{"a": 1000}')
    with pytest.raises(ValueError, match="a.json has 11 bytes; expected at most 10"):
        read_json_object(path)


def split(pattern: str) -> dict:
    return {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}}}


DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
TOKENIZERS = {
    "many": ("tokenizer_config.json", {"extra_special_tokens": [*map(str, range(2**14 + 1))]}),
    "many by id": ("added_tokens.json", {str(number): number for number in range(2**14 + 1)}),
    "many there": ("tokenizer.json", {"added_tokens": [{}] * (2**14 + 1)}),
    "long": ("tokenizer_config.json", {"eos_token": "x" * 257}),
    "other files": ("tokenizer_config.json", {"fast_tokenizer_files": ["tokenizer.4.0.json"]}),
    "doubled": ("tokenizer.json", {"normalizer": DOUBLING}),
    "doubled often": (
        "tokenizer.json",
        {"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 40}},
    ),
    "for ever": ("tokenizer.json", split("(a+)+$")),
    "for ever in a list": (
        "tokenizer.json",
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split("(a+)+$").values()]}},
    ),
}


@pytest.mark.parametrize(("name", "values"), TOKENIZERS.values(), ids=TOKENIZERS)
def test_tokenizer_settings_that_would_run_for_ever_are_refused(model, name, values):
    path = model / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))
    with pytest.raises(ValueError, match="expected|remove it") as refused:
        load_processor(ModelSource(str(model)))
    assert str(model) in str(refused.value)


def test_as_many_added_tokens_as_the_limit_are_accepted(model):
    update_json(model / "tokenizer_config.json", extra_special_tokens=[*map(str, range(2**14))])
    require_processor_files(str(model), "main")


def test_a_settings_file_that_changed_after_its_check_is_checked_again(model):
    require_processor_files(str(model), "main")
    update_json(model / "tokenizer_config.json", padding_side="above")
    with pytest.raises(ValueError, match="padding_side is 'above'"):
        require_processor_files(str(model), "main")


def test_a_vocabulary_with_a_very_long_line_is_refused(model):
    (model / "tokenizer.model").write_bytes(b"a" * 3000 + b" 1\n")
    with pytest.raises(ValueError, match="tokenizer.model has a line of 3,002 bytes"):
        load_processor(ModelSource(str(model)))


def with_template(model: Path, template: str):
    (model / "chat_template.jinja").write_text(template)
    return load_processor(ModelSource(str(model)))


def test_another_chat_template_gives_the_same_ids_in_the_limited_process(files, model):
    ours = load_processor(ModelSource(str(files.model)))
    theirs = with_template(model, OTHER_TEMPLATE)
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    conversations = [CHAT, CHAT[:1]]
    rendered = [
        processor.apply_chat_template(conversations, **options) for processor in (ours, theirs)
    ]
    assert rendered[0]["input_ids"] == rendered[1]["input_ids"]
    assert (
        rendered[0]["assistant_masks"] == rendered[1]["assistant_masks"]
        and rendered[0]["input_ids"][0]
    )
    image = [{"role": "user", "content": [{"type": "image", "image": torch.ones(3, 56, 56)}]}]
    texts = [processor.apply_chat_template(image) for processor in (ours, theirs)]
    assert texts[0] == texts[1] and "<|begin_of_image|>" in texts[0]
    with pytest.raises(TemplateError, match="has the role ghost"):
        theirs.apply_chat_template([{"role": "ghost", "content": "x"}])


# Well behaved until the word comes.
HOSTILE = {
    "memory": "{{ messages[0].role * 10000000000 }}",
    "time": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "text": "{{ messages[0].role * 9000000 }}",
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_a_chat_template_is_stopped_at_its_time_and_memory_limits(model, monkeypatch, template):
    monkeypatch.setattr(limited_process, "BASE_SECONDS", 2)
    template = "{% if 'now' in messages | string %}" + template + "{% endif %}" + CHAT_TEMPLATE
    collator = ConversationCollator(with_template(model, template))
    rows = [[{"role": "user", "content": text}, CHAT[1]] for text in ("then", "now", "now")]
    assert collator.measure(rows[:1])[0].supervised
    for row in rows[1:]:
        with pytest.raises(ValueError, match="its chat template"):
            collator.measure([row])
        monkeypatch.setattr(LIMITED_PROCESS, "run", lambda *_: pytest.fail("it was tried again"))


def test_a_chat_template_that_exceeds_its_limits_is_refused_at_load(model, monkeypatch):
    monkeypatch.setattr(limited_process, "BASE_SECONDS", 1)
    for template in ("{{ 'a' * 10000000000 }}", HOSTILE["time"]):
        with pytest.raises(ValueError, match="chat template took more than .*; use another"):
            with_template(model, template)


def test_the_limited_process_serves_all_threads_restarts_and_is_not_forked():
    template = LimitedTemplate("here")
    options = {"chat_template": "{{ messages[0].content }}"}
    rendered: dict[int, str] = {}

    def render(number: int) -> None:
        for _ in range(20):
            text, _ = template(conversations=[[{"content": f"{number}"}]], **options)
            rendered[number] = text[0]

    threads = [threading.Thread(target=render, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert rendered == {number: str(number) for number in range(4)}
    assert LIMITED_PROCESS._process is not None
    LIMITED_PROCESS._process.kill()
    with pytest.raises(LimitExceeded, match="ended the process that ran it, with status -9"):
        LIMITED_PROCESS.run("match", [("match", "a")], ["a"])
    assert LIMITED_PROCESS.run("match", [("match", "a")], ["a"]) is None
    if (child := os.fork()) == 0:
        os._exit(int(LIMITED_PROCESS._process is not None))
    assert os.waitpid(child, 0)[1] == 0 and LIMITED_PROCESS._process is not None


def test_an_idle_process_outlives_the_time_limit_of_its_last_request(monkeypatch):
    monkeypatch.setattr(limited_process, "BASE_SECONDS", 1)
    LIMITED_PROCESS.run("match", [("match", "a")], ["a"])
    time.sleep(1.2)
    assert LIMITED_PROCESS.run("match", [("match", "a")], ["a"]) is None


ADAPTERS = {
    "target_modules": (r"((\w+\.?)+)+!", "took more than 0.2"),
    "exclude_modules": ("((", "is not a valid regular expression"),
    "rank_pattern": ({"(.*?){20}!": 4}, "took more than 0.2"),
    "alpha_pattern": ({"*": 4}, "is not a valid regular expression"),
    "layers_pattern": (["(("], "is not a valid regular expression"),
    "modules_to_save": (["(.*)*(.*)*(.*)*!"], "took more than 0.2"),
    "r": (10**9, r"\[4, 128\] in .*, and \[1000000000, 128\] according to adapter_config.json"),
    "lora_dropout": (2, "peft cannot make its adapters: dropout probability"),
}


def test_adapter_settings_that_take_too_long_are_refused(files, adapters, monkeypatch):
    """In a thread: no clock of the main one alone."""
    monkeypatch.setattr(limited_process, "BASE_SECONDS", 0.2)
    config, refused = (adapters / "adapter_config.json").read_text(), []

    def look() -> None:
        for field, (value, message) in ADAPTERS.items():
            (adapters / "adapter_config.json").write_text(config)
            update_json(adapters / "adapter_config.json", **{field: value})
            with pytest.raises(ValueError, match=f"adapter_config.json.*{message}") as error:
                require_valid_adapters(ModelSource(str(files.model), adapters=adapters))
            assert field in ("r", "lora_dropout") or f": {field} " in str(error.value)
            refused.append(field)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(60)
    assert refused == [*ADAPTERS]
    (adapters / "adapter_config.json").write_text(config)
    assert find_source(str(adapters)).adapters == adapters
