"""Process that computes the cases with one of the two models.

``python worker.py JOB.json``. For the published model, the process imports nothing of this package
and runs where the published code runs: with Python 3.9 and transformers 4.44. It writes tensors as
safetensors and results as JSON, not as pickles, because the published code is not trusted.
"""

import json
import sys
import traceback
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# Weights whose gradients are compared: to save memory, only an early and a late weight of each
# submodule.
VISION_GRADIENTS = (
    "transformer.vision.transformer.layers.{last_vision_layer}.mlp.fc2.weight",
    "transformer.vision.conv.bias",
    "transformer.vision.linear_proj.linear_proj.weight",
    "transformer.vision.boi",
)
LANGUAGE_GRADIENTS = (
    "transformer.encoder.layers.0.self_attention.query_key_value.weight",
    "transformer.encoder.layers.{last_language_layer}.mlp.dense_4h_to_h.weight",
    "transformer.encoder.final_layernorm.weight",
)
# Logits are compared at the last positions only, which are never padding, because all logits of one
# sequence would take half a GB.
NUM_LAST_POSITIONS = 8
# Our model's logits are computed with each rotary embedding (original_rope of its config), and with
# image tokens that share one position or have a position each.
ROPE_PAIRS, ROPE_HALVES = ROPE_KINDS = ("neighboring pairs", "halves")
SHARED_IDS, COUNTED_IDS = POSITION_KINDS = ("shared", "counted")


def run_job(job):
    """Compute and write the logits, loss, gradients and answers of all cases."""
    torch.manual_seed(0)
    model = load_model(job).to(job["device"])
    names = gradient_names(model.config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    tensors: dict = {}
    results: dict = {}
    for case, inputs in read_cases(job["cases"]).items():
        inputs = {name: tensor.to(job["device"]) for name, tensor in inputs.items()}
        case_results = results[case] = {}
        labels = inputs.pop("labels", None)
        record_result(case_results, "logits", compute_logits, model.eval(), inputs, case, tensors)
        if job["ours"] and case in ("text", "image"):
            case_results["rotation"] = ROPE_PAIRS if model.config.original_rope else ROPE_HALVES
            for rotation, positions in product(ROPE_KINDS, POSITION_KINDS):
                name = f"{case}, {rotation}, {positions}"
                variant = model, inputs, name, tensors, rotation, positions
                record_result(case_results, name, compute_variant_logits, *variant)
        if labels is not None:
            labeled = dict(inputs, labels=labels)
            record_result(case_results, "loss", compute_loss, model.train(), labeled, case, tensors)
        if "answer_tokens" in job and case.startswith("prompt"):
            generate_greedily(model.eval(), inputs, job["answer_tokens"], case_results)
    save_file(tensors, job["tensors"])
    Path(job["results"]).write_text(json.dumps(results), encoding="utf-8")


def load_model(job):
    """Load our model, or the published one with its own code."""
    dtype = getattr(torch, job["dtype"])
    if job["ours"]:
        from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM

        return GLM4VForCausalLM.from_pretrained(job["folder"], dtype=dtype)
    from transformers import AutoModelForCausalLM

    # As in the published model card; without low_cpu_mem_usage the model would be in memory twice.
    options = {"trust_remote_code": True, "torch_dtype": dtype, "low_cpu_mem_usage": True}
    return AutoModelForCausalLM.from_pretrained(job["folder"], **options)


def gradient_names(config):
    """Return the names of the weights whose gradients are compared."""
    vision = config.vision_config
    layers = vision["num_hidden_layers"] if isinstance(vision, dict) else vision.num_hidden_layers
    last = {"last_language_layer": config.num_layers - 1, "last_vision_layer": layers - 1}
    return [name.format(**last) for name in VISION_GRADIENTS + LANGUAGE_GRADIENTS]


def read_cases(path):
    """Return the inputs of each case; their names in the file are ``case/name``."""
    cases: dict = {}
    for key, tensor in sorted(load_file(path).items()):
        case, _, name = key.partition("/")
        cases.setdefault(case, {})[name] = tensor
    return cases


def record_result(results, name, compute, *arguments):
    """Store what ``compute`` returns, or its error, so that the other cases are still computed."""
    try:
        results[name] = compute(*arguments)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        traceback.print_exc()
        results[name] = {"error": f"{type(error).__name__}: {error}"[:300]}


@torch.no_grad()
def compute_logits(model, inputs, case, tensors):
    """Store the logits of the last positions in ``tensors``, as fp32; return their shape."""
    last = model(**inputs).logits[:, -NUM_LAST_POSITIONS:].float().cpu().contiguous()
    tensors[f"{case}/logits"] = last
    return list(last.shape)


def compute_variant_logits(model, inputs, case, tensors, rotation, positions):
    """Store the logits of our model with another rotation or other image positions."""

    def count_positions(_, arguments):
        position_ids, dtype = arguments
        return torch.arange(position_ids.shape[1], device=position_ids.device)[None], dtype

    original_rope = model.config.original_rope
    model.config.original_rope = rotation == ROPE_PAIRS
    rotary = model.transformer.rotary_pos_emb
    hook = rotary.register_forward_pre_hook(count_positions) if positions == COUNTED_IDS else None
    try:
        return compute_logits(model, inputs, case, tensors)
    finally:
        model.config.original_rope = original_rope
        if hook is not None:
            hook.remove()


def compute_loss(model, inputs, case, tensors):
    """Store the gradients in ``tensors``, as fp32; return the loss."""
    model.zero_grad(set_to_none=True)
    value = model(**inputs).loss
    value.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            key = f"{case}/gradient/{name}"
            tensors[key] = parameter.grad.float().cpu().contiguous()
    model.zero_grad(set_to_none=True)
    return float(value.detach())


def generate_greedily(model, prompt, num_tokens, results):
    """Store ``num_tokens`` greedy tokens of ``generate`` or, if that fails, of decoding without a
    cache."""
    length = prompt["input_ids"].shape[1]

    def generate():
        ids = model.generate(**prompt, do_sample=False, max_new_tokens=num_tokens)
        return ids[0, length:].tolist()

    def decode_without_cache():
        inputs = dict(prompt)
        for _ in range(num_tokens):
            token = model(**inputs).logits[:, -1:].argmax(-1)
            inputs["input_ids"] = torch.cat((inputs["input_ids"], token), 1)
        return inputs["input_ids"][0, length:].tolist()

    with torch.no_grad():
        record_result(results, "generate", generate)
        decode = decode_without_cache if "error" in results["generate"] else generate
        record_result(results, "answer", decode)


if __name__ == "__main__":
    run_job(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
