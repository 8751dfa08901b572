"""A model trained under ZeRO, FSDP2 or DDP, a step at a time, whose gradients can be looked at."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from glm4v_patched.engine.deepspeed.internals import skip_collectives_compilation
from glm4v_patched.engine.deepspeed.zero3 import serialize_gloo_gathers
from tests.distributed.cells import ZERO_STAGES

# ZeRO-3 at its harshest: every parameter is sharded, and gathered only while it is used.
NOTHING_STAYS_GATHERED = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}


def start_deepspeed() -> None:
    """``deepspeed.init_distributed``; on the CPU nothing is compiled, and loading is correct."""
    import deepspeed

    with skip_collectives_compilation():
        deepspeed.init_distributed(verbose=False)
    if not torch.cuda.is_available():
        serialize_gloo_gathers()


def zero_config(stage: int = 3, harsh: bool = True, **zero: object) -> dict:
    """For an optimizer that is handed to DeepSpeed; ``harsh``: nothing stays gathered."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # DeepSpeed 0.19 clips to 1.0 unless told
        "zero_optimization": {"stage": stage} | (NOTHING_STAYS_GATHERED if harsh else {}) | zero,
    }


def select_weights(model, weights: str):
    """The model in training mode, with what ``weights`` names trainable and the rest frozen."""
    if weights == "frozen_vision":
        model.transformer.vision.requires_grad_(False)
    elif weights == "frozen_language":
        model.requires_grad_(False).transformer.vision.requires_grad_(True)
    elif weights != "all":
        from peft import LoraConfig, get_peft_model

        # On the fused attention projections, not zero, the same on every process.
        torch.manual_seed(0)
        config = LoraConfig(
            r=2,
            target_modules=f".*{'' if weights == 'lora_both' else 'encoder.*'}query_key_value",
            modules_to_save=["output_layer", "conv"] if weights == "lora_modules_to_save" else None,
            init_lora_weights=False,
        )
        # peft would keep them in fp32 beside bf16 weights, which DeepSpeed 0.19.2 cannot gather.
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
    return model.train()


def trainable(model) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Training:
    """Call it as the model, then ``backward`` the loss, look at ``gradients``, and ``update``. The
    strategies are those of cells.py; for ZeRO with DeepSpeed's config."""

    def __init__(
        self, model: nn.Module, strategy: str, config: dict | None = None, rate: float = 0.001
    ):
        self.model, self.strategy, self.engine = model, strategy, None
        if strategy == "fsdp2":
            for module in list(model.modules()):
                if type(module).__name__ in model._no_split_modules:
                    fully_shard(module)
            self.called = fully_shard(model)
        elif strategy.startswith("ddp"):
            static = strategy == "ddp_static_graph"
            self.called = DistributedDataParallel(model, static_graph=static)
        # Of weights that are sharded by now.
        self.optimizer = torch.optim.SGD(trainable(model), lr=rate)
        if strategy in ZERO_STAGES:
            import deepspeed

            made = deepspeed.initialize(model=model, config=config, optimizer=self.optimizer)
            self.engine = self.called = made[0]

    def __call__(self, **inputs):
        return self.called(**inputs)

    def backward(self, loss: Tensor) -> None:
        loss.backward() if self.engine is None else self.engine.backward(loss)

    def gradients(self) -> dict[str, Tensor]:
        """Over all ranks, by name; of parameters that have one."""
        learned = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        found = {name: self._whole_gradient(parameter) for name, parameter in learned}
        return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}

    def _whole_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        if self.engine is None:
            gradient = parameter.grad
            sharded = gradient is not None and self.strategy == "fsdp2"
            return gradient.full_tensor() if sharded else gradient
        from deepspeed.utils import safe_get_full_grad

        # DeepSpeed 0.16.9 at stage 0 reduces and uses an fp32 copy of a bf16 gradient, but its
        # ``safe_get_full_grad`` returns the one of this rank.
        reduced = getattr(parameter, "_hp_grad", None)
        if reduced is not None:
            return reduced.reshape(parameter.shape)
        return safe_get_full_grad(parameter)

    def update(self) -> None:
        (self.engine or self.optimizer).step()
        if self.engine is None:
            self.optimizer.zero_grad()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.destroy()


def averaged(loss: Tensor) -> float:
    """Over all ranks."""
    total = loss.detach().float().clone()
    torch.distributed.all_reduce(total)
    return total.item() / torch.distributed.get_world_size()


def of_both_ranks(value: object) -> list:
    everyone = [None, None]
    torch.distributed.all_gather_object(everyone, value)
    return everyone


def save_on_first(value: object, path: Path) -> None:
    if torch.distributed.get_rank() == 0:
        torch.save(value, path)
