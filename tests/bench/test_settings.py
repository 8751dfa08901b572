"""What a measurement is asked for, and the useful work that its figures are shares of."""

import json
import re
import subprocess
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from glm4v_patched.bench import accounting, machine, worker
from glm4v_patched.bench.ablation import MEASURES, ablation
from glm4v_patched.bench.command import describe
from glm4v_patched.bench.profiling import kind_of, longest, time_by_kind
from glm4v_patched.bench.roofline import PASSES, language_flop, tower_flop, useful_flop
from glm4v_patched.bench.settings import Settings
from glm4v_patched.bench.sizes import batch_of, options_of
from glm4v_patched.cli import main
from glm4v_patched.engine.gpus import Gpu, Gpus
from glm4v_patched.engine.memory_plan import GIB, Batch
from glm4v_patched.engine.options import TRAINED
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.loss import IGNORE_INDEX
from tests.helpers.tiny import golden_json, pictures, tiny_model


def test_the_towers_work_is_what_torch_counts():
    model = tiny_model(attn_implementation="eager")  # of sdpa torch counts nothing on a CPU
    vision = model.config.vision
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model.transformer.get_image_features(pictures(1))
    patches = 2 * vision.num_patches * vision.hidden_size * vision.in_channels
    patches *= vision.patch_size**2  # the only part that is not counted as useful
    assert counted.get_total_flops() - patches == tower_flop(model.config)


def test_the_language_models_work_is_what_torch_counts():
    model = tiny_model(attn_implementation="eager")  # of sdpa torch counts nothing on a CPU
    config, length = model.config, 20
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(input_ids=torch.arange(length)[None])
    heads_width = config.num_attention_heads * config.kv_channels
    # torch counts attention as if it were not causal, and here every position has logits.
    unseen = config.num_layers * 2 * length**2 * heads_width
    text = length - config.vision.num_image_tokens - 2
    assert counted.get_total_flops() - unseen == language_flop(config, text, length)


def test_a_sample_of_the_real_size():
    config = ChatGLMConfig()
    work = [
        useful_flop(config, name, 512, 256, reuse_features=False) / 1e12
        for name in ("full", "lm", "lora_lm", "lora_all")
    ]
    # By hand: 74 for an image, 37 for a row of 2,114 positions, each to the nearest.
    assert work == pytest.approx([333, 185, 148, 222], rel=0.02)
    reused = useful_flop(config, "lora_lm", 512, 256, reuse_features=True) / 1e12
    assert reused == pytest.approx(74, rel=0.02)


def test_every_workload_has_its_passes():
    assert set(PASSES) == set(TRAINED)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workload": "lora"}, "trained is 'lora'; expected one of full, lm"),
        ({"zero_stage": 4}, "ZeRO stage is 4; expected 0, 1, 2 or 3"),
        ({"micro_batch": 0}, "micro_batch is 0; expected at least 1"),
        ({"steps": 0}, "steps is 0; expected at least 1"),
        ({"tower": "most"}, "tower's policy is 'most'; expected auto, none"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd'; expected adamw or adamw_8bit"),
        ({"zero_options": "no"}, "zero_options 'no' is not JSON"),
        ({"zero_options": "[1]"}, "zero_options is '\\[1]'; expected an object"),
        (
            {"zero_options": '{"stage3_allgather_sequential": true}'},
            "zero_options has stage3_allgather_sequential.*add --copy-gathered",
        ),
        ({"shortest_text": 513}, "shortest_text is 513; expected from 1 to text_tokens, .* is 512"),
        ({"shortest_text": 0}, "shortest_text is 0; expected from 1"),
        ({"packed": True, "against": "original"}, "takes no packed rows"),
        ({"offload": True, "optimizer": "adamw_8bit"}, "offload with adamw_8bit"),
        ({"memory_limit": 0.0}, "memory_limit is 0.0; expected a number above 0, in GiB"),
        ({"memory_limit": float("nan")}, "memory_limit is nan; expected a number above 0"),
        ({"kept_gathered": -1.0}, "kept_gathered is -1.0; expected a number of weights"),
        ({"steps": 0, "zero_stage": 4}, "(?s)ZeRO stage is 4.*\nsteps is 0"),
        ({"layers_ahead": -1}, "layers_ahead is -1; expected at least 0"),
        ({"workload": "qlora"}, "qlora with ZeRO stage 3.*use stage 0"),
        ({"offload": True, "zero_stage": 0}, "offload with ZeRO stage 0"),
        ({"workload": "full", "reuse_features": True}, "full trains the vision tower"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Settings(**({"workload": "lm"} | options))


def test_lengths_of_text_fall_evenly():
    asked = Settings(workload="lm", micro_batch=4, text_tokens=100)
    assert asked.text_lengths() == [100] * 4
    assert replace(asked, shortest_text=40).text_lengths() == [100, 80, 60, 40]
    assert replace(asked, shortest_text=40, micro_batch=1).text_lengths() == [100]


@pytest.mark.parametrize("shortest", [None, 4])
def test_packed_samples_are_those_of_padded_rows(shortest):
    model = tiny_model()
    padded = Settings(workload="lm", micro_batch=3, text_tokens=20, shortest_text=shortest)
    batch = worker._batch(model.config, padded, "cpu")
    in_one_row = worker._batch(model.config, replace(padded, packed=True), "cpu")
    assert len(batch["input_ids"]) == 3 and len(in_one_row["input_ids"]) == 1
    assert ("attention_mask" in batch) == (shortest is not None)
    learned = sum(length - length // 2 for length in padded.text_lengths())
    for rows in (batch, in_one_row):
        assert int((rows["labels"] != IGNORE_INDEX).sum()) == learned
    losses = [model(**rows).loss.item() for rows in (batch, in_one_row)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_memory_is_that_of_the_rows():
    config = tiny_model().config
    settings = Settings(workload="lm", micro_batch=3, text_tokens=20, shortest_text=10)
    # 6 positions for an image with its begin and end; 20, 15 and 10 ids of text.
    assert batch_of(settings, config, 2) == Batch(rows=3, row_length=26, processes=2)
    packed = batch_of(replace(settings, packed=True), config, 1)
    assert packed == Batch(rows=1, row_length=63, images_per_row=3)


def test_the_original_is_left_as_it_is():
    options = options_of(Settings(workload="lora_lm", against="folder", language="none"))
    assert (options.tower, options.language, options.compile) == ("full", "full", False)
    assert not options.gathers_whole_layers
    assert (options.norms_in_place, options.layers_ahead) == (False, 0)


def test_ligers_kernels_are_taken_where_they_are_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(worker, "apply", lambda **options: asked.append(options))
    settings = Settings(workload="lm", compile=False)
    for liger in (False, True):
        worker._build(replace(settings, liger=liger), tiny_model().config, dtype=torch.bfloat16)
    assert asked == [{"rms_norm": True, "swiglu": True}]


def test_settings_survive_the_way_to_the_processes():
    settings = Settings(workload="lm", tower="every 2", memory_limit=22.5)
    assert Settings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    ("number", "arguments", "message"),
    [
        (0, [], "there is no GPU: none here; .* --device cpu --config FILE"),
        (1, [], "--gpus 2 on a machine with 1: expected --gpus 1$"),
        (2, ["--gpus", "4"], "--gpus 4 on a machine with 2: expected --gpus 2 or fewer"),
        (2, ["--gpus", "0"], "--gpus 0: expected at least 1"),
        (2, ["--timeout", "nan"], "--timeout nan: expected a number above 0"),
        (2, ["--config", "none.json"], "--config none.json cannot be read: No such file"),
        (0, ["--device", "cpu"], "--device cpu with the real model, .*: expected --config"),
        (
            1,
            ["--workload", "full", "lora_lm", "--gpus", "1"],
            "^glm4v-patched: full, micro-batch 1, on 1 processes: weights, gradients and optimizer "
            "take 222.5 GB of each GPU, which has 150.0 GB; expected more --gpus with --zero-stage "
            "3, --offload, --optimizer adamw_8bit, or another --workload$",
        ),
        (
            2,
            ["--workload", "lora_lm", "--memory-limit", "10"],
            "take 13.9 GB of each GPU, which has 10.7 GB",
        ),
        (
            2,
            ["--workload", "full", "--offload"],
            "full, .*: takes 166.9 GB of the machine's memory, of which 100.0 GB are free; "
            "expected no --offload",
        ),
    ],
)
def test_a_machine_that_cannot_measure_is_refused_before_anything_is_built(
    number, arguments, message, monkeypatch, capsys
):
    found = Gpus((Gpu("NVIDIA H200", 150 * 10**9),) * number, "none here")
    monkeypatch.setattr(machine, "find_gpus", lambda: found)
    monkeypatch.setattr(machine, "free_ram", lambda: 100e9)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("processes were started"))
    assert main(["bench", *arguments]) == 1
    told = capsys.readouterr().err.strip()
    assert "\n" not in told and re.search(message, told)


def test_on_a_cpu_the_estimated_peak_must_fit(tmp_path, monkeypatch, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(golden_json("config.json") | {"num_layers": 400}))
    monkeypatch.setattr(machine, "free_ram", lambda: 1e6)
    arguments = ["bench", "--device", "cpu", "--config", str(config)]
    assert main([*arguments, "--text-tokens", "20"]) == 1
    assert "GB of the machine's memory, of which 0.0 GB are free" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"model_type": "llama", "vision_config": {}}', "{}"]
)
def test_a_config_of_another_model_is_refused(content, tmp_path, capsys):
    (tmp_path / "config.json").write_text(content)
    assert main(["bench", "--device", "cpu", "--config", str(tmp_path / "config.json")]) == 1
    told = capsys.readouterr().err
    assert re.search("config.json (is not of a glm-4v; expected|cannot be read: Expecting)", told)


def test_a_machine_that_may_do_it_is_tried(monkeypatch):
    found = Gpus((Gpu("NVIDIA H200", 150 * 10**9),) * 2)
    monkeypatch.setattr(machine, "find_gpus", lambda: found)
    monkeypatch.setattr(machine, "free_ram", lambda: 200e9)
    asked = [Settings(workload=name) for name in TRAINED if name != "qlora"]
    machine.require_machine([*asked, replace(asked[0], offload=True)], 2, on_cpu=False)
    # These were measured on two H200s.
    row = Settings(workload="full", micro_batch=2, optimizer="adamw_8bit", memory_limit=139)
    machine.require_machine([row], 2, on_cpu=False)


def test_free_memory_is_within_the_limits_of_control_groups(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   1000 kB\n",
        "/proc/self/cgroup": "4:cpu,memory:/a\n2:cpu:/b\n0::/c:d\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "/sys/fs/cgroup/c:d/memory.max": "max\n",
    }
    monkeypatch.setattr(Path, "is_file", lambda path: str(path) in files)
    monkeypatch.setattr(Path, "read_text", lambda path, **_: files[str(path)])
    assert machine.free_ram() == 1_024_000
    for file in (
        "/sys/fs/cgroup/c:d/memory.max",
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/a/memory.limit_in_bytes",
    ):
        monkeypatch.setitem(files, file, "5000\n")
        assert machine.free_ram() == 5000
        used = file.replace("limit_in_bytes", "usage_in_bytes").replace(".max", ".current")
        monkeypatch.setitem(files, used, "3000\n")
        assert machine.free_ram() == 2000
        # Of what is used, pages of files that nobody has looked at lately go when others come.
        stat = str(Path(file).with_name("memory.stat"))
        prefix = "total_" if "limit_in_bytes" in file else ""
        monkeypatch.setitem(files, stat, f"anon 7\n{prefix}inactive_file 1000\nfile 1200\n")
        assert machine.free_ram() == 3000
        monkeypatch.setitem(files, used, "9000\n")
        assert machine.free_ram() == 0
        monkeypatch.delitem(files, file)
        files.pop(file, None)


def test_free_memory_of_this_machine_is_no_more_than_it_has():
    import psutil

    assert 0 < machine.free_ram() <= psutil.virtual_memory().total


def test_several_processes_without_zero_are_refused_before_anything_runs(capsys):
    assert main(["bench", "--zero-stage", "0", "--gpus", "2"]) == 1
    assert "2 GPUs with ZeRO stage 0" in capsys.readouterr().err


def test_a_failed_measurement_says_so_in_its_line():
    row = {"workload": "full", "implementation": "ours", "micro_batch": 1, "text_tokens": 512}
    assert describe(row | {"error": "out of memory"}).endswith("failed: out of memory")


def test_kernels_are_told_apart_by_their_names():
    # As a profile on an H200 with torch 2.11 and DeepSpeed 0.19.8 names them.
    kinds = {
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention",
        "nvjet_sm90_tst_256x128_64x4_2x1_v_bz_coopA_bias_TNT": "matrix products",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel": "optimizer",
        "void kOptimizerStatic8bit2StateBlockwise<float, 3, 256, 1>": "optimizer",
        "void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>": "quantisation",
        "triton_poi_fused_add_gelu_0": "compiled element-wise",
        "Memcpy DtoD (Device -> Device)": "copies",
        "void at::native::reduce_kernel<512, 1>": "other",
    }
    assert {name: kind_of(name) for name in kinds} == kinds


def test_idle_is_when_nothing_but_communication_runs():
    kernels = [
        ("nvjet_a", 1000.0, 2000.0),
        ("nccl_a", 2500.0, 4000.0),  # 500 us beside a product, then alone
        ("triton_a", 5000.0, 1000.0),
        ("triton_b", 5500.0, 1000.0),  # on another stream, half of it beside the one before
        ("nccl_b", 7000.0, 1000.0),
    ]
    assert time_by_kind(kernels) == {
        "matrix products": 2.0,
        "communication": 5.0,
        "compiled element-wise": 2.0,
        "idle": 2.0 + 1.5,
        "step": 7.0,
    }


def test_kernels_that_take_most_in_all_come_first():
    kernels = [("long", 0.0, 1500.0), ("often", 0.0, 1000.0), ("often", 2000.0, 1000.0)]
    kernels += [(f"short {number}", 0.0, 1.0) for number in range(50)]
    found = longest(kernels)
    assert len(found) == 25
    assert found[:2] == [
        {"name": "often", "ms": 2.0, "calls": 2},
        {"name": "long", "ms": 1.5, "calls": 1},
    ]


def test_an_ablation_goes_from_plain_training_to_what_was_asked_for():
    asked = Settings(
        workload="lora_lm",
        micro_batch=4,
        packed=True,
        optimizer="adamw_8bit",
        liger=True,
        reuse_features=True,
        memory_limit=40,
    )
    steps = ablation(asked)
    assert len(steps) == 1 + len(MEASURES)
    settings = list(steps.values())
    plain = settings[0]
    assert plain.all_logits and not plain.compile and not plain.reuse_features
    assert plain.attention == "eager" and not plain.liger and plain.optimizer == "adamw"
    assert (plain.tower, plain.language, plain.micro_batch, plain.memory_limit) == (
        *("full", "full"),
        *(4, 40),
    )
    assert settings[-1] == asked
    changes = [
        {field.name for field in fields(Settings) if before_after_differ(pair, field.name)}
        for pair in zip(settings, settings[1:], strict=False)
    ]
    assert changes == [set(names) for names in MEASURES.values()]


def before_after_differ(pair: tuple[Settings, Settings], name: str) -> bool:
    return getattr(pair[0], name) != getattr(pair[1], name)


def test_what_was_not_asked_for_is_no_step():
    asked = Settings(workload="full", compile=False, layers_ahead=0)
    names = [
        "(nothing)",
        "fused attention",
        "logits only where a token is learned, in chunks",
        "activations kept",
        "weights kept gathered",
    ]
    assert list(ablation(asked)) == names
    assert "weights gathered without copies" in ablation(replace(asked, compile=True))
    assert list(ablation(replace(asked, zero_stage=0))) == names[:-1]


class Step:
    """A trainer whose model keeps one buffer for gradients, and makes 3 GiB more of them."""

    def __init__(self, now: dict):
        self.now = now
        self.model = nn.ModuleDict({"output_layer": nn.Linear(2, 2)})
        self.now["allocated"] = 11 * GIB  # weights, optimizer and the buffer are there already

    def forward(self, _batch):
        self.now["allocated"] += 5 * GIB
        return torch.zeros(())

    def backward(self, _loss):
        self.now["allocated"] -= 2 * GIB

    def update(self):
        self.now["allocated"] = 11 * GIB

    def optimizer_tensors(self):
        on_gpu, on_cpu = torch.device("cuda"), torch.device("cpu")
        sizes = [(on_gpu, 4), (on_cpu, 100)]
        return [SimpleNamespace(device=device, nbytes=size * GIB) for device, size in sizes]

    def gradient_buffers(self):
        return [SimpleNamespace(device=torch.device("cuda"), nbytes=5 * GIB)]


def test_gradients_count_whether_they_are_made_in_a_step_or_stay(monkeypatch):
    now = {}
    monkeypatch.setattr(accounting, "allocated", lambda: now["allocated"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 24 * GIB)
    monkeypatch.setattr(accounting, "_held", lambda model: 2 * GIB)
    parts = accounting.memory_parts(Step(now), {})
    assert parts["gradients"] == 3 + 5
    assert parts["activations"] == 5 and parts["weights"] == 2 and parts["optimizer"] == 4
    assert parts["peak"] == 24 and parts["rest"] == 24 - 2 - 4 - 8 - 5
