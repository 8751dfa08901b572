"""Run a small real task from its images to a merged model, by the commands that users run.

``PYTHONPATH=. python docs/benchmarks/reading_task.py --out FOLDER`` draws lines of made-up text
(:mod:`reading_lines`), trains a randomly initialized glm-4v of 300 million weights to read them,
and then LoRA adapters for another script. All steps except drawing and initialization are commands
of glm4v-patched in separate processes. The phases (:data:`PHASES`):

1. ``draw``: draw the data sets, by as many processes as there are cores.
2. ``build``: write the model with random weights.
3. ``train``: train on Latin lines, stop by Ctrl-C after the checkpoint at half the steps, and
   resume.
4. ``lora``: train adapters on Greek lines. Meanwhile the model is evaluated, with right and with
   swapped images, on held-out Latin and Greek lines; of Greek it was trained on single letters
   only.
5. ``merge``: merge the adapters while they are evaluated on Greek; then compare answers of both.
6. ``fp32``: merge and answer once more in fp32, where merging hardly rounds.

All figures are in ``FOLDER/reading_task.json``, rewritten after each phase, with plots beside it.
Finished steps are not repeated if the script is started again. The exit status is 1 if the model
has not learned to read, 2 if a phase failed.
"""

import argparse
import json
import re
import shlex
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from reading_lines import SCRIPTS, Share, draw_set
from reading_runs import REPORT, SIZES, Failed, Size, Task

from glm4v_patched import __version__
from glm4v_patched.data.workers import count_cores
from glm4v_patched.engine.gpus import find_gpus

VERSIONS = ("torch", "transformers", "deepspeed", "accelerate", "peft", "pillow")
ACCURATE, GUESSED, EQUAL_IN_BF16 = 0.9, 0.05, 0.95
LENGTHS = 5, 7  # of held-out lines
MAX_NEW_TOKENS = 16
MAX_PROCESSES = 48
FEW_ROWS = 100  # drawn in this process, which is faster than to start others
WARM_UP = 0.15  # share of all steps
MAX_IMAGE_BYTES = 200_000


# Phases; each returns its figures.


def draw(task: Task) -> dict:
    size, processes = task.size, min(count_cores(), MAX_PROCESSES)
    held_out = {
        name: (Share(size.held_out, name, *LENGTHS, held_out=True),) for name in ("latin", "greek")
    }
    sets = {
        "train": size.train,
        "greek": size.greek,
        "watched": (Share(size.watched, "latin", *LENGTHS, held_out=True),),
        "held_out_latin": held_out["latin"],
        "held_out_greek": held_out["greek"],
    }
    rows = {}
    for seed, (name, shares) in enumerate(sets.items()):
        file = task.folder / "data" / f"{name}.jsonl"
        rows[name] = sum(share.rows for share in shares)
        if not file.exists():
            few = rows[name] <= FEW_ROWS
            draw_set(file, shares, seed, size.side, 1 if few else processes)
    return {"rows": rows, "side": size.side, "processes": processes}


def build(task: Task) -> dict:
    import torch

    from glm4v_patched.demo.tiny_model import build_processor, save, tiny_config
    from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM

    # Trained on single letters, so that no token has more than one.
    letters = [letter for script in SCRIPTS.values() for letter in script.characters]
    size = task.size
    processor = build_processor(letters, size.side)
    config = tiny_config(processor.tokenizer, size.side, size.language, size.tower)
    torch.manual_seed(0)
    model = GLM4VForCausalLM(config).to(getattr(torch, DTYPES[size.precision]))
    _replace(task.folder / "initial", lambda folder: save(model, processor, folder))
    tower = model.transformer.vision.parameters()
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "tower": sum(weight.numel() for weight in tower),
    }


DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def _replace(folder: Path, write: Callable[[Path], object]) -> None:
    """Write a folder atomically: it is complete or does not exist."""
    partial = folder.with_name(f"{folder.name}.partial")
    for old in (partial, folder):
        shutil.rmtree(old, ignore_errors=True)
    write(partial)
    partial.rename(folder)


def recipe(task: Task, name: str, changes: dict) -> str:
    """Write a recipe of ``changes`` and the settings that both trainings share."""
    size = task.size
    engine = {
        # A single process on the CPU needs no DeepSpeed.
        "zero_stage": 2 if task.gpus else 0,
        "precision": size.precision,
        "tower": "none",
        "language": "none",
        "compile": size.compile,
        "offload": False,
    }
    trainer = {
        "per_device_train_batch_size": size.batch,
        # Random weights learn the letters' frequencies first. If the rate is already high then,
        # they also learn to ignore the images, and take long to use them.
        "warmup_steps": WARM_UP,
        "adam_beta2": 0.98,
        "dataloader_drop_last": True,  # a smaller last batch would be compiled again
        **changes.pop("trainer"),
    }
    file = task.folder / f"{name}.json"
    file.write_text(json.dumps(changes | {"engine": engine, "trainer": trainer}, indent=1) + "\n")
    return file.name


def train(task: Task) -> dict:
    size, half = task.size, task.size.steps // 2
    out = task.folder / "latin"
    settings = recipe(
        task,
        "recipe_latin",
        {
            "model": "initial",
            "out": "latin",
            "trained": "full",
            "data": {
                "train": "data/train.jsonl",
                "eval": "data/watched.jsonl",
                "eval_answers": size.watched,
                "eval_max_new_tokens": MAX_NEW_TOKENS,
            },
            "trainer": {
                "max_steps": size.steps,
                "learning_rate": size.rate,
                "save_steps": half,
                "save_total_limit": 1,
                "eval_strategy": "steps",
                "eval_steps": max(half // 3, 1),
            },
        },
    )
    stopped = task.report.setdefault("stopped", {})
    if not (out / "training.json").is_file() and not _checkpoint(out, half).is_file():
        stopped.clear()
        stopped.update(_train_until_stopped(task, settings, _checkpoint(out, half)))
        task.write()
    started = time.monotonic()
    if not _finished(out):
        task.run("train_2", "train", settings, *task.everywhere, "--resume")
    return {
        "seconds_after_resuming": round(time.monotonic() - started, 1),
        "checkpoint": half,
        **_course(task, out, "train_1", "train_2"),
    }


def _checkpoint(out: Path, step: int) -> Path:
    return out / f"checkpoint-{step}" / "complete.json"


def _finished(out: Path) -> bool:
    report = out / "training.json"
    return report.is_file() and json.loads(report.read_text()).get("finished", False)


def _train_until_stopped(task: Task, settings: str, checkpoint: Path) -> dict:
    """Train until a checkpoint is complete, then send SIGINT."""
    started = time.monotonic()
    process = task.start("train_1", "train", settings, *task.everywhere, "--overwrite")
    while process.poll() is None and not checkpoint.is_file():
        time.sleep(0.05)
    if process.poll() is None:
        task.say(f"{checkpoint.parent.name} is complete: Ctrl-C")
        process.send_signal(signal.SIGINT)
    status = task.wait("train_1", process, expected=(0, 128 + signal.SIGINT))
    return {"status": status, "seconds": round(time.monotonic() - started, 1)}


def _course(task: Task, out: Path, *logs: str) -> dict:
    """Return the history in ``training.json``, and the speed that the progress bar printed."""
    report = json.loads((out / "training.json").read_text())
    speeds = [
        float(number)
        for name in logs
        if task.log_of(name).is_file()
        for number in re.findall(r"samples/s=([\d.e+]+)", task.log_of(name).read_text())
    ]
    return {
        "steps": report["history"][-1]["step"],
        "samples_a_step": task.size.batch * (task.gpus or 1),
        "samples": report["history"][-1]["step"] * task.size.batch * (task.gpus or 1),
        "samples_per_second": statistics.median(speeds) if speeds else None,
        "history": report["history"],
        "evaluations": report.get("evaluations", []),
    }


GENERATION = ["--batch-size", "64", "--max-new-tokens", str(MAX_NEW_TOKENS)]


def _evaluation(model: str, script: str) -> list[str]:
    data = ["--data", f"data/held_out_{script}.jsonl"]
    return ["evaluate", model, *data, "--out", f"scores/{model}_on_{script}", *GENERATION]


def _scores(task: Task, name: str) -> dict:
    report = json.loads((task.folder / "scores" / name / "metrics.json").read_text())
    names = ("rows", "exact_match", "exact_match_swapped", "f1", "f1_swapped")
    return {name: report[name] for name in names if name in report}


def lora(task: Task) -> dict:
    size, out = task.size, task.folder / "greek"
    settings = recipe(
        task,
        "recipe_greek",
        {
            "model": "latin",
            "out": "greek",
            "trained": "lora_all",
            "lora": {"rank": size.lora_rank, "targets": "all-linear"},
            "data": {"train": "data/greek.jsonl"},
            "trainer": {"max_steps": size.lora_steps, "learning_rate": size.lora_rate},
        },
    )
    commands = {
        "evaluate_latin": [*_evaluation("latin", "latin"), *task.one],
        "evaluate_greek_before": [*_evaluation("latin", "greek"), *task.one],
    }
    if not _finished(out):
        commands["lora"] = ["train", settings, *task.everywhere, "--overwrite"]
    task.run_side_by_side(commands)
    task.report["accuracy"] = {
        "latin": _scores(task, "latin_on_latin"),
        "greek_before_lora": _scores(task, "latin_on_greek"),
    }
    return _course(task, out, "lora")


def merge(task: Task) -> dict:
    commands = {"evaluate_greek": [*_evaluation("greek", "greek"), *task.one]}
    if not (task.folder / "merged").is_dir():
        commands["merged"] = ["merge", "greek", "--out", "merged"]
    task.run_side_by_side(commands)
    task.report["accuracy"]["greek"] = _scores(task, "greek_on_greek")
    return _compare(task, "greek", "merged")


def _compare(task: Task, adapters: str, merged: str) -> dict:
    """Compare the answers of adapters and of the merged model to the same questions."""
    rows = ["--data", "data/held_out_greek.jsonl"]
    task.run_side_by_side(
        {
            f"answer_{model}": [
                *("answer", model, *rows, "--out", f"answers/{model}.jsonl"),
                *(*GENERATION, *task.one),
            ]
            for model in (adapters, merged)
        }
    )
    files = (task.folder / "answers" / f"{name}.jsonl" for name in (adapters, merged))
    answers, merged_answers = ([json.loads(line) for line in file.open()] for file in files)
    pairs = list(zip(answers, merged_answers, strict=True))
    different = [(a["answer"], b["answer"]) for a, b in pairs if a["answer"] != b["answer"]]
    logits = re.findall(r"its logits differ .*", task.log_of(merged).read_text())
    return {
        "rows": len(pairs),
        "equal_answers": 1 - len(different) / len(pairs),
        "different": different[:10],
        "exact_match_merged": sum(b["answer"] == b["reference"] for b in merged_answers)
        / len(pairs),
        "logits": logits[-1] if logits else None,
    }


def fp32(task: Task) -> dict:
    """Repeat ``merge`` with the same weights in fp32."""
    if task.size.precision == "fp32":
        return {"the same as": "merge"}
    base, adapters = task.folder / "latin_fp32", task.folder / "greek_fp32"
    if not adapters.is_dir():
        _replace(base, lambda folder: _write_in_fp32(task.folder / "latin", folder))
        _replace(adapters, lambda folder: _copy_adapters(task.folder / "greek", base.name, folder))
    if not (task.folder / "merged_fp32").is_dir():
        task.run("merged_fp32", "merge", adapters.name, "--out", "merged_fp32")
    return _compare(task, adapters.name, "merged_fp32")


def _write_in_fp32(model: Path, folder: Path) -> None:
    import torch

    from glm4v_patched.demo.tiny_model import save
    from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
    from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor

    loaded = GLM4VForCausalLM.from_pretrained(model, dtype=torch.float32)
    save(loaded, ChatGLMProcessor.from_pretrained(model), folder)


def _copy_adapters(adapters: Path, base: str, folder: Path) -> None:
    """Copy adapters for another base model, without their ``training.json``."""
    folder.mkdir()
    processor_files = ("tokenizer", "processor", "preprocessor", "chat_template")
    for file in adapters.iterdir():
        if file.is_file() and file.name.startswith(("adapter_", *processor_files)):
            shutil.copyfile(file, folder / file.name)
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"base_model_name_or_path": base}))


PHASES: dict[str, Callable[[Task], dict]] = {
    "draw": draw,
    "build": build,
    "train": train,
    "lora": lora,
    "merge": merge,
    "fp32": fp32,
}


def run_phases(task: Task, names: Sequence[str]) -> None:
    """Run the phases that are not in the report yet. Raises :class:`Failed`."""
    phases = task.report.setdefault("phases", {})
    for name in names:
        if name in phases:
            task.say(f"{name}: is done")
            continue
        task.say(f"{name}: begins")
        started = time.monotonic()
        figures = PHASES[name](task)
        phases[name] = {"seconds": round(time.monotonic() - started, 1), **figures}
        task.report["seconds"] = round(sum(phase["seconds"] for phase in phases.values()), 1)
        task.write()
        draw_images(task)
        scalars = {key: value for key, value in figures.items() if not isinstance(value, list)}
        task.say(f"{name}: done in {phases[name]['seconds']} s: {scalars}")
        if name in ("lora", "merge"):
            task.say(f"accuracy: {task.report['accuracy']}")


def draw_images(task: Task) -> None:
    """Draw ``reading_loss.png`` and ``reading_sheet.png``, as far as there are data."""
    phases = task.report["phases"]
    courses = {name: phases[name] for name in ("train", "lora") if name in phases}
    if courses:
        _draw_courses(courses, task.folder / "reading_loss.png")
    sheet = task.folder / "scores" / "latin_on_latin" / "answers.png"
    if sheet.is_file():
        _copy_small(sheet, task.folder / "reading_sheet.png")


def _draw_courses(courses: dict[str, dict], path: Path) -> None:
    from matplotlib.figure import Figure

    titles = {"train": "all weights: Latin lines", "lora": "LoRA on top: Greek lines"}
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, len(courses), squeeze=False)[0]
    for plot, (name, course) in zip(axes, courses.items(), strict=True):
        points = [(entry["step"], float(entry["loss"])) for entry in course["history"]]
        plot.plot(*zip(*points, strict=True), label="loss")
        plot.set(title=titles[name], xlabel="step", yscale="log")
        plot.set_ylabel("loss (nats per supervised token)")
        plot.grid(alpha=0.3)
        if evaluations := course["evaluations"]:
            right = plot.twinx()
            points = [(e["step"], e["eval_exact_match"]) for e in evaluations]
            label = "held-out lines read"
            right.plot(*zip(*points, strict=True), "o-", color="tab:green", label=label)
            right.set(ylim=(-0.02, 1.02), ylabel=label)
            plot.plot([], "o-", color="tab:green", label=label)
        if "checkpoint" in course:
            label = "stopped and resumed"
            plot.axvline(course["checkpoint"], color="0.4", linestyle="--", label=label)
        plot.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def _copy_small(image: Path, copy: Path) -> None:
    """Copy an image with as many colors as fit into :data:`MAX_IMAGE_BYTES`."""
    from PIL import Image

    with Image.open(image) as image:
        for colors in (256, 128, 64, 32, 16, 8):
            image.convert("RGB").quantize(colors).save(copy, optimize=True)
            if copy.stat().st_size < MAX_IMAGE_BYTES:
                return


def verdict(report: dict) -> list[str]:
    """Return a line for each measured figure that is not as expected."""
    problems = []
    for name in ("latin", "greek"):
        if not (scores := report.get("accuracy", {}).get(name)):
            continue
        if scores["exact_match"] <= ACCURATE:
            problems.append(
                f"{name}: {scores['exact_match']:.3f} of lines are read, not {ACCURATE}"
            )
        if scores["exact_match_swapped"] >= GUESSED:
            problems.append(f"{name}: {scores['exact_match_swapped']:.3f} with swapped images")
    for phase, minimum in (("merge", EQUAL_IN_BF16), ("fp32", 1)):
        share = report["phases"].get(phase, {}).get("equal_answers", 1)
        if share < minimum:
            problems.append(f"{phase}: {share:.3f} of the answers are equal, not {minimum}")
    return problems


def open_task(options: argparse.Namespace, arguments: Sequence[str]) -> Task:
    """Start or continue the task of a folder. Raises :class:`Failed` if its settings differ."""
    size = SIZES[options.size]
    changes = {"steps": options.steps, "lora_steps": options.lora_steps, "rate": options.rate}
    changes |= {"batch": options.batch, "compile": options.compile, "held_out": options.held_out}
    changes = {name: value for name, value in changes.items() if value is not None}
    size = Size(**vars(size) | changes)
    options.out.mkdir(parents=True, exist_ok=True)
    gpus = 0 if options.device == "cpu" else options.gpus
    task = Task(options.out.resolve(), size, gpus)
    now = json.loads(json.dumps({"gpus": gpus, "size": asdict(size)}))
    file = task.folder / REPORT
    if file.exists():
        task.report = json.loads(file.read_text(encoding="utf-8"))
        stored = {name: task.report[name] for name in now}
        if stored != now:
            raise Failed(f"{file} has the settings {stored}, not {now}: give another --out")
        return _on_this_machine(task)
    words = ["FOLDER" if text == str(options.out) else text for text in arguments]
    task.report = {
        "command": f"python docs/benchmarks/reading_task.py {shlex.join(words)}",
        **now,
        "versions": {name: version(name) for name in VERSIONS}
        | {"python": sys.version.split()[0], "glm4v-patched": __version__},
    }
    return _on_this_machine(task)


def _on_this_machine(task: Task) -> Task:
    gpus = find_gpus().devices if task.gpus else ()
    task.report |= {"device": f"{task.gpus} x {gpus[0].name}" if gpus else "cpu"}
    task.report |= {"cores": count_cores()}
    return task


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of all outputs")
    parser.add_argument("--size", choices=SIZES, default="mid")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--phase", nargs="+", choices=PHASES, default=[*PHASES])
    changes = {"steps": int, "lora-steps": int, "batch": int, "held-out": int, "rate": float}
    for name, kind in changes.items():
        parser.add_argument(f"--{name}", type=kind, help="replaces the size's own")
    parser.add_argument("--no-compile", dest="compile", action="store_const", const=False)
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    if options.size != "tiny" and options.device == "cpu":
        parser.error(f"--size {options.size} takes GPUs: use --size tiny on the CPU")
    on_gpus = options.device == "cuda" and {*options.phase} - {"draw", "build"}
    if on_gpus and len(find_gpus()) < options.gpus:
        parser.error(f"--gpus {options.gpus}, and there are {len(find_gpus())}: give fewer")
    try:
        task = open_task(options, arguments)
        try:
            run_phases(task, options.phase)
        finally:
            task.stop()
    except Failed as error:
        print(error, file=sys.stderr)
        return 2
    wrong = verdict(task.report)
    task.say("\n".join(wrong) or "all figures are as expected")
    return 1 if wrong and options.size != "tiny" else 0


if __name__ == "__main__":
    sys.exit(main())
