"""Draw report.png and panel.png in docs/images from a made-up run: python -m docs.pictures [FOLDER].

The run goes through the reporter that training uses: 12 layers of 64 experts, a spike of the loss, a step that was
skipped, and experts of one layer that die.
"""

import io
import math
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from unittest.mock import patch

from rich.console import Console

from megatron_moe.config import schema
from megatron_moe.report.console import LiveConsoleSink
from megatron_moe.report.records import EvalRecord, StepRecord
from megatron_moe.report.reporter import Reporter
from megatron_moe_tools.pretrain import page_sink
from tests.report import chromium

DOCS = Path(__file__).resolve().parent / "images"
STEPS, LAYERS, EXPERTS, TOKENS, TOP_K = 400, range(2, 14), 64, 65536, 6
SPIKE, SKIPPED, DEAD_FROM, DEAD_LAYER, DEAD = 290, 120, 250, 9, 3
FORMAT = "<meta charset=utf-8><body style='margin:0;background:#11161d;color:#dfe5ec'><pre style='{style}'>{code}</pre>"
STYLE = "font:14px/18px DejaVu Sans Mono,monospace;margin:12px"


class _Terminal(LiveConsoleSink):
    """A terminal of 110 columns: the last lines, and the panel below them."""

    def __init__(self) -> None:
        super().__init__(io.StringIO(), train_iters=STEPS, log_interval=10, start_iteration=0, panel=True)
        self._lines: list[str] = []

    def _write(self, text: str) -> None:
        self._lines.append(text)

    def _width(self) -> int | None:
        return 110

    def html(self) -> str:
        console = Console(record=True, file=io.StringIO(), width=110, height=40, force_terminal=True, highlight=False)
        for text in self._lines[-4:]:
            console.print(text, markup=False)
        console.print(self._dashboard)
        return console.export_html(inline_styles=True, code_format=FORMAT.replace("{style}", STYLE))


def step_of(iteration: int, random: Random) -> StepRecord:
    loss = 3.1 + 7.7 * math.exp(-iteration / 60) + random.gauss(0, 0.03) + 1.6 * (iteration == SPIKE)
    norm = 0.4 + 2.5 * math.exp(-iteration / 30) + abs(random.gauss(0, 0.06)) + 2 * (iteration == SPIKE)
    seconds, mean = 2.1 + abs(random.gauss(0, 0.04)), TOKENS * TOP_K / EXPERTS
    spread = 0.08 + 0.5 * math.exp(-iteration / 50)
    counts = {layer: [max(1, round(mean * random.gauss(1, spread))) for _ in range(EXPERTS)] for layer in LAYERS}
    if iteration > DEAD_FROM:
        counts[DEAD_LAYER][10 : 10 + DEAD] = [0] * DEAD
    return StepRecord(
        iteration=iteration,
        consumed_samples=16 * iteration,
        loss=loss,
        learning_rate=4e-4 * min(1.0, iteration / 40) * (0.55 + 0.45 * math.cos(math.pi * iteration / STEPS)),
        grad_norm=math.nan if iteration == SKIPPED else norm,
        loss_scale=1.0,
        skipped=iteration == SKIPPED,
        tokens=TOKENS,
        seconds=seconds,
        tokens_per_second=TOKENS / seconds,
        model_tflops=310 / seconds,
        mfu=0.84 / seconds,
        tokens_per_expert=counts,
        expert_load=max(max(row) / mean for row in counts.values()),
        empty_experts=sum(row.count(0) for row in counts.values()),
        expert_bias_max=0.0004 * iteration,
        seconds_left=2.1 * (STEPS - iteration),
        global_batch_size=16,
        memory_bytes=58_200_000_000,
    )


def train(page: Path, upto: int) -> str:
    """Report the first `upto` steps to a page, and return the page of the terminal while the run goes on."""
    files = {"metrics_file": str(page.with_name("metrics.jsonl")), "report_file": str(page)}
    run = schema.replace(schema.Run(), train_iters=STEPS, **files)
    random, terminal = Random(3), _Terminal()
    with (
        patch("socket.gethostname", return_value="node-0"),
        Reporter(
            run, is_writer=True, start_iteration=0, stream=io.StringIO(), also=[terminal], page_sink=page_sink
        ) as reporter,
    ):
        reporter.start({"device": "a made-up device", "dtype": "bf16", "unigram_entropy": 7.42})
        for iteration in range(1, upto + 1):
            reporter.step(step_of(iteration, random))
            if iteration == SKIPPED:
                reporter.event("fault", f"iteration {iteration}: NaN in the gradient; the step is left out")
            if iteration % 100 == 0:
                loss = 3.15 + 7.7 * math.exp(-iteration / 60)
                reporter.evaluation(EvalRecord(iteration, "valid", loss, 10 * TOKENS, 5.0))
                reporter.event("saved", f"saved iteration {iteration} in 8.1 s")
        shown = terminal.html()
        reporter.close()
    return shown


def draw(folder: Path, upto: int = STEPS) -> None:
    with tempfile.TemporaryDirectory() as name:
        page, panel = Path(name) / "pretrain" / "report.html", Path(name) / "panel.html"
        panel.write_text(train(page, upto), encoding="utf-8")
        browser = chromium.Page(Path(name) / "profile")
        for path, picture, size in ((page, "report.png", (1000, 1190)), (panel, "panel.png", (960, 420))):
            browser.size(*size)
            browser.open(path)
            time.sleep(1.0)  # for what is in sight to be drawn
            browser.screenshot(folder / picture)
        browser.close()


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
