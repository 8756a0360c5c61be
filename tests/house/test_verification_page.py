"""docs/verification.md is made of the claims on the tests, and a claim that nothing holds is an error."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.helpers import verification

pytestmark = pytest.mark.one_engine

SETUP = "install_requires = ['megatron-core==0.16.1', 'megatron-core==0.19.2']\n"


@pytest.fixture
def made_up(tmp_path):
    """Return a function that writes the files of a small repository and returns its folder."""

    def write(**files: str) -> Path:
        (tmp_path / "docs").mkdir()
        (tmp_path / "setup.py").write_text(SETUP)
        for name, text in files.items():
            path = tmp_path / "tests" / (name.replace("__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("import pytest\nimport torch\n\n" + textwrap.dedent(text))
        return tmp_path

    return write


def rows(root: Path) -> list[list[str]]:
    """Return the cells of the rows of the page that a repository would get."""
    holders, errors = verification.read(root)
    assert errors == []
    lines = verification.page(holders, "one and another").splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in lines
        if line.startswith("| ") and not line.startswith("| claim")
    ]


def errors(root: Path) -> str:
    """Return what is wrong with a repository's claims, which the program reports with exit status 1."""
    assert verification.main([], root) == 1
    assert not (root / "docs" / "verification.md").exists()
    return "\n".join(verification.read(root)[1])


def test_the_page_of_this_repository_is_up_to_date(capsys):
    assert verification.main(["--check"]) == 0, capsys.readouterr().err


def test_tests_of_one_claim_share_a_row_which_says_where_they_run(made_up):
    root = made_up(
        unit__moe__test_one="""
            @pytest.mark.claim("Water is wet.")
            @pytest.mark.parametrize("drop", [1, 2])
            def test_water(drop): ...

            @pytest.mark.claim("Fire " "is hot.")
            @pytest.mark.claim("Ash is grey.")
            def test_fire(): ...

            def test_nothing_is_claimed(): ...
        """,
        distributed__test_two="""
            @pytest.mark.claim("Water is wet.")
            def test_rain(): ...
        """,
    )
    one = "tests/unit/moe/test_one.py"
    assert rows(root) == [
        [
            "Water is wet.",
            f"`tests/distributed/test_two.py::test_rain`<br>`{one}::test_water`",
            "both",
            "yes",
            "not verified",
        ],
        ["Fire is hot.", f"`{one}::test_fire`", "both", "yes", "not verified"],
        ["Ash is grey.", f"`{one}::test_fire`", "both", "yes", "not verified"],
    ]
    assert "## Routing, experts and balancing" in verification.page(verification.read(root)[0], "")


def test_a_class_and_a_file_hold_a_claim_as_a_whole(made_up):
    root = made_up(
        test_file='pytestmark = [pytest.mark.slow, pytest.mark.claim("All of it.")]\ndef test_one(): ...\n',
        test_class="""
            @pytest.mark.claim("The class.")
            class TestThings:
                def test_one(self): ...

                @pytest.mark.claim("A method.")
                def test_two(self): ...
        """,
    )
    assert {row[0]: row[1] for row in rows(root)} == {
        "All of it.": "`tests/test_file.py`",
        "The class.": "`tests/test_class.py::TestThings`",
        "A method.": "`tests/test_class.py::TestThings::test_two`",
    }


@pytest.mark.parametrize(
    ("marks", "cpu", "gpu"),
    [
        ('@pytest.mark.claim("It flies.")', "yes", "not verified"),
        (
            '@pytest.mark.claim("It flies.")\n@pytest.mark.skipif(torch.cuda.is_available(), reason="")',
            "yes",
            "not verified",
        ),
        ('@pytest.mark.claim("It flies.")\n@pytest.mark.gpu', "no", "not verified"),
        ('@pytest.mark.claim("It flies.")\n@WITHOUT_GPU', "no", "not verified"),
        ('@pytest.mark.claim("It flies.", ran_on="one H100")\n@pytest.mark.gpu', "no", "verified: one H100"),
    ],
)
def test_the_devices_follow_from_the_markers(made_up, marks, cpu, gpu):
    alias = 'WITHOUT_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="")\n'
    (row,) = rows(made_up(test_it=f"{alias}{marks}\ndef test_it(): ...\n"))
    assert row[3:] == [cpu, gpu]


@pytest.mark.parametrize(
    ("text", "engines"),
    [
        ('@pytest.mark.one_engine\n@pytest.mark.claim("It flies.")\ndef test_it(): ...\n', "one"),
        ('pytestmark = pytest.mark.one_engine\n@pytest.mark.claim("It flies.")\ndef test_it(): ...\n', "one"),
        ('pytestmark = [pytest.mark.one_engine, pytest.mark.claim("It flies.")]\ndef test_it(): ...\n', "one"),
        ('@pytest.mark.claim("It flies.")\ndef test_it(): ...\n', "both"),
    ],
)
def test_what_runs_with_one_engine_is_said_to(made_up, text, engines):
    assert rows(made_up(test_it=text))[0][2] == engines


def test_where_a_version_decides_the_claim_has_to_say_which(made_up):
    skip = '@pytest.mark.skipif(engine_version() < (0, 19), reason="")\ndef test_it(): ...\n'
    root = made_up(test_it='@pytest.mark.claim("It flies.", engines="0.19.2")\n' + skip)
    assert rows(root)[0][2] == "0.19.2"
    (root / "tests" / "test_it.py").write_text('import pytest\n@pytest.mark.claim("It flies.")\n' + skip)
    assert "tests/test_it.py:2: a version decides whether test_it is skipped" in errors(root)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('@pytest.mark.claim("")\ndef test_it(): ...', "sentence has to be one text"),
        ('@pytest.mark.claim("  ")\ndef test_it(): ...', "sentence has to be one text"),
        ("@pytest.mark.claim\ndef test_it(): ...", "sentence has to be one text"),
        ("@pytest.mark.claim()\ndef test_it(): ...", "sentence has to be one text"),
        ("@pytest.mark.claim(TEXT)\ndef test_it(): ...", "sentence has to be one text"),
        ('@pytest.mark.claim("A", "B")\ndef test_it(): ...', "sentence has to be one text"),
        ('@pytest.mark.claim("A", engine="0.19.2")\ndef test_it(): ...', "no keyword engine"),
        ('@pytest.mark.claim("A", ran_on="H100")\ndef test_it(): ...', "for a test that is marked gpu"),
        ('@pytest.mark.claim("A")\n@pytest.mark.skip("later")\ndef test_it(): ...', "is skipped everywhere"),
        ('@pytest.mark.claim("A")\n@pytest.mark.skipif(True, reason="")\ndef test_it(): ...', "is skipped everywhere"),
        ('@pytest.mark.claim("A")\n@pytest.mark.xfail\ndef test_it(): ...', "is expected to fail"),
        ('@pytest.mark.claim("A")\ndef test_it():\n    pytest.skip("later")', "skips itself everywhere"),
        (
            'pytestmark = pytest.mark.skip("later")\n@pytest.mark.claim("A")\ndef test_it(): ...',
            "is skipped everywhere",
        ),
        ('pytestmark = [pytest.mark.skip("later"), pytest.mark.claim("A")]', "is skipped everywhere"),
        (
            '@pytest.mark.skip\nclass TestIt:\n    @pytest.mark.claim("A")\n    def test_it(self): ...',
            "is skipped everywhere",
        ),
        ('@pytest.mark.claim("A")\ndef helper(): ...', "does not collect as a test"),
        ('def test_it():\n    @pytest.mark.claim("A")\n    def test_inner(): ...', "does not collect as a test"),
        (
            '@pytest.mark.claim("All water is wet.")\ndef test_it(): ...\n'
            '@pytest.mark.claim("All water is wet")\ndef test_too(): ...',
            "look like one with a slip in it",
        ),
    ],
)
def test_a_claim_that_nothing_holds_is_an_error(made_up, text, wrong):
    assert wrong in errors(made_up(test_it=text))


def test_a_claim_in_a_file_of_helpers_is_an_error(made_up):
    assert "does not collect" in errors(made_up(steps='@pytest.mark.claim("A")\ndef test_it(): ...'))


def test_check_shows_what_differs_and_writes_nothing(made_up, capsys):
    root = made_up(test_it='@pytest.mark.claim("It flies.")\ndef test_it(): ...\n')
    target = root / "docs" / "verification.md"
    assert verification.main(["--check"], root) == 1
    assert not target.exists()
    assert verification.main([], root) == 0
    assert verification.main(["--check"], root) == 0
    assert "0.16.1 and 0.19.2" in target.read_text()
    target.write_text(target.read_text().replace("It flies.", "It floats."))
    capsys.readouterr()
    assert verification.main(["--check"], root) == 1
    said = capsys.readouterr().err
    assert "-| It floats." in said and "+| It flies." in said
    assert "It floats." in target.read_text()


def test_another_word_on_the_command_line_is_a_mistake(capsys):
    assert verification.main(["--chek"]) == 2
    assert "--check" in capsys.readouterr().err
