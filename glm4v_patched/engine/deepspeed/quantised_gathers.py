"""Weights that multiply in fp8 are quantised before ZeRO-3 gathers them: half of the bytes.

Each process quantises its rows of a weight where DeepSpeed gathers it for a forward or backward
pass, so that what is gathered is what the others would have quantised. Shards, what is saved and
checkpoints stay as they are, and whoever else gathers a weight gets it whole.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ..activation_checkpointing import checkpointed_layers
from ..e4m3 import E4M3
from ..fp8 import HeldProduct, Linear
from ..fp8_numbers import quantise_rows
from . import internals


class GatheredLinear(Linear):
    """Its weight is gathered as ``numbers`` ``(O, I)``, bytes, and ``scales`` ``(O, 1)``, bits; the
    parameter itself is NaN meanwhile. Where it is whole, it is used as it is."""

    numbers: Tensor
    scales: Tensor
    absent: Tensor

    def without_bias(self, x: Tensor) -> Tensor:
        if not self.is_gathered:
            return super().without_bias(x)
        return HeldProduct.apply(x, self.numbers, self.scales, None, self.weight)

    def quantised(self) -> tuple[Tensor, Tensor]:
        if not self.is_gathered:
            return super().quantised()
        return self.numbers.view(E4M3), self.scales.view(torch.float32)

    @property
    def is_gathered(self) -> bool:
        """Whether the quantised weight is here, or on its way."""
        return len(self.numbers) > 0

    def quantise(self, weight: Any, rank: int) -> list[tuple[Tensor, Tensor]]:
        """Make room for the whole weight and quantise this process's rows into it. Returns what is
        to be gathered: pairs of a whole and this process's part of it, as bytes."""
        rows = internals.shard_of(weight).view(-1, self.in_features)
        own = slice(rank * len(rows), (rank + 1) * len(rows))
        numbers = rows.new_empty(self.out_features, self.in_features, dtype=E4M3)
        scales = rows.new_empty(self.out_features, 1, dtype=torch.float32)
        quantise_rows(rows, into=(numbers[own], scales[own]))
        # Swapped and not written to: autograd would say that what forward kept has changed.
        self.numbers.data, self.scales.data = numbers.view(torch.uint8), scales.view(torch.int32)
        weight.data = self.absent
        wholes = numbers.view(torch.uint8), scales.view(torch.uint8)
        return [(whole.view(-1), whole[own].view(-1)) for whole in wholes]

    def release(self) -> None:
        for tensor in (self.numbers, self.scales):
            if tensor.is_cuda:  # what was queued of it is still to be done
                tensor.record_stream(torch.cuda.current_stream())
            tensor.data = tensor.new_empty(0)


class QuantisedGathers:
    """The layers of a model that are gathered so, by their weights, which ZeRO-3 has sharded."""

    def __init__(self, model: nn.Module):
        self.layers: dict[Any, GatheredLinear] = {}
        self.updated: torch.cuda.Event | None = None
        for layer in checkpointed_layers(model):
            for linear in layer.modules():
                if type(linear) is Linear:
                    self._take(linear)
        if not self.layers:
            return
        for weight in model.parameters():
            internals.replace_in_all([weight], "partition", partial(self._partition, weight))
            internals.replace_in_all([weight], "all_gather", partial(self._gather_whole, weight))
        self._note_update()
        # Before DeepSpeed's own, which gather ahead.
        model.register_forward_pre_hook(self._note_update, prepend=True)

    def _take(self, linear: Any) -> None:
        # Not as an attribute: DeepSpeed gathers what is read so while it is not there.
        weight = dict(linear.named_parameters(recurse=False))["weight"]
        shard, processes = weight.ds_tensor, distributed.get_world_size(weight.ds_process_group)
        ends_with_a_row = shard.numel() % linear.in_features == 0
        if weight.ds_persist or not ends_with_a_row or shard.numel() * processes != weight.ds_numel:
            return
        linear.__class__ = GatheredLinear
        linear.numbers = torch.empty(0, dtype=torch.uint8, device=weight.device)
        linear.scales = torch.empty(0, dtype=torch.int32, device=weight.device)
        nan = torch.full((), torch.nan, dtype=weight.dtype, device=weight.device)
        linear.absent = nan.expand(weight.ds_shape)
        self.layers[weight] = linear

    def _note_update(self, *_: Any) -> None:
        if torch.cuda.is_available():
            self.updated = torch.cuda.Event()
            self.updated.record()

    def quantise(self, weight: Any, rank: int) -> list[tuple[Tensor, Tensor]]:
        """As :meth:`GatheredLinear.quantise`, of what the optimizer has updated."""
        if self.updated is not None:  # DeepSpeed's stream of gathers does not wait for it
            torch.cuda.current_stream().wait_event(self.updated)
        return self.layers[weight].quantise(weight, rank)

    def _gathered(self, weights: Iterable[Any]) -> list[Any]:
        return [w for w in weights if w in self.layers and self.layers[w].is_gathered]

    def _partition(self, weight: Any, partition: Callable) -> Callable:
        def partition_and_release(param_list: Any = None, *rest: Any, **options: Any) -> None:
            weights = [weight] if param_list is None else list(param_list)
            gathered = self._gathered(weights)
            if gathered and options.get("has_been_updated"):
                raise RuntimeError(
                    f"{len(gathered)} weights that were changed under ZeRO-3 have been gathered in "
                    "fp8 since, by a forward pass; leave GatheredParameters before the model runs"
                )
            partition(weights, *rest, **options)
            for one in gathered:
                self.layers[one].release()

        return partition_and_release

    def _gather_whole(self, weight: Any, gather: Callable) -> Callable:
        def release_and_gather(param_list: Any = None, *rest: Any, **options: Any) -> Any:
            weights = [weight] if param_list is None else list(param_list)
            if gathered := self._gathered(weights):
                weight.partition(gathered)
            return gather(weights, *rest, **options)

        return release_and_gather
