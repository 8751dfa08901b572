"""Train a model under ZeRO, FSDP2 or DDP step by step, with access to its gradients."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from glm4v_patched.engine.deepspeed.internals import skip_collectives_compilation
from glm4v_patched.engine.deepspeed.zero3 import serialize_gloo_gathers
from tests.distributed.cells import ZERO_STAGES

# ZeRO-3's harshest setting: every parameter is sharded, and gathered only while it is used.
NOTHING_STAYS_GATHERED = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}


def start_deepspeed() -> None:
    """Initialize DeepSpeed; on a CPU without compiling collectives, and with serial gathers."""
    import deepspeed

    with skip_collectives_compilation():
        deepspeed.init_distributed(verbose=False)
    if not torch.cuda.is_available():
        serialize_gloo_gathers()


def zero_config(stage: int = 3, harsh: bool = True, **zero: object) -> dict:
    """Return DeepSpeed's config for a client optimizer; if ``harsh``, nothing stays gathered."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # DeepSpeed 0.19 clips to 1.0 by default
        "zero_optimization": {"stage": stage} | (NOTHING_STAYS_GATHERED if harsh else {}) | zero,
    }


def select_weights(model, weights: str):
    """Return the model in training mode, with the named weights trainable and the rest frozen."""
    if weights == "frozen_vision":
        model.transformer.vision.requires_grad_(False)
    elif weights == "frozen_language":
        model.requires_grad_(False).transformer.vision.requires_grad_(True)
    elif weights != "all":
        from peft import LoraConfig, get_peft_model

        # On the fused attention projections, not initialized to zero, equal on every process.
        torch.manual_seed(0)
        config = LoraConfig(
            r=2,
            target_modules=f".*{'' if weights == 'lora_both' else 'encoder.*'}query_key_value",
            modules_to_save=["output_layer", "conv"] if weights == "lora_modules_to_save" else None,
            init_lora_weights=False,
        )
        # peft would make adapters fp32 beside bf16 weights, which DeepSpeed 0.19.2 cannot gather.
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
    return model.train()


def trainable(model) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Training:
    """A training loop: call it like the model, then ``backward``, ``gradients`` and ``update``.

    Args:
        strategy: One of cells.py.
        config: DeepSpeed's, for ZeRO.
    """

    def __init__(
        self, model: nn.Module, strategy: str, config: dict | None = None, rate: float = 0.001
    ):
        self.model, self.strategy, self.engine = model, strategy, None
        if strategy == "fsdp2":
            for module in list(model.modules()):
                if type(module).__name__ in model._no_split_modules:
                    fully_shard(module)
            self.wrapped = fully_shard(model)
        elif strategy.startswith("ddp"):
            static = strategy == "ddp_static_graph"
            self.wrapped = DistributedDataParallel(model, static_graph=static)
        # Created after the weights are sharded.
        self.optimizer = torch.optim.SGD(trainable(model), lr=rate)
        if strategy in ZERO_STAGES:
            import deepspeed

            engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=self.optimizer)
            self.engine = self.wrapped = engine

    def __call__(self, **inputs):
        return self.wrapped(**inputs)

    def backward(self, loss: Tensor) -> None:
        loss.backward() if self.engine is None else self.engine.backward(loss)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients, reduced over all ranks, by the parameters' names."""
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        gradients = {name: self._full_gradient(parameter) for name, parameter in named}
        return {n: gradient.clone() for n, gradient in gradients.items() if gradient is not None}

    def _full_gradient(self, parameter: nn.Parameter) -> Tensor | None:
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
    """Return the average over all ranks."""
    total = loss.detach().float().clone()
    torch.distributed.all_reduce(total)
    return total.item() / torch.distributed.get_world_size()


def gather_from_both_ranks(value: object) -> list:
    values = [None, None]
    torch.distributed.all_gather_object(values, value)
    return values


def save_on_rank_0(value: object, path: Path) -> None:
    if torch.distributed.get_rank() == 0:
        torch.save(value, path)
