"""Run other people's quantizers on a tiny model that answers questions about images.

``python -m tests.frameworks.quantizers PACKAGE`` runs the methods of an installed package and
writes their rows of docs/benchmarks/quantizers.json; ``--page`` writes the table into
docs/elsewhere.md. The session ``quantizers`` of tests/noxfile.py does both for each package, in a
separate environment.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from glm4v_patched.engine.environment import path_with_interpreter
from tests.helpers.processes import run_with_limit
from tests.tables import installed, markdown, on_page, put_rows, read_rows

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "benchmarks" / "quantizers.json"
PAGE = ROOT / "docs" / "elsewhere.md"
SCRIPT = Path(__file__).with_name("quantizer_script.py")
NUM_QUESTIONS = 24
SECONDS = 300  # time limit of each process
HEADS = ["quantizer", "code", "outcome", "logits", "right / swapped", "quantized layers", "with"]


@dataclass(frozen=True)
class Method:
    """A way to quantize.

    Args:
        call: What the page shows: a configuration for ``from_pretrained``, or calls of the
            quantizer's own functions.
        before: Code that runs before it, such as imports.
    """

    package: str
    call: str
    before: str = ""
    note: str = ""

    @property
    def code(self) -> str:
        is_config = re.match(r"\w+Config\(", self.call)
        return f"{self.before}\n" + (f"model = load({self.call})" if is_config else self.call)


def of_transformers(package: str, *configs: str, before: str = "", note: str = "") -> list[Method]:
    """Return methods for ``from_pretrained(quantization_config=...)``."""
    return [
        Method(package, config, f"from transformers import *\n{before}", note) for config in configs
    ]


LANGUAGE_ONLY = 'ignore=["re:.*vision.*", "re:.*output_layer"]'
TORCHAO = "from torchao.quantization import *"
TOKENIZER = """
from transformers import AutoProcessor
processor = AutoProcessor.from_pretrained("model", trust_remote_code=True)
tokenizer = processor.tokenizer
"""
METHODS = [
    *of_transformers(
        "torchao",
        "TorchAoConfig(Int8WeightOnlyConfig())",
        'TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=["transformer.vision"])',
        "TorchAoConfig(Int8DynamicActivationInt8WeightConfig())",
        "TorchAoConfig(Int8DynamicActivationIntxWeightConfig())",
        "TorchAoConfig(IntxWeightOnlyConfig(torch.int4, PerGroup(32)))",
        "TorchAoConfig(Int4WeightOnlyConfig(group_size=32))",
        "TorchAoConfig(Float8WeightOnlyConfig())",
        before=TORCHAO,
    ),
    *of_transformers(
        "torchao",
        "TorchAoConfig(Float8DynamicActivationFloat8WeightConfig())",
        before=TORCHAO,
        note="torchao treats the 128 x 128 layers of this tiny model as scaled in blocks; "
        "glm-4v-9b has no such layers",
    ),
    *of_transformers(
        "bitsandbytes",
        "BitsAndBytesConfig(load_in_8bit=True)",
        'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")',
        'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4")',
        "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)",
        'BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["transformer.vision"])',
    ),
    *(
        Method(
            "auto-round",
            f'AutoRound(model, tokenizer, processor=processor, scheme="{scheme}", iters=0{more})'
            '.quantize_and_save("quantized", format="auto_round")',
            f"{TOKENIZER}from auto_round import AutoRound\nmodel = load()",
        )
        # Otherwise it calibrates 4 bits with a data set of the Hub.
        for scheme, more in (("W8A16", ""), ("W4A16", ", disable_opt_rtn=True"))
    ),
    *(
        Method(
            "llmcompressor",
            f'oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme="{scheme}",'
            f" {LANGUAGE_ONLY}), trust_remote_code_model=True)",
            "from llmcompressor import oneshot\n"
            "from llmcompressor.modifiers.quantization import QuantizationModifier\n"
            "model = load()",
            note="its range of transformers, 5.15 to 5.17, is ignored",
        )
        for scheme in ("W8A16",)
    ),
    *of_transformers(
        "optimum-quanto",
        *(f'QuantoConfig(weights="{name}")' for name in ("int8", "int4", "float8")),
    ),
    *of_transformers("hqq", "HqqConfig(nbits=8, group_size=64)", "HqqConfig(nbits=4)"),
    Method(
        "gptqmodel",
        'quantizer = GPTQModel.load("model", QuantizeConfig(bits=4, group_size=32), '
        'trust_remote_code=True); quantizer.quantize(texts); quantizer.save("quantized")',
        # It starts two threads at least, and allows half as many as there are cores.
        "import os\nos.environ.setdefault('GPTQMODEL_CPU_WORKERS', '2')\n"
        "from gptqmodel import GPTQModel, QuantizeConfig\n"
        "texts = ['What color does the shape in this image have? ' * 4] * 8",
        note="gptqmodel's class for `chatglm` replaces the encoder's forward by GLM-4's; for rows "
        "with images, gptqmodel passes only the ids, which the model refuses",
    ),
    *of_transformers(
        "gptqmodel",
        'GPTQConfig(bits=4, group_size=32, dataset=["What color is it?"] * 8, tokenizer=tokenizer, '
        'block_name_to_quantize="transformer.encoder.layers")',
        before=TOKENIZER,
        note="optimum stores only the first positional argument and the keyword arguments of a "
        "layer, and this model passes all arguments by position",
    ),
    *of_transformers("fp-quant", 'FPQuantConfig(forward_dtype="mxfp4", pseudoquantization=True)'),
]
# The other quantizers of transformers, with the word by which the page says why they were not run.
# These only load what tools of their own have quantized beforehand:
PREQUANTIZED = {"aqlm", "awq", "bitnet", "gemma", "quark", "spqr", "vptq"}
# And these were not run, for want of a package, a kernel from the Hub, hardware or time:
NOT_RUN = {
    "eetq",
    "fbgemm_fp8",
    "fouroversix",
    "fp8",
    "gguf",
    "higgs",
    "metal",
    "mxfp4",
    "mxfp8",
    "nvfp4",
    "sinq",
}
PACKAGES = list(dict.fromkeys(method.package for method in METHODS))


def build_model(folder: Path) -> None:
    """Write ``model``, which has memorized the answers about 24 images, and ``rows.json``."""
    from glm4v_patched.demo.images import draw_data_set
    from glm4v_patched.demo.tiny_model import IMAGE_SIDE, build_processor, save, tiny_config
    from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
    from tests.frameworks.drawn_task import other_of, rows_of, teach

    conversations = draw_data_set(folder / "images", NUM_QUESTIONS, seed=0, side=IMAGE_SIDE)
    processor = build_processor([m["content"] for both in conversations for m in both])
    # Some quantizers need sizes that are multiples of 128.
    tower = {"hidden_size": 128, "intermediate_size": 256}
    model = GLM4VForCausalLM(tiny_config(processor.tokenizer, tower=tower))
    save(model, processor, folder / "random")
    rows = rows_of(conversations)
    teach(folder / "model", folder / "random", [rows] * 80, rate=2e-3)
    for row, pair in zip(rows, conversations, strict=True):
        row["swapped"] = other_of(*pair, conversations)[0]["image"]
    (folder / "rows.json").write_text(json.dumps(rows))


def run(method: Method, folder: Path) -> dict:
    """Run a method, and return its row, also if it fails."""
    import torch

    row = {
        "quantizer": method.package,
        "version": installed(method.package),
        "code": method.call,
        "transformers": installed("transformers"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "note": method.note,
    }
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        for name in ("model", "rows.json"):
            (work / name).symlink_to(folder / name)
        if error := run_script(work, "quantize", method.code):
            return row | {"error": error}
        measured = json.loads((work / "quantized.json").read_text())
        row |= {name: measured[name] for name in ("layers", "right", "swapped")}
        row["distance"] = float(f"{measured['distance']:.2g}")
        error = measured["why_not_saved"] or run_script(work, "reload")
        row["reloaded"] = without_paths(error) or "no error"
        if not error:
            again = json.loads((work / "reloaded.json").read_text())
            row["reloaded"] = "same" if again["answers"] == measured["answers"] else "other answers"
    return row


def run_script(work: Path, *arguments: str) -> str:
    """Run the script in a folder; return the last line of its error, or an empty string."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "GLM4V_PATCHED")}
    environment |= {
        "HF_HOME": str(work / "home"),
        "HF_MODULES_CACHE": str(work / "modules"),
        "HF_HUB_OFFLINE": "1",
        "PATH": path_with_interpreter(),
    }
    ended = run_with_limit([sys.executable, str(SCRIPT), *arguments], SECONDS, environment, work)
    if ended.status is None:
        return f"took more than {SECONDS} s"
    if ended.status == 0:
        return ""
    print(ended.output[-4000:], file=sys.stderr)
    # transformers prints the cause of a quantization error in a report before its own error.
    errors = re.findall(r"^\w*(?:Error|Exception): .*", ended.output, re.M)
    hidden = "automatic conversion of the weights" in (errors or [""])[-1]
    return without_paths(errors[0 if hidden else -1] if errors else f"status {ended.status}")


def without_paths(text: str) -> str:
    return re.sub(r"(?<!\w)/(?:[\w.-]+/)+", "", text.strip())[:150]


def outcome(row: dict) -> str:
    """Return the outcome: "works" if the answers are right, and wrong for swapped images."""
    if "error" in row:
        text = f"does not run: {row['error']}"
    elif row["right"] < 0.9 * NUM_QUESTIONS or row["swapped"] > 0.1 * NUM_QUESTIONS:
        text = "runs, and loses answers"
    else:
        text = "works"
    again = row.get("reloaded", "same")
    if again != "same":
        text += f"; not reloaded: {again}"
    return text + (f"; {row['note']}" if row["note"] else "")


def table(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        has_run = "error" not in row
        layers = [f"{part} {done}/{total}" for part, (done, total) in row.get("layers", {}).items()]
        lines.append(
            [
                f"{row['quantizer']} {row['version']}",
                f"`{row['code']}`",
                outcome(row),
                f"{row['distance']:.1%}" if has_run else "",
                f"{row['right']} / {row['swapped']}" if has_run else "",
                ", ".join(layers),
                f"transformers {row['transformers']}, {row['device']}, {row['date']}",
            ]
        )
    return markdown(HEADS, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=", ".join(PACKAGES))
    parser.add_argument("--folder", type=Path, help="folder in which the tiny model is kept")
    parser.add_argument("--page", action="store_true", help=f"write the table into {PAGE.name}")
    options = parser.parse_args()
    if unknown := {*options.packages} - {*PACKAGES}:
        parser.error(f"no methods of {', '.join(unknown)}; there are {', '.join(PACKAGES)}")
    chosen = [method for method in METHODS if method.package in options.packages]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        if chosen and not (folder / "rows.json").exists():
            folder.mkdir(exist_ok=True)
            build_model(folder)
        for method in chosen:
            row = run(method, folder)
            print(method.call, outcome(row), sep=": ", flush=True)
            put_rows(RESULTS, [row], key=key, order=position)
    if options.page:
        PAGE.write_text(on_page(PAGE.read_text("utf-8"), RESULTS, table(read_rows(RESULTS))))


def key(row: dict) -> tuple:
    return row["quantizer"], row["code"], row["device"]


def position(row: dict) -> int:
    """Return the index of a row's method. Rows of removed methods come first; a test finds them."""
    indices = {(method.package, method.call): n for n, method in enumerate(METHODS)}
    return indices.get((row["quantizer"], row["code"]), -1)


if __name__ == "__main__":
    main()
