"""Two processes train the stand-in for the published code, and ours, under ZeRO-3.

Started by test_failures.py with a folder that holds ``runs.json``, ``ours`` (weights) and
``legacy`` (a repository). Rank 0 writes there what :func:`train` returns for each run.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import CheckpointError
from transformers import AutoModel

from glm4v_patched.remote import checkpointing
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.distributed.strategies import Training, averaged, save_on_first, zero_config
from tests.helpers.legacy_repository import (
    count_labels_of_small_images,
    image_row,
    remote_code_under,
)
from tests.helpers.start_deepspeed import start_deepspeed

# The second step runs on DeepSpeed's finished trace of the parameters, the first does not.
STEPS = 2


def load(which: str, weights: str, dtype: torch.dtype, folder: Path):
    """The model, whole in every process: what is tested begins where DeepSpeed shards it."""
    if which == "legacy":
        for rank in range(torch.distributed.get_world_size()):
            if rank == torch.distributed.get_rank():  # both copy the code to the same place
                model = AutoModel.from_pretrained(
                    folder / "legacy", trust_remote_code=True, dtype=dtype
                )
            torch.distributed.barrier()
        count_labels_of_small_images(model)
    else:
        model = GLM4VForCausalLM.from_pretrained(
            folder / "ours", attn_implementation="sdpa", dtype=dtype
        )
    if weights == "adapters":
        torch.manual_seed(0)  # the same adapters on every process
        lora = LoraConfig(r=2, target_modules=["query_key_value"], init_lora_weights=False)
        # In the dtype of the weights: DeepSpeed 0.19.2 cannot gather fp32 adapters beside bf16.
        return get_peft_model(model, lora, autocast_adapter_dtype=False)
    return model


def train(model, dtype: str) -> dict:
    """Losses and full gradients, or the error that both processes met."""
    config = zero_config() | {"bf16": {"enabled": dtype == "bf16"}}
    training, rank = Training(model, "zero3", config), torch.distributed.get_rank()
    losses, gradients = [], []
    try:
        for step in range(STEPS):
            loss = training(**image_row(seed=2 * (10 * step + rank))).loss
            training.backward(loss)
            gradients.append(training.gradients())
            losses.append(averaged(loss))
            training.update()
    except CheckpointError as error:
        return {"error": str(error)}
    finally:
        training.close()
    return {"losses": losses, "gradients": gradients}


def main(folder: Path) -> None:
    start_deepspeed()
    # DeepSpeed replaces F.linear for good when a model is made under zero.Init, as from_pretrained
    # does; since 0.19.3 always. Only then are Linear weights saved for backward as they are.
    with deepspeed.zero.Init(config_dict_or_path=zero_config()):
        pass
    uncured = mock.patch.object(checkpointing, "frozen_parameters_held", nullcontext)
    for run in json.loads((folder / "runs.json").read_text()):
        code, weights, dtype, checkpoints = run
        types = {"bf16": torch.bfloat16, "fp32": torch.float32}
        model = load(code, weights, types[dtype], folder).train()
        if checkpoints == "nonreentrant":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with uncured if code == "ours without the cure" else nullcontext():
            save_on_first(train(model, dtype), folder / f"{'-'.join(run)}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with remote_code_under(Path(sys.argv[1], "modules")):
        main(Path(sys.argv[1]))
