"""A LoRA adapter that was trained on the published code serves ours."""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import glm4v_patched
from glm4v_patched.remote.configuration_chatglm import fault_of_adapters
from tests.helpers.legacy_repository import image_row

# fp32, as the golden data in parity/test_golden.py. Measured: 2.5e-5.
ATOL = 4e-5


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    return model.eval()(**image_row(9) | {"labels": None}).logits


def load(folder):
    with glm4v_patched.applied():
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def test_an_adapter_computes_what_it_did_and_trains_on(legacy, tmp_path):
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["query_key_value"])
    base, model = legacy.name_or_path, get_peft_model(legacy, config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        model(**image_row(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path)
    want = logits_of(model)
    with model.disable_adapter():
        assert (want - logits_of(model)).abs().max() > 0.1  # it learned something

    ours = PeftModel.from_pretrained(load(base), tmp_path, is_trainable=True)
    torch.testing.assert_close(logits_of(ours), want, rtol=0, atol=ATOL)
    ours.train().get_base_model().gradient_checkpointing_enable()
    ours(**image_row(3)).loss.backward()
    gradients = {n: p.grad for n, p in ours.named_parameters() if p.requires_grad}
    assert gradients and all(g is not None and g.any() for g in gradients.values())
    assert any("vision" in name for name in gradients)
    merged = PeftModel.from_pretrained(load(base), tmp_path).merge_and_unload()
    torch.testing.assert_close(logits_of(merged), want, rtol=0, atol=ATOL)
    if fault_of_adapters() is None:  # else by PeftModel only, as the class says
        torch.testing.assert_close(logits_of(load(tmp_path)), want, rtol=0, atol=ATOL)
