"""Two processes train one cell after the other and compare each with its unsharded run.

Started by matrix.py on every rank with a folder that holds ``cells.json`` (what to train),
``references.pt`` and ``model``. Every rank appends to ``rows.<rank>.jsonl`` before and after a
cell. A cell that raises or hangs ends the processes, because what it leaves behind may spoil the
next one; matrix.py starts new ones for the rest.
"""

import faulthandler
import gc
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch

from glm4v_patched.remote import checkpointing
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.cells import ZERO_STAGES, Cell
from tests.helpers.gathers import counted_gathers
from tests.helpers.start_deepspeed import NOTHING_STAYS_GATHERED, start_deepspeed
from tests.helpers.steps import (
    LEARNING_RATE,
    autocast,
    device,
    largest,
    rank_batch,
    select_weights,
    trainable,
    weights_dtype,
)
from tests.helpers.unsharded import reference_name

SECONDS_FOR_ONE_CELL = 60
# Loss, gradients by name, and how often DeepSpeed gathered parameters.
Step = tuple[torch.Tensor, dict[str, torch.Tensor], int | None]


def zero_config(cell: Cell) -> dict:
    zero: dict = {"stage": ZERO_STAGES[cell.strategy]}
    if cell.persistence == "0":
        zero |= NOTHING_STAYS_GATHERED
    if cell.strategy == "zero3_offload":
        zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # DeepSpeed 0.19 clips to 1.0 unless told
        "zero_optimization": zero,
        "bf16": {"enabled": cell.precision == "bf16"},
        "torch_autocast": {"enabled": cell.precision == "bf16_autocast", "dtype": "bfloat16"},
    }


def load(cell: Cell, folder: Path):
    model = GLM4VForCausalLM.from_pretrained(
        folder / "model", attn_implementation="sdpa", dtype=weights_dtype(cell)
    )
    model = select_weights(model, cell.weights)
    model.config.skip_logits = cell.skip_logits
    if cell.use_reentrant == "unset":
        model.gradient_checkpointing_enable()
    elif cell.use_reentrant != "off":
        model.gradient_checkpointing_enable({"use_reentrant": cell.use_reentrant})
    return model


@contextmanager
def with_or_without_cure(cell: Cell) -> Iterator[None]:
    if cell.cure:
        yield
    else:
        with mock.patch.object(checkpointing, "frozen_parameters_held", nullcontext):
            yield


def full_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Over all ranks.

    DeepSpeed 0.16.9 at stage 0 reduces and uses an fp32 copy of a bf16 gradient, but its
    ``safe_get_full_grad`` returns the one of this rank.
    """
    from deepspeed.utils import safe_get_full_grad

    reduced = getattr(parameter, "_hp_grad", None)
    return safe_get_full_grad(parameter) if reduced is None else reduced.reshape(parameter.shape)


def deepspeed_steps(cell: Cell, folder: Path) -> Iterator[Step]:
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    config = zero_config(cell)
    # Kept alive while the model loads: makes from_pretrained shard it under stage 3.
    hf_config = HfDeepSpeedConfig(config)  # noqa: F841
    model = load(cell, folder)
    optimizer = torch.optim.SGD(trainable(model), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    for step in range(cell.steps):
        with counted_gathers() as count:
            with autocast(cell):
                loss = engine(**rank_batch(cell, engine.global_rank, step)).loss
            engine.backward(loss)
        gradients = {
            name: full_gradient(parameter)
            for name, parameter in engine.module.named_parameters()
            if parameter.requires_grad
        }
        yield loss, {n: g.float() for n, g in gradients.items() if g is not None}, count.calls
        engine.step()
    engine.destroy()


def torch_steps(cell: Cell, folder: Path) -> Iterator[Step]:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = load(cell, folder).to(device())
    if cell.strategy == "fsdp2":
        for module in model.modules():
            if type(module).__name__ in model._no_split_modules:
                fully_shard(module)
        wrapped = fully_shard(model)
    else:
        wrapped = DistributedDataParallel(model, static_graph=cell.strategy == "ddp_static_graph")
    optimizer = torch.optim.SGD(trainable(model), lr=LEARNING_RATE)
    for step in range(cell.steps):
        with autocast(cell):
            loss = wrapped(**rank_batch(cell, torch.distributed.get_rank(), step)).loss
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        if cell.strategy == "fsdp2":
            gradients = {name: gradient.full_tensor() for name, gradient in gradients.items()}
        yield loss, {name: gradient.float() for name, gradient in gradients.items()}, None
        optimizer.step()
        optimizer.zero_grad()


def train(cell: Cell, folder: Path) -> dict:
    """``losses``, averaged over the ranks, and ``gradients``: one of each a step.

    ``gathers`` is the number of all-gathers in the last step.
    """
    steps = deepspeed_steps if cell.strategy in ZERO_STAGES else torch_steps
    result = {"losses": [], "gradients": []}
    for loss, gradients, gathers in steps(cell, folder):
        total = loss.detach().float().clone()
        torch.distributed.all_reduce(total)
        result["losses"].append(total.item() / torch.distributed.get_world_size())
        result["gathers"] = gathers
        result["gradients"].append({n: g.cpu().clone() for n, g in gradients.items()})
    return result


def differences(got: dict, want: dict) -> dict[str, float]:
    """The largest ones over all steps, relative to the loss and to the step's largest gradient.

    A parameter without a gradient counts as one whose gradient is zero.
    """
    loss = max(abs(g - w) / abs(w) for g, w in zip(got["losses"], want["losses"], strict=True))
    gradient = 0.0
    for got_step, want_step in zip(got["gradients"], want["gradients"], strict=True):
        if unknown := want_step.keys() - got_step.keys():
            raise ValueError(f"no gradient for {sorted(unknown)}")
        apart = {n: g - want_step[n] if n in want_step else g for n, g in got_step.items()}
        gradient = max(gradient, largest(apart) / largest(want_step))
    return {"loss_difference": loss, "gradient_difference": gradient}


def main() -> None:
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    cells = [Cell(**cell) for cell in json.loads((folder / "cells.json").read_text())]
    references = torch.load(folder / "references.pt") if rank == 0 else {}
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if any(cell.strategy in ZERO_STAGES for cell in cells):
        start_deepspeed()
    else:
        torch.distributed.init_process_group("nccl" if device() == "cuda" else "gloo")
    keep = folder / "gradients"
    with open(folder / f"rows.{rank}.jsonl", "a") as rows:

        def note(row: dict) -> None:
            rows.write(json.dumps(row) + "\n")
            rows.flush()

        for cell in cells:
            note({"started": cell.name})
            faulthandler.dump_traceback_later(SECONDS_FOR_ONE_CELL, exit=True)
            try:
                with with_or_without_cure(cell):
                    result = train(cell, folder)
                if rank == 0:
                    want = references[reference_name(cell)]
                    figures = differences(result, want) | {"gathers": result["gathers"]}
                    note({"done": cell.name} | figures)
                    if keep.is_dir():
                        torch.save(result, keep / f"{cell.name}.pt")
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
