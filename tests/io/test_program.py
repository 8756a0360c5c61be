"""What goes wrong in a program is one line on stderr and an exit status that says which kind of thing it was."""

import errno
import os
import sys

import pytest

from megatron_moe.config.errors import ConfigError, RunFault
from megatron_moe.io.program import FAILED, INTERRUPTED, READER_GONE, USER_ERROR, run_program


def raising(error: BaseException):
    def main(argv: list[str]) -> int:
        assert argv == ["--flag"]
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ConfigError("--flag 3: too many"), USER_ERROR, "x.py: error: --flag 3: too many"),
        (OSError(errno.ENOENT, "No such file", "a.txt"), USER_ERROR, "x.py: error: a.txt: No such file"),
        (RunFault("the loss is NaN"), FAILED, "x.py: stopped: the loss is NaN"),
        (KeyboardInterrupt(), INTERRUPTED, "x.py: interrupted; nothing was written"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_each_error_has_its_status_and_one_line_from_rank_0(error, status, line, rank, capsys):
    options = {"interrupted": "interrupted; nothing was written", "errors": (ConfigError, OSError), "rank": rank}
    assert run_program("x.py", raising(error), ["--flag"], **options) == status
    assert capsys.readouterr().err == (f"{line}\n" if rank == 0 else "")


@pytest.mark.parametrize("error", [OSError("a socket"), ValueError("a bug")])
def test_an_error_that_is_no_mistake_of_the_user_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        run_program("x.py", raising(error), ["--flag"])


def test_a_program_that_ends_well_says_nothing(capsys):
    assert run_program("x.py", lambda argv: len(argv), ["a", "b"]) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("ends_by", [int, sys.exit])  # a program's return, and `--help`
def test_output_whose_reader_has_gone_is_no_traceback(ends_by, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert run_program("tool", lambda argv: ends_by(print("a line") or 0), []) == READER_GONE
