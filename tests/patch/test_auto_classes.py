"""After ``apply()`` the Auto classes give our classes for a glm-4v, and only for that."""

import importlib
import json
import shutil
import socket
import string
import time
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoProcessor, AutoTokenizer

import glm4v_patched
from glm4v_patched.demo.tiny_model import build_from_scratch
from glm4v_patched.patch.patch_set import AttributePatch, PatchSet
from glm4v_patched.patch.repository import Repository
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.image_processing_chatglm import ChatGLMImageProcessor
from glm4v_patched.remote.modeling_chatglm import ChatGLMForSequenceClassification, GLM4VForCausalLM
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from glm4v_patched.remote.tokenization_chatglm import ChatGLM4Tokenizer
from tests.helpers.cogagent import permuted
from tests.helpers.legacy_repository import image_row, remote_code_under, write_legacy_repository
from tests.helpers.local_hub import redirect_client
from tests.helpers.tiny import tiny_model, update_json
from tests.remote.inputs import assert_close

OURS = {
    "AutoConfig": ChatGLMConfig,
    "AutoModel": GLM4VForCausalLM,
    "AutoModelForCausalLM": GLM4VForCausalLM,
    "AutoModelForSeq2SeqLM": GLM4VForCausalLM,
    "AutoModelForImageTextToText": GLM4VForCausalLM,
    "AutoModelForMultimodalLM": GLM4VForCausalLM,
    "AutoModelForSequenceClassification": ChatGLMForSequenceClassification,
    "AutoTokenizer": ChatGLM4Tokenizer,
    "AutoProcessor": ChatGLMProcessor,
    "AutoImageProcessor": ChatGLMImageProcessor,
}
if Version(transformers.__version__).major < 5:
    OURS.pop("AutoModelForMultimodalLM")
TRUSTED = {"trust_remote_code": True}
LLAMA = transformers.LlamaConfig(
    hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9, intermediate_size=8
)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A stand-in for the published repository. Not to be written to."""
    folder = tmp_path_factory.mktemp("published") / "glm-4v-9b"
    write_legacy_repository(folder)
    return folder


@pytest.fixture(autouse=True)
def code_of_repositories(tmp_path):
    with remote_code_under(tmp_path / "modules"):
        yield


@pytest.fixture(autouse=True)
def before() -> dict[str, object]:
    """The patched attributes of the Auto classes before a test, which are restored after it."""
    originals = entries()
    yield originals
    glm4v_patched.revert()
    assert entries() == originals


def entries() -> dict[str, object]:
    attributes = {}
    for name in OURS:
        own = vars(getattr(transformers, name))
        attributes |= {(name, m): own[m] for m in ("from_pretrained", "from_config") if m in own}
    return attributes


def load(auto_class: str, folder, **options):
    cls = getattr(transformers, auto_class)
    return cls.from_pretrained(pretrained_model_name_or_path=folder, **options)


def is_ours(obj) -> bool:
    return type(obj).__module__.startswith("glm4v_patched.remote.")


def is_from_the_repository(obj) -> bool:
    return type(obj).__module__.startswith("transformers_modules.")


@pytest.mark.parametrize("options", [TRUSTED, {"trust_remote_code": False}, {}], ids=str)
def test_every_auto_class_gives_ours(options, published):
    assert is_from_the_repository(load("AutoModel", published, **TRUSTED))
    glm4v_patched.apply()
    for auto_class, ours in OURS.items():
        assert type(load(auto_class, published, **options)) is ours, auto_class


TASKS = {
    "image-text-to-text": GLM4VForCausalLM,
    "text-classification": ChatGLMForSequenceClassification,
    "text-generation": GLM4VForCausalLM,
}


def test_a_pipeline_asks_for_no_trust_and_supports_our_classes(tmp_path, monkeypatch, warned):
    build_from_scratch(tmp_path, [[{"role": "user", "content": "Why?"}]], seed=0)
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail(prompt))
    glm4v_patched.apply()
    for task, ours in TASKS.items():
        assert type(transformers.pipeline(task, model=str(tmp_path)).model) is ours
    assert not [record for record in warned.records if "is not supported for" in record.message]
    # transformers has this class without torchvision, too.
    videos = importlib.import_module("transformers.models.auto.video_processing_auto")
    for options in (TRUSTED, {}):
        with pytest.raises(ValueError, match="reads no videos"):
            videos.AutoVideoProcessor.from_pretrained(tmp_path, **options)


def test_a_config_that_was_loaded_before_gives_our_model(published):
    config = AutoConfig.from_pretrained(published, **TRUSTED)
    assert not is_ours(config)
    glm4v_patched.apply()
    loaded = load("AutoModelForImageTextToText", published, config=config, **TRUSTED)
    for model in (loaded, AutoModel.from_config(config, **TRUSTED)):
        assert type(model) is GLM4VForCausalLM and type(model.config) is ChatGLMConfig
        assert model.config.name_or_path == str(published)
        assert model.config.num_layers == config.num_layers


def test_weights_and_options_reach_the_model(published):
    glm4v_patched.apply(fused_linear_cross_entropy=True)
    options = {"dtype": torch.bfloat16, "attn_implementation": "eager", "use_cache": False}
    model, report = load("AutoModel", published, output_loading_info=True, **options)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16 and model.config.skip_logits is True
    assert model.config.use_cache is False and model.config._attn_implementation == "eager"
    assert_close(model.state_dict(), tiny_model(torch.bfloat16).state_dict())


def test_a_tokenizer_saved_by_itself_is_ours(published, tmp_path):
    (tmp_path / "alone").mkdir()
    for name in ("tokenizer_config.json", "tokenizer.model", "tokenization_chatglm.py"):
        shutil.copy(published / name, tmp_path / "alone")
    glm4v_patched.apply()
    assert type(AutoTokenizer.from_pretrained(tmp_path / "alone")) is ChatGLM4Tokenizer
    assert type(AutoProcessor.from_pretrained(tmp_path / "alone")) is ChatGLMProcessor


def test_the_text_models_of_the_type_load_as_before(published, tmp_path):
    folder = Path(shutil.copytree(published, tmp_path / "other"))
    update_json(folder / "config.json", vision_config=None)
    original = AutoConfig.from_pretrained(folder, **TRUSTED)
    load_as_before = AutoConfig.from_pretrained
    glm4v_patched.apply()
    assert type(AutoConfig.from_pretrained(folder, **TRUSTED)) is type(original)
    assert not is_ours(original)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        AutoConfig.from_pretrained(folder, trust_remote_code=False)
    assert is_from_the_repository(load_as_before(folder, **TRUSTED))


def test_a_cogagent_loads_with_our_code(published, tmp_path):
    """Its config differs in the rotation and in the name of the class."""
    folder = Path(shutil.copytree(published, tmp_path / "cogagent"))
    architectures = ["ChatGLMForConditionalGeneration"]
    update_json(folder / "config.json", original_rope=False, architectures=architectures)
    weights = permuted(load_file(folder / "model.safetensors"), tiny_model().config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    glm4v_patched.apply()
    for name in ("AutoConfig", "AutoTokenizer", "AutoProcessor"):
        assert is_ours(load(name, folder, trust_remote_code=False)), name
    model = AutoModel.from_config(AutoConfig.from_pretrained(folder))
    assert is_ours(model) and model.config.original_rope is False
    inputs = {name: value for name, value in image_row(seed=0).items() if name != "labels"}
    loaded = load("AutoModelForCausalLM", folder, trust_remote_code=True)
    logits = {"logits": loaded.eval()(**inputs).logits}
    assert_close(logits, {"logits": tiny_model()(**inputs).logits}, atol=1e-4)


@pytest.mark.parametrize("auto_class", ["AutoConfig", "AutoModel", "AutoTokenizer"])
def test_a_method_taken_before_apply_raises_an_error(auto_class, published):
    cls = getattr(transformers, auto_class)
    load_as_before, make_as_before = cls.from_pretrained, getattr(cls, "from_config", None)
    config = AutoConfig.from_pretrained(published, **TRUSTED)
    glm4v_patched.apply()
    with pytest.raises(RuntimeError, match=r"before apply\(\): call apply\(\) earlier"):
        load_as_before(published, **TRUSTED)
    if make_as_before:
        with pytest.raises(RuntimeError, match=r"before apply\(\): call apply\(\) earlier"):
            make_as_before(config, **TRUSTED)
    glm4v_patched.revert()
    assert is_from_the_repository(load_as_before(published, **TRUSTED))


def test_a_config_that_is_no_json_object_is_no_glm4v(tmp_path):
    for content in ("[]", "{", "null"):
        (tmp_path / "config.json").write_text(content)
        assert not Repository(tmp_path, {}).contains_glm4v()


def test_a_model_in_the_cache_is_not_asked_for_again(hub, tmp_path):
    """Also for other models: the patched methods add no requests to their loading."""
    LLAMA.save_pretrained(tmp_path / "other")
    config = (tmp_path / "other" / "config.json").read_bytes()
    hub.add_repository("our-org/other", {"config.json": config})

    def requests() -> list[tuple[str, str]]:
        hub.requests.clear()
        AutoConfig.from_pretrained("our-org/other", cache_dir=tmp_path / "cache")
        return [(request.method, request.path) for request in hub.requests]

    requests()
    without = requests()
    glm4v_patched.apply()
    assert requests() == without


def test_an_image_processor_has_the_size_of_its_revision(hub, published, tmp_path):
    """Without preprocessor_config.json, it is built from the config of that revision."""
    config = json.loads((published / "config.json").read_text())
    repository = hub.add_repository("our-org/model", {"config.json": json.dumps(config).encode()})
    repository.refs["v1"] = repository.head
    config["vision_config"] |= {"image_size": 112, "num_positions": 65}
    repository.add_commit({"config.json": json.dumps(config).encode()})
    glm4v_patched.apply()
    for revision, side in (("v1", 56), ("main", 112)):
        download = {"revision": revision, "cache_dir": tmp_path / "cache"}
        assert load("AutoImageProcessor", "our-org/model", **download).size["height"] == side


def test_a_private_repository_is_recognized_with_a_token_and_asked_for_once(
    hub, published, tmp_path
):
    download = {"cache_dir": str(tmp_path / "cache")}
    config = {"config.json": (published / "config.json").read_bytes()}
    hub.add_repository("our-org/private", config, private=True)
    assert not Repository("our-org/private", download).contains_glm4v()
    for option in ("token", "use_auth_token"):
        options = {"cache_dir": str(tmp_path / option), option: hub.token}
        assert Repository("our-org/private", options).contains_glm4v()
    hub.requests.clear()
    hub.fail("*", ".", times=99, status=403)  # not tried again, as 500 is
    assert not Repository("our-org/unknown", download).contains_glm4v()
    paths = {request.path for request in hub.requests}
    assert paths == {"/our-org/unknown/resolve/main/config.json"}


@pytest.mark.parametrize("option", ["token", "use_auth_token"])
def test_a_saved_token_is_not_sent_where_the_token_is_false(
    hub, published, tmp_path, monkeypatch, option
):
    config = {"config.json": (published / "config.json").read_bytes()}
    hub.add_repository("our-org/private", config, private=True)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    without = {"cache_dir": str(tmp_path / "without"), option: False}
    assert not Repository("our-org/private", without).contains_glm4v()
    assert Repository("our-org/private", {"cache_dir": str(tmp_path / "with")}).contains_glm4v()


def test_an_adapters_base_is_looked_for_without_its_subfolder_and_revision(
    hub, published, tmp_path
):
    download = {"cache_dir": str(tmp_path / "cache")}
    config = {"config.json": (published / "config.json").read_bytes()}
    base = hub.add_repository("our-org/base", config)
    content = json.dumps({"base_model_name_or_path": "our-org/base"}).encode()
    files = {"adapter_config.json": content, "text/adapter_config.json": content}
    adapter = hub.add_repository("our-org/adapter", files)
    adapter.refs["v2"] = adapter.head
    assert "v2" not in base.refs
    for subfolder in ({}, {"subfolder": "text"}):
        options = download | {"revision": "v2"} | subfolder
        assert Repository("our-org/adapter", options).contains_glm4v()


def test_a_hub_that_never_answers_is_an_error_or_the_cache_is_used(
    published, tmp_path, monkeypatch, warned
):
    cached = tmp_path / "cache" / "models--our-org--cached"
    snapshot = cached / "snapshots" / ("a" * 40)
    for folder in (snapshot, cached / "refs"):
        folder.mkdir(parents=True)
    shutil.copy(published / "config.json", snapshot)
    (cached / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT", 0.2)
    download = {"cache_dir": tmp_path / "cache"}
    glm4v_patched.apply()
    # This server accepts connections and never answers.
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        host = f"127.0.0.1:{listening.getsockname()[1]}"
        redirect_client(f"http://me:secret@{host}", monkeypatch)
        for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor"):
            begun = time.monotonic()
            with pytest.raises(TimeoutError) as refused:
                load(name, "our-org/model", **download)
            assert f"http://{host} did not answer within 0.2 s" in str(refused.value)
            assert "our-org/model is not in the cache" in str(refused.value)
            assert time.monotonic() - begun < 10
        from_pretrained = ChatGLMConfig.from_pretrained

        def from_the_cache(*args, local_files_only, **options):
            return from_pretrained(*args, local_files_only=local_files_only, **options)

        monkeypatch.setattr(ChatGLMConfig, "from_pretrained", from_the_cache)
        assert is_ours(load("AutoConfig", "our-org/cached", **download))
    assert (
        "did not answer within 0.2 s" in warned.text
        and "files in the cache are loaded" in warned.text
    )


def test_a_block_reverts_only_its_own_patches(before):
    with glm4v_patched.applied():
        once = entries()
        with glm4v_patched.applied():
            assert entries() == once != before
        assert entries() == once
    assert entries() == before
    glm4v_patched.apply()
    once = entries()
    with glm4v_patched.applied():
        pass
    assert entries() == once


def test_patches_of_others_are_named_and_not_reverted(monkeypatch):
    glm4v_patched.apply()
    ours = vars(AutoTokenizer)["from_pretrained"]
    our_model_patch = vars(AutoModel)["from_pretrained"]

    def theirs(cls, *args, **kwargs):
        return ours.__func__(cls, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(AutoTokenizer, "from_pretrained", classmethod(theirs))
        with pytest.raises(RuntimeError, match=r"transformers\.AutoTokenizer\.from_pretrained;"):
            glm4v_patched.revert()
        assert vars(AutoModel)["from_pretrained"] is our_model_patch
        assert vars(AutoTokenizer)["from_pretrained"].__func__ is theirs
    glm4v_patched.revert()


@pytest.mark.parametrize(
    "missing, options, kind, message",
    [
        ("transformers.AutoModel.from_config", {}, AttributeError, "AutoModel.from_config"),
        (None, {"fused_loss": True}, TypeError, "fused_loss"),
        (None, {"fused_linear_cross_entropy": 0}, ValueError, "fused_.* is 0: give True"),
    ],
)
def test_if_apply_fails_nothing_is_patched(missing, options, kind, message, monkeypatch):
    with monkeypatch.context() as patch:
        if missing is not None:
            patch.delattr(missing)
        originals = entries()
        with pytest.raises(kind, match=message):
            glm4v_patched.apply(**options)
        with pytest.raises(kind, match=message), glm4v_patched.applied(**options):
            pass
        assert entries() == originals


def test_if_one_replacement_cannot_be_made_nothing_is_patched():
    owner, before = "string:Formatter", dict(vars(string.Formatter))
    patches = PatchSet(
        [
            AttributePatch(owner, "format", lambda original: None),
            AttributePatch(owner, "vformat", lambda original: 1 / 0),
        ]
    )
    with pytest.raises(ZeroDivisionError):
        patches.apply()
    assert dict(vars(string.Formatter)) == before and not patches.is_applied


@pytest.mark.parametrize(
    "first, same, other",
    [
        (
            {"attn_implementation": "eager"},
            {"fused_linear_cross_entropy": False},
            {"attn_implementation": "sdpa"},
        ),
        ({"fused_linear_cross_entropy": False}, {}, {"fused_linear_cross_entropy": True}),
        ({"fused_linear_cross_entropy": True}, {}, {"fused_linear_cross_entropy": False}),
    ],
    ids=["another attention", "False before True", "True before False"],
)
def test_options_that_contradict_those_in_force_are_refused(first, same, other):
    glm4v_patched.apply(**first)
    glm4v_patched.apply(**same)
    glm4v_patched.apply(**first)
    (value,) = other.values()
    with pytest.raises(ValueError, match=rf"={value!r}\) contradicts .*: call revert\(\)"):
        glm4v_patched.apply(**other)
    with pytest.raises(ValueError, match="contradicts"), glm4v_patched.applied(**other):
        pass
    glm4v_patched.revert()
    glm4v_patched.apply(**other)


def test_fused_linear_cross_entropy_has_the_same_loss_without_logits_and_false_turns_it_off(
    published,
):
    batch = image_row(0)
    with glm4v_patched.applied():
        model = load("AutoModel", published)
        assert model.config._attn_implementation == "sdpa"
        plain = model.train()(**batch)
    with glm4v_patched.applied(fused_linear_cross_entropy=True):
        config = AutoConfig.from_pretrained(published)
        assert AutoModel.from_config(config).config.skip_logits is True
        fused = load("AutoModel", published).train()(**batch)
    with glm4v_patched.applied(fused_linear_cross_entropy=False):  # also if the config says so
        config.skip_logits = True
        assert AutoModel.from_config(config).config.skip_logits is False
    assert fused.logits is None and plain.logits is not None
    torch.testing.assert_close(fused.loss, plain.loss, rtol=0, atol=1e-6)


def test_attention_is_the_default_of_models_loaded_without_one(published):
    glm4v_patched.apply(attn_implementation="eager")
    config = AutoConfig.from_pretrained(published)
    for options in ({}, {"attn_implementation": "sdpa"}):
        models = load("AutoModel", published, **options), AutoModel.from_config(config, **options)
        implementations = {model.config._attn_implementation for model in models}
        assert implementations == {options.get("attn_implementation", "eager")}
