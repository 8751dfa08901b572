"""Computes the rows with one of the two models; a process of its own, which imports nothing of ours
for the published one.

``python worker.py JOB.json``. It must run where the published code runs: on Python 3.9 and
transformers 4.44, too. What it writes are tensors and JSON, never pickles, because the published
code is not to be trusted with more.
"""

import json
import sys
import traceback
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# Whose gradients are compared: an early and a late weight of each part, for memory's sake.
VISION_GRADIENTS = (
    "transformer.vision.transformer.layers.{last_of_tower}.mlp.fc2.weight",
    "transformer.vision.conv.bias",
    "transformer.vision.linear_proj.linear_proj.weight",
    "transformer.vision.boi",
)
LANGUAGE_GRADIENTS = (
    "transformer.encoder.layers.0.self_attention.query_key_value.weight",
    "transformer.encoder.layers.{last}.mlp.dense_4h_to_h.weight",
    "transformer.encoder.final_layernorm.weight",
)
# Of the end of each row, which no padding is in: all logits would be half a GB a row.
NUM_LAST_POSITIONS = 8


def run_job(job):
    torch.manual_seed(0)
    model = load_model(job).to(job["device"])
    names = gradient_names(model.config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    tensors: dict = {}
    told: dict = {}
    for case, inputs in read_cases(job["rows"]).items():
        inputs = {name: tensor.to(job["device"]) for name, tensor in inputs.items()}
        of_case = told[case] = {}
        labels = inputs.pop("labels", None)
        record_result(of_case, "logits", logits, model.eval(), inputs, case, tensors)
        if labels is not None:
            arguments = dict(inputs, labels=labels)
            record_result(of_case, "loss", loss, model.train(), arguments, case, tensors)
        if "answers" in job and case.startswith("prompt"):
            generate_greedily(model.eval(), inputs, job["answers"], of_case)
    save_file(tensors, job["tensors"])
    Path(job["told"]).write_text(json.dumps(told), encoding="utf-8")


def load_model(job):
    dtype = getattr(torch, job["dtype"])
    if job["ours"]:
        from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM

        return GLM4VForCausalLM.from_pretrained(job["folder"], dtype=dtype)
    from transformers import AutoModelForCausalLM

    # Else the weights are in memory twice; as the published card loads them.
    options = {"trust_remote_code": True, "torch_dtype": dtype, "low_cpu_mem_usage": True}
    return AutoModelForCausalLM.from_pretrained(job["folder"], **options)


def gradient_names(config):
    vision = config.vision_config
    layers = vision["num_hidden_layers"] if isinstance(vision, dict) else vision.num_hidden_layers
    ends = {"last": config.num_layers - 1, "last_of_tower": layers - 1}
    return [name.format(**ends) for name in VISION_GRADIENTS + LANGUAGE_GRADIENTS]


def read_cases(path):
    """Inputs of each case by their names; files of safetensors hold them as ``case/name``."""
    cases: dict = {}
    for key, tensor in sorted(load_file(path).items()):
        case, _, name = key.partition("/")
        cases.setdefault(case, {})[name] = tensor
    return cases


def record_result(told, name, compute, *arguments):
    """What it computes, or the error that it ends with; the other rows go on."""
    try:
        told[name] = compute(*arguments)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        traceback.print_exc()
        told[name] = {"error": f"{type(error).__name__}: {error}"[:300]}


@torch.no_grad()
def logits(model, inputs, case, tensors):
    found = model(**inputs).logits[:, -NUM_LAST_POSITIONS:].float().cpu().contiguous()
    tensors[f"{case}/logits"] = found
    return list(found.shape)


def loss(model, inputs, case, tensors):
    model.zero_grad(set_to_none=True)
    value = model(**inputs).loss
    value.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            key = f"{case}/gradient/{name}"
            tensors[key] = parameter.grad.float().cpu().contiguous()
    model.zero_grad(set_to_none=True)
    return float(value)


def generate_greedily(model, prompt, number, told):
    """Greedy tokens of ``generate``; where that fails, of plain forward passes without a cache."""
    length = prompt["input_ids"].shape[1]

    def generate():
        ids = model.generate(**prompt, do_sample=False, max_new_tokens=number)
        return ids[0, length:].tolist()

    def step_by_step():
        grown = dict(prompt)
        for _ in range(number):
            token = model(**grown).logits[:, -1:].argmax(-1)
            grown["input_ids"] = torch.cat((grown["input_ids"], token), 1)
        return grown["input_ids"][0, length:].tolist()

    with torch.no_grad():
        record_result(told, "generate", generate)
        record_result(told, "answer", step_by_step if "error" in told["generate"] else generate)


if __name__ == "__main__":
    run_job(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
