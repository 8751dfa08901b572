"""The command that compares loss curves: its verdict on made-up curves, and a real run of it."""

import json
import math
import random
import re
import sys

import pytest
import torch

from tests.distributed import loss_curve
from tests.distributed.loss_curve import (
    PATHS,
    describe,
    distance,
    earlier_runs,
    judge,
    judge_answers,
    learning_rate_at,
    make_batch,
    order_of_rows,
)
from tests.helpers.processes import WORKERS, run_command_warm, run_with_limit

STEPS = 60


def curve(seed: int, floor: float = 0.3) -> list[float]:
    """A loss that falls to a floor, with the noise of small batches."""
    rng = random.Random(seed)
    return [floor + 6 * 0.9**step + rng.gauss(0, 0.05) for step in range(STEPS)]


def judged(seed_1: list[float], name: str = "fast") -> dict:
    """The verdict where only this curve, of seed 1, differs from the plain ones."""
    made = {"plain": {0: curve(0), 1: curve(1)}, "fast": {0: curve(0), 1: curve(1)}}
    made.setdefault(name, {})[1] = seed_1
    return judge(made)


def test_equal_curves_are_within_the_noise():
    verdict = judged(curve(1))
    assert verdict["as_it_should"]
    assert verdict["curves"]["fast, seed 1"]["distance"] == [0, 0]
    assert verdict["noise"][0] > 0 and verdict["noise"][1] > 0


def test_a_shifted_curve_is_outside_of_the_noise():
    verdict = judged([loss + 0.1 for loss in curve(1)])
    assert verdict["curves"]["fast, seed 0"]["within"]
    assert not verdict["curves"]["fast, seed 1"]["within"]
    assert verdict["curves"]["fast, seed 1"]["distance"] == pytest.approx([0.1, 0.1])
    assert not verdict["as_it_should"]
    assert "fast, seed 1: 0.1 over all steps, 0.1 over the last quarter: OUTSIDE" in describe(
        verdict
    )


def test_a_loss_divided_by_twice_the_tokens_is_outside_of_the_noise():
    assert not judged([loss / 2 for loss in curve(1)])["as_it_should"]


def test_a_curve_that_parts_only_in_its_last_quarter_is_outside_of_the_noise():
    wide = {0: curve(0), 1: [loss + 6 * 0.8**step for step, loss in enumerate(curve(1))]}
    parted = [loss + 0.2 * (step >= 45) for step, loss in enumerate(curve(0))]
    verdict = judge({"plain": wide, "fast": {0: parted}})
    row = verdict["curves"]["fast, seed 0"]
    assert row["distance"][0] < verdict["noise"][0]
    assert row["distance"][1] == pytest.approx(0.2) and not row["within"]


def test_a_loss_that_is_no_number_is_outside_of_the_noise():
    assert not judged([*curve(1)[:-1], math.nan])["as_it_should"]


def test_the_control_should_be_outside_of_the_noise():
    assert not judged(curve(1), "blank")["as_it_should"]
    assert judged([loss + 1 for loss in curve(1)], "blank")["as_it_should"]


def test_curves_that_cannot_be_compared_are_errors():
    with pytest.raises(ValueError, match="curves of 50 and of 60 steps"):
        judged(curve(1)[:50])
    with pytest.raises(ValueError, match="curves of 19 steps, of which 10 .* at least 20"):
        judge({"plain": {0: curve(0)[:19], 1: curve(1)[:19]}})
    with pytest.raises(ValueError, match="plain curves of 2 seeds are equal"):
        judge({"plain": {0: curve(0), 1: curve(0)}})


def test_noise_of_single_steps_is_averaged_before_curves_are_compared():
    flat = [1.0] * STEPS
    swinging = [1.0 + (-1) ** step for step in range(STEPS)]
    assert distance(flat, swinging) == pytest.approx([0, 0])


def test_the_learning_rate_rises_and_falls_to_zero():
    rates = [learning_rate_at(step, 200, 1.0) for step in range(201)]
    assert rates[0] == 0.05 and rates[19] == rates[20] == 1
    assert rates[110] == pytest.approx(0.5) and rates[200] == pytest.approx(0)


def test_a_seed_decides_the_order_of_samples_and_every_epoch_holds_all():
    order = order_of_rows(10, [6, 3, 1], 25, seed=0)
    samples = [row % 10 for row in order]
    assert sorted(samples[:10]) == sorted(samples[10:20]) == list(range(10)) and len(order) == 25
    assert order == order_of_rows(10, [6, 3, 1], 25, seed=0)
    assert order != order_of_rows(10, [6, 3, 1], 25, seed=1)


def test_wordings_are_drawn_by_their_shares_each_time_that_a_sample_is_seen():
    wordings = [row // 10 for row in order_of_rows(10, [6, 3, 1], 2000, seed=0)]
    shares = [wordings.count(wording) / 2000 for wording in range(3)]
    assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.03)
    assert wordings[:1000] != wordings[1000:]


@pytest.mark.parametrize(
    ("of_fp8", "fine"), [([0.90, 0.91], True), ([0.90, 0.80], False), ([1.0, 1.0], True)]
)
def test_right_answers_are_compared_with_the_lower_of_the_references_seeds(of_fp8, fine):
    shares = {"fast": [0.95, 0.91], "fp8": of_fp8, "blank": [0.1]}
    runs = [
        {"path": path, "seed": seed, "right": share}
        for path, of_path in shares.items()
        for seed, share in enumerate(of_path)
    ]
    verdict = judge_answers(runs, "fast")
    assert verdict == {"right": shares, "as_it_should": fine}
    without = judge_answers([{"path": "fast", "seed": 0}], "fast")
    assert without == {"right": {}, "as_it_should": True}


def test_packed_and_padded_batches_hold_the_same_samples():
    rows = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    data = {"input_ids": rows, "labels": [-row for row in rows]}
    data["pixel_values"] = torch.arange(2.0)
    padded = make_batch(data, [1, 0], PATHS["plain"], "cpu")
    worded = data | {"input_ids": [*rows, *rows], "labels": [*rows, *rows]}
    assert make_batch(worded, [3, 0], PATHS["plain"], "cpu")["pixel_values"].tolist() == [1, 0]
    assert padded["input_ids"].tolist() == [[8, 9, 0], [5, 6, 7]]
    assert padded["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert padded["labels"].tolist() == [[-8, -9, -100], [-5, -6, -7]]
    packed = make_batch(data, [1, 0], PATHS["packed"], "cpu")
    assert packed["input_ids"].tolist() == [[8, 9, 5, 6, 7]]
    assert packed["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    assert packed["labels"].tolist() == [[-8, -9, -5, -6, -7]]
    assert padded["pixel_values"].tolist() == packed["pixel_values"].tolist() == [1, 0]
    assert make_batch(data, [1, 0], PATHS["blank"], "cpu")["pixel_values"].tolist() == [0, 0]


def test_the_mid_size_is_refused_without_gpus(tmp_path):
    command = [
        sys.executable,
        str(WORKERS / "loss_curve.py"),
        "--out",
        str(tmp_path / "curves.json"),
    ]
    ended = run_with_limit([*command, "--picture", str(tmp_path / "x.png")], 100)
    assert ended.status == 2
    assert "takes a GPU for each of 2 processes, and there are 0: use --size tiny" in ended.output


def test_fp8_is_refused_without_gpus_and_else_trained_with_both_seeds(tmp_path, monkeypatch):
    command = ["loss_curve.py", "--out", str(tmp_path / "x"), "--picture", str(tmp_path / "x.png")]
    monkeypatch.setattr(sys, "argv", [*command, "--size", "tiny", "--also", "fp8"])
    with pytest.raises(SystemExit):
        loss_curve.main()
    trained = []

    def train_one(name, path, size, seed, folder, options):
        trained.append((name, path.fp8, seed))
        return {"path": name, "seed": seed, "losses": curve(seed)} | dict.fromkeys(
            ("median_step_s", "total_s", "right"), 0.0
        )

    monkeypatch.setattr(loss_curve, "runs_on_cpu", lambda processes: False)
    monkeypatch.setattr(loss_curve, "train_one", train_one)
    assert loss_curve.main() == 0
    assert {each for each in trained if each[1]} == {("fp8", True, 0), ("fp8", True, 1)}
    assert {each[0] for each in trained if not each[1]} == {"plain", "fast"}
    trained.clear()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--reference", "fast"])
    assert loss_curve.main() == 0
    assert {each[0] for each in trained} == {"fast", "fp8"}
    verdict = json.loads((tmp_path / "x").read_text())["verdict"]
    assert verdict["reference"] == "fast" and set(verdict["curves"]) == {
        "fp8, seed 0",
        "fp8, seed 1",
    }


@pytest.mark.slow
def test_the_fast_path_is_within_the_noise_and_blank_pictures_are_not(tmp_path, monkeypatch):
    """Five trainings on two processes; layers are left uncompiled, which takes minutes."""
    out, picture = tmp_path / "curves.json", tmp_path / "curves.png"
    command = ["loss_curve.py", "--out", str(out), "--picture", str(picture), "--size", "tiny"]
    command += ["--steps", "40", "--no-compile", "--timeout", "600"]
    monkeypatch.setattr(loss_curve, "run_with_limit", run_command_warm)
    monkeypatch.setattr(sys, "argv", [*command, "--also", "blank"])
    assert loss_curve.main() == 0
    report = json.loads(out.read_text())
    trained = [(run["path"], run["seed"]) for run in report["runs"]]
    wanted = [("blank", 0), ("fast", 0), ("fast", 1), ("plain", 0), ("plain", 1)]
    assert sorted(trained) == wanted
    assert all(len(run["losses"]) == 40 for run in report["runs"])
    assert all(run["losses"][-1] < run["losses"][0] / 3 for run in report["runs"])
    assert {"torch", "transformers", "deepspeed"} <= set(report["versions"])
    within = {name: row["within"] for name, row in report["verdict"]["curves"].items()}
    assert within == {"fast, seed 0": True, "fast, seed 1": True, "blank, seed 0": False}
    assert picture.read_bytes().startswith(b"\x89PNG")
    # The file alone gives the same verdict again, and what it holds is not trained again.
    for again in (["--draw-only"], ["--resume", "--also", "blank"]):
        monkeypatch.setattr(sys, "argv", [*command, *again])
        assert loss_curve.main() == 0
        found = json.loads(out.read_text())
        assert (found["runs"], found["verdict"]) == (report["runs"], report["verdict"])


@pytest.mark.slow
def test_adapters_are_compared_on_a_model_that_was_trained_before(tmp_path, monkeypatch):
    out = tmp_path / "curves.json"
    command = ["loss_curve.py", "--out", str(out), "--picture", str(tmp_path / "x.png")]
    command += ["--size", "tiny", "--no-compile", "--timeout", "600", "--reference", "fast"]
    monkeypatch.setattr(loss_curve, "run_with_limit", run_command_warm)
    command += ["--steps", "20", "--lora-after", "40", "--lora-learning-rate", "0.004"]
    monkeypatch.setattr(sys, "argv", command)
    assert loss_curve.main() == 0
    report = json.loads(out.read_text())
    assert (report["first"]["learning_rate"], report["size"]["learning_rate"]) == (0.002, 0.004)
    first = report["first"]["losses"]
    assert len(first) == 40 and first[-1] < first[0] / 3
    assert report["paths"]["fast"]["trained"] == "lora_lm"
    one, other = (run["losses"] for run in report["runs"])
    # Both seeds go on from that model, where new wordings are all that it does not know.
    assert len(one) == len(other) == 20 and one != other
    assert max(one[-1], other[-1]) < min(one[0], other[0]) < first[0]


def test_a_learning_rate_of_adapters_takes_adapters(tmp_path, monkeypatch, capsys):
    command = ["loss_curve.py", "--out", str(tmp_path / "x"), "--picture", str(tmp_path / "y")]
    monkeypatch.setattr(sys, "argv", [*command, "--lora-learning-rate", "1e-3"])
    with pytest.raises(SystemExit):
        loss_curve.main()
    assert "without --lora-after: no adapters are trained" in capsys.readouterr().err


def test_a_comparison_of_adapters_is_not_resumed(tmp_path, monkeypatch, capsys):
    command = ["loss_curve.py", "--out", str(tmp_path / "x"), "--picture", str(tmp_path / "y")]
    monkeypatch.setattr(sys, "argv", [*command, "--lora-after", "40", "--resume"])
    with pytest.raises(SystemExit):
        loss_curve.main()
    assert "--resume with --lora-after: the model that adapters were on" in capsys.readouterr().err


def test_trainings_of_another_length_are_not_resumed(tmp_path):
    out = tmp_path / "curves.json"
    wanted = {"steps": 100, "size": {}, "optimizer": {"AdamW": {"weight_decay": 0.0}}}
    out.write_text(json.dumps(wanted | {"runs": [1]}))
    assert earlier_runs(out, wanted) == [1]
    assert earlier_runs(tmp_path / "none.json", wanted) == []
    for name, other in (("steps", 60), ("optimizer", {"AdamW": {"weight_decay": 0.01}})):
        told = re.escape(f"({name} {wanted[name]}, not {other})")
        with pytest.raises(ValueError, match=f"holds other trainings than are asked for {told}"):
            earlier_runs(out, wanted | {name: other})
