"""Two processes train one cell after the other and compare each with its unsharded run.

Started by matrix.py on every rank with a folder that holds ``cells.json`` (what to train),
``references.pt`` and ``model``. Every rank appends to ``rows.<rank>.jsonl`` before and after a
cell; losses and gradients go to the folder ``gradients``, if there is one. A cell that raises or
hangs ends the processes, because what it leaves behind may spoil the next one; matrix.py starts new
ones for the rest.
"""

import faulthandler
import gc
import json
import os
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

import torch

from glm4v_patched.remote import checkpointing
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.distributed.strategies import Training, averaged, zero_config
from tests.helpers.cells import ZERO_STAGES, Cell
from tests.helpers.gathers import counted_gathers
from tests.helpers.start_deepspeed import start_deepspeed
from tests.helpers.steps import (
    LEARNING_RATE,
    autocast,
    device,
    largest,
    rank_batch,
    select_weights,
    weights_dtype,
)
from tests.helpers.unsharded import reference_name

SECONDS_FOR_ONE_CELL = 60


def config_of(cell: Cell) -> dict:
    zero: dict = {}
    if cell.strategy == "zero3_offload":
        zero = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    return zero_config(ZERO_STAGES[cell.strategy], cell.persistence == "0", **zero) | {
        "bf16": {"enabled": cell.precision == "bf16"},
        "torch_autocast": {"enabled": cell.precision == "bf16_autocast", "dtype": "bfloat16"},
    }


def start(cell: Cell, folder: Path) -> Training:
    config = None
    if cell.strategy in ZERO_STAGES:
        from transformers.integrations import HfDeepSpeedConfig

        config = config_of(cell)
        # Kept alive while the model loads: makes from_pretrained shard it under stage 3.
        hf_config = HfDeepSpeedConfig(config)  # noqa: F841
    model = GLM4VForCausalLM.from_pretrained(
        folder / "model", attn_implementation="sdpa", dtype=weights_dtype(cell)
    )
    model = select_weights(model, cell.weights)
    model.config.skip_logits = cell.skip_logits
    if cell.use_reentrant != "off":
        told = {"use_reentrant": cell.use_reentrant} if cell.use_reentrant != "unset" else None
        model.gradient_checkpointing_enable(told)
    model = model if config else model.to(device())
    return Training(model, cell.strategy, config, LEARNING_RATE)


def with_or_without_cure(cell: Cell) -> AbstractContextManager:
    if cell.cure:
        return nullcontext()
    return mock.patch.object(checkpointing, "frozen_parameters_held", nullcontext)


def train(cell: Cell, folder: Path) -> dict:
    """``losses``, averaged over the ranks, and ``gradients``, one of each a step; how often ZeRO
    gathered in the last one."""
    training, rank = start(cell, folder), torch.distributed.get_rank()
    with_deepspeed = training.engine is not None
    result: dict = {"losses": [], "gradients": []}
    for step in range(cell.steps):
        with counted_gathers() if with_deepspeed else nullcontext() as count:
            with autocast(cell):
                loss = training(**rank_batch(cell, rank, step)).loss
            training.backward(loss)
        result["gathers"] = count and count.calls
        result["losses"].append(averaged(loss))
        result["gradients"].append({n: g.float().cpu() for n, g in training.gradients().items()})
        training.update()
    training.close()
    return result


def differences(got: dict, want: dict) -> dict[str, float]:
    """The largest ones over all steps, relative to the loss and to the step's largest gradient. A
    parameter without a gradient counts as one whose gradient is zero."""
    loss = max(abs(g - w) / abs(w) for g, w in zip(got["losses"], want["losses"], strict=True))
    gradient = 0.0
    for got_step, want_step in zip(got["gradients"], want["gradients"], strict=True):
        if unknown := want_step.keys() - got_step.keys():
            raise ValueError(f"no gradient for {sorted(unknown)}")
        apart = {n: g - want_step[n] if n in want_step else g for n, g in got_step.items()}
        gradient = max(gradient, largest(apart) / largest(want_step))
    return {"loss_difference": loss, "gradient_difference": gradient}


def train_and_compare(cell: Cell, folder: Path, references: dict, note) -> None:
    with with_or_without_cure(cell):
        result = train(cell, folder)
    if torch.distributed.get_rank() == 0:
        figures = differences(result, references[reference_name(cell)])
        note({"done": cell.name, "gathers": result["gathers"]} | figures)
        if (folder / "gradients").is_dir():
            torch.save(result, folder / "gradients" / f"{cell.name}.pt")


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    cells = [Cell(**cell) for cell in json.loads((folder / "cells.json").read_text())]
    references = torch.load(folder / "references.pt") if rank == 0 else {}
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if any(cell.strategy in ZERO_STAGES for cell in cells):
        start_deepspeed()
    else:
        torch.distributed.init_process_group("nccl" if device() == "cuda" else "gloo")

    def note(row: dict) -> None:
        with open(folder / f"rows.{rank}.jsonl", "a") as rows:
            rows.write(json.dumps(row) + "\n")

    for cell in cells:
        note({"started": cell.name})
        faulthandler.dump_traceback_later(SECONDS_FOR_ONE_CELL, exit=True)
        try:
            train_and_compare(cell, folder, references, note)
        except Exception as error:
            note({"failed": cell.name, "reason": f"{type(error).__name__}: {error}"})
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        gc.collect()
        gc.freeze()  # what was imported by now costs half a second in each later collection
    faulthandler.cancel_dump_traceback_later()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
