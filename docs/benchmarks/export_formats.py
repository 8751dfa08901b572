"""Measure the accuracy that one trained model loses by exports to fp8, int8 and int4.

``PYTHONPATH=. python docs/benchmarks/export_formats.py --out FOLDER`` draws colored shapes, trains
a randomly initialized glm-4v of 300 million weights to name them, and exports it in each format by
:func:`export.export`, as ``glm4v-patched export --evaluate`` does. ``FOLDER/export_formats.json``
gets the accuracy before and after the export, also with swapped images, the bytes and the seconds.
Images and the trained model are reused if the script is started again. ``--by-vllm``, in an
environment with vLLM and this package, evaluates all of FOLDER's models by vLLM and adds the
scores.

``--size real`` exports a model of the published size with random weights and measures bytes,
seconds and the GPU's peak memory only.
"""

import argparse
import json
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import torch
from reading_runs import SIZES

from glm4v_patched.cli import main as run
from glm4v_patched.engine.trainable import build_random_model
from glm4v_patched.inference.export import EXPORT_FORMATS, require_llm_compressor
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM

PACKAGES = ("torch", "transformers", "llmcompressor", "compressed-tensors")


@dataclass(frozen=True)
class Task:
    side: int
    rows: int
    held_out: int
    steps: int
    batch: int
    rate: float
    precision: str
    calibration: int
    language: dict = field(default_factory=dict)
    tower: dict = field(default_factory=dict)


MID = SIZES["mid"]
CONFIG = ChatGLMConfig()  # the published sizes
SIZE_FIELDS = [*MID.language, "padded_vocab_size", "seq_length"]
REAL = {name: getattr(CONFIG, name) for name in SIZE_FIELDS}
REAL_TOWER = {name: getattr(CONFIG.vision, name) for name in MID.tower}
TASKS = {
    "real": Task(CONFIG.vision.image_size, 32, 1, 0, 1, 0.0, "bf16", 32, REAL, REAL_TOWER),
    "mid": Task(MID.side, 20_000, 500, 2_000, 64, 3e-4, "bf16", 256, MID.language, MID.tower),
    "tiny": Task(56, 24, 6, 4, 4, 2e-3, "fp32", 4),
}


def train(folder: Path, task: Task, device: str) -> None:
    """Write the data (``train.jsonl``, ``held_out.jsonl``), and train the model ``trained``."""
    from glm4v_patched.data.rows import write_conversations
    from glm4v_patched.demo.images import draw_data_set
    from glm4v_patched.demo.tiny_model import build_processor, save, tiny_config

    for seed, (name, number) in enumerate({"train": task.rows, "held_out": task.held_out}.items()):
        if not (folder / f"{name}.jsonl").exists():
            rows = draw_data_set(folder / name, number, seed=seed, side=task.side)
            write_conversations(folder / f"{name}.jsonl", rows)
            texts = [message["content"] for messages in rows for message in messages]
            if name == "train":
                processor = build_processor(texts, task.side)
                config = tiny_config(processor.tokenizer, task.side, task.language, task.tower)
                torch.manual_seed(0)
                if task.steps:
                    model = GLM4VForCausalLM(config)
                    if task.precision == "bf16":
                        model = model.bfloat16()
                    save(model, processor, folder / "initial")
                else:  # too large to be built on a CPU, or in fp32
                    with torch.device(device):
                        model = build_random_model(config, dtype=torch.bfloat16)
                    save(model, processor, folder / "trained")
    if not task.steps:
        return
    recipe = {
        "model": str(folder / "initial"),
        "out": str(folder / "trained"),
        "data": {"train": str(folder / "train.jsonl")},
        "engine": {"zero_stage": 0, "precision": task.precision},
        "trainer": {
            "max_steps": task.steps,
            "per_device_train_batch_size": task.batch,
            "learning_rate": task.rate,
            "warmup_steps": 0.1,
        },
    }
    (folder / "recipe.json").write_text(json.dumps(recipe, indent=1))
    arguments = ["train", str(folder / "recipe.json"), "--device", device, "--processes", "1"]
    if run([*arguments, "--overwrite"]) != 0:
        raise SystemExit("the training failed; its error is printed above")


def export_all(folder: Path, task: Task, device: str) -> dict:
    from glm4v_patched.data.rows import DataSource
    from glm4v_patched.inference.export import export
    from glm4v_patched.inference.questions import AnswerOptions, Generation

    request = AnswerOptions(
        model=str(folder / "trained"),
        data=DataSource(str(folder / "held_out.jsonl")),
        device=device,
        generation=Generation(max_new_tokens=8),
        processes=1,
    )
    rows = {}
    for name in EXPORT_FORMATS:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        report = export(
            request.model,
            name,
            DataSource(str(folder / "train.jsonl")),
            folder / name,
            rows=task.calibration,
            evaluation=request if task.steps else None,
            device=device,
        )
        figures = {"seconds": round(report.seconds, 1)}
        if report.before is None or report.after is None:
            peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
            sizes = {"bytes_before": report.bytes_before, "bytes_after": report.bytes_after}
            rows[name] = figures | sizes | {"peak_bytes": peak}
            continue
        for when, scores in (("before", report.before), ("after", report.after)):
            size = report.bytes_before if when == "before" else report.bytes_after
            names = ("exact_match", "exact_match_swapped", "rows")
            figures[when] = {"bytes": size} | {key: scores[key] for key in names}
        rows[name] = figures
    return rows


def ask_by_vllm(folder: Path) -> dict:
    """Return the accuracy of the trained model and of each export in vLLM with the plug-in."""
    from PIL import Image
    from vllm import LLM, SamplingParams

    from glm4v_patched.data.messages import images_of, text_of
    from glm4v_patched.data.rows import DataSource
    from glm4v_patched.inference.answers_file import AnswerLine
    from glm4v_patched.inference.evaluate import compute_scores
    from glm4v_patched.inference.questions import digest_image_files, read_questions
    from glm4v_patched.inference.scoring import METRICS, swap_images

    questions = read_questions(DataSource(str(folder / "held_out.jsonl")), with_reference=True)
    questions += swap_images(questions, digest_image_files(questions))
    chats = []
    for question in questions:
        [image] = images_of(question.prompt)
        image_part = {"type": "image_pil", "image_pil": Image.open(image).convert("RGB")}
        text_part = {"type": "text", "text": text_of(question.prompt[-1])}
        chats.append([{"role": "user", "content": [image_part, text_part]}])
    greedy = SamplingParams(temperature=0, max_tokens=8)
    scores = {}
    for name in ("trained", *(name for name in EXPORT_FORMATS if (folder / name).exists())):
        llm = LLM(
            str(folder / name),
            trust_remote_code=True,
            dtype="bfloat16",
            gpu_memory_utilization=0.2,
            limit_mm_per_prompt={"image": 1},
            enforce_eager=True,
        )
        # vLLM 0.26 tokenizes a chat with a second [gMASK]<sop> otherwise.
        options = {"tokenization_kwargs": {"add_special_tokens": False}, "use_tqdm": False}
        outputs = [result.outputs[0] for result in llm.chat(chats, greedy, **options)]
        lines = [
            AnswerLine(question, output.text.strip(), output.finish_reason)
            for question, output in zip(questions, outputs, strict=True)
        ]
        metrics = compute_scores(lines, METRICS)
        scores[name] = {key: metrics[key] for key in ("exact_match", "exact_match_swapped", "rows")}
        print(f"{name} by vLLM: right {metrics['exact_match']:.3f}", flush=True)
        del llm
    return {"version": version("vllm"), **scores}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--size", choices=TASKS, default="mid", help="tiny is to try the script")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    for name in ("rows", "held_out", "steps"):
        help_text = "replaces the size's own number"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=help_text)
    parser.add_argument("--train-only", action="store_true", help="export nothing")
    parser.add_argument("--by-vllm", action="store_true", help="evaluate the existing exports")
    options = parser.parse_args()
    changes = {name: getattr(options, name) for name in ("rows", "held_out", "steps")}
    changes = {name: number for name, number in changes.items() if number is not None}
    folder, task = options.out.resolve(), replace(TASKS[options.size], **changes)
    folder.mkdir(parents=True, exist_ok=True)
    if options.train_only:
        return train(folder, task, options.device)
    path = folder / "export_formats.json"
    if options.by_vllm:
        report = json.loads(path.read_text()) | {"by_vllm": ask_by_vllm(folder)}
        path.write_text(json.dumps(report, indent=1) + "\n")
        return None
    try:
        require_llm_compressor()
    except RuntimeError as error:
        parser.error(str(error))
    if existing := [name for name in EXPORT_FORMATS if (folder / name).exists()]:
        parser.error(f"{folder / existing[0]} exists; give another --out, or move it away")
    last = "training.json" if task.steps else "tokenizer_config.json"
    if not (folder / "trained" / last).is_file():
        train(folder, task, options.device)
    report = {
        "task": {**asdict(task), "size": options.size},
        "versions": {name: version(name) for name in PACKAGES},
        "formats": export_all(folder, task, options.device),
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
    for name, figures in report["formats"].items():
        if "before" not in figures:
            print(f"{name}: {figures}")
            continue
        before, after = (figures[when]["exact_match"] for when in ("before", "after"))
        print(f"{name}: right {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    main()
