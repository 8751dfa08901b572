"""Decisions by class names: a Trainer's loss with label smoothing, the task of a model."""

import os
from inspect import getsource, signature
from unittest.mock import patch

import peft
import pytest
import torch
from transformers import PretrainedConfig, Trainer, TrainingArguments
from transformers.modelcard import TrainingSummary
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.quantizers import HfQuantizer
from transformers.trainer_pt_utils import LabelSmoother

from glm4v_patched.remote.class_lists import add_to_mapping_names
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM, RMSNorm
from tests.helpers.tiny import (
    expanded_image,
    random_pixels,
    shallow_model,
    text,
    tiny_model,
    unexpanded_image,
)

# Older tested releases do not divide by the labels of all accumulated batches.
COUNTS_ALL = "num_items_in_batch" in signature(LabelSmoother.__call__).parameters
# fp32, sums in another order. Measured 4e-7 on this CPU.
REL = 1e-5
# The older ones count labels at the first position, too.
SHIFTS_COUNT = "_loss_shifts_labels" in getsource(Trainer)


Batch = dict[str, torch.Tensor]


def batches(image: list[int]) -> list[Batch]:
    """Two batches of one sample: an image and seven text tokens, two or five of them supervised."""
    result = []
    for learned in (2, 5):
        ids = torch.tensor([[*text(2, seed=learned), *image, *text(7, seed=10 + learned)]])
        labels = ids.clone()
        labels[:, :-learned] = -100
        result.append({"input_ids": ids, "labels": labels})
        if image:
            result[-1]["pixel_values"] = random_pixels(1, seed=learned)
    return result


def trainer(model, batches, out, **options):
    """A Trainer for one step over all batches, with learning rate 0 by default."""
    common = {"max_steps": 1, "learning_rate": 0.0, "logging_steps": 1, "save_strategy": "no"}
    common |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": len(batches)}
    common |= {"per_device_eval_batch_size": 1, "remove_unused_columns": False, "use_cpu": True}
    common |= {"label_smoothing_factor": 0.1, "report_to": "none", "disable_tqdm": True}
    arguments = TrainingArguments(str(out), **(common | options))
    data = {"train_dataset": batches, "eval_dataset": batches}
    return Trainer(model, arguments, data_collator=lambda several: several[0], **data)


def trained_and_evaluated(model, batches, out):
    ran = trainer(model, batches, out)
    ran.train()
    return [ran.state.log_history[0]["loss"], ran.evaluate()["eval_loss"]]


@torch.no_grad()
def by_hand(model, batches: list[Batch]) -> list[float]:
    """Return the loss of the step, and of the evaluation, which averages over batches."""
    losses = []
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model.eval()(**inputs).logits[0].double()
        surprise = logits.logsumexp(-1, keepdim=True) - logits
        losses.append(
            [
                0.9 * surprise[position - 1, label] + 0.1 * surprise[position - 1].mean()
                for position, label in enumerate(batch["labels"][0].tolist())
                if label != -100
            ]
        )
    means = [sum(of_batch) / len(of_batch) for of_batch in losses]
    trained = sum(map(sum, losses)) / sum(map(len, losses)) if COUNTS_ALL else sum(means)
    return [float(trained), float(sum(means) / len(means))]


class Derived(GLM4VForCausalLM):
    """A subclass, as users define them."""


def adapted(model) -> peft.PeftModel:
    torch.manual_seed(0)
    options = {"target_modules": ["query_key_value"], "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def derived_model() -> Derived:
    model = Derived(tiny_model().config)
    model.load_state_dict(tiny_model().state_dict())
    return model


MODELS = {
    "ours": tiny_model,
    "inside peft": lambda: adapted(tiny_model()),
    "a class of somebody's own": derived_model,
}


@pytest.mark.parametrize("kind", MODELS)
def test_smoothed_labels_are_shifted(kind, tmp_path):
    """The class of a saved folder's code has the same name: test_saving.py."""
    model, data = MODELS[kind](), batches(expanded_image())
    want = by_hand(model, data)
    assert trained_and_evaluated(model, data, tmp_path) == pytest.approx(want, rel=REL)


def test_smoothed_labels_of_text_and_of_packed_samples_are_shifted(tmp_path):
    model, two = tiny_model(), batches(expanded_image())
    packed = {name: torch.cat([batch[name] for batch in two], dim=1) for name in two[0]}
    packed["pixel_values"] = torch.cat([batch["pixel_values"] for batch in two])
    length = two[0]["input_ids"].shape[1]
    packed["position_ids"] = torch.arange(2 * length)[None] % length
    for data in ([packed], batches([])):
        want = by_hand(model, data)
        assert trained_and_evaluated(model, data, tmp_path) == pytest.approx(want, rel=REL)


def test_a_derived_class_has_the_loss_of_ours(tmp_path):
    model, [batch, _] = derived_model(), batches([])
    batch["labels"] = batch["input_ids"]  # of which the first is never predicted
    with torch.no_grad():
        want = model.eval()(**batch).loss.item()
    ran = trainer(model, [batch], tmp_path, label_smoothing_factor=0.0)
    ran.train()
    counted = 1.0 if SHIFTS_COUNT else 1 - 1 / batch["labels"].numel()
    assert ran.state.log_history[0]["loss"] == pytest.approx(want * counted, rel=1e-4)


@pytest.mark.parametrize("by", ["label_smoothing_factor", "compute_loss_func"])
def test_a_trainers_own_loss_on_unexpanded_prompts_is_refused_before_a_step(by, tmp_path):
    model, data = adapted(tiny_model()), batches(unexpanded_image())
    ran = trainer(model, data, tmp_path, learning_rate=1.0)
    if by == "compute_loss_func":
        ran.label_smoother = None
        ran.compute_loss_func = lambda outputs, labels, num_items_in_batch: outputs.logits.sum()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    for run in (ran.train, ran.evaluate):
        with pytest.raises(ValueError, match="prompts of 12 ids expand to 15 .* expanded prompts"):
            run()
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    # Without smoothing the model has the labels, and expands them.
    trainer(model, data, tmp_path, label_smoothing_factor=0.0).train()


def test_a_compiled_model_is_known_by_its_class_or_refused(tmp_path):
    model, data = shallow_model(), batches([])[:1]
    [want, _] = by_hand(model, data)
    model.compile(backend="eager")
    ran = trainer(model, data, tmp_path)
    ran.train()
    assert ran.state.log_history[0]["loss"] == pytest.approx(want, rel=REL)
    torch._dynamo.reset()  # torch 2.11 would run the graph of the other model
    # torch's wrapper has its own class name.
    wrapped = {"torch_compile": True, "torch_compile_backend": "eager"}
    # transformers 4 passes the setting to accelerate by the environment.
    with (
        patch.dict(os.environ),
        pytest.raises(RuntimeError, match="model.compile.* label_smoothing"),
    ):
        trainer(shallow_model(), data, tmp_path, **wrapped).train()


ENTRIES = {
    "CAUSAL_LM": "GLM4VForCausalLM",
    "IMAGE_TEXT_TO_TEXT": "GLM4VForCausalLM",
    "SEQUENCE_CLASSIFICATION": "ChatGLMForSequenceClassification",
}


def test_entries_are_found_by_name_and_load_no_other_model(tmp_path, monkeypatch):
    class ChatGLMConfig(PretrainedConfig):
        """Of another model of the type."""

        model_type = "chatglm"

    for kind, name in ENTRIES.items():
        names = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")
        assert name in names.values()
        assert ChatGLMConfig not in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING")
        assert (
            not {key for key, class_name in names.items() if class_name == name}
            & CONFIG_MAPPING_NAMES.keys()
        )
    # As TRL's OnlineDPO asks.
    assert "chatglm" in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    ran = trainer(tiny_model(), batches([]), tmp_path)
    assert TrainingSummary.from_trainer(ran).tasks == "image-text-to-text"
    monkeypatch.delattr(modeling_auto, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    with pytest.raises(ImportError, match="no MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.* pip install"):
        add_to_mapping_names(GLM4VForCausalLM, "CAUSAL_LM")


def test_names_of_modules_spare_norms_from_decay_and_the_output_layer_from_quantizers(tmp_path):
    model = tiny_model()
    decayed = trainer(model, batches([]), tmp_path).get_decay_parameter_names(model)
    norms = [part for part in model.modules() if isinstance(part, (RMSNorm, torch.nn.LayerNorm))]
    spared = {id(weight) for norm in norms for weight in norm.parameters()}
    for name, weight in model.named_parameters():
        assert (name in decayed) == (id(weight) not in spared and not name.endswith(".bias")), name
    excluded = HfQuantizer.get_modules_to_not_convert(model)
    linear = {name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    assert linear & {*excluded} == {"transformer.output_layer"}
