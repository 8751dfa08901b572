"""Where the memory of a training step goes."""

import torch
from torch import Tensor, nn

from ..engine.deepspeed.internals import is_sharded, shard_of
from ..engine.memory_plan import GIB
from ..engine.prepare import Engine


def allocated() -> int:
    """Bytes that torch has allocated on this process's GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def memory_parts(trainer: Engine, batch: dict[str, Tensor]) -> dict[str, float]:
    """Train one more step and look at it: GiB of each part, and the ``peak``.

    - ``weights``: what the model takes, this process's shard of it;
    - ``optimizer``: its states and fp32 weights, as far as they are on the GPU;
    - ``gradients``: what the backward pass leaves for the update, and the buffers that hold
      gradients from one step to the next. Rows that have ``held_ceiling_tflops`` and none of
      gradients under ZeRO-3 count those buffers as rest; rows without it count as gradients all
      that is there beside weights and optimizer;
    - ``activations``: what the forward pass leaves for the backward pass;
    - ``logits``: the most that the output layer and the loss take, forward or backward;
    - ``rest``: the peak less all of these: gathered weights, the inside of a layer, buckets. 0
      where they are never all there at once.

    Args:
        trainer: Of :func:`prepare.start`.
    """
    watch = _PeakWatch()
    handles = watch.watch(_output_layer(trainer.model))
    before = allocated() - _gathered(trainer.model)
    loss = trainer.forward(batch)
    after_forward = allocated() - _gathered(trainer.model)
    trainer.backward(loss)
    del loss
    after_backward = allocated() - _gathered(trainer.model)
    trainer.update()
    watch.restart()
    for handle in handles:
        handle.remove()
    parts = {"weights": _held(trainer.model), "optimizer": _on_gpu(trainer.optimizer_tensors())}
    parts["gradients"] = max(after_backward - before, 0) + _on_gpu(trainer.gradient_buffers())
    parts["activations"] = max(after_forward - before, 0)
    parts["logits"] = watch.of_module
    parts["rest"] = max(watch.peak - sum(parts.values()), 0)
    return {name: size / GIB for name, size in (parts | {"peak": watch.peak}).items()}


def _on_gpu(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor.device.type == "cuda")


class _PeakWatch:
    """The peak of a step, and how far it rises during a module's forward and backward."""

    def __init__(self):
        self.peak = self.of_module = 0
        torch.cuda.reset_peak_memory_stats()

    def restart(self) -> int:
        """Begin a new stretch; returns the peak of the one that ends here."""
        peak = torch.cuda.max_memory_allocated()
        self.peak = max(self.peak, peak)
        torch.cuda.reset_peak_memory_stats()
        return peak

    def watch(self, module: nn.Module) -> list:
        def begin(*_):
            self.restart()
            self.start = allocated()

        def end(*_):
            self.of_module = max(self.of_module, self.restart() - self.start)

        def forward_ends(_module, inputs, output):
            end()
            if output.requires_grad:
                output.register_hook(begin)  # returns nothing: gradients stay as they are
                inputs[0].register_hook(end)

        return [module.register_forward_pre_hook(begin), module.register_forward_hook(forward_ends)]


def _held(model: nn.Module) -> int:
    """Bytes of weights and buffers between steps: under ZeRO-3 of this process's shard."""
    weights = [shard_of(weight) for weight in model.parameters()]
    return _on_gpu([*weights, *model.buffers()])


def _output_layer(model: nn.Module) -> nn.Module:
    (layer,) = (part for name, part in model.named_modules() if name.endswith("output_layer"))
    return layer


def _gathered(model: nn.Module) -> int:
    """Bytes of weights that ZeRO-3 holds gathered at the moment."""
    return sum(weight.data.nbytes for weight in model.parameters() if is_sharded(weight))
