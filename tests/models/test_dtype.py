"""The dtype that answers are computed in on a CPU: chosen, printed, and replaced by --dtype."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glm4v_patched.cli import main
from glm4v_patched.data.rows import DataSource
from glm4v_patched.inference import answer_worker
from glm4v_patched.inference.answer import answer_settings
from glm4v_patched.inference.questions import AnswerOptions, Generation, ModelOptions
from glm4v_patched.models import loading
from glm4v_patched.models.base import ModelSource
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.answering import write_files
from tests.helpers.tiny import update_json

NO_BF16 = "this CPU has no instructions for bf16"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """Return folders of one model, by the dtype that it was saved in."""
    folder = tmp_path_factory.mktemp("dtypes")
    files = write_files(folder)
    folders = {"float32": files.model, "rows": files.data, "adapters": folder / "adapted"}
    for dtype in ("bfloat16", "float16"):
        folders[dtype] = shutil.copytree(files.model, folder / dtype)
        model = GLM4VForCausalLM.from_pretrained(files.model, dtype=dtype)
        model.save_pretrained(folders[dtype])
    shutil.copytree(files.adapters, folders["adapters"])
    config = folders["adapters"] / "adapter_config.json"
    update_json(config, base_model_name_or_path=str(folders["bfloat16"]))
    return folders


@pytest.fixture
def cpu(monkeypatch):
    """Let the CPU have, or not have, instructions for bf16, and so many bytes of free memory."""

    def set_cpu(has_bf16: bool, free: float = 1e12) -> None:
        monkeypatch.setattr("glm4v_patched.engine.options.has_bf16", lambda: has_bf16)
        monkeypatch.setattr(loading, "free_ram", lambda: free)

    return set_cpu


@pytest.mark.parametrize(
    ("saved_in", "has_bf16", "requested", "expected"),
    [
        ("bfloat16", False, "auto", ("float32", NO_BF16)),
        ("float16", False, "auto", ("float32", NO_BF16)),
        ("float32", False, "auto", ("auto", "")),
        ("bfloat16", True, "auto", ("bfloat16", "this CPU has instructions for bf16")),
        ("float32", True, "auto", ("auto", "")),
        ("bfloat16", False, "bfloat16", ("bfloat16", "")),
        ("bfloat16", True, "float32", ("float32", "")),
        ("float32", False, "bfloat16", ("bfloat16", "")),
    ],
)
def test_a_cpu_computes_in_what_it_is_fast_in_unless_a_dtype_is_asked_for(
    saved, cpu, saved_in, has_bf16, requested, expected
):
    cpu(has_bf16)
    assert loading.choose_dtype(ModelSource(str(saved[saved_in])), requested) == expected


def test_fp32_is_chosen_only_where_the_memory_of_all_processes_holds_it(saved, cpu):
    base = ModelSource(str(saved["bfloat16"]))
    model = GLM4VForCausalLM.from_pretrained(saved["float32"])
    needed = sum(weight.nbytes for weight in model.parameters())
    cpu(False, free=needed * 1.5)
    assert loading.choose_dtype(base, "auto")[0] == "float32"
    dtype, reason = loading.choose_dtype(base, "auto", processes=2)
    assert dtype == "bfloat16" and reason.startswith(f"{NO_BF16}, but fp32 needs ")
    with pytest.raises(ValueError, match=r"--dtype float32: fp32 needs .*B of memory, and .*B are"):
        loading.choose_dtype(base, "float32", processes=2)


def test_a_model_that_was_saved_quantized_is_not_converted(saved, cpu, tmp_path):
    cpu(False)
    shutil.copytree(saved["bfloat16"], tmp_path / "quantized")
    config = tmp_path / "quantized" / "config.json"
    update_json(config, quantization_config={"quant_method": "compressed-tensors"})
    base = ModelSource(str(config.parent))
    assert loading.choose_dtype(base, "auto") == ("auto", "")
    with pytest.raises(ValueError, match="was saved quantized; remove --dtype"):
        loading.choose_dtype(base, "bfloat16")


@pytest.mark.parametrize("name", ["bfloat16", "adapters"])
@pytest.mark.parametrize(
    ("requested", "computed"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_all_weights_have_the_chosen_dtype(saved, cpu, name, requested, computed, capsys):
    cpu(False)
    options = ModelOptions(model=str(saved[name]), device="cpu", dtype=requested)
    answerer = answer_worker.load_answerer(options, options.find(), Generation())
    assert {weight.dtype for weight in answerer.model.parameters()} == {computed}
    line = f"computes in float32: {NO_BF16} (--dtype)\n" if requested == "auto" else ""
    output = capsys.readouterr()
    assert output.err == line and output.out == ""  # stdout is for answers


def test_processes_compute_in_what_their_parent_has_chosen(saved, cpu, monkeypatch, capsys):
    cpu(False)
    monkeypatch.setattr(loading, "load_with_processor", lambda *a: pytest.fail(f"{a[-1]}"))
    options = ModelOptions(model=str(saved["bfloat16"]), device="cpu")
    dtype = answer_worker.decide_dtype(options, ModelSource(options.model), processes=2)
    chosen = replace(options, dtype=dtype)
    assert chosen.dtype == "float32" and NO_BF16 in capsys.readouterr().err
    cpu(True)  # what a worker would choose does not matter
    with pytest.raises(pytest.fail.Exception, match="float32"):
        answer_worker.load_answerer(chosen, ModelSource(options.model), Generation(), verbose=False)
    assert capsys.readouterr().err == ""


def test_a_file_of_answers_is_not_continued_in_another_dtype(saved):
    values = {"model": str(saved["bfloat16"]), "data": DataSource(str(saved["rows"]))}
    base = ModelSource(values["model"])
    settings = [
        answer_settings(AnswerOptions(**values, dtype=dtype), base, [], {})["options"]
        for dtype in ("auto", "bfloat16", "float32")
    ]
    assert "dtype" not in settings[0]  # files of earlier versions are continued
    assert [options["dtype"] for options in settings[1:]] == ["bfloat16", "float32"]


def test_a_dtype_with_quantized_weights_is_refused(capsys):
    assert main(["chat", "m", "--dtype", "float32", "--weights", "fp8"]) == 1
    assert "--dtype float32 does not go with --weights fp8" in capsys.readouterr().err
