"""What is told before the first step, and what is seen while training goes on."""

import re
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from glm4v_patched.cli import main
from glm4v_patched.engine import memory_check
from glm4v_patched.engine.memory_plan import Batch
from glm4v_patched.engine.options import EngineOptions
from glm4v_patched.finetune import disk, progress, summary, worker
from glm4v_patched.finetune.plan import Plan, check_data
from glm4v_patched.finetune.progress import LossPlot, Measurements, ProgressBar
from glm4v_patched.finetune.recipe import Recipe
from glm4v_patched.finetune.summary import fault_of_memory, show_sample
from glm4v_patched.models.base import Base
from glm4v_patched.models.placement import Placement
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.helpers.recipes import drawn_recipe, recipe, train_here


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Recipe:
    changes = {
        "trainer.max_steps": None,
        "trainer.num_train_epochs": 2.0,
        "trainer.gradient_accumulation_steps": 2,
        "trainer.save_steps": 3,
        "trained": "lora_lm",
        "engine.zero_stage": 0,
        "data.eval": 0.2,
    }
    return drawn_recipe(tmp_path_factory.mktemp("summary"), changes)


def test_a_dry_run_says_all_and_writes_nothing(drawn, tmp_path, capsys):
    drawn.write(tmp_path / "recipe.json")
    before = sorted(Path(drawn.model).parent.rglob("*"))
    assert main(["train", str(tmp_path / "recipe.json"), "--device", "cpu", "--dry-run"]) == 0
    told = capsys.readouterr().out
    counts = check_data(drawn).counts
    assert counts.rows == counts.pictures == 14  # of 20, which batches of 4 take in 4 steps
    for line in [
        f"data        14 rows, 14 pictures; {counts.positions} positions, of which "
        f"{counts.learned} are learned",
        "evaluation  after every epoch, on 6 rows",
        "steps       8, 4 an epoch: 2.00 epochs; effective batch 4 (per_device_train_batch_size 2",
        "trained     lora_lm: 6,144 of 766,688 weights; learning rate 0.001",
        "device      1 x CPU, fp32, no ZeRO",
        "kept        tower full, language full, offload False, compile False",
        ", 2 checkpoints at once of ",
        "(4 positions of a picture)<|end_of_image|>Which",
        "<|assistant|>[[",
        "<|endoftext|>]]",
        "nothing was trained, and nothing written (--dry-run)",
    ]:
        assert line in told, told
    assert sorted(Path(drawn.model).parent.rglob("*")) == before


def test_a_dry_run_tells_of_doubtful_values(drawn, tmp_path, capsys):
    drawn.write(tmp_path / "recipe.json")
    command = ["train", str(tmp_path / "recipe.json"), "--device", "cpu", "--dry-run"]
    assert main(command) == 0
    assert "doubtful" not in capsys.readouterr().out
    assert main([*command, "trainer.learning_rate=10"]) == 0
    assert "\ndoubtful    trainer.learning_rate is 10: " in capsys.readouterr().out


def test_each_learned_turn_of_the_sample_is_marked_and_no_other(drawn):
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    later = [{"role": "user", "content": "C"}, {"role": "assistant", "content": "D"}]
    shown = show_sample(ChatGLMProcessor.from_pretrained(drawn.model), [*messages, *later])
    inside = [part.split("]]")[0] for part in shown.split("[[")[1:]]
    assert len(inside) == 2 and "B" in inside[0] and "D" in inside[1]
    assert not any(letter in "".join(inside) for letter in "AC")


def test_words_that_come_many_times_are_no_picture(drawn):
    messages = [
        {"role": "user", "content": "? ? ? ????????"},
        {"role": "assistant", "content": "B"},
    ]
    shown = show_sample(ChatGLMProcessor.from_pretrained(drawn.model), messages)
    assert "? ? ? ????????" in shown and "positions of a picture" not in shown


def test_a_disk_that_is_too_small_for_the_epochs_is_told_before_anything_is_written(
    drawn, tmp_path, capsys, monkeypatch
):
    """How many steps an epoch has is known only once the rows are read."""
    mine = drawn.override({"out": str(tmp_path / "out")})
    mine.write(tmp_path / "recipe.json")
    sizes = disk.needed_space(mine.flat(), 10)
    free = sizes._replace(free=sizes.total - 1)
    monkeypatch.setattr(disk, "needed_space", lambda known, steps=None: steps and free)
    assert main(["train", str(tmp_path / "recipe.json"), "--device", "cpu"]) == 1
    assert "and up to 3 checkpoints at once" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("local", "needed"), [(None, 222), (2, 111)])
def test_a_machine_with_too_little_memory_for_an_offloaded_optimizer_is_told(
    local, needed, monkeypatch
):
    """16 bytes for each of 13.9 billion weights; the processes of two machines share them."""
    options = EngineOptions(trained="full", zero_stage=3, offload=True)
    batch = Batch(rows=1, row_length=9, processes=4)
    planned = Plan(
        recipe=recipe(),
        base=Base("m"),
        files={},
        data="",
        placement=Placement(4, local_processes=local),
        options=options,
        batch=batch,
        rows=1,
        steps=1,
        free=80e9,
        needed=0,
    )
    monkeypatch.setattr(summary, "config_of", lambda base: ChatGLMConfig())
    monkeypatch.setattr(memory_check, "free_ram", lambda: (needed - 1) * 1e9)
    told = fault_of_memory(planned)
    least = rf"takes {needed}\.\d GB of the machine's memory, of which {needed - 1}\.0 GB are free"
    assert re.search(least, told), told
    monkeypatch.setattr(memory_check, "free_ram", lambda: (needed + 1) * 1e9)
    assert fault_of_memory(planned) == ""


def test_no_optimizer_is_started_that_does_not_fit(drawn, tmp_path, capsys, monkeypatch):
    mine = drawn.override(
        {"out": str(tmp_path / "out"), "engine.zero_stage": 2, "engine.offload": True}
        | {"trained": "full"}
    )
    mine.write(tmp_path / "recipe.json")
    monkeypatch.setattr(memory_check, "free_ram", lambda: 1e6)
    assert main(["train", str(tmp_path / "recipe.json"), "--device", "cpu"]) == 1
    told = capsys.readouterr()
    assert re.search(r"optimizer   [\d.]+ MB of the machine's memory", told.out)
    assert "engine.offload is true, and the optimizer takes" in told.err
    assert not (tmp_path / "out").exists()


def test_the_loss_is_drawn_as_it_trains(drawn, tmp_path, monkeypatch):
    drawn_after = []

    def draw(history, path):
        drawn_after.append(len(history))
        path.write_text("a plot")

    monkeypatch.setattr(progress, "plot_loss", draw)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_PLOTS", 0)
    train_here(drawn.override({"out": str(tmp_path / "out")}))
    assert len(drawn_after) > 3 and drawn_after == sorted(drawn_after)
    assert (tmp_path / "out" / "loss.png").is_file()
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_PLOTS", 30)
    plot, args = LossPlot(), TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    drawn_after.clear()
    for _ in range(3):
        plot.on_log(args, TrainerState(is_world_process_zero=True), TrainerControl())
    assert len(drawn_after) == 1


def test_what_draws_the_loss_keeps_nothing_of_the_training(tmp_path, monkeypatch):
    """As matplotlib keeps the errors of its parser of fonts, which have the frames of all callers;
    data workers that ended later than their loader's queues cost five seconds."""
    kept = []

    def draw(history, path):
        try:
            raise ValueError
        except ValueError as error:
            kept.append(error)

    class Model:
        pass

    def train() -> weakref.ref:
        model = Model()
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
        LossPlot().on_log(arguments, TrainerState(is_world_process_zero=True), TrainerControl())
        return weakref.ref(model)

    monkeypatch.setattr(progress, "plot_loss", draw)
    left = train()
    assert kept and left() is None


def test_speed_is_that_of_steps_without_what_comes_between(monkeypatch):
    clock = {"now": 0.0}
    monkeypatch.setattr("glm4v_patched.finetune.progress.time.monotonic", lambda: clock["now"])
    measurements = Measurements(batch=8)

    def step(seconds: float) -> None:
        clock["now"] += seconds
        measurements.on_step_end(None, None, None)

    assert measurements.found() == {"samples_per_s": None}
    for seconds in (60, 9, 9, 9):  # layers are compiled, workers start
        step(seconds)
    assert measurements.found() == {"samples_per_s": None}
    step(2)
    measurements.on_evaluate(None, None, None)
    step(100)
    step(3)
    measurements.on_save(None, None, None)
    step(50)
    step(1)
    assert measurements.found() == {"samples_per_s": 3 * 8 / (2 + 3 + 1)}


@pytest.mark.parametrize(("pack_to", "samples_per_row"), [(None, 1), (400, 14)])
def test_a_packed_row_counts_as_the_samples_in_it(
    drawn, tmp_path, monkeypatch, pack_to, samples_per_row
):
    def measure(batch: float):
        raise InterruptedError(batch)

    monkeypatch.setattr(worker, "Measurements", measure)
    asked = {"out": str(tmp_path / "out"), "data.pack_to": pack_to}
    with pytest.raises(InterruptedError) as measured:
        train_here(drawn.override(asked))
    # Two rows a batch, two batches a step.
    assert measured.value.args == (pytest.approx(2 * 2 * samples_per_row),)


def test_the_bar_shows_loss_rate_and_speed(tmp_path, monkeypatch):
    clock = iter([0.0, 0.0, 4.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    state = TrainerState(is_world_process_zero=True, is_local_process_zero=True, max_steps=10)
    bar = ProgressBar(batch=8)
    bar.on_train_begin(args, state, TrainerControl())
    state.global_step = 2
    bar.on_log(args, state, TrainerControl(), logs={"loss": 1.5, "learning_rate": 1e-4})
    assert bar.training_bar.postfix == "loss=1.5, lr=0.0001, samples/s=4"
    bar.training_bar.close()
