"""Two processes train the tiny model under DeepSpeed, one scenario after the other.

Started by test_zero.py: ``python -m torch.distributed.run --nproc_per_node 2 zero_worker.py
FOLDER``. ``FOLDER/scenarios.json`` lists what to run, ``FOLDER/model`` holds the weights; rank 0
writes losses and full gradients to ``FOLDER/<name>.pt``.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from steps import add_adapters, rank_batch
from transformers.integrations import HfDeepSpeedConfig

from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM


def deepspeed_config(stage: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # DeepSpeed clips to 1.0 unless told
        "zero_optimization": {
            "stage": stage,
            # Everything is sharded and nothing stays gathered: the harshest setting.
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        },
    }


def run(scenario: dict, folder: Path) -> dict:
    config = deepspeed_config(scenario["stage"])
    # Kept alive while the model loads: makes from_pretrained shard it under stage 3.
    hf_config = HfDeepSpeedConfig(config)  # noqa: F841
    model = GLM4VForCausalLM.from_pretrained(folder / "model", attn_implementation="sdpa")
    if scenario["weights"] == "adapters":
        model = add_adapters(model)
    model.train()
    model.config.skip_logits = scenario["skip_logits"]
    if scenario["use_reentrant"] is not None:
        model.gradient_checkpointing_enable({"use_reentrant": scenario["use_reentrant"]})
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, config=config, optimizer=torch.optim.SGD(trainable, lr=0.001)
    )
    losses, gradients = [], []
    for step in range(scenario["steps"]):
        batch = rank_batch(engine.global_rank, step)
        loss = engine(**batch).loss
        engine.backward(loss)
        gradients.append(
            {
                name: gradient.clone()
                for name, parameter in engine.module.named_parameters()
                if (gradient := safe_get_full_grad(parameter) if parameter.requires_grad else None)
                is not None
            }
        )
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / torch.distributed.get_world_size())
        engine.step()
    engine.destroy()
    return {"losses": losses, "gradients": gradients}


def main() -> None:
    folder = Path(sys.argv[1])
    deepspeed.init_distributed()
    for scenario in json.loads((folder / "scenarios.json").read_text()):
        result = run(scenario, folder)
        if torch.distributed.get_rank() == 0:
            torch.save(result, folder / f"{scenario['name']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
