"""A LoRA adapter that was trained on the published code serves ours."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import glm4v_patched
from glm4v_patched.remote.configuration_chatglm import fault_of_adapters
from tests.helpers.legacy_repository import (
    count_labels_of_small_images,
    image_row,
    remote_code_under,
    write_legacy_repository,
)

# fp32, as the golden data in parity/test_golden.py. Measured: 2.5e-5.
ATOL = 4e-5


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    return model.eval()(**image_row(9) | {"labels": None}).logits


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folders of base and adapter, and the logits of the published code with it."""
    folder = tmp_path_factory.mktemp("trained")
    write_legacy_repository(folder / "base")
    with remote_code_under(folder / "modules"):
        base = AutoModelForCausalLM.from_pretrained(folder / "base", trust_remote_code=True)
        count_labels_of_small_images(base)
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["query_key_value"])
        model = get_peft_model(base, config).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            model(**image_row(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(folder / "adapter")
        logits = logits_of(model)
        with model.disable_adapter():
            without = logits_of(model)
    assert (logits - without).abs().max() > 0.1  # it learned something
    return folder, logits


def test_its_logits_on_our_model_are_those_of_the_published_code(trained):
    folder, want = trained
    with glm4v_patched.applied():
        base = AutoModelForCausalLM.from_pretrained(folder / "base", trust_remote_code=True)
    model = PeftModel.from_pretrained(base, folder / "adapter")
    torch.testing.assert_close(logits_of(model), want, rtol=0, atol=ATOL)
    torch.testing.assert_close(logits_of(model.merge_and_unload()), want, rtol=0, atol=ATOL)


@pytest.mark.skipif(
    fault_of_adapters() is not None,
    reason=f"this transformers {fault_of_adapters()}: by PeftModel, above",
)
def test_the_folder_of_the_adapter_alone_loads_both(trained):
    folder, want = trained
    with glm4v_patched.applied():
        model = AutoModelForCausalLM.from_pretrained(folder / "adapter", trust_remote_code=True)
    torch.testing.assert_close(logits_of(model), want, rtol=0, atol=ATOL)


def test_training_goes_on(trained):
    folder, _ = trained
    with glm4v_patched.applied():
        base = AutoModelForCausalLM.from_pretrained(folder / "base", trust_remote_code=True)
    model = PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True).train()
    base.gradient_checkpointing_enable()
    model(**image_row(3)).loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert gradients and all(g is not None and g.any() for g in gradients.values())
    assert any("vision" in name for name in gradients)
