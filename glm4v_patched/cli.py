"""Command line: ``glm4v-patched demo``."""

import argparse
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="glm4v-patched", description="Fine-tuning glm-4v-9b.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="fine-tune a tiny glm-4v on drawn pictures and test it")
    demo.add_argument("--out", type=Path, default=Path("demo_output"), help="folder to write to")
    demo.add_argument("--processes", type=_at_least_one, default=2, help="training processes")
    demo.add_argument("--steps", type=_at_least_one, default=300, help="training steps")
    demo.add_argument("--data", type=Path, help="JSONL of messages to train on instead")
    options = parser.parse_args(argv)

    # Late: --help and mistakes are answered without loading torch.
    from .demo import run_demo

    try:
        metrics = run_demo(options.out, options.processes, options.steps, options.data)
    except (ValueError, RuntimeError, FileNotFoundError) as error:
        print(f"glm4v-patched: {error}", file=sys.stderr)
        return 1
    print(
        f"""
exact match on pictures it has not seen, answered by a fresh process without this package:
  before training       {metrics["accuracy_before"]:.3f}
  after training        {metrics["accuracy_after"]:.3f}
  with pictures swapped {metrics["accuracy_swapped"]:.3f}
loss curve     {options.out / "loss.png"}
contact sheet  {options.out / "answers.png"}
model          {options.out / "trained"}
figures        {options.out / "metrics.json"}   ({metrics["seconds"]:.0f} s)"""
    )
    return 0


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
