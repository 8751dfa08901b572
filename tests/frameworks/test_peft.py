"""peft's methods on both towers: which train and generate, and what the others say."""

import inspect

import peft
import pytest
import torch
from packaging.version import Version

from glm4v_patched.remote.keywords import CACHE_KEYWORD
from tests.frameworks.results_table import job
from tests.helpers.tiny import PAD, text, tiny_model
from tests.remote.inputs import two_sequences

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

# With transformers 5.24, this peft looks for the cache by its old name, of any model.
KNOWS_THE_CACHE = CACHE_KEYWORD != "cache" or Version(peft.__version__) >= Version("0.22")
LINEAR = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
TOKENS = text(3, seed=1)  # of the first row
# What a method is told beyond the modules, which its defaults do not fit in this tiny model.
OPTIONS: dict[str, dict] = {
    "AdaLora": {"total_step": 9, "tinit": 1, "tfinal": 2, "deltaT": 1},
    "C3A": {"block_size": 16},
    "IA3": {"feedforward_modules": ["dense_4h_to_h"]},
    "Miss": {"r": 8},
    "PromptEncoder": {"num_virtual_tokens": 3},
    "PromptTuning": {"num_virtual_tokens": 3},
    "Road": {"group_size": 16},
    "Shira": {"r": 4},
    "TrainableTokens": {"target_modules": ["word_embeddings"], "token_indices": TOKENS},
    "VBLoRA": {"vector_length": 16, "num_vectors": 8},
    "CPT": {"cpt_token_ids": TOKENS, "cpt_mask": [1] * 3, "cpt_tokens_type_mask": [1, 2, 4]},
    "WaveFT": {"n_frequency": 64},
}
METHODS = [*OPTIONS, *("Lora", "BOFT", "FourierFT", "HRA", "LNTuning", "LoHa", "LoKr", "OFT")]
METHODS += ["RandLora", "Vera"]
# Newer than the oldest peft that is supported.
METHODS += ["Beft", "Deft", "Delora", "Frod", "Glora", "Gralora", "Hira", "Lily", "OSF", "Peanut"]
METHODS += ["Psoft", "Pvera", "Supertuning", "TinyLora", "UniLora"]
LORA = {
    "DoRA": {"use_dora": True},
    "rsLoRA": {"use_rslora": True},
    "PiSSA": {"init_lora_weights": "pissa"},
    "OLoRA": {"init_lora_weights": "olora"},
    "all-linear": {"target_modules": "all-linear"},
    "embeddings and head as they are": {"modules_to_save": ["word_embeddings", "output_layer"]},
}


def config_of(method: str):
    """Of a method, or of a kind of LoRA."""
    if method in LORA:
        options = {"r": 8, "target_modules": LINEAR} | LORA[method]
        return peft.LoraConfig(task_type="CAUSAL_LM", **options)
    kind, options = getattr(peft, f"{method}Config"), OPTIONS.get(method, {})
    if "target_modules" in inspect.signature(kind).parameters and method != "CPT":
        options = {"target_modules": LINEAR} | options
    return kind(task_type="CAUSAL_LM", **options)


def assert_it_learns_and_generates(config) -> None:
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_model(), config).train()
    inputs = two_sequences()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1e-3, losses
    model.eval()
    prompt = {n: inputs[n][:1] for n in ("input_ids", "attention_mask", "pixel_values")}
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    if config.is_prompt_learning and not KNOWS_THE_CACHE:
        with pytest.raises(ValueError, match="give one value for every cache entry"):
            model.generate(**prompt, **options)
        return
    assert model.generate(**prompt, **options).shape[1] >= 3


def test_every_peft_method_learns_and_generates():
    name = f"{len(METHODS)} methods, {len(LORA)} kinds of LoRA"
    with job("peft", name, "peft.get_peft_model", "peft") as done:
        done["note"] = (
            "losses fall, and they generate; prefix tuning, cartridges, X-LoRA are refused"
        )
        for method in [*METHODS, *LORA]:
            print(method)  # which pytest shows of a failure
            assert_it_learns_and_generates(config_of(method))


@pytest.mark.parametrize("method", ["Lora", "Vera", "LoHa", "LoKr", "OFT", "BOFT", "FourierFT"])
def test_without_targets_peft_adapts_both_towers(method):
    config = getattr(peft, f"{method}Config")(task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model(), config)
    adapted = model.base_model.targeted_module_names
    assert {name.split(".")[-1] for name in adapted} == {"query_key_value"}
    assert 0 < sum(".vision." in name for name in adapted) < len(adapted)


def test_an_image_is_found_after_more_virtual_tokens_than_the_prompt_has_ids():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=20)
    model = peft.get_peft_model(tiny_model(), config).eval()
    prompt = {n: two_sequences()[n][:1] for n in ("input_ids", "attention_mask", "pixel_values")}
    assert prompt["input_ids"].shape[1] < 20
    answer = model.generate(**prompt, max_new_tokens=1, do_sample=False, pad_token_id=PAD)
    assert answer[0, -1] == model(**prompt).logits[0, -1].argmax()


@pytest.mark.parametrize("method", ["PrefixTuning", "Cartridge"])
def test_prefix_tuning_is_refused_with_the_alternatives(method):
    """Keys without ids: whether they hold an image, and what position comes next, is not known."""
    config = getattr(peft, f"{method}Config")(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(tiny_model(), config)
    with pytest.raises(ValueError, match="3 cache entries .* prefix tuning .* use prompt tuning"):
        model(**two_sequences())
