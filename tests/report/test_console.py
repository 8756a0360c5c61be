"""A log has plain lines; a terminal has the same lines and what follows each step below them, and never a mixture."""

import contextlib
import io
import os
import queue
import re
import threading

import pytest

from megatron_moe.report import console
from megatron_moe.report.console import ConsoleSink, LiveConsoleSink, console_sink
from megatron_moe.report.metric import Metric
from megatron_moe.report.records import EvalRecord, SourceStep
from tests.report import steps
from tests.report.test_health import HEALTH

STEP = steps.STEP.replace(
    loss_scale=4096.0,
    mfu=0.125,
    tokens_per_expert={2: [1, 1]},
    expert_load=1.25,
    empty_experts=3,
    expert_bias_max=0.1,
    seconds_left=72.0,
)


def tell(sink, start, stop, **changes):
    for iteration in range(start, stop + 1):
        sink.step(STEP.replace(iteration=iteration, **changes))


def plain(**options):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=options.pop("encoding", "utf-8"), newline="")
    return stream, ConsoleSink(stream, **{"train_iters": 100, "log_interval": 1, **options})


def text(stream):
    return stream.buffer.getvalue().decode(stream.encoding)


def without_clock(lines):
    """Take the date and the time of day away, with which each line has to begin."""
    stripped = [re.subn(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line) for line in lines.splitlines(keepends=True)]
    assert all(count == 1 for _, count in stripped)
    return "".join(line for line, _ in stripped)


class Terminal:
    """A real pseudo terminal, which is read all the time: whoever writes more than it holds waits for a reader."""

    def __init__(self):
        self._reader, writer = os.openpty()
        self.stream, self._parts = open(writer, "w", encoding="utf-8"), queue.SimpleQueue()  # noqa: SIM115
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with contextlib.suppress(OSError):  # the stream is closed
            while part := os.read(self._reader, 65536):
                self._parts.put(part)

    def output(self):
        print(end="\0", file=self.stream, flush=True)
        read = b""
        while b"\0" not in read:
            read += self._parts.get()
        return read.partition(b"\0")[0].decode()


@pytest.fixture
def terminal(monkeypatch):
    for name, value in (("TERM", "xterm"), ("COLUMNS", "120"), ("LINES", "30")):
        monkeypatch.setenv(name, value)
    return Terminal()


def test_a_line_names_everything_a_reader_steers_by_and_of_a_dense_model_no_experts():
    stream, sink = plain()
    tell(sink, 1, 1)
    tell(sink, 2, 2, expert_load=None, mfu=None, grad_norm=None)
    assert without_clock(text(stream)) == (
        "iteration   1/100 | loss 3.0000 | lr 1.00e-03 | grad norm 0.500 | 2,000 tok/s | 0.25 TFLOP/s | MFU 12.5% | "
        "load 1.25 | empty 3 | left 1m12s\n"
        "iteration   2/100 | loss 3.0000 | lr 1.00e-03 | grad norm - | 2,000 tok/s | 0.25 TFLOP/s | left 1m12s\n"
    )


def test_lines_come_at_the_first_step_then_every_interval_and_at_the_end():
    stream, sink = plain(log_interval=10, train_iters=25)
    tell(sink, 4, 25)
    lines = without_clock(text(stream)).splitlines()
    assert [line.split("|")[0].split()[1] for line in lines] == ["4/25", "10/25", "20/25", "25/25"]


def test_a_line_shows_the_mean_losses_and_speed_of_its_interval_and_counts_what_was_skipped():
    stream, sink = plain(log_interval=4)
    tell(sink, 1, 1)
    web = [{"web": SourceStep(loss, tokens, 0.25)} for loss, tokens in ((2.0, 100), (float("nan"), 900), (4.0, 300))]
    sink.step(STEP.replace(iteration=2, loss=2.0, seconds=1.5, mtp_losses=[3.0, 4.0], sources=web[0]))
    skipped = {"loss": float("nan"), "skipped": True, "mtp_losses": [9.0, 9.0], "sources": web[1]}
    sink.step(STEP.replace(iteration=3, seconds=0.5, **skipped))
    last = {"loss": 4.0, "model_tflops": 0.5, "mtp_losses": [2.0, 3.0], "sources": web[2]}
    sink.step(STEP.replace(iteration=4, seconds=1.0, **last))
    line = text(stream).splitlines()[-1]
    assert line.endswith("| web 3.5000 400 tok 0.25 ep")
    assert "| loss 3.0000 | mtp 2.5000 3.5000 |" in line
    assert "1,000 tok/s" in line  # 3000 tokens in 3 seconds
    assert "0.333 TFLOP/s" in line  # (0.25 x 2 s + 0.5 x 1 s) / 3 s
    assert "SKIPPED 1 (loss scale 4096)" in line


def test_a_pipe_gets_no_control_characters():
    stream, sink = plain(log_interval=5)
    sink.start({"parameters": 1234567, "device": "cpu"})
    tell(sink, 1, 50)
    sink.evaluation(EvalRecord(50, "valid", 2.0, 4096, 1.0))
    sink.close(None)
    assert not set(text(stream)) & {"\r", "\x1b", "\b"} and text(stream).isascii()
    assert "parameters  1,234,567" in text(stream)


def of(stream, train_iters=20, log_interval=1, **style):
    return console_sink(stream, train_iters=train_iters, log_interval=log_interval, start_iteration=0, **style)


@pytest.mark.parametrize(("name", "live"), [("xterm", True), ("dumb", False)])
def test_only_a_terminal_that_can_move_its_cursor_gets_the_progress_line(terminal, monkeypatch, name, live):
    monkeypatch.setenv("TERM", name)
    tell(of(terminal.stream, style="plain"), 1, 2)
    assert "\x1b" not in terminal.output()
    assert isinstance(of(terminal.stream), LiveConsoleSink) is live
    assert type(of(io.StringIO())) is ConsoleSink


@pytest.mark.parametrize("style", ["panel", "line"])
def test_a_terminal_gets_whole_lines_and_what_follows_below_them_is_taken_away(terminal, style):
    sink = of(terminal.stream, log_interval=10, style=style)
    tell(sink, 1, 20)
    sink.message("saved [bold]iter_0000020[/bold]")
    sink.close(None)
    output = terminal.output()
    assert "20/20" in output and "2,000 tok/s" in output
    # A log line starts at a cleared line and ends with a line break, so that the progress line can't run into it.
    for line in ("iteration 10/20 ", "iteration 20/20 ", "saved [bold]iter_0000020[/bold]"):
        before, after = output.split(line, 1)
        before = re.sub(r"\d\d:\d\d:\d\d $", "", before)
        assert before.endswith(("\x1b[2K", "\n"))
        assert "\x1b" not in after.split("\r\n", 1)[0]
    assert output.rstrip("\r\n").endswith("\x1b[2K")  # what was below the lines is cleared
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")  # and the cursor is back


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_line_is_cut_between_its_parts_where_the_terminal_is_narrow(terminal, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    of(terminal.stream, train_iters=2, style="line").step(STEP.replace(skipped=True))
    line = re.search(r"\d iteration [^\r\n]*", terminal.output())[0]
    parts = without_clock("2026-01-01 00:00:00 " + line.partition(" ")[2]).split(" | ")
    stream, sink = plain(train_iters=2)
    sink.step(STEP.replace(skipped=True))
    whole = without_clock(text(stream).strip())
    assert parts == whole.split(" | ")[: len(parts)] and len(line) + 7 <= columns
    assert ("SKIPPED" in line) is (columns > 40) and ("left" in line) is False


def test_the_progress_line_keeps_the_last_known_load_between_counted_steps(terminal):
    sink = of(terminal.stream, train_iters=3, log_interval=100, style="line")
    tell(sink, 1, 2)
    sink.step(STEP.replace(iteration=3, expert_load=None))
    last_drawn = terminal.output().rsplit("3/3", 1)[1]
    assert "load 1.25" in last_drawn


def test_a_log_interval_of_any_length_keeps_a_bounded_number_of_records(monkeypatch):
    """The counts per expert are large, and a run whose log is silent may have a million steps to its next line."""
    monkeypatch.setattr(console, "MOST_STEPS", 20)
    seen = []
    shown = Metric("seen", console=lambda records: seen.extend(records))
    monkeypatch.setattr(console, "metrics", lambda: [shown])
    _, sink = plain(log_interval=60)
    tell(sink, 1, 1)  # the first step of a process has a line of its own
    seen.clear()
    tell(sink, 2, 60, dropped_per_expert={2: [1, 0]}, health=HEALTH)
    assert [record.iteration for record in seen] == list(range(41, 61))
    assert [(record.tokens_per_expert, record.dropped_per_expert) for record in seen[:-1]] == [({}, {})] * 19
    assert [bool(record.health.layers[2].tokens_per_source) for record in seen] == [False] * 19 + [True]
    assert (seen[-1].tokens_per_expert, seen[-1].dropped_per_expert) == ({2: [1, 1]}, {2: [1, 0]})


def test_text_that_the_stream_lacks_or_that_moves_the_cursor_is_written_as_its_escape():
    stream, sink = plain(encoding="ascii")
    sink.message("continued: \u00e9\u4e16")
    sink.message("def f():\n\treturn '\x1b[2J\x07'")
    assert text(stream) == "continued: \\xe9\\u4e16\ndef f():\n\treturn '\\x1b[2J\\x07'\n"


def test_an_evaluation_of_masked_tokens_says_so_and_shows_no_number():
    stream, sink = plain()
    sink.evaluation(EvalRecord(iteration=4, split="valid", loss=float("nan"), tokens=0, seconds=1.0))
    assert "no token" in text(stream) and "nan" not in text(stream)
