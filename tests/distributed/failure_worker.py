"""Two processes train the stand-in for the published code, and ours, under ZeRO-3.

Started by test_failures.py with a folder that holds ``runs.json`` (what to run), ``ours`` (weights)
and ``legacy`` (a repository). Rank 0 writes losses and full gradients, or the error that both
processes met, to ``<name>.pt`` in that folder.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import CheckpointError
from transformers import AutoModel

from glm4v_patched.remote import checkpointing
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.legacy_repository import (
    count_labels_of_small_images,
    image_row,
    remote_code_under,
)
from tests.helpers.start_deepspeed import NOTHING_STAYS_GATHERED, start_deepspeed

# The second step runs on DeepSpeed's finished trace of the parameters, the first does not.
STEPS = 2


def zero_config(dtype: str) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # DeepSpeed 0.19 clips to 1.0 unless told
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": 3} | NOTHING_STAYS_GATHERED,
    }


def load(which: str, dtype: torch.dtype, folder: Path):
    """The model, whole in every process: what is tested begins where DeepSpeed shards it."""
    if which == "ours":
        return GLM4VForCausalLM.from_pretrained(
            folder / "ours", attn_implementation="sdpa", dtype=dtype
        )
    for rank in range(torch.distributed.get_world_size()):
        if rank == torch.distributed.get_rank():  # both copy the code to the same place
            model = AutoModel.from_pretrained(
                folder / "legacy", trust_remote_code=True, dtype=dtype
            )
        torch.distributed.barrier()
    count_labels_of_small_images(model)
    return model


def freeze(model, weights: str):
    """What is trained: see WEIGHTS in test_failures.py."""
    if weights == "adapters":
        torch.manual_seed(0)  # the same adapters on every process
        lora = LoraConfig(r=2, target_modules=["query_key_value"], init_lora_weights=False)
        # In the dtype of the weights: DeepSpeed 0.19.2 cannot gather fp32 adapters beside bf16.
        return get_peft_model(model, lora, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        is_frozen = {
            "all": False,
            "frozen norms": "encoder" in name and "layernorm" in name,
            "frozen language model": "vision" not in name,
            "frozen tower": "vision" in name,
        }[weights]
        parameter.requires_grad_(not is_frozen)
    return model


def train(model, run: dict) -> dict:
    config = zero_config(run["dtype"])
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, config=config, optimizer=torch.optim.SGD(trainable, lr=0.001)
    )
    losses, gradients = [], []
    try:
        for step in range(STEPS):
            loss = engine(**image_row(seed=2 * (10 * step + engine.global_rank))).loss
            engine.backward(loss)
            gradients.append(
                {
                    name: safe_get_full_grad(parameter).clone()
                    for name, parameter in engine.module.named_parameters()
                    if parameter.requires_grad
                }
            )
            total = loss.detach().float()
            torch.distributed.all_reduce(total)
            losses.append(total.item() / torch.distributed.get_world_size())
            engine.step()
    except CheckpointError as error:
        return {"error": str(error)}
    finally:
        engine.destroy()
    return {"losses": losses, "gradients": gradients}


def main(folder: Path) -> None:
    start_deepspeed()
    # DeepSpeed replaces F.linear for good when a model is made under zero.Init, as from_pretrained
    # does; since 0.19.3 always. Only then are Linear weights saved for backward as they are.
    with deepspeed.zero.Init(config_dict_or_path=zero_config("fp32")):
        pass
    uncured = mock.patch.object(checkpointing, "frozen_parameters_held", nullcontext)
    for run in json.loads((folder / "runs.json").read_text()):
        dtype = torch.bfloat16 if run["dtype"] == "bf16" else torch.float32
        model = load("legacy" if run["model"] == "legacy" else "ours", dtype, folder).train()
        if run["use_reentrant"] is not None:
            model.gradient_checkpointing_enable({"use_reentrant": run["use_reentrant"]})
        with uncured if run["model"] == "ours without the cure" else nullcontext():
            result = train(freeze(model, run["weights"]), run)
        if torch.distributed.get_rank() == 0:
            torch.save(result, folder / f"{run['name']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with remote_code_under(Path(sys.argv[1], "modules")):
        main(Path(sys.argv[1]))
