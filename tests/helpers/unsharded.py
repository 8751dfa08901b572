"""One process takes the steps of a cell without sharding and without activation checkpoints."""

from tests.helpers.cells import WITHOUT_DEEPSPEED, Cell
from tests.helpers.steps import (
    LEARNING_RATE,
    autocast,
    device,
    rank_batch,
    select_weights,
    small_model,
    trainable,
    weights_dtype,
)


def reference_name(cell: Cell) -> str:
    """Cells that share it have one reference."""
    masters = cell.precision == "bf16" and cell.strategy not in WITHOUT_DEEPSPEED
    return f"{cell.weights}-{cell.precision}-{masters}-{cell.images}-{cell.steps}"


def unsharded_run(cell: Cell) -> dict:
    """Losses and gradients of both ranks' batches, averaged: one of each a step.

    bf16 weights under DeepSpeed are updated in fp32 and rounded; elsewhere they are themselves
    updated.
    """
    model = select_weights(small_model(weights_dtype(cell)).to(device()), cell.weights)
    keeps_masters = cell.precision == "bf16" and cell.strategy not in WITHOUT_DEEPSPEED
    parameters = trainable(model)
    masters = [p.detach().float() if keeps_masters else p.detach() for p in parameters]
    losses, gradients = [], []
    for step in range(cell.steps):
        loss = 0
        for rank in range(2):
            with autocast(cell):
                loss = loss + model(**rank_batch(cell, rank, step)).loss / 2
        loss.backward()
        losses.append(loss.item())
        gradients.append(
            {n: p.grad.float().cpu() for n, p in model.named_parameters() if p.grad is not None}
        )
        for parameter, master in zip(parameters, masters, strict=True):
            if parameter.grad is not None:
                master.sub_(LEARNING_RATE * parameter.grad.to(master.dtype))
                parameter.data.copy_(master)
        model.zero_grad()
    return {"losses": losses, "gradients": gradients}
